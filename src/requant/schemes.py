"""Schemes: LLM Compressor's preset names, each a storage format plus what the engine does with activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from requant.dialects.compressed_tensors import CT_FORMAT, Group


@dataclass(frozen=True, slots=True)
class Scheme:
    """A preset: ``format`` names the storage format, the two mappings are compressed-tensors arguments.

    ``weights`` and ``input_activations`` (None: weight-only) go into ``config.json`` as they stand.
    """

    name: str
    format: str
    weights: Mapping[str, Any]
    input_activations: Mapping[str, Any] | None

    @property
    def group(self) -> Group:
        """The scheme as a group of a compressed-tensors config."""
        return Group(CT_FORMAT[self.format], self.weights, self.input_activations)


def _args(num_bits: int, type_: str, strategy: str, dynamic: bool, **more: Any) -> Mapping[str, Any]:
    base = {"num_bits": num_bits, "type": type_, "symmetric": True, "strategy": strategy, "dynamic": dynamic}
    return MappingProxyType({**base, **more})


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        scheme.name: scheme
        for scheme in (
            Scheme(
                "FP8_DYNAMIC",
                "fp8-channel",
                _args(8, "float", "channel", False),
                _args(8, "float", "token", True),
            ),
            Scheme(
                "FP8_BLOCK",
                "fp8-block",
                _args(8, "float", "block", False, block_structure=[128, 128]),
                _args(8, "float", "group", True, group_size=128),
            ),
            Scheme(
                "MXFP4A16",
                "mxfp4",
                _args(4, "float", "group", False, group_size=32, scale_dtype="torch.uint8"),
                None,
            ),
        )
    }
)
