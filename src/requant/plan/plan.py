"""The plan: every output shard laid out, every problem found, from headers alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

from requant.checkpoint.checkpoint import Checkpoint, gc_paused
from requant.checkpoint.header import MAX_NAME
from requant.checkpoint.names import CONFIG_FILES
from requant.checkpoint.sidefiles import SideFile, side_files
from requant.dialects import OUTPUT_DIALECTS
from requant.dialects.recognise import Weight
from requant.errors import CheckpointError, Problem
from requant.families.family import Family, family_for
from requant.formats import NUMPY_BITS, format_named
from requant.plan.banks import divide_banks, into_banks
from requant.plan.config_edit import edit_config
from requant.plan.describe import Description, describe
from requant.plan.disagreements import disagreements
from requant.plan.fused_groups import fused_members, split_groups
from requant.plan.input_bound import InputBounds, find_bounds
from requant.plan.inventory import take_inventory
from requant.plan.jobs import HELD_BYTES, Job, is_held, make_jobs, must_round, pooled_groups, source_bytes
from requant.plan.mistral import refusals
from requant.plan.respell import respelled_parts
from requant.plan.select import Selection, Target, select
from requant.plan.shards import (
    ShardPlan,
    check_conservation,
    kept_tensors,
    lay_out_shards,
    spread_groups,
    stored_inputs,
)
from requant.plan.source_config import parse_config
from requant.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done.

    ``files`` are the new config.json and its like, by name; empty where a problem kept it from being made.
    ``spread`` holds the jobs of the fused groups that lie in more than one shard, ``pooled`` by module the numbers that
    such groups have pooled already. ``respelled`` holds by scheme the weights whose parts only change their names, or
    what lies beside them, ``bounds`` what bounds the activations if the recipe asks for that. ``family`` is whose facts
    say what is fused.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    shards: list[ShardPlan]
    side_files: list[SideFile]
    files: Mapping[str, bytes]
    spread: Mapping[str, list[Job]]
    pooled: Mapping[str, float]
    respelled: Mapping[str, list[Weight]]
    bounds: InputBounds | None
    family: Family | None
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
            for group, jobs in pooled_groups(shard.jobs).items():
                together = self.spread.get(group, jobs)
                again += sum(map(source_bytes, together))
                if is_held(together):
                    again -= sum(map(source_bytes, jobs))
        return again

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form; sizes are payload bytes."""
        jobs = list(self.jobs())
        bytes_out = sum(shard.layout.data_bytes for shard in self.shards)
        shared = sum(shard.layout.shared_bytes for shard in self.shards)
        respelled = Counter({scheme: len(weights) for scheme, weights in self.respelled.items()})
        return {
            "ok": not self.problems,
            "bytes_in": self.checkpoint.data_bytes,
            "bytes_read": sum(map(source_bytes, jobs)) + self._read_again(),
            "bytes_out": bytes_out,
            "bytes_written": bytes_out - shared,
            "bytes_shared": shared,
            "tensors_in": self.checkpoint.tensor_count,
            "tensors_out": sum(len(shard.layout.tensors) for shard in self.shards),
            "converted": dict(Counter(job.kind.target.scheme.name for job in jobs) + respelled),
            "routes": dict(Counter(job.kind.route.kind for job in jobs) + Counter(exact=respelled.total())),
            "kept": self.kept,
            "kept_reasons": self.kept_reasons,
            "problems": [problem.to_json() for problem in self.problems],
            "notes": list(self.notes),
        }


def make_plan(
    checkpoint: Checkpoint,
    recipe: Recipe,
    pooled: Mapping[str, float] = MappingProxyType({}),
    *,
    in_place: bool = False,
) -> Plan:
    """Plan the conversion of an open checkpoint; problems are listed in the plan, not raised.

    ``pooled``: what is known already of weights whose fused group is half done. ``in_place``: shards are rewritten
    where they are, so that what stays should stay in its order.
    """
    with gc_paused():
        return _make_plan(checkpoint, recipe, pooled, in_place)


