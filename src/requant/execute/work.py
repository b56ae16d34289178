"""Work: tiles converted, and every part written where the layout wants it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from requant.checkpoint.store import LocalStore
from requant.checkpoint.writer import ShardWriter
from requant.dialects.recognise import Weight
from requant.errors import CheckpointError
from requant.execute.pooling import nan_or_inf, pool
from requant.execute.scratch import Scratch
from requant.execute.tiles import Rows, job_tiles, read_weight, values_of
from requant.execute.values import Values
from requant.formats import FLOAT_DTYPES, NUMPY_BITS, Encoding, Tile
from requant.formats.nvfp4 import Nvfp4
from requant.plan.jobs import Into, Job, is_held


@dataclass(slots=True)
class JobState:
    """A job under way: its scales, gathered over the tiles and written once, and the tiles still to come."""

    job: Job
    starts: tuple[int, ...]
    remaining: int
    scales: tuple[NDArray[Any], ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self) -> None:
        """Allocate the scales, and write the shape where it is one of the parts."""
        with self.lock:
            if not self.scales:
                parts = self.job.kind.parts[1:]
                self.scales = tuple(
                    np.empty(part.shape if part.rows else (1, *part.shape), NUMPY_BITS[part.dtype]) for part in parts
                )
                for part, scale in zip(parts, self.scales, strict=True):
                    if part.is_shape:
                        scale[:] = self.job.weight.shape


def start_job(job: Job, starts: Mapping[str, int]) -> JobState:
    """Return a job none of whose tiles is done; ``starts`` says where every tensor of the shard begins."""
    tiles = sum(1 for _ in job_tiles(job))
    return JobState(job, tuple(starts[name] for name in job.names), tiles)


def _write_turned(into: Into, start: int, codes: Tile, writer: ShardWriter, scratch: Scratch) -> None:
    """Write a whole weight as the columns ``[in, out]`` that it has in a bank, which begins at ``start``."""
    from requant.kernels import transpose

    rows, columns = codes.bits.shape
    turned = scratch.tile("turned", codes.dtype, columns, rows).bits
    transpose.transpose(codes.bits, turned)
    stride = into.shape[2]
    if rows == stride:
        writer.write(start + into.first * turned.itemsize, turned)
        return
    for column in range(columns):
        writer.write(start + (into.first + column * stride) * turned.itemsize, turned[column])


def convert_tile(state: JobState, rows: Rows, store: LocalStore, writer: ShardWriter, scratch: Scratch) -> Values:
    """Read and convert some rows of a weight that pools nothing."""
    return _convert(state, rows, read_weight(store, state.job.weight, rows, scratch), 0.0, writer, scratch)


def convert_group(
    states: Sequence[JobState],
    pooled_with: Sequence[Job],
    known: float | None,
    store: LocalStore,
    writer: ShardWriter,
    scratch: Scratch,
) -> Values:
    """Convert weights that share what they pool, with each other and with all of ``pooled_with``.

    ``known`` is the number that they share, if it has been pooled before.
    """
    jobs = [state.job for state in states]
    held: dict[tuple[str, int], Sequence[Tile]] = {}
    holds = known is None and is_held(pooled_with)

    def read(job: Job, rows: Rows) -> Sequence[Tile]:
        key = job.weight.module, rows.first
        if key not in held:
            slot = f"held {len(held)}" if holds else "source"
            tile = read_weight(store, job.weight, rows, scratch, slot)
            if not holds:
                return tile
            held[key] = tile
        return held[key]

    pooled = pool(pooled_with, read, lambda job, rows: read(job, rows)[1:], scratch) if known is None else known
    values = Values(unlike_reference=sum(_is_unlike_reference(job, pooled) for job in jobs))
    for state, job in zip(states, jobs, strict=True):
        for rows in job_tiles(job):
            values.add(_convert(state, rows, read(job, rows), pooled, writer, scratch))
    return values


def _is_unlike_reference(job: Job, pooled: float) -> bool:
    route = job.kind.route
    if route.exact is not None or route.arithmetic != "reference" or not isinstance(route.target, Nvfp4):
        return False
    return route.target.replaces_reference(pooled, route.through)


def _convert(
    state: JobState, rows: Rows, source: Sequence[Tile], pooled: float, writer: ShardWriter, scratch: Scratch
) -> Values:
    """Convert some rows of a weight; whoever does a weight's last tile writes its scales."""
    weight, kind = state.job.weight, state.job.kind
    payload = kind.parts[0]
    codes = scratch.tile("target", payload.dtype, rows.last - rows.first, payload.shape[1])
    state.prepare()
    target = [codes]
    for part, scale in zip(kind.parts[1:], state.scales, strict=True):
        first, last = rows.of(part)
        target.append(Tile(scale[first:last], part.dtype))
    count = (rows.last - rows.first) * weight.shape[1]
    exact = kind.route.exact
    if exact is not None and (exact.holds is None or exact.holds(pooled)):
        over_span = exact.transcode(source, target, pooled)
        _refuse(weight, rows, _first_nonfinite(source[0], target))
        values = Values(exact=count - over_span, over_span=over_span)
    else:
        values = _round(state.job, rows, source, target, pooled, scratch)
        values.rounded = count
    if state.job.into is None:
        writer.write(state.starts[0] + rows.first * payload.shape[1] * codes.bits.itemsize, codes.bits)
    else:
        _write_turned(state.job.into, state.starts[0], codes, writer, scratch)
    with state.lock:
        state.remaining -= 1
        done = state.remaining == 0
    if done:
        for start, scale in zip(state.starts[1:], state.scales, strict=True):
            writer.write(start, scale)
        state.scales = ()
    return values


def _round(
    job: Job, rows: Rows, source: Sequence[Tile], target: Sequence[Tile], pooled: float, scratch: Scratch
) -> Values:
    weight, route = job.weight, job.kind.route
    errors = np.zeros(2) if route.scale == "mse" else None
    reference = route.arithmetic == "reference"
    how = Encoding(reference, route.scale, pooled, errors)
    _refuse(weight, rows, route.target.encode(values_of(source, route, weight.shape[1], scratch), target, how))
    return Values() if errors is None else Values(amax_error=float(errors[0]), error=float(errors[1]))


def _first_nonfinite(source: Tile, target: Sequence[Tile]) -> int:
    """Return the flat index of the first NaN or Inf that an exact route has passed on, or made; -1: there is none.

    Of payloads that are not decoded, FP8 codes alone can spell NaN; a decoded value can be beyond its dtype, and a
    scale of the whole weight beyond F32, to which no place belongs but the first.
    """
    from requant.kernels import compare

    payload = target[0] if target[0].dtype in FLOAT_DTYPES else source
    bad = compare.first_nonfinite(payload.bits, payload.dtype) if payload.dtype in compare.FLOATING else -1
    whole = target[-1]
    if bad < 0 and whole.bits.size == 1 and whole.dtype == "F32":
        return compare.first_nonfinite(whole.bits, "F32")
    return bad


def _refuse(weight: Weight, rows: Rows, bad: int) -> None:
    """Raise CheckpointError if a flat index in some rows of a weight says that a value there is NaN or Inf."""
    if bad >= 0:
        columns = weight.shape[1]
        raise CheckpointError(nan_or_inf(weight, rows.first + bad // columns, bad % columns))
