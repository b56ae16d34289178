"""What a dialect is: how it spells the parts of each storage format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from requant.formats import PackedInt

Shape = tuple[int, ...]


def same_shape(shape: Shape) -> Shape:
    """Return the shape that the format gives a part."""
    return shape


def scalar(_shape: Shape) -> Shape:
    """Return the shape of a 0-d tensor, for the single value of a part [1]."""
    return ()


class Spelling(NamedTuple):
    """How one part of a format is written: what follows the module's name, and its shape.

    ``shape`` turns the format's shape into the one on disk; the bytes are the same. ``dtypes`` are taken in place
    of the format's own when a checkpoint is read.
    """

    suffix: str
    dtypes: tuple[str, ...] = ()
    shape: Callable[[Shape], Shape] = same_shape


class InputScale(NamedTuple):
    """The scale of the activations that is stored beside a weight, one F32 value.

    ``reach`` is the largest magnitude that the scaled activations can have; stored is ``reach / amax`` if
    ``divisor``, else ``amax / reach``.
    """

    suffix: str
    shape: Shape
    reach: float
    divisor: bool

    def stored(self, amax: float) -> float:
        """Return what is stored for activations of at most ``amax``."""
        return self.reach / amax if self.divisor else amax / self.reach

    def amax(self, stored: float) -> float:
        """Return the largest magnitude of activations for which ``stored`` is stored."""
        return self.reach / stored if self.divisor else stored * self.reach


@dataclass(frozen=True, slots=True)
class Dialect:
    """A way to write quantized checkpoints.

    ``spellings``: storage format → its parts in the format's order; grouped integers of all widths and groups are
    there as "int" and "int-asym". ``input_scales``: format → activation scale. ``formats``: a scheme's format →
    the one that this dialect has in its place. ``scale_dtype``: that of float scales, if it is not the weights'.
    ``float32``: formats that are encoded in float32, whatever arithmetic is asked for. ``never_weight_only``: formats
    under whose name engines quantize activations, too.
    """

    name: str
    spellings: Mapping[str, tuple[Spelling, ...]]
    input_scales: Mapping[str, InputScale] = field(default_factory=lambda: MappingProxyType({}))
    formats: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    scale_dtype: str | None = None
    float32: frozenset[str] = frozenset()
    never_weight_only: frozenset[str] = frozenset()

    def spelling(self, format_name: str) -> tuple[Spelling, ...] | None:
        """Return how the parts of a format are written; None where this dialect has no way to."""
        packed = PackedInt.named(format_name)
        return self.spellings.get(format_name if packed is None else "int" if packed.symmetric else "int-asym")
