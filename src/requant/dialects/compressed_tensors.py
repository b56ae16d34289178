"""compressed-tensors: what it calls the parts of a weight, and how it names the formats in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

SUFFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dense": ("weight",),
        "fp8-channel": ("weight", "weight_scale"),
        "fp8-block": ("weight", "weight_scale"),
        "mxfp4": ("weight_packed", "weight_scale"),
    }
)
"""Storage format → tensor name suffixes, in the order of the format's parts."""

CT_FORMAT: Mapping[str, str] = MappingProxyType(
    {
        "fp8-channel": "float-quantized",
        "fp8-block": "float-quantized",
        "mxfp4": "mxfp4-pack-quantized",
    }
)
"""Storage format → the ``format`` key of a quantization_config."""


@dataclass(frozen=True, slots=True)
class Group:
    """What a config group says of its modules: the ``format``, and the arguments of weights and activations."""

    format: str
    weights: Mapping[str, Any]
    input_activations: Mapping[str, Any] | None


def part_suffix(format_name: str, index: int) -> str:
    """Return what follows a module's name in the name of its format's part ``index``, dot included."""
    return "." + SUFFIXES[format_name][index]
