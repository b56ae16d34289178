"""ModelOpt: multipliers for global scales, one algorithm or a table of them in the config."""

from __future__ import annotations

from types import MappingProxyType

from requant.dialects.base import Dialect, InputScale, Shape, Spelling, scalar


def _four_dimensions(shape: Shape) -> Shape:
    return shape[0], 1, shape[1], 1


_WEIGHT, _SCALE = Spelling("weight"), Spelling("weight_scale")

MODELOPT = Dialect(
    "modelopt",
    MappingProxyType(
        {
            "dense": (_WEIGHT,),
            "fp8-tensor": (_WEIGHT, Spelling("weight_scale", shape=scalar)),
            "fp8-block": (_WEIGHT, Spelling("weight_scale", shape=_four_dimensions)),
            "mxfp8": (_WEIGHT, _SCALE),
            "nvfp4-scale2": (_WEIGHT, _SCALE, Spelling("weight_scale_2", shape=scalar)),
        }
    ),
    MappingProxyType(
        {
            "nvfp4-scale2": InputScale("input_scale", (), 2688.0, divisor=False),
            "fp8-tensor": InputScale("input_scale", (), 448.0, divisor=False),
        }
    ),
    MappingProxyType({"nvfp4": "nvfp4-scale2"}),
    scale_dtype="F32",
    float32=frozenset({"fp8-block"}),
    never_weight_only=frozenset({"mxfp8"}),
)
