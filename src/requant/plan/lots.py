"""Lots: what goes into one output shard, and how a lot that is too large is divided."""

from __future__ import annotations

from typing import NamedTuple

from requant.checkpoint.header import TensorRef
from requant.dialects import InputScale
from requant.dialects.recognise import Weight
from requant.plan.jobs import Job


class StoredInput(NamedTuple):
    """An activation scale to be written: the tensor's name, the weight that it is for, how it is stored."""

    name: str
    weight: Weight
    scale: InputScale


class Lot(NamedTuple):
    """Weights to convert, activation scales to write, and tensors to copy, all into one shard."""

    jobs: list[Job]
    inputs: list[StoredInput]
    kept: list[TensorRef]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is written."""
        converted = sum([nbytes for job in self.jobs for _, (_, _, nbytes) in job.kind.outputs])
        return converted + 4 * len(self.inputs) + sum([ref.nbytes for ref in self.kept])


def divide(lot: Lot, max_bytes: int) -> list[Lot]:
    """Divide a lot into some of at most ``max_bytes`` each, in the order in which the source has the tensors.

    What belongs together stays together, however large it is: a weight with its scales and its bias, a bank, and a
    fused group that pools a number.
    """
    units: dict[str, Lot] = {}
    places: dict[str, int] = {}

    def unit(key: str, place: int) -> Lot:
        places[key] = min(place, places.get(key, place))
        return units.setdefault(key, Lot([], [], []))

    home: dict[str, str] = {}
    for job in lot.jobs:
        module = job.weight.module
        home[module] = job.into.name if job.into is not None else job.group if job.kind.route.pools else ""
        home[module] = home[module] or module
        unit(home[module], job.weight.parts[0].offset).jobs.append(job)
    for one in lot.inputs:
        module = one.weight.module
        unit(home.get(module, module), one.weight.parts[0].offset).inputs.append(one)
    for ref in lot.kept:
        module = ref.name.rpartition(".")[0] or ref.name
        unit(home.get(module, module), ref.offset).kept.append(ref)
    lots: list[Lot] = []
    room = 0
    for key in sorted(units, key=places.__getitem__):
        whole = units[key]
        nbytes = whole.nbytes
        if not lots or nbytes > room:
            lots.append(Lot([], [], []))
            room = max_bytes
        room -= nbytes
        lots[-1].jobs.extend(whole.jobs)
        lots[-1].inputs.extend(whole.inputs)
        lots[-1].kept.extend(whole.kept)
    return lots
