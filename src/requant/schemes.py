"""Schemes: LLM Compressor's preset names, each a storage format plus what the engine does with activations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from requant.dialects.base import Dialect
from requant.dialects.compressed_tensors import ConfigGroup, ct_format
from requant.formats import PackedInt

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A preset: ``format`` names the storage format, the two mappings are compressed-tensors arguments.

    ``weights`` and ``input_activations`` (None: weight-only) go into ``config.json`` as they stand. A scheme
    without ``weights`` leaves weights unquantized.
    """

    name: str
    format: str
    weights: Arguments | None
    input_activations: Arguments | None

    @property
    def config_group(self) -> ConfigGroup | None:
        """The scheme as a group of a compressed-tensors config; None: unquantized."""
        if self.weights is None:
            return None
        return ConfigGroup(ct_format(self.format), self.weights, self.input_activations)

    @property
    def stores_input_scale(self) -> bool:
        """Whether a scale of the activations is stored beside every weight: they are not scaled as they come."""
        activations = self.input_activations
        return activations is not None and activations["dynamic"] is not True


def scheme_named(name: str) -> Scheme | None:
    """Return the scheme of that name: a preset, or one of the grouped integers in another group (``W4A16_G32``)."""
    return SCHEMES.get(name) or _regrouped(name)


def can_write(dialect: Dialect, scheme: Scheme) -> bool:
    """Tell whether a dialect has names, and a config, for what a scheme makes."""
    if scheme.input_activations is None and scheme.format in dialect.never_weight_only:
        return False
    return dialect.spelling(dialect.formats.get(scheme.format, scheme.format)) is not None


def scheme_of(format_name: str, *, stores_input_scale: bool) -> Scheme | None:
    """Return the scheme of a weight of which nothing is known but its parts: of several, the weight-only one."""
    stored = format_name.replace("nvfp4-scale2", "nvfp4")
    found = [scheme for scheme in (*SCHEMES.values(), _TENSOR_TOKEN) if scheme.format == stored]
    if not found and (packed := PackedInt.named(stored)):
        name = f"W{packed.bits}A16{'' if packed.symmetric else '_ASYM'}_G{packed.group}"
        found = list(filter(None, [scheme_named(name)]))
    found = [scheme for scheme in found if scheme.stores_input_scale == stores_input_scale]
    return min(found, key=lambda scheme: scheme.input_activations is not None, default=None)


def _args(num_bits: int, type_: str, strategy: str, dynamic: bool | str, **more: Any) -> Arguments:
    base = {"num_bits": num_bits, "type": type_, "symmetric": True, "strategy": strategy, "dynamic": dynamic}
    return MappingProxyType({**base, **more})


_FP8_TOKEN = _args(8, "float", "token", True)
_INT8_TOKEN = _args(8, "int", "token", True)
_NVFP4 = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_MX = {"group_size": 32, "scale_dtype": "torch.uint8"}


def _mx(bits: int, dynamic: bool) -> Arguments:
    return _args(bits, "float", "group", dynamic, **_MX)


def _packed(name: str, bits: int, group: int, input_activations: Arguments | None = None, asym: bool = False) -> Scheme:
    weights = _args(bits, "int", "group", False, group_size=group, **({"symmetric": False} if asym else {}))
    return Scheme(name, f"int{bits}-g{group}{'-asym' if asym else ''}", weights, input_activations)


_PRESETS = (
    Scheme("BF16", "dense", None, None),
    Scheme("FP8", "fp8-tensor", _args(8, "float", "tensor", False), _args(8, "float", "tensor", False)),
    Scheme("FP8_DYNAMIC", "fp8-channel", _args(8, "float", "channel", False), _FP8_TOKEN),
    Scheme(
        "FP8_BLOCK",
        "fp8-block",
        _args(8, "float", "block", False, block_structure=[128, 128]),
        _args(8, "float", "group", True, group_size=128),
    ),
    Scheme(
        "NVFP4",
        "nvfp4",
        _args(4, "float", "tensor_group", False, **_NVFP4),
        _args(4, "float", "tensor_group", "local", **_NVFP4),
    ),
    Scheme("NVFP4A16", "nvfp4", _args(4, "float", "tensor_group", False, **_NVFP4), None),
    Scheme("MXFP4", "mxfp4", _mx(4, False), _mx(4, True)),
    Scheme("MXFP4A16", "mxfp4", _mx(4, False), None),
    Scheme("MXFP8", "mxfp8", _mx(8, False), _mx(8, True)),
    Scheme("MXFP8A16", "mxfp8", _mx(8, False), None),
    Scheme("W8A8", "int8-channel", _args(8, "int", "channel", False), _INT8_TOKEN),
    Scheme("INT8", "int8-channel", _args(8, "int", "channel", False), _INT8_TOKEN),
    _packed("W8A16", 8, 128),
    _packed("W4A16", 4, 128),
    _packed("W4A16_ASYM", 4, 128, asym=True),
    _packed("W4A8", 4, 128, _INT8_TOKEN),
    _packed("W4AFP8", 4, 128, _FP8_TOKEN),
)

_TENSOR_TOKEN = Scheme("fp8-tensor", "fp8-tensor", _args(8, "float", "tensor", False), _FP8_TOKEN)
"""What no preset makes and checkpoints hold: a scale per tensor, and none for activations, scaled as they come."""

SCHEMES: Mapping[str, Scheme] = MappingProxyType({scheme.name: scheme for scheme in _PRESETS})

_GROUPED = re.compile(r"(W[48]A16|W4A16_ASYM)_G([1-9]\d{0,5})", re.ASCII)


@lru_cache(maxsize=64)
def _regrouped(name: str) -> Scheme | None:
    match = _GROUPED.fullmatch(name)
    if match is None:
        return None
    return _packed(name, int(match[1][1]), int(match[2]), asym=match[1].endswith("ASYM"))
