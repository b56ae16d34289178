"""Tiles: some whole rows of a weight, and how they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from requant.checkpoint.header import TensorRef
from requant.checkpoint.store import LocalStore
from requant.dialects.recognise import Weight
from requant.execute.scratch import Scratch
from requant.formats import Part, Tile, ceil_div, format_named
from requant.plan.jobs import Job
from requant.plan.routes import Route

TILE_BYTES = 8 << 20
TILE_ROWS = 128
"""A tile's rows are a multiple of this, so that no block of 128 rows is cut."""


class Rows(NamedTuple):
    """Rows [first, last) of a weight."""

    first: int
    last: int

    def of(self, part: Part) -> tuple[int, int]:
        """Return the rows of a part that belong to these rows of the weight."""
        if not part.rows:
            return 0, 1
        return self.first // part.rows, ceil_div(self.last, part.rows)


def job_tiles(job: Job) -> Iterator[Rows]:
    """Cut a job's weight into tiles; one that lies transposed, or is to, is not cut."""
    if job.into is not None:
        return iter((Rows(0, job.weight.shape[0]),))
    return tile_rows(job.weight, job.kind.route.widest_item)


def tile_rows(weight: Weight, widest_item: int) -> Iterator[Rows]:
    """Cut a weight into tiles of about TILE_BYTES, given the widest value that it becomes on its way."""
    rows, columns = weight.shape
    if weight.bank is not None and weight.bank.stride:
        yield Rows(0, rows)
        return
    fitting = TILE_BYTES // max(1, columns * widest_item)
    step = max(TILE_ROWS, fitting // TILE_ROWS * TILE_ROWS)
    for first in range(0, rows, step):
        yield Rows(first, min(rows, first + step))


def read_part(store: LocalStore, ref: TensorRef, part: Part, rows: Rows, scratch: Scratch, slot: str) -> Tile:
    """Read the rows of a part that belong to some rows of its weight."""
    first, last = rows.of(part)
    columns = part.shape[-1]
    tile = scratch.tile(slot, ref.dtype, last - first, columns)
    store.read_into(ref.shard, ref.offset + first * columns * tile.bits.itemsize, tile.bits)
    return tile


def read_turned(store: LocalStore, ref: TensorRef, part: Part, stride: int, scratch: Scratch, slot: str) -> Tile:
    """Read all rows of a part that lies transposed: a column every ``stride`` elements."""
    from requant.kernels import transpose

    rows, columns = part.shape
    turned = scratch.tile("turned", ref.dtype, columns, rows)
    if stride == rows:
        store.read_into(ref.shard, ref.offset, turned.bits)
    else:
        for column in range(columns):
            at = ref.offset + column * stride * turned.bits.itemsize
            store.read_into(ref.shard, at, turned.bits[column])
    tile = scratch.tile(slot, ref.dtype, rows, columns)
    transpose.transpose(turned.bits, tile.bits)
    return tile


def read_weight(
    store: LocalStore, weight: Weight, rows: Rows, scratch: Scratch, slot: str = "source"
) -> tuple[Tile, ...]:
    """Read some rows of every part of a weight."""
    return _read_parts(store, weight, rows, scratch, slot, 0)


def read_scales(store: LocalStore, weight: Weight, rows: Rows, scratch: Scratch) -> tuple[Tile, ...]:
    """Read some rows of every part of a weight but the payload."""
    return _read_parts(store, weight, rows, scratch, "source", 1)


def _read_parts(
    store: LocalStore, weight: Weight, rows: Rows, scratch: Scratch, slot: str, first: int
) -> tuple[Tile, ...]:
    """Read some rows of the parts from the ``first`` on."""
    parts = format_named(weight.format).parts((weight.shape[0], weight.shape[1]), weight.dtype)
    stride = 0 if weight.bank is None else weight.bank.stride
    return tuple(
        read_turned(store, ref, part, stride, scratch, f"{slot} {index}")
        if stride and not index
        else read_part(store, ref, part, rows, scratch, f"{slot} {index}")
        for index, (ref, part) in enumerate(zip(weight.parts, parts, strict=True))
        if index >= first
    )


def values_of(source: Sequence[Tile], route: Route, columns: int, scratch: Scratch) -> Tile:
    """Return a tile's values as the route rounds them on their way: decoded, or the tile itself if it is dense."""
    if not route.decodes:
        return source[0]
    values = scratch.tile("decoded", route.through, source[0].bits.shape[0], columns)
    route.source.decode(source, values)
    return values
