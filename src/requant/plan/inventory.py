"""The inventory: which weight lies in which format, and which tensors belong to no weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from requant.checkpoint.checkpoint import Checkpoint
from requant.checkpoint.header import TensorRef
from requant.dialects.recognise import PART_SUFFIXES, Recogniser, Weight, is_bank
from requant.errors import Problem
from requant.formats import FLOAT_DTYPES


@dataclass(frozen=True, slots=True)
class Inventory:
    """Every tensor of a checkpoint, once: as a part of a weight, or among the ``others`` (biases, A_log …).

    Weights are in the order of their first part in the shards.
    """

    weights: list[Weight]
    others: list[TensorRef]
    problems: list[Problem]


def take_inventory(checkpoint: Checkpoint) -> Inventory:
    """Group the tensors into weights; a missing or orphaned part is a problem."""
    modules: dict[str, tuple[TensorRef, ...]] = {}
    others: list[TensorRef] = []
    banks: list[Weight] = []  # all experts of a layer in one tensor, named without a part suffix
    for shard in checkpoint.shards:
        for tensor in shard.tensors:
            module, _, suffix = tensor.name.rpartition(".")
            if suffix in PART_SUFFIXES and module:
                modules[module] = (*modules.get(module, ()), tensor)
            elif is_bank(tensor.name, tensor.shape):
                format_name = "dense" if tensor.dtype in FLOAT_DTYPES else ""
                banks.append(Weight(tensor.name, format_name, tensor.shape, tensor.dtype, (tensor,)))
            else:
                others.append(tensor)
    weights: list[Weight] = banks
    recognise = Recogniser(partial(_read_shape, checkpoint))
    problems: list[Problem] = []
    for module, parts in modules.items():
        found = recognise(module, parts)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            weights.append(found)
    return Inventory(weights, others, problems)


def _read_shape(checkpoint: Checkpoint, tensor: TensorRef) -> tuple[int, ...]:
    """Return the numbers in a ``weight_shape``, the only data that tell a format."""
    data = checkpoint.store.read(tensor.shard, tensor.offset, tensor.nbytes)
    return tuple(np.frombuffer(data, f"<i{tensor.nbytes // 2}").tolist())
