"""Two checkpoints side by side: which weight of one is which of the other, and the values of both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from requant.checkpoint.checkpoint import Checkpoint
from requant.checkpoint.header import TensorRef
from requant.checkpoint.store import LocalStore
from requant.dialects.recognise import Weight
from requant.errors import CheckpointError
from requant.execute.scratch import Scratch
from requant.execute.tiles import Rows, read_weight, tile_rows
from requant.families.family import families, family_of
from requant.formats import FLOAT_DTYPES, Tile, format_named
from requant.plan.inventory import take_inventory
from requant.plan.source_config import config_if_any

_PIECE = 8 << 20


class Pair(NamedTuple):
    """A weight, or another tensor, of the first checkpoint and the one of that module in the second."""

    a: Weight
    b: Weight


@dataclass(slots=True)
class Pairs:
    """What two checkpoints hold under the same names and in the same shapes, and what they do not.

    Of the latter, either both have it, in two shapes, or one has it and the other (None) has not.
    """

    together: list[Pair] = field(default_factory=list)
    apart: list[tuple[Weight | None, Weight | None]] = field(default_factory=list)


def pair_up(a: Checkpoint, b: Checkpoint) -> Pairs:
    """Pair the weights by module, and every other tensor by its name."""
    left, right = _by_module(a), _by_module(b)
    for one, other in ((left, right), (right, left)):
        for module in [module for module, weight in one.items() if weight.bank is not None and weight.bank.whole]:
            experts = {expert.module: expert for expert in _experts(one[module])}
            if module not in other and not experts.keys().isdisjoint(other):
                del one[module]
                one.update(experts)
    found = Pairs()
    for module, weight in left.items():
        partner = right.pop(module, None)
        if partner is not None and partner.shape == weight.shape:
            found.together.append(Pair(weight, partner))
        else:
            found.apart.append((weight, partner))
    found.apart += ((None, weight) for weight in right.values())
    return found


def _by_module(checkpoint: Checkpoint) -> dict[str, Weight]:
    """Return all weights by module, and every other tensor as a weight of its own."""
    source = config_if_any(checkpoint)
    # Of an unknown family the usual order of gate and up in a bank: were it another, the values would not match.
    family = family_of(source.model_types) or families()["generic"]
    inventory = take_inventory(checkpoint, source, family)
    if inventory.problems:
        raise CheckpointError(inventory.problems)
    weights = {weight.module: weight for weight in inventory.weights}
    for tensor in inventory.others:
        format_name = "dense" if tensor.dtype in FLOAT_DTYPES else ""
        weights[tensor.name] = Weight(tensor.name, format_name, tensor.shape, tensor.dtype, (tensor,))
    return weights


def _experts(weight: Weight) -> Iterator[Weight]:
    """Yield the experts of an unquantized bank ``[experts, in, out]`` that engines load as a whole."""
    bank = weight.bank
    if bank is None or weight.format != "dense" or len(weight.shape) != 3:
        return
    experts, columns, rows = weight.shape
    [stored] = weight.parts
    parent, _, leaf = weight.module.rpartition(".")
    nbytes = stored.nbytes // max(1, experts)
    for expert in range(experts):
        own = stored._replace(shape=(rows, columns), offset=stored.offset + expert * nbytes, nbytes=nbytes)
        module, its_bank = f"{parent}.{expert}.{leaf}", bank._replace(stride=rows)
        yield weight._replace(module=module, shape=(rows, columns), parts=(own,), bank=its_bank)


def flat(weight: Weight) -> Weight:
    """Return a dense or opaque tensor of any rank as if it had two dimensions; a quantized one has."""
    if len(weight.shape) == 2:
        return weight
    columns = weight.shape[-1] if weight.shape else 1
    rows = math.prod(weight.shape[:-1])
    return weight._replace(shape=(rows, columns), parts=(weight.parts[0]._replace(shape=(rows, columns)),))


def tiles_of(pair: Pair) -> Iterator[Rows]:
    """Cut the weights of a pair, both of two dimensions, into tiles of rows; one that lies transposed is not cut."""
    turned = pair.b.bank is not None and pair.b.bank.stride
    return tile_rows(pair.b if turned else pair.a, 4)


def values(store: LocalStore, weight: Weight, rows: Rows, scratch: Scratch, slot: str) -> tuple[Tile, tuple[Tile, ...]]:
    """Return some rows of a weight as F32, and the parts that say so; both stay until the slot is asked for again."""
    out = scratch.tile(slot, "F32", rows.last - rows.first, weight.shape[1])
    parts = read_weight(store, weight, rows, scratch, f"{slot} parts")
    format_named(weight.format).decode(parts, out)
    return out, parts


def same_bytes(a: LocalStore, x: TensorRef, b: LocalStore, y: TensorRef) -> bool:
    """Tell whether two tensors have the same bytes."""
    return x.nbytes == y.nbytes and all(
        a.read(x.shard, x.offset + at, min(_PIECE, x.nbytes - at))
        == b.read(y.shard, y.offset + at, min(_PIECE, x.nbytes - at))
        for at in range(0, x.nbytes, _PIECE)
    )
