"""LLM Compressor's entry points: its model-free scripts run with only their two import lines changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from requant import api
from requant.execute.progress import progress


@dataclass(frozen=True, slots=True)
class CompressedTensorsDequantizer:
    """Accepted where LLM Compressor wants it: requant recognises a quantized source by itself."""

    model: str | os.PathLike[str]
    ignore: Sequence[str] = ()


def model_free_ptq(
    model_stub: str | os.PathLike[str],
    save_directory: str | os.PathLike[str],
    scheme: str,
    config: object = None,
    ignore: str | Sequence[str] = (),
    max_workers: int | None = None,
    device: object = None,
    converter: CompressedTensorsDequantizer | None = None,
) -> api.ConvertResult:
    """Convert ``model_stub`` (a folder) into ``save_directory`` under ``scheme``.

    Exact routes are taken where they exist, which LLM Compressor does not do. Progress and notes go to stderr;
    ``config``, ``device`` and ``converter`` are accepted, and noted as not needed.
    """
    result = api.convert(model_stub, save_directory, scheme, ignore=ignore, workers=max_workers, progress=progress)
    for name, value in (("config", config), ("device", device), ("converter", converter)):
        if value is not None:
            result.plan.notes.append(f"{name} is not needed here and was not used")
    for note in result.plan.notes:
        print(f"note {note}", file=sys.stderr)
    return result
