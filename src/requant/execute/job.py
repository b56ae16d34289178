"""A job from start to finish: destination checked, scales scanned, shards written, committed."""

from __future__ import annotations

from pathlib import Path

from requant.checkpoint.sidefiles import side_files
from requant.errors import CheckpointError, Problem, SurroundingsError
from requant.execute.convert import commit, output_files, write_shards
from requant.execute.journal import check_destination, claim, fingerprint_of, free_space
from requant.execute.progress import Progress
from requant.execute.scan import scan, scanned_bytes
from requant.execute.tiles import Values
from requant.plan.plan import Plan


def run_job(plan: Plan, destination: Path, workers: int, restart: bool, progress: Progress) -> Values:
    """Carry out a plan without problems, or what is left of it; return the fate of all converted values."""
    sides = side_files(plan.checkpoint.store)
    fingerprint = fingerprint_of(plan)
    if not check_destination(destination, fingerprint, restart):
        lack = lack_of_space(plan, destination)
        if lack:
            raise SurroundingsError(Problem("no-space", lack), plan.to_json())
        scan_job(plan, workers, progress, count_over_span=_refuses_over_span(plan))
    with claim(destination, fingerprint, output_files(plan, sides), restart) as journal:
        with progress("converting", sum(shard.layout.data_bytes for shard in plan.shards)) as advance:
            values = write_shards(plan, journal, workers, advance)
        commit(plan, journal, sides)
    return values


def scan_job(plan: Plan, workers: int, progress: Progress, *, count_over_span: bool) -> Values:
    """Scan; return the fate of all values that it foretells, or raise what stands in the way."""
    with progress("scanning scales", scanned_bytes(plan)) as advance:
        findings = scan(plan, workers, advance, count_over_span=count_over_span)
    problems = sorted(findings.problems, key=lambda problem: problem.module)
    if _refuses_over_span(plan):
        remedy = "round them (--exact auto --on-over-span round), or --ignore the weight"
        problems += [
            Problem("over-span", f"{count:,} values lie in regions that no exact scale holds", module, remedy)
            for module, count in sorted(findings.over_span.items())
        ]
    if problems:
        raise CheckpointError(problems, plan.to_json())
    values = Values(over_span=sum(findings.over_span.values()))
    for job in plan.jobs():
        count = job.weight.shape[0] * job.weight.shape[1]
        if job.route.exact is None:
            values.rounded += count
        else:
            values.exact += count
    values.exact -= values.over_span
    return values


def lack_of_space(plan: Plan, destination: Path) -> str:
    """Say what is missing where the output does not fit; "" where it does."""
    needed = sum(shard.layout.data_bytes for shard in plan.shards)
    free = free_space(destination)
    return f"the output takes {needed:,} bytes; {free:,} are free at {destination}" if needed > free else ""


def _refuses_over_span(plan: Plan) -> bool:
    return plan.recipe.on_over_span == "refuse" or plan.recipe.exact == "required"
