"""Groups of 32 neighbours as LLVM vectors: loops this short, the compiler would unroll instead of vectorising."""

from __future__ import annotations

from typing import Any

import numba
import numba.core.cgutils
from llvmlite import ir

from requant.kernels.mx import GROUP

from .jit import operation

_types: Any = numba.types
_cgutils: Any = numba.core.cgutils
_INDEX = ir.IntType(32)


def _place(context: Any, builder: Any, array_type: Any, array: Any, start: Any, element: Any) -> Any:
    """Return a pointer to the group of an array that starts at an index."""
    item = builder.gep(context.make_array(array_type)(context, builder, array).data, [start])
    return builder.bitcast(item, ir.VectorType(element, GROUP).as_pointer())


def _shuffled(builder: Any, vector: Any, places: range | list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_INDEX, len(places)), list(places))
    return builder.shuffle_vector(vector, vector, mask)


@operation
def largest(_typing: Any, patterns: Any, start: Any) -> Any:
    """Return the largest of ``patterns[start : start + 32]`` without their sign bits; uint16 or uint32 as they are."""
    width = patterns.dtype.bitwidth
    element = ir.IntType(width)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, first = args
        place = _place(context, builder, signature.args[0], array, first, element)
        vector = builder.load(place, align=width // 8)
        magnitudes = builder.and_(vector, ir.Constant(vector.type, [(1 << (width - 1)) - 1] * GROUP))
        name, function = f"llvm.vector.reduce.umax.v{GROUP}i{width}", ir.FunctionType(element, [vector.type])
        return builder.call(_cgutils.get_or_insert_function(builder.module, function, name), [magnitudes])

    return patterns.dtype(patterns, _types.intp), generate


@operation
def spread(_typing: Any, out: Any, start: Any, value: Any) -> Any:
    """Write ``value``, of the dtype of ``out``, to ``out[start : start + 32]``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, first, number = args
        place = _place(context, builder, signature.args[0], array, first, number.type)
        one = builder.insert_element(ir.Constant(ir.VectorType(number.type, GROUP), ir.Undefined), number, _INDEX(0))
        builder.store(_shuffled(builder, one, [0] * GROUP), place, align=out.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return _types.void(out, _types.intp, out.dtype), generate


@operation
def sum_of_squares(_typing: Any, values: Any, start: Any) -> Any:
    """Return the float64 sum of the squares of float32 ``values[start : start + 32]``, in one order everywhere."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, first = args
        place = _place(context, builder, signature.args[0], array, first, ir.FloatType())
        wide = builder.fpext(builder.load(place, align=4), ir.VectorType(ir.DoubleType(), GROUP))
        sums = builder.fmul(wide, wide)
        half = GROUP // 2
        while half:
            sums = builder.fadd(
                _shuffled(builder, sums, range(half)),
                _shuffled(builder, sums, range(half, 2 * half)),
            )
            half //= 2
        return builder.extract_element(sums, _INDEX(0))

    return _types.float64(values, _types.intp), generate
