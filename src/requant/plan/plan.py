"""The plan: every output shard laid out, every problem found, from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from requant.checkpoint.checkpoint import Checkpoint, gc_paused
from requant.checkpoint.dtypes import payload_bytes
from requant.checkpoint.header import ShardHeader, TensorRef
from requant.checkpoint.layout import CopyRun, ShardLayout, TensorSpec, lay_out
from requant.checkpoint.sidefiles import SideFile, side_files
from requant.dialects import DIALECTS, Dialect, InputScale
from requant.dialects.recognise import Weight
from requant.errors import CheckpointError, Problem
from requant.families.family import family_of
from requant.formats import Part
from requant.plan.config_edit import edit_config
from requant.plan.describe import describe, disagreements
from requant.plan.groups import fused_members, split_groups
from requant.plan.inventory import Inventory, take_inventory
from requant.plan.respell import respelled_parts
from requant.plan.routes import Route, route_of
from requant.plan.select import Selection, Target, select
from requant.plan.source_config import parse_config
from requant.recipe.recipe import Recipe


class Kind(NamedTuple):
    """What all weights of one format, dtype and shape have in common: their route, and the parts it makes.

    ``outputs`` are the suffix of each part's name, and its dtype, shape and bytes.
    """

    target: Target
    route: Route
    parts: tuple[Part, ...]
    outputs: tuple[tuple[str, tuple[str, tuple[int, ...], int]], ...]


class Job(NamedTuple):
    """A weight to convert. ``group`` names the fused group that it pools a number with; "": none."""

    weight: Weight
    kind: Kind
    group: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts that replace it, in the target format's order."""
        return tuple(self.weight.module + suffix for suffix, _ in self.kind.outputs)


class StoredInput(NamedTuple):
    """An activation scale to be written: the tensor's name, the weight that it is for, how it is stored."""

    name: str
    weight: Weight
    scale: InputScale


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One output shard. Without ``jobs`` and with the same tensors as its source it is copied as it is."""

    name: str
    layout: ShardLayout
    jobs: list[Job]
    inputs: list[StoredInput]
    verbatim: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done.

    ``files`` are the new config.json and its like, by name; empty where a problem kept it from being made.
    ``spread`` holds the jobs of the fused groups that lie in more than one shard.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    shards: list[ShardPlan]
    side_files: list[SideFile]
    files: Mapping[str, bytes]
    spread: Mapping[str, list[Job]]
    kept: int
    kept_reasons: dict[str, int]
    problems: list[Problem]
    notes: list[str]

    def jobs(self) -> Iterator[Job]:
        """Yield the weights to convert, shard by shard."""
        return (job for shard in self.shards for job in shard.jobs)

    def _read_again(self) -> int:
        """Return the bytes that pooling reads beyond what is converted: of other shards, or too large to hold."""
        again = 0
        for shard in self.shards:
            for group in pooled_groups(shard.jobs):
                together = self.spread.get(group[0].group, group)
                again += sum(map(_source_bytes, together))
                if is_held(together):
                    again -= sum(map(_source_bytes, group))
        return again

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form; sizes are payload bytes."""
        jobs = list(self.jobs())
        bytes_out = sum(shard.layout.data_bytes for shard in self.shards)
        shared = sum(shard.layout.shared_bytes for shard in self.shards)
        return {
            "ok": not self.problems,
            "bytes_in": self.checkpoint.data_bytes,
            "bytes_read": sum(map(_source_bytes, jobs)) + self._read_again(),
            "bytes_out": bytes_out,
            "bytes_written": bytes_out - shared,
            "bytes_shared": shared,
            "tensors_in": self.checkpoint.tensor_count,
            "tensors_out": sum(len(shard.layout.tensors) for shard in self.shards),
            "converted": dict(Counter(job.kind.target.scheme.name for job in jobs)),
            "routes": dict(Counter(job.kind.route.kind for job in jobs)),
            "kept": self.kept,
            "kept_reasons": self.kept_reasons,
            "problems": [problem.to_json() for problem in self.problems],
            "notes": list(self.notes),
        }


HELD_BYTES = 128 << 20
"""A fused group of up to this size is held in memory between pooling and conversion, so that it is read once."""