def _make_plan(checkpoint: Checkpoint, recipe: Recipe, pooled: Mapping[str, float], in_place: bool) -> Plan:
    source = parse_config(checkpoint.config, checkpoint.config_file)
    family = family_for(source.model_types, recipe.family)
    inventory = take_inventory(checkpoint, source, family)
    selection = select(inventory.weights, recipe, source.experts)
    groups, faults = fused_members(selection, family, source.model_type, pooled)
    problems = inventory.problems + selection.problems + faults + split_groups(selection, family)
    notes = [*checkpoint.notes, *selection.notes, *disagreements(source, inventory.weights)]
    notes += _unused_scale_rule(selection, recipe)
    dialect = OUTPUT_DIALECTS[recipe.dialect]
    jobs = make_jobs(selection, recipe, dialect, source.dtype, groups)
    problems += must_round(jobs) + refusals(selection, dialect, source)
    renamed, unspoken = respelled_parts(selection, dialect, recipe.input_scale)
    banks, torn = divide_banks(selection, renamed)
    problems += unspoken + torn
    copies, dropped = kept_tensors(inventory, selection, renamed, banks)
    jobs, taken = into_banks(jobs, family, source.experts, chain.from_iterable(copies.values()))
    problems += taken
    notes += _held_experts(jobs)
    if not problems:
        check_conservation(checkpoint, jobs, copies, dropped, banks)
    inputs = stored_inputs(selection, dialect, recipe.input_scale)
    bounds = None
    if recipe.input_scale.kind == "bound" and inputs:
        modules = [one.weight.module for stored in inputs.values() for one in stored]
        bounds, unbounded = find_bounds(modules, inventory.weights, source)
        problems += unbounded
    shards = lay_out_shards(checkpoint, jobs, copies, inputs, recipe.max_shard_size, in_place)
    problems += _too_long(shards)
    notes += _too_large(shards, recipe.max_shard_size)
    files: Mapping[str, bytes] = {}
    sides: list[SideFile] = []
    try:
        sides = side_files(checkpoint.store, checkpoint.config_file)
        if not problems:
            new = describe(selection, dialect, source, family, native_activations=_wants_native(recipe))
            config = edit_config(source.raw, new.quantization_config, new.settings, source.key)
            files = {source.file: config, **_second_config(checkpoint, new), **new.files}
    except CheckpointError as error:
        problems += error.problems
    return Plan(
        checkpoint=checkpoint,
        recipe=recipe,
        shards=shards,
        side_files=sides,
        files=files,
        spread=spread_groups(shards),
        pooled=pooled,
        respelled=_by_scheme(selection.respelled),
        bounds=bounds,
        family=family,
        kept=len(selection.kept) + sum(map(len, selection.already.values())),
        kept_reasons=dict(selection.kept_reasons),
        problems=problems,
        notes=notes,
    )


def _by_scheme(selected: Mapping[Target, list[Weight]]) -> dict[str, list[Weight]]:
    """Return weights by the name of their scheme, under which several rules may have put them."""
    found: dict[str, list[Weight]] = {}
    for target, weights in selected.items():
        found.setdefault(target.scheme.name, []).extend(weights)
    return found


def _wants_native(recipe: Recipe) -> bool:
    """Tell whether kept MXFP4 experts are meant for vLLM: recipes that say nothing else are."""
    return recipe.name is not None and not (recipe.engine or "").lower().startswith(("tensorrt", "trt"))


def _second_config(checkpoint: Checkpoint, new: Description) -> Mapping[str, bytes]:
    """Return config.json, where there is one beside a params.json: vLLM fills in from it what that does not say."""
    name = CONFIG_FILES[0]
    nbytes = checkpoint.store.files().get(name)
    if nbytes is None or checkpoint.config_file == name:
        return {}
    return {name: edit_config(checkpoint.store.read(name, 0, nbytes), new.quantization_config, new.settings)}


def _held_experts(jobs: Iterable[Job]) -> list[str]:
    """Return a note where experts lie transposed: a worker then holds all of one, not a tile."""
    turned = [job for job in jobs if job.into is not None or (job.weight.bank is not None and job.weight.bank.stride)]
    if not turned:
        return []
    together: Counter[str] = Counter()
    for job in turned:
        if job.kind.route.pools:
            together[job.group or job.weight.module] += source_bytes(job)
    largest = max(_buffers(job, together[job.group or job.weight.module]) for job in turned)
    return [f"{len(turned)} experts' weights lie transposed in banks: each worker holds up to {largest:,} bytes"]


def _buffers(job: Job, group: int) -> int:
    """Return the bytes in which a weight that is not cut into tiles is held, from its source to its target.

    ``group``: those of all parts that are read of what it pools a number with, 0 where it pools none.
    """
    weight, route = job.weight, job.kind.route
    source, target = source_bytes(job), sum(nbytes for _, (_, _, nbytes) in job.kind.outputs)
    from_bank = weight.bank is not None and weight.bank.stride
    turned = max(source if from_bank else 0, target if job.into is not None else 0)
    rounds = route.decodes and (route.exact is None or route.exact.holds is not None)
    decoded = math.prod(weight.shape) * NUMPY_BITS[route.through].itemsize if rounds else 0
    return max(source, group if group <= HELD_BYTES else 0) + turned + decoded + target


def _too_long(shards: Iterable[ShardPlan]) -> list[Problem]:
    """Return a problem for every tensor with a name that no header may have: parts have longer ones than weights."""
    return [
        Problem("name-hostile", f"a name of {len(name)} characters, over the limit of {MAX_NAME}", name, "--ignore it")
        for shard in shards
        for name, *_ in shard.layout.tensors
        if len(name) > MAX_NAME
    ]


def _too_large(shards: Iterable[ShardPlan], max_bytes: int | None) -> list[str]:
    """Return a note for every shard that could not be made as small as was asked for."""
    return [
        f"{shard.name} has {shard.layout.data_bytes:,} bytes, more than --max-shard-size: it is not divided further"
        for shard in shards
        if max_bytes is not None and shard.layout.data_bytes > max_bytes
    ]


def _unused_scale_rule(selection: Selection, recipe: Recipe) -> list[str]:
    """Return a note for every scheme whose format has no use for the recipe's scale rule."""
    if recipe.scale == "amax":
        return []
    return [
        f"--scale {recipe.scale} is not for {target.scheme.name}: its scales are those of amax"
        for target, weights in selection.converted.items()
        if weights and recipe.scale not in format_named(target.format).scale_rules
    ]
