"""Routes: how the bytes of one format become those of another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from requant.dialects import OUTPUT_DIALECTS
from requant.dialects.recognise import DEFAULT_DTYPE, Weight
from requant.formats import EXACT_ROUTES, NUMPY_BITS, TO_DENSE, ExactRoute, Format, ScaleRule, format_named, same_format
from requant.recipe.recipe import Arithmetic, Exact, Recipe

RouteKind = Literal["exact", "reference", "float32"]
MICROSCALED = frozenset({"mxfp4", "mxfp8", "nvfp4", "nvfp4-scale2"})
"""Formats of few significant bits per value, which another can hold without loss."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way from ``source`` to ``target``, the same for every weight that takes it.

    ``exact`` is set for an exact route. On every other, and for a weight that an exact one does not hold, tiles are
    decoded to ``through`` (a dense source of that dtype is taken as it is) and encoded. ``scale_dtype``: dtype of
    the target's scales, or values if it is dense. ``required``: rounding is refused.
    """

    source: Format
    target: Format
    through: str
    scale_dtype: str
    arithmetic: Arithmetic
    scale: ScaleRule
    exact: ExactRoute | None
    required: bool

    @property
    def kind(self) -> RouteKind:
        """How the route is counted: as exact only where that is certain before a byte is read."""
        return "exact" if self.exact is not None and self.exact.holds is None else self.arithmetic

    @property
    def decodes(self) -> bool:
        """Whether a rounded tile passes through a buffer of values in ``through``."""
        return self.source.name != "dense"

    @property
    def pools(self) -> bool:
        """Whether a number must be known of a whole weight, or fused group, before its first tile is converted."""
        return self.target.pools_amax if self.exact is None else self.exact.pool is not None

    @property
    def widest_item(self) -> int:
        """Bytes of a value in the widest form that it takes on its way."""
        widest = 1 if self.target.name != "dense" else NUMPY_BITS[self.scale_dtype].itemsize
        if self.exact is None or self.exact.holds is not None:
            widest = max(widest, NUMPY_BITS[self.through].itemsize)
        return widest


def route_of(weight: Weight, target: str, exact: Exact, recipe: Recipe, dtype: str) -> Route:
    """Return the route for a weight of a checkpoint whose config says that it computes in ``dtype``.

    Under ``reference`` a quantized source is decoded to that dtype first, as LLM Compressor's dequantizer
    does; under ``float32`` it is not rounded on the way, and the scales stay F32.
    """
    dialect = OUTPUT_DIALECTS[recipe.dialect]
    arithmetic: Arithmetic = "float32" if target in dialect.float32 else recipe.arithmetic
    through = weight.dtype if weight.format == "dense" else ("F32" if recipe.arithmetic == "float32" else dtype)
    settings = recipe.scale, dialect.scale_dtype, exact
    return _route(weight.format, weight.dtype, target, through, arithmetic, *settings)


@lru_cache(maxsize=256)
def _route(
    source: str,
    stored: str,
    target: str,
    through: str,
    arithmetic: Arithmetic,
    scale: ScaleRule,
    wanted: str | None,
    exact: Exact,
) -> Route:
    shortcut = None
    if exact != "off":
        shortcut = TO_DENSE.get((source, DEFAULT_DTYPE)) if target == "dense" else EXACT_ROUTES.get((source, target))
    if source == target:
        shortcut = same_format()
    if shortcut is not None and shortcut.holds is not None and through == "F16":
        shortcut = None  # the scales of weights that qualify need not be in F16's range
    if target == "dense":
        scale_dtype = DEFAULT_DTYPE
    elif wanted is not None:
        scale_dtype = wanted
    elif shortcut is None or shortcut.holds is not None:
        scale_dtype = "F32" if arithmetic == "float32" else through
    else:
        scale_dtype = "F32" if arithmetic == "float32" and source in MICROSCALED else stored
    required = exact == "required" and source in MICROSCALED
    ends = format_named(source), format_named(target)
    return Route(*ends, through, scale_dtype, arithmetic, scale, shortcut, required)
