"""The inventory: which weight lies in which format, and which tensors belong to no weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from requant.checkpoint.checkpoint import Checkpoint
from requant.checkpoint.header import TensorRef
from requant.dialects.banks import ACTIVATION_SCALE, Banks, ExpertFacts
from requant.dialects.recognise import MAYBE_PARTS, PART_SUFFIXES, Bank, Recogniser, Weight, stray_scale
from requant.errors import Problem
from requant.families.family import Family, family_of
from requant.plan.source_config import SourceConfig

_BIAS = "_bias"


@dataclass(frozen=True, slots=True)
class Inventory:
    """Every tensor of a checkpoint, once: as a part of a weight, or among the ``others`` (biases, A_log …).

    Those of banks first, weights are in the order of their first part in the shards.
    """

    weights: list[Weight]
    others: list[TensorRef]
    problems: list[Problem]


def take_inventory(checkpoint: Checkpoint, source: SourceConfig, family: Family | None = None) -> Inventory:
    """Group the tensors into weights; a missing or orphaned part is a problem.

    ``source`` is the checkpoint's config; ``family`` stands in for the one that it names.
    """
    modules: dict[str, tuple[TensorRef, ...]] = {}
    others: list[TensorRef] = []
    scaled: list[str] = []
    banks = Banks()
    for shard in checkpoint.shards:
        for tensor in shard.tensors:
            if len(tensor.shape) > 2 and banks.add(tensor):
                continue
            module, _, suffix = tensor.name.rpartition(".")
            if suffix in PART_SUFFIXES and module:
                modules[module] = (*modules.get(module, ()), tensor)
                if suffix in MAYBE_PARTS:
                    scaled.append(module)
            elif not (suffix.endswith(ACTIVATION_SCALE) and banks.add(tensor)):
                others.append(tensor)
    for module in scaled:
        stray = stray_scale(modules[module])
        if stray is not None:
            others.append(stray)
            modules[module] = tuple(part for part in modules[module] if part is not stray)
            if not modules[module]:
                del modules[module]
    weights: list[Weight] = []
    recognise = Recogniser(partial(_read_shape, checkpoint))
    problems: list[Problem] = []
    apart: dict[str, Bank | None] = {}
    biased = {tensor.name.removesuffix(_BIAS) for tensor in others if tensor.name.endswith(_BIAS)}
    facts = _expert_facts(source, family or family_of(source.model_types))
    for found in banks.weights(facts, biased, recognise):
        if isinstance(found, Problem):
            problems.append(found)
        elif found.module in modules:
            bank = found.module if found.bank is None else found.bank.name
            message = f"it is stored by itself, too, beside the bank {bank} in {found.parts[0].shard}"
            problems.append(Problem("name-hostile", message, found.module, "delete one of the two"))
        elif found.module in apart:
            banks_of_it = " and ".join(bank.name for bank in (apart[found.module], found.bank) if bank is not None)
            message = f"it is in two banks, {banks_of_it}"
            problems.append(Problem("name-hostile", message, found.module, "delete one of the two"))
        else:
            weights.append(found)
            apart[found.module] = found.bank
    for module, parts in modules.items():
        found = recognise(module, parts)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            weights.append(found)
    return Inventory(weights, others, problems)


def _expert_facts(source: SourceConfig, family: Family | None) -> ExpertFacts:
    hidden, intermediate = source.expert_sizes
    order = None if family is None else family.dense_bank or "halves"
    return ExpertFacts(hidden, intermediate, source.experts, order)


def _read_shape(checkpoint: Checkpoint, tensor: TensorRef) -> tuple[int, ...]:
    """Return the numbers in a ``weight_shape``, the only data that tell a format."""
    data = checkpoint.store.read(tensor.shard, tensor.offset, tensor.nbytes)
    return tuple(np.frombuffer(data, f"<i{tensor.nbytes // 2}").tolist())
