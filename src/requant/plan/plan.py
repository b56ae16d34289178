"""The plan: every output shard laid out, every problem found, from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from requant.checkpoint.checkpoint import Checkpoint, gc_paused
from requant.checkpoint.dtypes import payload_bytes
from requant.checkpoint.header import ShardHeader
from requant.checkpoint.layout import CopyRun, ShardLayout, TensorSpec, lay_out
from requant.checkpoint.sidefiles import SideFile, side_files
from requant.dialects.compressed_tensors import part_suffix
from requant.dialects.recognise import Weight
from requant.errors import CheckpointError, Problem
from requant.formats import Part
from requant.plan.config_edit import edit_config
from requant.plan.describe import describe, disagreements
from requant.plan.inventory import take_inventory
from requant.plan.routes import Route, route_of
from requant.plan.select import select
from requant.plan.source_config import parse_config
from requant.recipe.recipe import Recipe


class Kind(NamedTuple):
    """What all weights of one format, dtype and shape have in common: their route, and the parts it makes.

    ``outputs`` are the suffix of each part's name, and its dtype, shape and bytes.
    """

    route: Route
    parts: tuple[Part, ...]
    outputs: tuple[tuple[str, tuple[str, tuple[int, ...], int]], ...]


class Job(NamedTuple):
    """A weight to convert."""

    weight: Weight
    kind: Kind

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts that replace it, in the target format's order."""
        return tuple(self.weight.module + suffix for suffix, _ in self.kind.outputs)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One output shard. Without ``jobs`` and with the same tensors as its source it is copied as it is."""

    name: str
    layout: ShardLayout
    jobs: list[Job]
    verbatim: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done. ``config`` is the new config.json; b"" where a problem kept it from being made."""

    checkpoint: Checkpoint
    recipe: Recipe
    shards: list[ShardPlan]
    side_files: list[SideFile]
    config: bytes
    kept: int
    kept_reasons: dict[str, int]
    problems: list[Problem]
    notes: list[str]

    def jobs(self) -> Iterator[Job]:
        """Yield the weights to convert, shard by shard."""
        return (job for shard in self.shards for job in shard.jobs)

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form; sizes are payload bytes."""
        jobs = list(self.jobs())
        bytes_out = sum(shard.layout.data_bytes for shard in self.shards)
        shared = sum(shard.layout.shared_bytes for shard in self.shards)
        return {
            "ok": not self.problems,
            "bytes_in": self.checkpoint.data_bytes,
            "bytes_read": sum(part.nbytes for job in jobs for part in job.weight.parts),
            "bytes_out": bytes_out,
            "bytes_written": bytes_out - shared,
            "bytes_shared": shared,
            "tensors_in": self.checkpoint.tensor_count,
            "tensors_out": sum(len(shard.layout.tensors) for shard in self.shards),
            "converted": {self.recipe.scheme.name: len(jobs)} if jobs else {},
            "routes": dict(Counter(job.kind.route.kind for job in jobs)),
            "kept": self.kept,
            "kept_reasons": self.kept_reasons,
            "problems": [problem.to_json() for problem in self.problems],
            "notes": list(self.notes),
        }


def make_plan(checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    """Plan the conversion of an open checkpoint; problems are listed in the plan, not raised."""
    with gc_paused():
        return _make_plan(checkpoint, recipe)


def _make_plan(checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    source = parse_config(checkpoint.config)
    inventory = take_inventory(checkpoint)
    selection = select(inventory.weights, recipe, source.experts)
    problems = inventory.problems + selection.problems
    notes = [*checkpoint.notes, *selection.notes, *disagreements(source, inventory.weights)]
    jobs = _jobs(selection.converted, recipe, source.dtype)
    shards = _lay_out(checkpoint, jobs)
    config = b""
    sides: list[SideFile] = []
    try:
        sides = side_files(checkpoint.store)
        if not problems:
            selected = selection.converted + selection.already
            config = edit_config(source.raw, describe(selected, selection.kept, recipe.scheme, source))
    except CheckpointError as error:
        problems += error.problems
    kept = len(selection.kept) + len(selection.already)
    return Plan(checkpoint, recipe, shards, sides, config, kept, dict(selection.kept_reasons), problems, notes)


def _jobs(weights: Iterable[Weight], recipe: Recipe, dtype: str) -> list[Job]:
    """Give every weight its route; the thinking is done once per kind of weight."""
    kinds: dict[tuple[str, str, tuple[int, ...]], Kind] = {}
    jobs = []
    for weight in weights:
        key = weight.format, weight.dtype, weight.shape
        kind = kinds.get(key)
        if kind is None:
            route = route_of(weight, recipe, dtype)
            parts = route.target.parts((weight.shape[0], weight.shape[1]), route.scale_dtype)
            outputs = tuple(
                (part_suffix(route.target.name, index), (part.dtype, part.shape, payload_bytes(part.dtype, part.shape)))
                for index, part in enumerate(parts)
            )
            kind = kinds[key] = Kind(route, parts, outputs)
        jobs.append(Job(weight, kind))
    return jobs


def _lay_out(checkpoint: Checkpoint, jobs: Sequence[Job]) -> list[ShardPlan]:
    """Give every job to the shard of its payload; a shard that is left without tensors is dropped."""
    by_shard: dict[str, list[Job]] = {}
    replaced: set[str] = set()
    for job in jobs:
        by_shard.setdefault(job.weight.parts[0].shard, []).append(job)
        replaced.update(part.name for part in job.weight.parts)
    new_spec = partial(tuple.__new__, TensorSpec)  # what _make does, without a frame for each
    plans = []
    for shard in checkpoint.shards:
        mine = by_shard.get(shard.shard, [])
        kept = [tensor for tensor in shard.tensors if tensor.name not in replaced]
        if len(kept) == len(shard.tensors) and not mine:
            plans.append(ShardPlan(shard.shard, _as_it_is(shard), mine, verbatim=True))
        elif mine or kept:
            new = [new_spec((job.weight.module + suffix, *rest)) for job in mine for suffix, rest in job.kind.outputs]
            layout = lay_out(shard.shard, new, kept, shard.metadata)
            plans.append(ShardPlan(shard.shard, layout, mine, verbatim=False))
    return plans


def _as_it_is(shard: ShardHeader) -> ShardLayout:
    """Return the layout of a shard that is copied, header and all, in whatever order its tensors are."""
    tensors = tuple(TensorSpec(t.name, t.dtype, t.shape, t.nbytes) for t in shard.tensors)
    nbytes = shard.size - shard.data_start
    run = CopyRun(shard.shard, shard.data_start, 0, nbytes)
    return ShardLayout(shard.shard, tensors, nbytes, shard.metadata, (run,), None, nbytes)
