"""Banks: all experts of a layer in one tensor, taken apart into the 2-D weights that it holds.

Qwen3.5 stores ``experts.gate_up_proj`` ``[E, 2I, H]``, Llama-4 ``[E, H, 2I]``, Step ``moe.gate_proj.weight``
``[E, I, H]``, gpt-oss ``experts.gate_up_proj_blocks`` ``[E, 2I, H/32, 16]`` with ``gate_up_proj_scales``. What one
expert has of a stored tensor is a tensor like another, only that it begins in the middle of a stored one; where
it lies transposed, its columns have a stride as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from requant.checkpoint.header import TensorRef
from requant.dialects.recognise import PAYLOADS, Bank, Weight
from requant.errors import Problem
from requant.formats import FLOAT_DTYPES
from requant.formats.fp8 import BLOCK


class ExpertFacts(NamedTuple):
    """What the model's config and family say of its experts.

    ``hidden`` and ``intermediate`` are their sizes (0, none: not known), ``experts`` their number if it is known;
    ``order``: how gate and up share a bank (None: not known).
    """

    hidden: int
    intermediate: frozenset[int]
    experts: int | None
    order: Literal["halves", "interleaved"] | None


class _Naming(NamedTuple):
    """How banks are named: ``pattern`` finds parent, leaf and part; ``parts`` tells what a 2-D weight calls the part.

    ``below`` stands between the parent and an expert's number where experts are named one by one.
    """

    pattern: re.Pattern[str]
    below: str
    parts: Mapping[str, str]


ACTIVATION_SCALE = "_activation_scale"
"""What ends the name of the one part of a bank that has fewer than three dimensions."""

_NAMINGS = (
    _Naming(
        re.compile(
            r"(.+\.experts)\.((?:gate|up|down|gate_up)_proj|w[123])(|_blocks|_scales?|_scale_inv|_activation_scale)"
        ),
        "",
        {
            "": "weight",
            "_blocks": "weight_packed",
            "_scales": "weight_scale",
            "_scale": "weight_scale",
            "_scale_inv": "weight_scale_inv",
            ACTIVATION_SCALE: "input_scale",
        },
    ),
    _Naming(
        re.compile(r"(.+\.moe)\.((?:gate|up|down)_proj)\.(weight|weight_scale|weight_scale_inv)"),
        ".experts",
        {"weight": "weight", "weight_scale": "weight_scale", "weight_scale_inv": "weight_scale_inv"},
    ),
)
_BELOW_EXPERTS = re.compile(r".+\.experts\.[^.]+")
_GATE_UP = "gate_up_proj"
_DOWN = ("down_proj", "w2")

Recognise = Callable[[str, Sequence[TensorRef]], Weight | Problem]


class Banks:
    """The banks of a checkpoint, gathered tensor by tensor."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], dict[str, TensorRef]] = {}
        self._strange: list[tuple[TensorRef, str]] = []

    def add(self, tensor: TensorRef) -> bool:
        """Take a tensor if it is a part of a bank; tell whether it is.

        To be asked for tensors of three dimensions or more, and for those that end in `ACTIVATION_SCALE`.
        """
        for naming in _NAMINGS:
            match = naming.pattern.fullmatch(tensor.name)
            if match is not None:
                parent, leaf, part = match.groups()
                known = self._known.setdefault((parent, naming.below, leaf), {})
                if known.setdefault(naming.parts[part], tensor) is not tensor:
                    self._strange.append((tensor, f"it is beside {known[naming.parts[part]].name}"))
                return True
        if len(tensor.shape) > 2 and _BELOW_EXPERTS.fullmatch(tensor.name):
            self._strange.append((tensor, "its name is that of no bank known here"))
            return True
        return False

    def weights(self, facts: ExpertFacts, biased: Container[str], recognise: Recognise) -> Iterator[Weight | Problem]:
        """Yield the weights in all banks; of a bank that cannot be taken apart, the bank itself, or what is wrong.

        ``biased`` are the banks that have a tensor of biases beside them.
        """
        for (parent, below, leaf), parts in self._known.items():
            try:
                if f"{parent}.{leaf}" in biased and facts.order != "interleaved":
                    raise _RefusedError("with biases in another, which would have to be divided, too")
                yield from _take_apart(f"{parent}.{leaf}", f"{parent}{below}", leaf, parts, facts, recognise)
            except _RefusedError as refused:
                yield _undivided(f"{parent}.{leaf}", tuple(parts.values()), str(refused))
        for tensor, refusal in self._strange:
            yield _undivided(tensor.name, (tensor,), refusal)


class _RefusedError(Exception):
    """Why a bank is not taken apart."""


def _undivided(name: str, tensors: tuple[TensorRef, ...], refusal: str, *, whole: bool = False) -> Weight:
    payload = tensors[0]
    format_name = "dense" if len(tensors) == 1 and payload.dtype in FLOAT_DTYPES else ""
    bank = Bank(name, tensors, whole=whole, refusal=refusal)
    return Weight(name, format_name, payload.shape, payload.dtype, tensors, bank=bank)


