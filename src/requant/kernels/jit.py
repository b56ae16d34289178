"""The compiler: numba's ``njit`` with this package's settings, and the operations on 32-bit words it lacks."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numba
import numba.extending
from llvmlite import ir

from .cache import cache_directory

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

# numba is typed in part, and not for this.
_config: Any = numba.config
_types: Any = numba.types
_switching = Lock()


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile ``function`` on first use, without the GIL, into the cache.

    ``error_model="numpy"``: a check for division by zero would keep every loop with a division from vectorising.
    """
    with _switching:  # threads may import two modules of kernels at once
        before = _config.CACHE_DIR
        # numba picks a function's cache when it is decorated: the setting stays as it was for everybody else.
        _config.CACHE_DIR = str(cache_directory())
        try:
            compiled: Callable[P, R] = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
        finally:
            _config.CACHE_DIR = before
    return compiled


# numba widens integer operands to 64 bits. LLVM narrows sums and masks again where the result is cut to 32 bits, but
# not a shift by a variable: vectors of such would be half as wide. So these operations cut their operands.
_WORD = ir.IntType(32)


def _operation(define: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = numba.extending.intrinsic(define)
    return compiled


def _word(builder: Any, integer: Any) -> Any:
    return builder.trunc(integer, _WORD) if integer.type.width > 32 else builder.zext(integer, _WORD)


@_operation
def bits_of(_typing: Any, value: Any) -> Any:
    """Return the bits of a float32 as uint32."""
    if value != _types.float32:
        return None
    return _types.uint32(value), lambda _c, builder, _s, args: builder.bitcast(args[0], _WORD)


@_operation
def float_of(_typing: Any, bits: Any) -> Any:
    """Return the float32 with the bits of an unsigned integer's low 32."""
    if not isinstance(bits, _types.Integer) or bits.signed:
        return None
    return _types.float32(bits), lambda _c, builder, _s, args: builder.bitcast(_word(builder, args[0]), ir.FloatType())


def _shift(operation: str, word: Any, count: Any) -> Any:
    if not all(isinstance(operand, _types.Integer) and not operand.signed for operand in (word, count)):
        return None
    return _types.uint32(word, count), lambda _c, builder, _s, args: getattr(builder, operation)(
        *(_word(builder, operand) for operand in args)
    )


@_operation
def left(_typing: Any, word: Any, count: Any) -> Any:
    """Return the uint32 ``word`` shifted left by ``count`` (unsigned, below 32)."""
    return _shift("shl", word, count)


@_operation
def right(_typing: Any, word: Any, count: Any) -> Any:
    """Return the uint32 ``word`` shifted right by ``count`` (unsigned, below 32)."""
    return _shift("lshr", word, count)
