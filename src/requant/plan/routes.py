"""Routes: how the bytes of one format become those of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from requant.dialects.recognise import DEFAULT_DTYPE, Weight
from requant.formats import EXACT_ROUTES, FORMATS, NUMPY_BITS, Encoding, ExactRoute, Format, Tile
from requant.recipe.recipe import Recipe

Kind = Literal["exact", "reference", "float32"]


@dataclass(frozen=True, slots=True)
class Route:
    """One way from ``source`` to ``target``, the same for every weight that takes it.

    ``exact`` is set for an exact route. Otherwise tiles are decoded to ``through`` (a dense source of that
    dtype is taken as it is) and encoded. ``scale_dtype``: dtype of the target's scales.
    """

    kind: Kind
    source: Format
    target: Format
    through: str
    scale_dtype: str
    exact: ExactRoute | None

    @property
    def decodes(self) -> bool:
        """Whether a tile passes through a buffer of values in ``through``."""
        return self.exact is None and self.source.name != "dense"

    @property
    def widest_item(self) -> int:
        """Bytes of a value in the widest form that it takes on its way."""
        return NUMPY_BITS[self.through].itemsize if self.through else 1

    def encode(self, values: Tile, target: Sequence[Tile]) -> int:
        """Encode a tile of values; return the flat index of the first NaN/Inf, or -1."""
        return self.target.encode(values, target, Encoding(self.kind == "reference"))


def route_of(weight: Weight, recipe: Recipe, dtype: str) -> Route:
    """Return the route for a weight of a checkpoint whose config says that it computes in ``dtype``.

    Under ``reference`` a quantized source is decoded to that dtype first, as LLM Compressor's dequantizer
    does; under ``float32`` it is not rounded on the way, and the scales stay F32.
    """
    dense = weight.format == "dense"
    through = weight.dtype if dense else ("F32" if recipe.arithmetic == "float32" else dtype)
    allow_exact = recipe.exact != "off"
    return _route(weight.format, recipe.scheme.format, through, recipe.arithmetic, allow_exact)


@lru_cache(maxsize=256)
def _route(
    source: str, target: str, through: str, arithmetic: Literal["reference", "float32"], allow_exact: bool
) -> Route:
    exact = EXACT_ROUTES.get((source, target)) if allow_exact else None
    if exact is not None:
        scale_dtype = "F32" if arithmetic == "float32" else DEFAULT_DTYPE
        return Route("exact", FORMATS[source], FORMATS[target], "", scale_dtype, exact)
    scale_dtype = "F32" if arithmetic == "float32" else through
    return Route(arithmetic, FORMATS[source], FORMATS[target], through, scale_dtype, None)
