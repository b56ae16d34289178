"""Banks in a plan: which are copied as they are, and which weights come together in one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from requant.checkpoint.header import TensorRef
from requant.dialects.recognise import Bank, Weight
from requant.errors import Problem
from requant.families.family import Family
from requant.plan.jobs import Into, Job
from requant.plan.select import Selection

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
_MEMBERS = {
    "halves": {
        "gate_proj": ("gate_up_proj", 0, 2),
        "up_proj": ("gate_up_proj", 1, 2),
        "down_proj": ("down_proj", 0, 1),
    },
    "interleaved": {"gate_up_proj": ("gate_up_proj", 0, 1), "down_proj": ("down_proj", 0, 1)},
}
"""How gate and up share a bank → an expert's weight → the bank that it lies in, its place there, of how many."""


@dataclass(frozen=True, slots=True)
class BankPlan:
    """``copied``: the banks of which nothing changes; ``apart``: those whose weights go their own ways."""

    copied: Mapping[str, Bank]
    apart: Mapping[str, Bank]


def divide_banks(selection: Selection, renamed: Mapping[str, TensorRef | None]) -> tuple[BankPlan, list[Problem]]:
    """Find the banks that are copied whole: no weight of theirs is converted, and no part of one has a new name."""
    apart = {weight.bank.name: weight.bank for weight in _weights(selection, converted=True) if weight.bank}
    copied: dict[str, Bank] = {}
    staying = [(weight, weight.bank) for weight in _weights(selection, converted=False) if weight.bank is not None]
    for weight, bank in staying:
        renamed_part = any(part.name in renamed for part in (*weight.parts, *weight.inputs))
        (apart if renamed_part or (bank.own_names and not bank.whole) else copied)[bank.name] = bank
    problems: dict[str, Problem] = {}
    for weight, bank in staying:
        if bank.name not in apart or bank.name in problems or not (bank.stride or bank.whole):
            continue
        why = "engines load its bank as a whole" if bank.whole else "in its bank the experts lie transposed"
        message = f"it would stay as it is, in names that the output does not have or apart from others, but {why}"
        remedy = "convert all experts of the layer"
        if bank.whole or not bank.own_names:
            remedy += ", or ignore all"
        problems[bank.name] = Problem("fused-split", message, weight.module, remedy)
    halved = {name.rpartition(".")[0] for name, bank in apart.items() if bank.whole}
    for name, bank in copied.items():
        if bank.whole and name not in apart and name.rpartition(".")[0] in halved:
            message = "it would stay as it is, and the layer's other bank would not: engines load both in one format"
            problems[name] = Problem("fused-split", message, name, "convert both, or ignore both")
    return BankPlan({name: bank for name, bank in copied.items() if name not in apart}, apart), list(problems.values())


def _weights(selection: Selection, *, converted: bool) -> Iterator[Weight]:
    """Return the weights that are converted, or those that are not."""
    if converted:
        return chain.from_iterable(selection.converted.values())
    return chain(selection.kept, *selection.already.values(), *selection.respelled.values())


def into_banks(
    jobs: list[Job], family: Family | None, experts: int | None, kept: Iterable[TensorRef]
) -> tuple[list[Job], list[Problem]]:
    """Send the experts that become unquantized into banks, where the family's engines want them so.

    A bank is made of all experts of a layer or not at all. One that has the name of a tensor that is ``kept`` is a
    problem.
    """
    if family is None or family.dense_bank is None:
        return jobs, []
    problems: list[Problem] = []
    members = _MEMBERS[family.dense_bank]
    layers: dict[str, dict[tuple[int, int], tuple[int, Job, int]]] = {}
    for place, job in enumerate(jobs):
        match = _EXPERT.fullmatch(job.weight.module) if job.kind.target.format == "dense" else None
        if match is not None and match[3] in members:
            leaf, half, halves = members[match[3]]
            layers.setdefault(f"{match[1]}.{leaf}", {})[int(match[2]), half] = place, job, halves
    taken = {ref.name: ref for ref in kept if ref.name in layers}
    for name, found in layers.items():
        halves = next(iter(found.values()))[2]
        count = len(found) // halves
        shapes = {job.weight.shape for _, job, _ in found.values()}
        complete = found.keys() == {(expert, half) for expert in range(count) for half in range(halves)}
        if not complete or len(shapes) > 1 or experts not in (None, count):
            continue
        if name in taken:
            _, dtype, shape_there, shard, *_ = taken[name]
            message = (
                f"unquantized experts lie in a bank of this name, which {dtype} {list(shape_there)} in {shard} has"
            )
            problems.append(Problem("name-hostile", message, name, "delete it, or --ignore the experts"))
            continue
        rows, columns = shapes.pop()
        shape = count, columns, rows * halves
        for (expert, half), (place, job, _) in found.items():
            first = expert * shape[1] * shape[2] + half * rows
            jobs[place] = job._replace(into=Into(name, shape, first))
    return jobs, problems
