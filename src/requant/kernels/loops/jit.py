"""The compiler: numba's ``njit`` with this package's settings, and the operations that it lacks.

numba widens integer operands to 64 bits. LLVM narrows sums and masks again where the result is cut to 32 bits, but
not a shift by a variable: vectors of such would be half as wide. So the operations on words cut their operands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numba
import numba.core.cgutils
import numba.extending
import numba.np.arrayobj
from llvmlite import ir

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

# numba is typed in part, and not for this.
_njit: Any = numba.njit
_types: Any = numba.types
_cgutils: Any = numba.core.cgutils
_populate_array: Any = numba.np.arrayobj.populate_array
_WORD = ir.IntType(32)
_CACHE_LINE = 64


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` be compiled into every kernel that calls it.

    ``error_model="numpy"``: a check for division by zero would keep every loop with a division from vectorising.
    """
    compiled: Callable[P, R] = _njit(error_model="numpy", no_cpython_wrapper=True)(function)
    return compiled


def operation(define: Callable[..., Any]) -> Callable[..., Any]:
    """Make an operation of a function that takes types and returns a signature and what generates its code."""
    compiled: Callable[..., Any] = numba.extending.intrinsic(define)
    return compiled


def _word(builder: Any, integer: Any) -> Any:
    return builder.trunc(integer, _WORD) if integer.type.width > 32 else builder.zext(integer, _WORD)


@operation
def bits_of(_typing: Any, value: Any) -> Any:
    """Return the bits of a float32 as uint32."""
    if value != _types.float32:
        return None
    return _types.uint32(value), lambda _c, builder, _s, args: builder.bitcast(args[0], _WORD)


@operation
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


@operation
def left(_typing: Any, word: Any, count: Any) -> Any:
    """Return the uint32 ``word`` shifted left by ``count`` (unsigned, below 32)."""
    return _shift("shl", word, count)


@operation
def right(_typing: Any, word: Any, count: Any) -> Any:
    """Return the uint32 ``word`` shifted right by ``count`` (unsigned, below 32)."""
    return _shift("lshr", word, count)


def _array(context: Any, builder: Any, array_type: Any, data: Any, size: Any) -> Any:
    """Return a one-dimensional array that owns nothing."""
    array = context.make_array(array_type)(context, builder)
    itemsize = context.get_constant(_types.intp, array_type.dtype.bitwidth // 8)
    _populate_array(array, data=data, shape=[size], strides=[itemsize], itemsize=itemsize, meminfo=None)
    return array._getvalue()


@operation
def view(_typing: Any, array: Any, dtype: Any) -> Any:
    """Return contiguous ``array`` [n] as one of ``dtype``; what numpy's would raise for is cut off."""
    if array.layout != "C" or array.ndim != 1:
        return None
    viewed = _types.Array(dtype.dtype, 1, "C")

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source = context.make_array(array)(context, builder, args[0])
        size = builder.extract_value(source.shape, 0)
        before, after = array.dtype.bitwidth, viewed.dtype.bitwidth
        if after > before:
            size = builder.sdiv(size, ir.Constant(size.type, after // before))
        else:
            size = builder.mul(size, ir.Constant(size.type, before // after))
        pointer = context.get_data_type(viewed.dtype).as_pointer()
        return _array(context, builder, viewed, builder.bitcast(source.data, pointer), size)

    return viewed(array, dtype), generate


def scratch(dtype: Any, size: int) -> Callable[[], Any]:
    """Return an operation that returns a new array ``dtype`` [size] on the stack, with anything in it.

    It lives as long as the function that calls the operation. LLVM knows that nothing else overlaps it.
    """
    array_type = _types.Array(numba.from_dtype(dtype), 1, "C")

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        count = context.get_constant(_types.intp, size)
        data = _cgutils.alloca_once(builder, context.get_data_type(array_type.dtype), size=count)
        data.align = _CACHE_LINE
        return _array(context, builder, array_type, data, count)

    def room(_typing: Any) -> Any:
        return array_type(), generate

    return operation(room)
