"""What a route must know of a whole weight, or fused group, before it converts the first tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from requant.checkpoint.store import LocalStore
from requant.dialects.recognise import Weight
from requant.errors import CheckpointError, Problem
from requant.execute.scratch import Scratch
from requant.execute.tiles import Rows, job_tiles, read_scales, read_weight, values_of
from requant.formats import Tile
from requant.plan.jobs import Job

Read = Callable[[Job, Rows], Sequence[Tile]]


def pool(jobs: Iterable[Job], read: Read, read_scales: Read, scratch: Scratch) -> float:
    """Return the number that the weights of a fused group, or one alone, pool: the largest of all their tiles.

    For an exact route it is the route's own; otherwise amax, and 0 if all is zero. ``read`` returns all parts of
    some rows, ``read_scales`` all but the payload. A NaN or Inf on the way is a CheckpointError.
    """
    largest = -math.inf
    for job in jobs:
        exact = job.kind.route.exact
        if exact is None or exact.pool is None:
            largest = max(largest, amax(job, read, scratch))
            continue
        for rows in job_tiles(job):
            if exact.pool.bound(read_scales(job, rows)) > largest:
                largest = max(largest, exact.pool.of(read(job, rows)))
    return largest


def pool_stored(jobs: Iterable[Job], store: LocalStore, scratch: Scratch) -> float:
    """Return what weights `pool`, read from ``store``."""
    return pool(
        jobs,
        lambda job, rows: read_weight(store, job.weight, rows, scratch),
        lambda job, rows: read_scales(store, job.weight, rows, scratch),
        scratch,
    )


def amax(job: Job, read: Read, scratch: Scratch) -> float:
    """Return the largest magnitude of a job's weight, -inf of an empty one; a NaN or Inf is a CheckpointError."""
    largest = -math.inf
    for rows in job_tiles(job):
        values = values_of(read(job, rows), job.kind.route, job.weight.shape[1], scratch)
        largest = max(largest, _amax(job, values, rows))
    return largest


def _amax(job: Job, values: Tile, rows: Rows) -> float:
    from requant.kernels import floats

    largest, bad = floats.amax(values.bits, values.dtype)
    if bad >= 0:
        columns = job.weight.shape[1]
        raise CheckpointError(nan_or_inf(job.weight, rows.first + bad // columns, bad % columns))
    return largest


def nan_or_inf(weight: Weight, row: int, column: int) -> Problem:
    """Return the problem of a value that the target cannot hold."""
    tensor = weight.parts[0] if weight.bank is None else weight.bank.tensors[0]  # the one that is in the shard
    place = f"[{row}, {column}] of {list(weight.shape)} ({tensor.name} in {tensor.shard})"
    message = f"NaN, Inf, or a value too large for the format, at {place}"
    return Problem("nan-or-inf", message, weight.module, "repair the source, or --ignore this weight and --restart")
