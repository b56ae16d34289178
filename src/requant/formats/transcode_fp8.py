"""Exact transcodes from FP8: a tensor's scale becomes that of every channel or block, the codes stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from requant.formats.base import Tile
from requant.formats.exact import ExactRoute


def _broadcast(source: Sequence[Tile], target: Sequence[Tile], _pooled: float) -> int:
    """Copy the codes, repeat the scale; the target keeps scales in the source's dtype."""
    target[0].bits[:] = source[0].bits
    target[1].bits[:] = source[1].bits.reshape(())
    return 0


def _no_suspects(_scales: Sequence[Tile], _pooled: float) -> NDArray[np.bool_]:
    return np.zeros((1, 1), np.bool_)


def _no_over_span(_source: Sequence[Tile], _pooled: float) -> int:
    return 0


_BROADCAST = ExactRoute(_broadcast, _no_suspects, _no_over_span)

FROM_FP8_TENSOR: Mapping[str, ExactRoute] = MappingProxyType({"fp8-channel": _BROADCAST, "fp8-block": _BROADCAST})
"""Target format → the exact route to it; the target's scales must have the dtype of the source's."""
