"""The scan: what headers cannot tell, read before a byte is written.

The scales of every quantized weight that is to be converted are read: a NaN among them is a problem. Asked to
count over-span values, the scan also finds the regions that an exact route cannot hold; only where the scales
alone leave that open is the payload of those rows read as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from requant.checkpoint.store import LocalStore
from requant.errors import Problem
from requant.execute.pool import run_parallel
from requant.execute.scratch import Scratch
from requant.execute.tiles import Rows, read_part, read_weight, tile_rows
from requant.formats import Tile
from requant.plan.plan import Job, Plan


@dataclass(slots=True)
class Findings:
    """What a scan found: over-span values by module, and weights with a NaN among their scales."""

    over_span: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def scanned_bytes(plan: Plan) -> int:
    """Return how many bytes of scales a scan reads."""
    return sum(ref.nbytes for job in _quantized(plan) for ref in job.weight.parts[1:])


def scan(plan: Plan, workers: int, advance: Callable[[int], None], *, count_over_span: bool) -> Findings:
    """Read the scales of every quantized weight that the plan converts.

    ``advance`` is told the bytes read, from any thread. Problems and over-span counts are in no order.
    """
    store = plan.checkpoint.store
    findings = Findings()
    lock = threading.Lock()

    def look_at(job: Job, scratch: Scratch) -> None:
        for rows in tile_rows(job.weight, 1):
            scales = _read_scales(job, rows, store, scratch)
            problem = _nan_scale(job, rows, scales)
            if problem is not None:
                with lock:
                    findings.problems.append(problem)
                return
            exact = job.kind.route.exact
            if count_over_span and exact is not None and exact.suspects(scales, 0.0).any():
                values = exact.over_span(read_weight(store, job.weight, rows, scratch), 0.0)
                if values:
                    with lock:
                        findings.over_span[job.weight.module] = findings.over_span.get(job.weight.module, 0) + values
        advance(sum(ref.nbytes for ref in job.weight.parts[1:]))

    run_parallel(_quantized(plan), look_at, workers)
    return findings


def _quantized(plan: Plan) -> Iterator[Job]:
    return (job for job in plan.jobs() if job.weight.format != "dense")


def _read_scales(job: Job, rows: Rows, store: LocalStore, scratch: Scratch) -> list[Tile]:
    """Read what belongs to some rows of every part but the payload."""
    weight = job.weight
    parts = job.kind.route.source.parts((weight.shape[0], weight.shape[1]), weight.dtype)
    return [
        read_part(store, weight.parts[index], parts[index], rows, scratch, f"source {index}")
        for index in range(1, len(parts))
    ]


def _nan_scale(job: Job, rows: Rows, scales: list[Tile]) -> Problem | None:
    """Return the problem of the first scale that is NaN or Inf."""
    from requant.kernels import compare

    weight = job.weight
    parts = job.kind.route.source.parts((weight.shape[0], weight.shape[1]), weight.dtype)
    for ref, part, tile in zip(weight.parts[1:], parts[1:], scales, strict=True):
        bad = compare.first_nonfinite(tile.bits, part.spells)
        if bad >= 0:
            columns = tile.bits.shape[1]
            row = rows.of(part)[0] + bad // columns
            message = f"NaN or Inf among its scales, at [{row}, {bad % columns}] of {ref.name} in {ref.shard}"
            return Problem("nan-or-inf", message, weight.module, "repair the source, or --ignore this weight")
    return None
