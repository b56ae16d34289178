"""compressed-tensors: what it calls the parts of a weight, and how it names the formats in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from requant.dialects.base import Dialect, InputScale, Spelling

_WEIGHT, _PACKED, _SCALE = Spelling("weight"), Spelling("weight_packed"), Spelling("weight_scale")
_SHAPE = Spelling("weight_shape", ("I32",))

COMPRESSED_TENSORS = Dialect(
    "compressed-tensors",
    MappingProxyType(
        {
            "dense": (_WEIGHT,),
            "fp8-tensor": (_WEIGHT, _SCALE),
            "fp8-channel": (_WEIGHT, _SCALE),
            "fp8-block": (_WEIGHT, Spelling("weight_scale", ("F8_E8M0",))),
            "mxfp4": (_PACKED, _SCALE),
            "mxfp8": (_WEIGHT, _SCALE),
            "nvfp4": (_PACKED, _SCALE, Spelling("weight_global_scale")),
            "int8-channel": (_WEIGHT, _SCALE),
            "int": (_PACKED, _SCALE, _SHAPE),
            "int-asym": (_PACKED, _SCALE, Spelling("weight_zero_point"), _SHAPE),
        }
    ),
    MappingProxyType(
        {
            "nvfp4": InputScale("input_global_scale", (1,), 2688.0, divisor=True),
            "fp8-tensor": InputScale("input_scale", (1,), 448.0, divisor=False),
        }
    ),
)

CT_FORMAT: Mapping[str, str] = MappingProxyType(
    {
        "fp8-tensor": "float-quantized",
        "fp8-channel": "float-quantized",
        "fp8-block": "float-quantized",
        "mxfp4": "mxfp4-pack-quantized",
        "mxfp8": "mxfp8-quantized",
        "nvfp4": "nvfp4-pack-quantized",
        "nvfp4-scale2": "nvfp4-pack-quantized",
        "int8-channel": "int-quantized",
    }
)
"""Storage format → the ``format`` key of a quantization_config; grouped integers: see `ct_format`."""


def ct_format(format_name: str) -> str:
    """Return what compressed-tensors calls a storage format in config.json."""
    return CT_FORMAT.get(format_name, "pack-quantized")


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """What a config group says of its modules: the ``format``, and the arguments of weights and activations."""

    format: str
    weights: Mapping[str, Any]
    input_activations: Mapping[str, Any] | None
