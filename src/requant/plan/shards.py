"""Output shards: which tensors each holds, in which order, and which of them are copies."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from requant.checkpoint.checkpoint import Checkpoint
from requant.checkpoint.header import ShardHeader, TensorRef
from requant.checkpoint.layout import CopyRun, ShardLayout, TensorSpec, lay_out
from requant.dialects import Dialect
from requant.plan.banks import BankPlan
from requant.plan.inventory import Inventory
from requant.plan.jobs import Job, pooled_groups
from requant.plan.lots import Lot, StoredInput, divide
from requant.plan.select import Selection
from requant.recipe.input_scale import InputScaleSource


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One output shard. Without ``jobs`` and with the same tensors as its source it is copied as it is."""

    name: str
    layout: ShardLayout
    jobs: list[Job]
    inputs: list[StoredInput]
    verbatim: bool


def stored_inputs(selection: Selection, dialect: Dialect, wish: InputScaleSource) -> dict[str, list[StoredInput]]:
    """Return the activation scales to be written, by the shard of the weight that they are for."""
    found: dict[str, list[StoredInput]] = {}
    for selected in (selection.converted, selection.respelled):
        for target, weights in selected.items():
            if not target.scheme.stores_input_scale:
                continue
            scale = dialect.input_scales[target.format]
            for weight in weights:
                if weight.inputs and selected is selection.respelled and not wish.overrides:
                    continue  # it has its own
                stored = StoredInput(f"{weight.module}.{scale.suffix}", weight, scale)
                found.setdefault(weight.parts[0].shard, []).append(stored)
    return found


def kept_tensors(
    inventory: Inventory, selection: Selection, renamed: Mapping[str, TensorRef | None], banks: BankPlan
) -> tuple[dict[str, list[TensorRef]], list[TensorRef]]:
    """Return by shard the tensors that are copied, as they are written, and those that are left out.

    They are written under the names that ``renamed`` gives.
    """
    found: dict[str, list[TensorRef]] = {}
    dropped = []
    for tensor in chain(inventory.others, *(bank.tensors for bank in banks.copied.values())):
        found.setdefault(tensor.shard, []).append(tensor)
    for weights in (selection.kept, *selection.already.values(), *selection.respelled.values()):
        for weight in weights:
            if weight.bank is not None and weight.bank.name in banks.copied:
                continue
            for part in (*weight.parts, *weight.inputs):
                written = renamed.get(part.name, part) if renamed else part
                if written is None:
                    dropped.append(part)
                else:
                    found.setdefault(part.shard, []).append(written)
    return found, dropped


def check_conservation(
    checkpoint: Checkpoint,
    jobs: Iterable[Job],
    kept: Mapping[str, Sequence[TensorRef]],
    dropped: Sequence[TensorRef],
    banks: BankPlan,
) -> None:
    """Make sure that every tensor of the source is copied, replaced, or dropped on purpose.

    Where banks are taken apart, that every byte is: a scale may be shared by two of their weights.
    """
    if banks.apart:
        replaced = chain.from_iterable((*job.weight.parts, *job.weight.inputs) for job in jobs)
        accounted = {ref[3:] for ref in chain(replaced, dropped, *kept.values())}
        complete = sum(nbytes for _, _, nbytes in accounted) == checkpoint.data_bytes
    else:
        count = sum([len(job.weight.parts) + len(job.weight.inputs) for job in jobs])
        complete = count + sum(map(len, kept.values())) + len(dropped) == checkpoint.tensor_count
    if not complete:
        raise AssertionError("a plan must account for every tensor")


