"""Which format a weight lies in, told from its parts on disk: suffixes, dtypes and shape ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

from requant.checkpoint.header import TensorRef
from requant.dialects import DIALECTS
from requant.dialects.base import Spelling
from requant.errors import Problem
from requant.formats import FLOAT_DTYPES, FORMATS, Format, PackedInt
from requant.formats.packed_int import CHANNEL

PAYLOADS = ("weight", "weight_packed")
PART_SUFFIXES = frozenset(
    {
        *(spelled.suffix for dialect in DIALECTS.values() for parts in dialect.spellings.values() for spelled in parts),
        *(scale.suffix for dialect in DIALECTS.values() for scale in dialect.input_scales.values()),
        "weight_g_idx",
        "input_zero_point",
    }
)
"""Last name components that may belong to a quantized weight."""

DEFAULT_DTYPE = "BF16"
"""The dtype of the scales made from a source that has no float dtype of its own."""


class Bank(NamedTuple):
    """What the weights of one bank (all experts of a layer in one tensor) have in common.

    ``tensors`` are the stored ones, the payload first. ``stride``: elements from one column of a weight to the next
    where it lies transposed, else 0. ``whole``: engines do not take the experts apart. ``own_names``: its parts have
    names that no dialect has. ``refusal`` says why this bank is one weight of three dimensions or more; "" where it is
    meant to be, or is taken apart.
    """

    name: str
    tensors: tuple[TensorRef, ...]
    stride: int = 0
    whole: bool = False
    own_names: bool = False
    refusal: str = ""


class Weight(NamedTuple):
    """A weight as it lies on disk.

    ``module`` is the name without the part suffix, ``format`` the name of one or "" where the parts are of no
    known format, ``shape`` the logical one, ``dtype`` the float dtype of the stored values (dense) or scales;
    BF16 where the format has no float dtype. ``parts`` follow the format's order and are spelled in ``dialect``;
    ``inputs`` are the activation scales beside them. ``bank``: the one that it is a part of. Its ``parts`` are then
    slices of stored tensors, under names of their own.
    """

    module: str
    format: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[TensorRef, ...]
    dialect: str = ""
    inputs: tuple[TensorRef, ...] = ()
    bank: Bank | None = None


MAYBE_PARTS = frozenset({"scale", "qscale_act"})
"""Suffixes that parts of a weight may have, and many a vector that is none."""

_SCALES = ("weight_scale", "weight_scale_inv")
"""What the scales of codes are called in the dialects that are written."""

_CODES = ("U8", "F8_E4M3", "F8_E5M2")
"""Dtypes of weights that mean nothing without a scale."""

_BITS: tuple[Literal[4, 8], ...] = (4, 8)
_USUAL_GROUPS = (32, 64, 128)
"""A row of so many columns is one group rather than a channel."""

Signature = tuple[str | tuple[int, ...], ...]
"""Suffix, dtype and shape of one part after the other."""

_new_weight = partial(tuple.__new__, Weight)  # what _make does, without a frame for each


class _Found(NamedTuple):
    """What weights of one signature are; ``order`` and ``inputs`` are places in the signature."""

    format: str
    dialect: str
    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...]
    inputs: tuple[int, ...]


def stray_scale(parts: Sequence[TensorRef]) -> TensorRef | None:
    """Return the part with a suffix of `MAYBE_PARTS` if it lies beside no codes and is a tensor of its own.

    An E8M0 exponent is none; a vector beside codes that have scales of another name is one.
    """
    scale = next((part for part in parts if part.name.rpartition(".")[2] in MAYBE_PARTS), None)
    if scale is None or scale.dtype == "F8_E8M0":
        return None
    suffixes = {part.name.rpartition(".")[2] for part in parts}
    has_others = len(scale.shape) < 2 and not suffixes.isdisjoint(_SCALES)
    return scale if has_others or not any(part.dtype in (*_CODES, "I8") for part in parts) else None


class Recogniser:
    """Recognises weights, thinking once about each signature: thousands are alike.

    ``read_shape`` returns the two numbers of a ``weight_shape``: packed integers do not tell their width otherwise.
    It is read for every one of them, and part of its signature.
    """

    def __init__(self, read_shape: Callable[[TensorRef], tuple[int, ...]]) -> None:
        self._read_shape = read_shape
        self._known: dict[Signature, _Found | None] = {}

    def __call__(self, module: str, tensors: Sequence[TensorRef]) -> Weight | Problem:
        """Return the weight that ``tensors``, called ``module.suffix``, are the parts of.

        A payload without the scale that its dtype calls for, and a scale without a payload, are problems.
        Parts of no known format give a weight whose ``format`` is "".
        """
        start = len(module) + 1
        if len(tensors) == 2:  # a quarter million times
            a, b = tensors
            signature: Signature = (a[0][start:], a[1], a[2], b[0][start:], b[1], b[2])
        else:
            signature = tuple(chain.from_iterable((part.name[start:], part.dtype, part.shape) for part in tensors))
        stored_shape: tuple[int, ...] = ()
        if "weight_shape" in signature:
            part = tensors[signature.index("weight_shape") // 3]
            stored_shape = self._read_shape(part) if part.shape == (2,) and part.dtype in ("I32", "I64") else ()
            signature = (*signature, stored_shape)
        if signature not in self._known:
            self._known[signature] = _classify(start, tensors, stored_shape)
        found = self._known[signature]
        if found is None:
            return _unknown(module, tensors)
        name, dialect, shape, dtype, order, inputs = found
        if len(order) == 1:
            parts: tuple[TensorRef, ...] = (tensors[order[0]],)
        else:
            parts = tuple([tensors[place] for place in order])
        beside = tuple([tensors[place] for place in inputs]) if inputs else ()
        return _new_weight((module, name, shape, dtype, parts, dialect, beside, None))


def _classify(start: int, tensors: Sequence[TensorRef], stored_shape: tuple[int, ...]) -> _Found | None:
    signature = [(tensor.name[start:], tensor.dtype, tensor.shape) for tensor in tensors]
    places = {suffix: place for place, (suffix, _, _) in enumerate(signature)}
    for dialect in DIALECTS.values():
        for name, spelling in dialect.spellings.items():
            order = [places.get(spelled.suffix, -1) for spelled in spelling]
            scale = dialect.input_scales.get(name)
            inputs = [places[scale.suffix]] if scale is not None and scale.suffix in places else []
            if -1 in order or len(order) + len(inputs) != len(signature):
                continue
            stored = [signature[place] for place in order]
            for format_, columns in _candidates(name, [shape for _, _, shape in stored], stored_shape):
                found = _logical(format_, columns, spelling, stored)
                if found is not None:
                    return _Found(format_.name, dialect.name, *found, tuple(order), tuple(inputs))
    return None


def _candidates(
    name: str, shapes: Sequence[tuple[int, ...]], stored_shape: tuple[int, ...]
) -> list[tuple[Format, int]]:
    """Return the formats that a spelling may be of, and the logical columns: one, or integers of some group."""
    packed = shapes[0]
    if name in FORMATS:
        return [(FORMATS[name], packed[-1] * FORMATS[name].packing if packed else 0)]
    if len(packed) != 2 or len(shapes[1]) != 2 or not shapes[1][1]:
        return []
    if len(stored_shape) != 2 or stored_shape[0] != packed[0] or stored_shape[1] < 1:
        return []
    columns, groups = stored_shape[1], shapes[1][1]
    whole_row = groups == 1 and columns not in _USUAL_GROUPS
    group = CHANNEL if whole_row else columns // groups
    return [(PackedInt(bits, group, symmetric=name == "int"), columns) for bits in _BITS if group]


def _logical(
    format_: Format, columns: int, spelling: Sequence[Spelling], stored: Sequence[tuple[str, str, tuple[int, ...]]]
) -> tuple[tuple[int, ...], str] | None:
    """Return logical shape and float dtype of parts that are spelled as this format's would be, or None."""
    _, payload_dtype, payload = stored[0]
    if format_.name == "dense":
        return (payload, payload_dtype) if payload_dtype in FLOAT_DTYPES else None
    if len(payload) != 2 or columns % format_.multiple:
        return None
    shape = payload[0], columns
    for dtype in FLOAT_DTYPES:
        wanted = format_.parts(shape, dtype)
        if all(
            actual in (part.dtype, part.spells, *spelled.dtypes) and spelled.shape(part.shape) == on_disk
            for part, spelled, (_, actual, on_disk) in zip(wanted, spelling, stored, strict=True)
        ):
            return shape, dtype
    return None


