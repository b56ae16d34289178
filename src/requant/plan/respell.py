"""Respelling: weights whose bits stay, under the names, and in the company, that the output's dialect wants."""

from __future__ import annotations

from requant.checkpoint.header import TensorRef
from requant.dialects import OUTPUT_DIALECTS, Dialect
from requant.dialects.recognise import Weight
from requant.errors import Problem
from requant.formats import NUMPY_BITS, format_named
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
            if weight.dialect != dialect.name and not _has_names(dialect, weight):
                dtypes = ", ".join(ref.dtype for ref in weight.parts)
                message = f"it is {weight.format} already, stored as {dtypes}, for which {dialect.name} has no names"
                problems.append(Problem("unknown-format", message, weight.module, _elsewhere(dialect)))
                continue
            if weight.dialect != dialect.name:
                found.update(_renamed(weight, dialect))
            if weight.inputs and (input_scale.overrides or not target.scheme.stores_input_scale):
                found.update((part.name, None) for part in weight.inputs)
    for weight in selection.kept:
        if weight.format in ("", "dense") or weight.dialect == dialect.name:
            continue
        if not _has_names(dialect, weight):
            message = f"it stays {weight.format} of {weight.dialect}, for which {dialect.name} has no names"
            own = f", or write --dialect {weight.dialect}" if weight.dialect in OUTPUT_DIALECTS else ""
            remedy = f"convert it too{own}"
            problems.append(Problem("unknown-format", message, weight.module, remedy))
        else:
            found.update(_renamed(weight, dialect))
    return found, problems


def _elsewhere(dialect: Dialect) -> str:
    others = [name for name in OUTPUT_DIALECTS if name != dialect.name]
    return f"--dialect {' or '.join(others)}, or another scheme"


def _has_names(dialect: Dialect, weight: Weight) -> bool:
    """Tell whether a dialect has names for a weight as it is stored: not all of them have scales that are E8M0."""
    spelling = dialect.spelling(weight.format)
    if spelling is None:
        return False
    parts = format_named(weight.format).parts((weight.shape[0], weight.shape[1]), weight.dtype)
    return all(
        ref.dtype in (part.dtype, *spelled.dtypes) or NUMPY_BITS[ref.dtype] == NUMPY_BITS[part.dtype]
        for ref, part, spelled in zip(weight.parts, parts, spelling, strict=True)
    )


def _renamed(weight: Weight, dialect: Dialect) -> dict[str, TensorRef | None]:
    spelling = dialect.spelling(weight.format)
    assert spelling is not None
    parts = format_named(weight.format).parts((weight.shape[0], weight.shape[1]), weight.dtype)
    renamed: dict[str, TensorRef | None] = {}
    for ref, part, spelled in zip(weight.parts, parts, spelling, strict=True):
        name, shape = f"{weight.module}.{spelled.suffix}", spelled.shape(part.shape)
        # Bits that go by several dtypes, such as E8M0 and U8, take the one that is read as what they are.
        dtype = ref.dtype if ref.dtype in (part.dtype, *spelled.dtypes) else part.dtype
        if (name, shape, dtype) != (ref.name, ref.shape, ref.dtype):
            renamed[ref.name] = ref._replace(name=name, shape=shape, dtype=dtype)
    scale = dialect.input_scales.get(weight.format)
    if scale is None:
        return renamed
    for ref in weight.inputs:
        renamed[ref.name] = ref._replace(name=f"{weight.module}.{scale.suffix}", shape=scale.shape)
    return renamed
