"""The scan: what headers cannot tell, read before a byte is written.

The scales of every quantized weight that is to be converted are read: a NaN among them is a problem. Asked to
count over-span values, the scan also finds the regions that an exact route cannot hold; only where the scales
alone leave that open is the payload of those rows read as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from requant.checkpoint.store import LocalStore
from requant.errors import Problem
from requant.execute.pooling import pool_stored
from requant.execute.scratch import Scratch
from requant.execute.tiles import job_tiles, read_scales, read_weight, tile_rows
from requant.execute.workers import run_parallel
from requant.plan.jobs import Job, pooled_groups
from requant.plan.plan import Plan


@dataclass(slots=True)
class Findings:
    """What a scan found: over-span values by module, and weights with a NaN among their scales."""

    over_span: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add what was found elsewhere."""
        self.over_span.update(other.over_span)
        self.problems += other.problems


def scanned_bytes(plan: Plan) -> int:
    """Return how many bytes of scales a scan reads."""
    return sum(ref.nbytes for job in _quantized(plan) for ref in job.weight.parts[1:])


def scan(plan: Plan, workers: int, advance: Callable[[int], None], *, count_over_span: bool) -> Findings:
    """Read the scales of every quantized weight that the plan converts.

    ``advance`` is told the bytes read, from any thread. Problems and over-span counts are in no order.
    """
    findings = Findings()
    lock = threading.Lock()

    def look_at(group: Sequence[Job], scratch: Scratch) -> None:
        found = Findings()
        for job in group:
            found.problems += _nan_scales(job, plan.checkpoint.store, scratch)
        if count_over_span and not found.problems:
            _count_over_span(plan, group, scratch, found)
        with lock:
            findings.add(found)
        advance(sum(ref.nbytes for job in group for ref in job.weight.parts[1:]))

    run_parallel(_groups(plan), look_at, workers)
    return findings


def _groups(plan: Plan) -> Iterator[Sequence[Job]]:
    """Yield the quantized jobs, those that pool a number together."""
    for job in _quantized(plan):
        if not job.kind.route.pools:
            yield (job,)
    yield from pooled_groups(_quantized(plan)).values()


def _count_over_span(plan: Plan, group: Sequence[Job], scratch: Scratch, found: Findings) -> None:
    store = plan.checkpoint.store
    pooled = 0.0
    if group[0].kind.route.exact is not None and group[0].kind.route.pools:
        pooled = pool_stored(group, store, scratch)
    for job in group:
        exact = job.kind.route.exact
        if exact is None:
            continue
        if exact.holds is not None and not exact.holds(pooled):
            found.over_span[job.weight.module] = job.weight.shape[0] * job.weight.shape[1]
            continue
        for rows in job_tiles(job):
            scales = read_scales(store, job.weight, rows, scratch)
            if exact.suspects(scales, pooled).any():
                values = exact.over_span(read_weight(store, job.weight, rows, scratch), pooled)
                if values:
                    found.over_span[job.weight.module] = found.over_span.get(job.weight.module, 0) + values


def _quantized(plan: Plan) -> Iterator[Job]:
    return (job for job in plan.jobs() if job.weight.format != "dense")


def _nan_scales(job: Job, store: LocalStore, scratch: Scratch) -> list[Problem]:
    """Return the problem of the first scale that is NaN or Inf, if one is."""
    from requant.kernels import compare

    weight = job.weight
    parts = job.kind.route.source.parts((weight.shape[0], weight.shape[1]), weight.dtype)
    for rows in tile_rows(weight, 1):
        for ref, part, tile in zip(weight.parts[1:], parts[1:], read_scales(store, weight, rows, scratch), strict=True):
            spells = part.spelled(ref.dtype)
            if spells not in compare.FLOATING:
                continue
            bad = compare.first_nonfinite(tile.bits, spells)
            if bad >= 0:
                columns = tile.bits.shape[1]
                row = rows.of(part)[0] + bad // columns
                message = f"NaN or Inf among its scales, at [{row}, {bad % columns}] of {ref.name} in {ref.shard}"
                return [Problem("nan-or-inf", message, weight.module, "repair the source, or --ignore this weight")]
    return []