def _unknown(module: str, tensors: Sequence[TensorRef]) -> Weight | Problem:
    parts = {tensor.name[len(module) + 1 :]: tensor for tensor in tensors}
    where = ", ".join(f"{suffix} {part.dtype} {list(part.shape)} in {part.shard}" for suffix, part in parts.items())
    payload = next((parts[suffix] for suffix in PAYLOADS if suffix in parts), None)
    if payload is None:
        remedy = "restore the weight's payload, or delete the stray tensor"
        return Problem("orphan-part", f"no weight beside {where}", module, remedy)
    missing = _missing_part(parts, payload)
    if missing:
        message = f"no {missing} beside {where}; read without it, every value would be wrong"
        return Problem("missing-part", message, module, f"restore {module}.{missing}")
    rest = (part for part in parts.values() if part is not payload)
    return Weight(module, "", payload.shape, DEFAULT_DTYPE, (payload, *rest))


def _missing_part(parts: Mapping[str, TensorRef], payload: TensorRef) -> str:
    """Return the part that what is there calls for and that is not there; "" if none is known."""
    if len(parts) == 1:
        return "weight_scale" if "weight_packed" in parts or payload.dtype in _CODES else ""
    missing: list[set[str]] = []
    for dialect in DIALECTS.values():
        for name, spelling in dialect.spellings.items():
            suffixes = {spelled.suffix for spelled in spelling}
            beside = {dialect.input_scales[name].suffix} if name in dialect.input_scales else set()
            if parts.keys() <= suffixes | beside and _has_dtypes(name, spelling, parts):
                missing.append(suffixes - parts.keys())
    if set() in missing:
        return ""  # all parts of a format: it is the shapes that are wrong
    return next((one for gone in missing for one in gone if len(gone) == 1), "")


def _has_dtypes(name: str, spelling: Sequence[Spelling], parts: Mapping[str, TensorRef]) -> bool:
    """Tell whether the parts that are there have dtypes that the spelling of a format allows."""
    format_ = FORMATS.get(name) or PackedInt(4, 32, symmetric=name == "int")
    for part, spelled in zip(format_.parts((128, 128), DEFAULT_DTYPE), spelling, strict=True):
        if spelled.suffix in parts:
            allowed = (part.dtype, part.spells, *spelled.dtypes)
            if parts[spelled.suffix].dtype not in (*allowed, *(FLOAT_DTYPES if part.dtype in FLOAT_DTYPES else ())):
                return False
    return True
