"""What a shard will hold and where, known before its first byte is written."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple

from requant.checkpoint.dtypes import DTYPES
from requant.checkpoint.fsio import PAGE
from requant.checkpoint.header import TensorRef, encode_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class TensorSpec(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class CopyRun(NamedTuple):
    """Bytes that move unchanged: from ``source_offset`` of the file ``shard`` to ``start`` of the data."""

    shard: str
    source_offset: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The tensors of an output shard in their order, and which bytes of it are copies.

    The data start is ``residue`` modulo 4096 (None: any multiple of 8).
    ``shared_bytes`` then lie in whole 4-KiB pages that a reflinking file system shares with the source.
    """

    shard: str
    tensors: tuple[TensorSpec, ...]
    data_bytes: int
    metadata: Mapping[str, str]
    runs: tuple[CopyRun, ...]
    residue: int | None
    shared_bytes: int

    def starts(self) -> list[int]:
        """Return where each tensor starts, relative to the data start."""
        return list(accumulate([tensor.nbytes for tensor in self.tensors], initial=0))[:-1]


def lay_out(
    shard: str,
    new: Sequence[TensorSpec],
    kept: Sequence[TensorRef],
    metadata: Mapping[str, str],
    *,
    keep_order: bool = False,
) -> ShardLayout:
    """Lay out the shard that holds the ``new`` tensors and copies of the ``kept`` ones.

    The order is the safetensors library's, widest dtype first and then by name, so that every tensor starts
    at a multiple of its item size. With ``keep_order`` the kept ones stay in the order of their file, and the new ones
    follow, if that lets more bytes be shared and leaves every tensor at a multiple of its item size. Raises ValueError
    if a name occurs twice.
    """
    usual = _in_order(shard, _library_order([*new, *kept]), metadata)
    if not (keep_order and kept):
        return usual
    as_found = _in_order(shard, [*sorted(kept, key=attrgetter("shard", "offset")), *_library_order(new)], metadata)
    aligned = all(
        start * 8 % DTYPES[tensor.dtype].bits == 0
        for tensor, start in zip(as_found.tensors, as_found.starts(), strict=True)
    )
    return as_found if aligned and as_found.shared_bytes > usual.shared_bytes else usual


def _library_order(tensors: Iterable[TensorSpec | TensorRef]) -> list[TensorSpec | TensorRef]:
    by_dtype: defaultdict[str, list[TensorSpec | TensorRef]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    placed: list[TensorSpec | TensorRef] = []
    for dtype in sorted(by_dtype, key=lambda dtype: -DTYPES[dtype].rank):
        placed += sorted(by_dtype[dtype], key=itemgetter(0))
    return placed


def _in_order(shard: str, placed: Sequence[TensorSpec | TensorRef], metadata: Mapping[str, str]) -> ShardLayout:
    if len(set(map(itemgetter(0), placed))) < len(placed):
        raise ValueError(f"a tensor name occurs twice in {shard}")
    *starts, data_bytes = accumulate([tensor.nbytes for tensor in placed], initial=0)
    runs = tuple(_runs(placed, starts))
    residue, shared_bytes = _best_residue(runs)
    tensors = tuple(
        [t if isinstance(t, TensorSpec) else TensorSpec(t.name, t.dtype, t.shape, t.nbytes) for t in placed]
    )
    return ShardLayout(shard, tensors, data_bytes, metadata, runs, residue, shared_bytes)


def header_bytes(layout: ShardLayout) -> bytes:
    """Return the shard's header, padded so that its runs move by whole pages where they can."""
    if layout.residue is None:
        return encode_header(layout.tensors, layout.metadata)
    return encode_header(layout.tensors, layout.metadata, residue=layout.residue, modulus=PAGE)


def _runs(placed: Sequence[TensorSpec | TensorRef], starts: Sequence[int]) -> Iterable[CopyRun]:
    """Yield the maximal runs of tensors that are neighbours both in a source file and here."""
    shard, source, start, nbytes = "", 0, 0, 0
    for tensor, at in zip(placed, starts, strict=True):
        if isinstance(tensor, TensorSpec) or not tensor.nbytes:
            continue
        if tensor.shard == shard and tensor.offset == source + nbytes and at == start + nbytes:
            nbytes += tensor.nbytes
            continue
        if nbytes:
            yield CopyRun(shard, source, start, nbytes)
        _, _, _, shard, source, nbytes = tensor
        start = at
    if nbytes:
        yield CopyRun(shard, source, start, nbytes)


def _best_residue(runs: Iterable[CopyRun]) -> tuple[int | None, int]:
    """Return the data start modulo 4096 that lets the most bytes move by whole pages, and those bytes."""
    shared: defaultdict[int, int] = defaultdict(int)
    for run in runs:
        residue = (run.source_offset - run.start) % PAGE
        first = -(-run.source_offset // PAGE)
        last = (run.source_offset + run.nbytes) // PAGE
        if residue % 8 == 0 and last > first:
            shared[residue] += (last - first) * PAGE
    if not shared:
        return None, 0
    return max(shared.items(), key=lambda item: (item[1], -item[0]))
