"""Respelling: weights whose bits stay, under the names, and in the company, that the output's dialect wants."""

from __future__ import annotations

from requant.checkpoint.header import TensorRef
from requant.dialects import Dialect
from requant.dialects.recognise import Weight
from requant.errors import Problem
from requant.formats import format_named
from requant.plan.select import Selection
from requant.recipe.input_scale import InputScaleSource


def respelled_parts(
    selection: Selection, dialect: Dialect, input_scale: InputScaleSource
) -> tuple[dict[str, TensorRef | None], list[Problem]]:
    """Return tensor name → the tensor as it is written (None: left out), where that is not as it is.

    Weights in a scheme's format take its dialect's names and lose an activation scale that the scheme has no use
    for, or that ``input_scale`` replaces. Kept quantized weights are respelled with them: one config.json speaks one
    dialect. Those that it has no names for are problems.
    """
    found: dict[str, TensorRef | None] = {}
    problems = []
    for target, weights in selection.respelled.items():
        for weight in weights:
            if weight.dialect != dialect.name:
                found.update(_renamed(weight, dialect))
            if weight.inputs and (input_scale.overrides or not target.scheme.stores_input_scale):
                found.update((part.name, None) for part in weight.inputs)
    for weight in selection.kept:
        if weight.format in ("", "dense") or weight.dialect == dialect.name:
            continue
        if dialect.spelling(weight.format) is None:
            message = f"it stays {weight.format} of {weight.dialect}, for which {dialect.name} has no names"
            remedy = f"convert it too, or write --dialect {weight.dialect}"
            problems.append(Problem("unknown-format", message, weight.module, remedy))
        else:
            found.update(_renamed(weight, dialect))
    return found, problems


def _renamed(weight: Weight, dialect: Dialect) -> dict[str, TensorRef | None]:
    spelling = dialect.spelling(weight.format)
    assert spelling is not None
    parts = format_named(weight.format).parts((weight.shape[0], weight.shape[1]), weight.dtype)
    renamed: dict[str, TensorRef | None] = {}
    for ref, part, spelled in zip(weight.parts, parts, spelling, strict=True):
        name, shape = f"{weight.module}.{spelled.suffix}", spelled.shape(part.shape)
        if (name, shape) != (ref.name, ref.shape):
            renamed[ref.name] = ref._replace(name=name, shape=shape)
    scale = dialect.input_scales.get(weight.format)
    if scale is None:
        return renamed
    for ref in weight.inputs:
        renamed[ref.name] = ref._replace(name=f"{weight.module}.{scale.suffix}", shape=scale.shape)
    return renamed
