"""Tiles: some whole rows of a weight, read, converted, and the payload written where the layout wants it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from requant.checkpoint.header import TensorRef
from requant.checkpoint.store import LocalStore
from requant.checkpoint.writer import ShardWriter
from requant.dialects.recognise import Weight
from requant.errors import CheckpointError, Problem
from requant.execute.scratch import Scratch
from requant.formats import FORMATS, NUMPY_BITS, Part, Tile, ceil_div
from requant.plan.plan import Job

TILE_BYTES = 8 << 20
TILE_ROWS = 128
"""A tile's rows are a multiple of this, so that no block of 128 rows is cut."""


@dataclass(slots=True)
class Values:
    """How the values of the converted weights fared."""

    exact: int = 0
    rounded: int = 0
    over_span: int = 0

    def add(self, other: Values) -> None:
        """Add another count to this one."""
        self.exact += other.exact
        self.rounded += other.rounded
        self.over_span += other.over_span


class Rows(NamedTuple):
    """Rows [first, last) of a weight."""

    first: int
    last: int

    def of(self, part: Part) -> tuple[int, int]:
        """Return the rows of a part that belong to these rows of the weight."""
        return self.first // part.rows, ceil_div(self.last, part.rows)


def tile_rows(weight: Weight, widest_item: int) -> Iterator[Rows]:
    """Cut a weight into tiles of about TILE_BYTES, given the widest value that it becomes on its way."""
    rows, columns = weight.shape
    fitting = TILE_BYTES // max(1, columns * widest_item)
    step = max(TILE_ROWS, fitting // TILE_ROWS * TILE_ROWS)
    for first in range(0, rows, step):
        yield Rows(first, min(rows, first + step))


def read_part(store: LocalStore, ref: TensorRef, part: Part, rows: Rows, scratch: Scratch, slot: str) -> Tile:
    """Read the rows of a part that belong to some rows of its weight."""
    first, last = rows.of(part)
    columns = ref.shape[1]
    tile = scratch.tile(slot, ref.dtype, last - first, columns)
    store.read_into(ref.shard, ref.offset + first * columns * tile.bits.itemsize, tile.bits)
    return tile


def read_weight(store: LocalStore, weight: Weight, rows: Rows, scratch: Scratch) -> tuple[Tile, ...]:
    """Read some rows of every part of a weight."""
    height, width = weight.shape
    parts = FORMATS[weight.format].parts((height, width), weight.dtype)
    return tuple(
        read_part(store, ref, part, rows, scratch, f"source {index}")
        for index, (ref, part) in enumerate(zip(weight.parts, parts, strict=True))
    )


@dataclass(slots=True)
class JobState:
    """A job under way: its scales, gathered over the tiles and written once, and the tiles still to come."""

    job: Job
    starts: tuple[int, ...]
    remaining: int = 0
    scales: tuple[NDArray[Any], ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self) -> None:
        """Allocate the scales."""
        self.scales = tuple(np.empty(part.shape, NUMPY_BITS[part.dtype]) for part in self.job.kind.parts[1:])


def convert_tile(state: JobState, rows: Rows, store: LocalStore, writer: ShardWriter, scratch: Scratch) -> Values:
    """Convert some rows of a weight; whoever does a weight's last tile writes its scales."""
    job = state.job
    weight, route = job.weight, job.kind.route
    columns = weight.shape[1]
    source = read_weight(store, weight, rows, scratch)
    payload = job.kind.parts[0]
    codes = scratch.tile("target", payload.dtype, rows.last - rows.first, payload.shape[1])
    with state.lock:
        if not state.scales:
            state.prepare()
    target = [codes]
    for part, scale in zip(job.kind.parts[1:], state.scales, strict=True):
        first, last = rows.of(part)
        target.append(Tile(scale[first:last], part.dtype))
    count = (rows.last - rows.first) * columns
    if route.exact is not None:
        over_span = route.exact.transcode(source, target, 0.0)
        values = Values(exact=count - over_span, over_span=over_span)
    else:
        tile = source[0]
        if route.decodes:
            tile = scratch.tile("decoded", route.through, rows.last - rows.first, columns)
            route.source.decode(source, tile)
        bad = route.encode(tile, target)
        if bad >= 0:
            raise CheckpointError(nan_or_inf(weight, rows.first + bad // columns, bad % columns))
        values = Values(rounded=count)
    writer.write(state.starts[0] + rows.first * payload.shape[1] * codes.bits.itemsize, codes.bits)
    with state.lock:
        state.remaining -= 1
        done = state.remaining == 0
    if done:
        for start, scale in zip(state.starts[1:], state.scales, strict=True):
            writer.write(start, scale)
        state.scales = ()
    return values


def nan_or_inf(weight: Weight, row: int, column: int) -> Problem:
    """Return the problem of a value that the target cannot hold."""
    tensor = weight.parts[0]
    place = f"[{row}, {column}] of {list(weight.shape)} ({tensor.name} in {tensor.shard})"
    message = f"NaN, Inf, or a value too large for the format, at {place}"
    return Problem("nan-or-inf", message, weight.module, "repair the source, or --ignore this weight and --restart")