def pooled_groups(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return the jobs of a shard that pool a number, by fused group; a job of no group is one of its own."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        if job.kind.route.pools:
            groups.setdefault(job.group or job.weight.module, []).append(job)
    return list(groups.values())


def is_held(group: Iterable[Job]) -> bool:
    """Tell whether jobs that pool a number are read into memory as a whole."""
    return sum(map(_source_bytes, group)) <= HELD_BYTES


def _source_bytes(job: Job) -> int:
    return sum([part.nbytes for part in job.weight.parts])


def make_plan(checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    """Plan the conversion of an open checkpoint; problems are listed in the plan, not raised."""
    with gc_paused():
        return _make_plan(checkpoint, recipe)


def _make_plan(checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    source = parse_config(checkpoint.config)
    inventory = take_inventory(checkpoint)
    selection = select(inventory.weights, recipe, source.experts)
    family = recipe.family or family_of(source.model_types)
    groups, faults = fused_members(selection, family, source.family)
    problems = inventory.problems + selection.problems + faults + split_groups(selection, family)
    notes = [*checkpoint.notes, *selection.notes, *disagreements(source, inventory.weights)]
    dialect = DIALECTS[recipe.dialect]
    jobs = _jobs(selection, recipe, dialect, source.dtype, groups)
    problems += _unheld(jobs)
    renamed, unspoken = respelled_parts(selection, dialect)
    problems += unspoken
    kept_tensors = _kept_tensors(inventory, selection, renamed)
    if not problems:
        _check_conservation(checkpoint, jobs, kept_tensors, sum(again is None for again in renamed.values()))
    shards = _lay_out(checkpoint, jobs, kept_tensors, _inputs(selection, dialect))
    files: Mapping[str, bytes] = {}
    sides: list[SideFile] = []
    try:
        sides = side_files(checkpoint.store)
        if not problems:
            new = describe(selection, dialect, source)
            files = {"config.json": edit_config(source.raw, new.quantization_config), **new.files}
    except CheckpointError as error:
        problems += error.problems
    kept = len(selection.kept) + sum(map(len, selection.already.values()))
    reasons = dict(selection.kept_reasons)
    return Plan(checkpoint, recipe, shards, sides, files, _spread(jobs), kept, reasons, problems, notes)


def _jobs(selection: Selection, recipe: Recipe, dialect: Dialect, dtype: str, groups: Mapping[str, str]) -> list[Job]:
    """Give every weight its route; the thinking is done once per kind of weight."""
    jobs = []
    for target, weights in selection.converted.items():
        kinds: dict[tuple[str, str, tuple[int, ...]], Kind] = {}
        for weight in weights:
            key = weight.format, weight.dtype, weight.shape
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = _kind(weight, target, recipe, dialect, dtype)
            jobs.append(Job(weight, kind, groups.get(weight.module, "") if groups else ""))
    return _agreed(jobs, partial(_rounded, recipe, dialect, dtype)) if groups else jobs


def _agreed(jobs: list[Job], rounded: Callable[[Job], Job]) -> list[Job]:
    """Let a fused group take one kind of route: an exact one and another do not pool the same number."""
    kinds: dict[str, set[bool]] = {}
    for job in jobs:
        if job.group:
            kinds.setdefault(job.group, set()).add(job.kind.route.exact is None)
    torn = {group for group, found in kinds.items() if len(found) > 1}
    return [rounded(job) if job.group in torn else job for job in jobs] if torn else jobs


def _rounded(recipe: Recipe, dialect: Dialect, dtype: str, job: Job) -> Job:
    """Return the job without an exact route."""
    rule = replace(job.kind.target.rule, exact="off")
    return job._replace(kind=_kind(job.weight, replace(job.kind.target, rule=rule), recipe, dialect, dtype))


def _kind(weight: Weight, target: Target, recipe: Recipe, dialect: Dialect, dtype: str) -> Kind:
    route = route_of(weight, target.format, target.rule.exact, recipe, dtype)
    parts = route.target.parts((weight.shape[0], weight.shape[1]), route.scale_dtype)
    spelling = dialect.spelling(target.format)
    assert spelling is not None, "make_recipe refuses a scheme that the dialect cannot write"
    outputs = []
    for part, spelled in zip(parts, spelling, strict=True):
        shape = spelled.shape(part.shape)
        nbytes = payload_bytes(part.dtype, shape)
        outputs.append((f".{spelled.suffix}", (part.dtype, shape, nbytes)))
    return Kind(target, route, parts, tuple(outputs))


def _unheld(jobs: Iterable[Job]) -> list[Problem]:
    """Return a problem for every weight that must not be rounded and has no exact route."""
    remedy = "allow rounding (--exact auto), or --ignore it"
    return [
        Problem(
            "over-span",
            f"no exact route leads from {job.kind.route.source.name} to {job.kind.route.target.name}",
            job.weight.module,
            remedy,
        )
        for job in jobs
        if job.kind.route.required and job.kind.route.exact is None
    ]


def _inputs(selection: Selection, dialect: Dialect) -> dict[str, list[StoredInput]]:
    """Return the activation scales to be written, by the shard of the weight that they are for."""
    found: dict[str, list[StoredInput]] = {}
    for selected in (selection.converted, selection.respelled):
        for target, weights in selected.items():
            if not target.scheme.stores_input_scale:
                continue
            scale = dialect.input_scales[target.format]
            for weight in weights:
                if weight.inputs and selected is selection.respelled:
                    continue  # it has its own
                stored = StoredInput(f"{weight.module}.{scale.suffix}", weight, scale)
                found.setdefault(weight.parts[0].shard, []).append(stored)
    return found


def _spread(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    """Return the jobs of every fused group that lies in more than one shard."""
    members: dict[str, list[Job]] = {}
    for job in jobs:
        if job.group and job.kind.route.pools:
            members.setdefault(job.group, []).append(job)
    return {
        group: together
        for group, together in members.items()
        if len({job.weight.parts[0].shard for job in together}) > 1
    }


def _kept_tensors(
    inventory: Inventory, selection: Selection, renamed: Mapping[str, TensorRef | None]
) -> dict[str, list[TensorRef]]:
    """Return by shard the tensors that are copied, as they are written: under the names that ``renamed`` gives."""
    found: dict[str, list[TensorRef]] = {}
    for tensor in inventory.others:
        found.setdefault(tensor.shard, []).append(tensor)
    for weights in (selection.kept, *selection.already.values(), *selection.respelled.values()):
        for weight in weights:
            for part in (*weight.parts, *weight.inputs):
                written = renamed.get(part.name, part) if renamed else part
                if written is not None:
                    found.setdefault(part.shard, []).append(written)
    return found


def _lay_out(
    checkpoint: Checkpoint,
    jobs: Iterable[Job],
    kept: Mapping[str, Sequence[TensorRef]],
    inputs: Mapping[str, list[StoredInput]],
) -> list[ShardPlan]:
    """Give every job to the shard of its payload; a shard that is left without tensors is dropped."""
    by_shard: dict[str, list[Job]] = {}
    for job in jobs:
        by_shard.setdefault(job.weight.parts[0].shard, []).append(job)
    new_spec = partial(tuple.__new__, TensorSpec)  # what _make does, without a frame for each
    plans = []
    for shard in checkpoint.shards:
        mine, stored, copied = by_shard.get(shard.shard, []), inputs.get(shard.shard, []), kept.get(shard.shard, [])
        if not (mine or stored) and sorted(copied) == sorted(shard.tensors):
            plans.append(ShardPlan(shard.shard, _as_it_is(shard), mine, stored, verbatim=True))
        elif mine or stored or copied:
            new = [new_spec((job.weight.module + suffix, *rest)) for job in mine for suffix, rest in job.kind.outputs]
            new += [TensorSpec(one.name, "F32", one.scale.shape, 4) for one in stored]
            layout = lay_out(shard.shard, new, copied, shard.metadata)
            plans.append(ShardPlan(shard.shard, layout, mine, stored, verbatim=False))
    return plans


def _check_conservation(
    checkpoint: Checkpoint, jobs: Iterable[Job], kept: Mapping[str, Sequence[TensorRef]], dropped: int
) -> None:
    """Make sure that every tensor of the source is copied, replaced, or dropped on purpose."""
    replaced = sum([len(job.weight.parts) + len(job.weight.inputs) for job in jobs])
    if replaced + sum(map(len, kept.values())) + dropped != checkpoint.tensor_count:
        raise AssertionError("a plan must account for every tensor")


def _as_it_is(shard: ShardHeader) -> ShardLayout:
    """Return the layout of a shard that is copied, header and all, in whatever order its tensors are."""
    tensors = tuple(TensorSpec(t.name, t.dtype, t.shape, t.nbytes) for t in shard.tensors)
    nbytes = shard.size - shard.data_start
    run = CopyRun(shard.shard, shard.data_start, 0, nbytes)
    return ShardLayout(shard.shard, tensors, nbytes, shard.metadata, (run,), None, nbytes)