def lay_out_shards(
    checkpoint: Checkpoint,
    jobs: Iterable[Job],
    kept: Mapping[str, list[TensorRef]],
    inputs: Mapping[str, list[StoredInput]],
    max_bytes: int | None = None,
    in_place: bool = False,
) -> list[ShardPlan]:
    """Give every job to the shard of its payload; a shard that is left without tensors is dropped.

    Shards of more than ``max_bytes`` of data are split.
    """
    by_shard: dict[str, list[Job]] = {}
    homes: dict[str, str] = {}  # of banks: where their first weight was
    for job in jobs:
        home = job.weight.parts[0].shard
        if job.into is not None:
            home = homes.setdefault(job.into.name, home)
        by_shard.setdefault(home, []).append(job)
    plans: list[ShardPlan] = []
    taken = {shard.shard for shard in checkpoint.shards}
    for shard in checkpoint.shards:
        mine, stored, copied = by_shard.get(shard.shard, []), inputs.get(shard.shard, []), kept.get(shard.shard, [])
        if not (mine or stored or copied):
            continue
        if not (mine or stored) and sorted(copied) == sorted(shard.tensors):
            plan = ShardPlan(shard.shard, _as_it_is(shard), mine, stored, verbatim=True)
        else:
            plan = _laid_out(shard.shard, shard.metadata, Lot(mine, stored, copied), in_place)
        if max_bytes is None or plan.layout.data_bytes <= max_bytes:
            plans.append(plan)
            continue
        lots = divide(Lot(mine, stored, copied), max_bytes)
        names = _names_of_pieces(shard.shard, len(lots), taken)
        taken.update(names)
        plans += [_laid_out(name, shard.metadata, lot) for name, lot in zip(names, lots, strict=True)]
    return plans


def _laid_out(name: str, metadata: Mapping[str, str], lot: Lot, in_place: bool = False) -> ShardPlan:
    new_spec = partial(tuple.__new__, TensorSpec)  # what _make does, without a frame for each
    jobs, stored, copied = lot
    alone = [job for job in jobs if job.into is None] if any(job.into for job in jobs) else jobs
    new = [new_spec((job.weight.module + suffix, *rest)) for job in alone for suffix, rest in job.kind.outputs]
    new += dict.fromkeys(_bank_of(job) for job in jobs if job.into is not None)
    new += [TensorSpec(one.name, "F32", one.scale.shape, 4) for one in stored]
    return ShardPlan(name, lay_out(name, new, copied, metadata, keep_order=in_place), jobs, stored, verbatim=False)


def _names_of_pieces(shard: str, count: int, taken: Container[str]) -> list[str]:
    """Return the names of the pieces of a shard: ``model.safetensors`` → ``model-00001-of-00003.safetensors``."""
    if count == 1:
        return [shard]
    stem, dot, suffix = shard.rpartition(".")
    while True:
        names = [f"{stem}-{number:05}-of-{count:05}{dot}{suffix}" for number in range(1, count + 1)]
        if not any(name in taken for name in names):
            return names
        stem += "-split"


def spread_groups(shards: Iterable[ShardPlan]) -> dict[str, list[Job]]:
    """Return the jobs of every fused group that pools a number and is written to more than one shard."""
    pieces: dict[str, list[list[Job]]] = {}
    for shard in shards:
        for group, jobs in pooled_groups(shard.jobs).items():
            pieces.setdefault(group, []).append(jobs)
    return {group: [*chain.from_iterable(found)] for group, found in pieces.items() if len(found) > 1}


def _bank_of(job: Job) -> TensorSpec:
    """Return the bank that a job's weight becomes a part of."""
    assert job.into is not None
    [(_, (dtype, shape, nbytes))] = job.kind.outputs
    whole = math.prod(job.into.shape)
    return TensorSpec(job.into.name, dtype, job.into.shape, nbytes // math.prod(shape) * whole)


def _as_it_is(shard: ShardHeader) -> ShardLayout:
    """Return the layout of a shard that is copied, header and all, in whatever order its tensors are."""
    tensors = tuple(TensorSpec(t.name, t.dtype, t.shape, t.nbytes) for t in shard.tensors)
    nbytes = shard.size - shard.data_start
    run = CopyRun(shard.shard, shard.data_start, 0, nbytes)
    return ShardLayout(shard.shard, tensors, nbytes, shard.metadata, (run,), None, nbytes)