def _take_apart(
    name: str, parent: str, leaf: str, parts: Mapping[str, TensorRef], facts: ExpertFacts, recognise: Recognise
) -> Iterable[Weight | Problem]:
    payload = next((parts[suffix] for suffix in PAYLOADS if suffix in parts), None)
    if payload is None:
        where = ", ".join(f"{part.name} {part.dtype} {list(part.shape)} in {part.shard}" for part in parts.values())
        return [Problem("orphan-part", f"no experts beside {where}", name, "restore them, or delete the stray tensor")]
    tensors = payload, *(part for part in parts.values() if part is not payload)
    experts = payload.shape[0]
    if any(part.shape[:1] != (experts,) for part in tensors) or facts.experts not in (None, experts):
        here = ", ".join(f"{part.name} {list(part.shape)}" for part in tensors)
        raise _RefusedError(f"the numbers of experts disagree: {facts.experts or '?'} in config.json, here {here}")
    if not payload.nbytes:
        raise _RefusedError("it is empty")  # and may have any number of experts without a byte
    whole = facts.order == "interleaved"
    if whole and len(tensors) == 1 and payload.dtype in FLOAT_DTYPES:
        return [_undivided(name, tensors, "", whole=True)]
    if leaf == _GATE_UP and facts.order is None:
        raise _RefusedError("whether gate and up lie one after the other there is not known for this model type")
    leaves = ("gate_proj", "up_proj") if leaf == _GATE_UP and not whole else (leaf,)
    transposed = "weight_packed" not in parts and _is_transposed(payload, leaf, facts)
    rows = payload.shape[2] if transposed else payload.shape[1]
    if rows % len(leaves):
        raise _RefusedError(f"{rows} rows are no two halves")
    own_names = len(tensors) > 1 and not payload.name.endswith(PAYLOADS)
    bank = Bank(name, tensors, stride=rows if transposed else 0, whole=whole, own_names=own_names)
    weights: list[Weight | Problem] = []
    for place, own_leaf in enumerate(leaves):
        of_first = [
            _of_first_expert(part, suffix, rows, place, len(leaves), transposed=transposed)
            for suffix, part in parts.items()
        ]
        names = [f"{parent}.0.{own_leaf}.{suffix}" for suffix, _ in of_first]
        first = [ref._replace(name=of_it) for of_it, (_, ref) in zip(names, of_first, strict=True)]
        found = recognise(f"{parent}.0.{own_leaf}", first)
        if isinstance(found, Problem):
            return [replace(found, module=name)]
        if not found.format:
            listed = ", ".join(f"{part.name} {part.dtype} {list(part.shape)}" for part in tensors)
            raise _RefusedError(f"no known format has these parts: {listed}")
        steps = {ref.name: part.nbytes // experts for ref, part in zip(first, parts.values(), strict=True)}
        weights += _of_every_expert(found, f"{parent}.", f".{own_leaf}", steps, experts, bank)
    return weights


def _is_transposed(payload: TensorRef, leaf: str, facts: ExpertFacts) -> bool:
    """Tell from the model's sizes whether the experts of a bank lie as ``[in, out]``."""
    if len(payload.shape) != 3:
        raise _RefusedError(f"{list(payload.shape)} is no [experts, out, in]")
    fused = 2 if leaf == _GATE_UP else 1
    fits = {
        (facts.hidden, size) if leaf in _DOWN else (fused * size, facts.hidden)
        for size in facts.intermediate
        if facts.hidden
    }
    one, two = payload.shape[1:]
    as_is, turned = (one, two) in fits, (two, one) in fits
    if as_is == turned:
        known = f"hidden size {facts.hidden}, intermediate {sorted(facts.intermediate)}" if fits else "no sizes"
        what = "both [out, in] and [in, out]" if as_is else "neither [out, in] nor [in, out]"
        raise _RefusedError(f"{list(payload.shape)} fits {what} of the experts in config.json ({known})")
    return turned


def _of_first_expert(
    part: TensorRef, suffix: str, rows: int, place: int, leaves: int, *, transposed: bool
) -> tuple[str, TensorRef]:
    """Return what the ``place``-th of ``leaves`` weights of the first expert has of a stored part, and its suffix.

    ``rows`` are those that the bank's payload has for each expert.
    """
    of_each = math.prod(part.shape[1:])
    item = part.nbytes // max(1, math.prod(part.shape))
    is_payload = suffix in PAYLOADS
    if not is_payload and of_each == 1:  # one scale for all of it
        return suffix.removesuffix("_inv"), part._replace(shape=(1,), nbytes=item)
    shape = part.shape[1], of_each // max(1, part.shape[1])
    if transposed:
        if not is_payload and shape[0] != 1:
            raise _RefusedError(f"{part.name} {list(part.shape)}: scales of blocks that lie transposed")
        if shape[1] != rows:
            raise _RefusedError(f"{part.name} {list(part.shape)}: not a scale for each of {rows} rows")
        own = rows // leaves, shape[0]
        return suffix, part._replace(
            shape=own, offset=part.offset + place * own[0] * item, nbytes=math.prod(own) * item
        )
    if shape[0] % leaves or (shape[0] < rows and leaves > 1 and rows // leaves % BLOCK):
        raise _RefusedError(f"{part.name} {list(part.shape)}: gate and up share a row of scales")
    own = shape[0] // leaves, shape[1]
    nbytes = math.prod(own) * item
    return suffix, part._replace(shape=own, offset=part.offset + place * nbytes, nbytes=nbytes)


def _of_every_expert(
    first: Weight, before: str, after: str, steps: Mapping[str, int], experts: int, bank: Bank
) -> Iterator[Weight]:
    parts, inputs = (
        [(ref, steps[ref.name], ref.name.removeprefix(f"{before}0")) for ref in refs]
        for refs in (first.parts, first.inputs)
    )
    for expert in range(experts):
        name = f"{before}{expert}"
        own, beside = (
            tuple([ref._replace(name=name + tail, offset=ref.offset + expert * step) for ref, step, tail in refs])
            for refs in (parts, inputs)
        )
        yield first._replace(module=name + after, parts=own, inputs=beside, bank=bank)
