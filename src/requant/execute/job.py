"""A job from start to finish: destination checked, scales scanned, shards written, committed."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from requant.errors import CallError, CheckpointError, Problem, SurroundingsError
from requant.execute.convert import commit, output_files, write_shards
from requant.execute.input_scales import input_amax
from requant.execute.journal import check_destination, claim, fingerprint_of, free_space, left_behind
from requant.execute.manifest import manifest_json, source_digest
from requant.execute.progress import Progress
from requant.execute.scan import scan, scanned_bytes
from requant.execute.values import Values
from requant.plan.plan import Plan


def run_job(
    plan: Plan, destination: Path, workers: int, restart: bool, progress: Progress, *, manifest: bool
) -> Values:
    """Carry out a plan without problems, or what is left of it; return the fate of all converted values.

    With ``manifest`` there is one in the end.
    """
    fingerprint = fingerprint_of(plan)
    amax = input_amax(plan)
    if not check_destination(destination, fingerprint, restart):
        lack = lack_of_space(plan, destination)
        if lack:
            remedy = "free some space, or name a DST on another file system"
            raise SurroundingsError(Problem("no-space", lack, str(destination), remedy), plan.to_json())
        scan_job(plan, workers, progress, count_over_span=plan.recipe.refuses_over_span)
    with claim(destination, fingerprint, output_files(plan), restart) as journal:
        if journal.done:
            plan.notes.append(f"continued: {len(journal.done)} of {len(plan.shards)} shards were done already")
        with progress("converting", sum(shard.layout.data_bytes for shard in plan.shards)) as advance:
            values = write_shards(plan, journal, amax, workers, advance, hashing=manifest)
        values.exact += _respelled_values(plan)
        if values.unlike_reference:
            plan.notes.append(
                f"{values.unlike_reference:,} weights are so small that the reference's global scale overflows: they "
                "were encoded in float32"
            )
        source = source_digest((header.shard, header.digest) for header in plan.checkpoint.shards)
        wanted = partial(manifest_json, plan, destination, source, workers, progress)
        commit(plan, journal, wanted if manifest else None)
    return values


def scan_job(plan: Plan, workers: int, progress: Progress, *, count_over_span: bool) -> Values:
    """Scan; return the fate of all values that it foretells, or raise what stands in the way."""
    with progress("scanning scales", scanned_bytes(plan)) as advance:
        findings = scan(plan, workers, advance, count_over_span=count_over_span)
    problems = sorted(findings.problems, key=lambda problem: problem.module)
    if plan.recipe.refuses_over_span:
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
        if job.kind.route.exact is None:
            values.rounded += count
        else:
            values.exact += count
    values.exact += _respelled_values(plan) - values.over_span
    return values


def check_input_scales(plan: Plan) -> None:
    """Raise what keeps the activation scales from being found in another checkpoint, or in a file."""
    if plan.recipe.input_scale.kind == "path":
        input_amax(plan)


def obstacles(plan: Plan, destination: Path, restart: bool) -> list[str]:
    """Return what, as things are, would keep the job from starting."""
    try:
        check_destination(destination, fingerprint_of(plan), restart)
        lack = lack_of_space(plan, destination)
    except (CallError, SurroundingsError) as error:
        return [str(problem) for problem in error.problems]
    return [lack] if lack else []


def lack_of_space(plan: Plan, destination: Path) -> str:
    """Say what is missing where the output does not fit; "" where it does.

    What an unfinished job has left in ``destination`` makes room: it is continued, or cleared.
    """
    needed = sum(shard.layout.data_bytes for shard in plan.shards)
    free = free_space(destination) + left_behind(destination)
    return f"the output takes {needed:,} bytes; {free:,} are free at {destination}" if needed > free else ""


def _respelled_values(plan: Plan) -> int:
    return sum(math.prod(weight.shape) for weights in plan.respelled.values() for weight in weights)
