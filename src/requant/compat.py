"""LLM Compressor's entry points: its model-free scripts run with only their two import lines changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from requant import api
from requant.errors import CallError, Problem
from requant.execute.progress import progress


@dataclass(frozen=True, slots=True)
class CompressedTensorsDequantizer:
    """Accepted where LLM Compressor wants it: requant recognises a quantized source by itself."""

    model: str | os.PathLike[str]
    ignore: Sequence[str] = ()


def model_free_ptq(
    model_stub: str | os.PathLike[str],
    save_directory: str | os.PathLike[str],
    scheme: str | None = None,
    config: object = None,
    ignore: str | Sequence[str] = (),
    max_workers: int | None = None,
    device: object = None,
    converter: CompressedTensorsDequantizer | None = None,
) -> api.ConvertResult:
    """Convert ``model_stub`` (a folder) into ``save_directory`` under ``scheme``.

    Exact routes are taken where they exist, which LLM Compressor does not do. Progress and notes go to stderr;
    ``device`` and ``converter`` are accepted, and noted as not needed. A ``config`` of several schemes, and a
    scheme that is no preset's name, are refused with a CallError.
    """
    if config is not None or not isinstance(scheme, str):
        message = "only the name of a preset is taken as scheme, and no config"
        raise CallError(Problem("bad-option", message, remedy="name a scheme such as FP8_BLOCK"))
    result = api.convert(model_stub, save_directory, scheme, ignore=ignore, workers=max_workers, progress=progress)
    for name, value in (("device", device), ("converter", converter)):
        if value is not None:
            result.plan.notes.append(f"{name} is not needed here and was not used")
    for note in result.plan.notes:
        print(f"note {note}", file=sys.stderr)
    return result
