"""What vLLM cannot make of Mistral's own checkpoints (params.json), or would make wrong values of."""

from __future__ import annotations

import re

from requant.dialects import Dialect
from requant.dialects.compressed_tensors import COMPRESSED_TENSORS
from requant.errors import Problem
from requant.formats.fp8 import BLOCK
from requant.plan.select import Selection
from requant.plan.source_config import SourceConfig

_ROTATED = re.compile(r"layers\.\d+\.attention\.w[qk]")
_REMEDY = r"--ignore 're:layers\.\d+\.attention\.w[qkv]$', or take the checkpoint with Hugging Face's names"


def refusals(selection: Selection, dialect: Dialect, source: SourceConfig) -> list[Problem]:
    """Return the problems (``engine-refuses``) of an output that has a params.json; [] for any other.

    Its quantization can only be compressed-tensors (vLLM's ``configs/mistral.py``). Mistral's queries and keys lie
    with rotary pairs side by side: vLLM reorders the rows of each head when it loads ``wq.weight`` and ``wk.weight``
    (``MistralForCausalLM.maybe_remap_mistral``), and of them nothing else, neither packed codes nor scales.
    """
    if not source.is_mistral:
        return []
    problems = []
    quantizes = any(weights for target, weights in selection.under_schemes() if target.format != "dense")
    if quantizes and dialect is not COMPRESSED_TENSORS:
        message = f"vLLM takes a quantization of compressed-tensors there, not one of {dialect.name}"
        remedy = f"--dialect {COMPRESSED_TENSORS.name}"
        problems.append(Problem("engine-refuses", message, source.file, remedy))
    in_order = {"dense", "fp8-tensor", *(["fp8-block"] if _blocks_hold_heads(source) else [])}
    for target, weights in selection.under_schemes():
        if target.format in in_order:
            continue
        message = f"vLLM reorders its rows, but not the scales or packed codes of {target.scheme.name}"
        problems += [
            Problem("engine-refuses", message, weight.module, _REMEDY)
            for weight in weights
            if _ROTATED.fullmatch(weight.module)
        ]
    return problems


def _blocks_hold_heads(source: SourceConfig) -> bool:
    """Tell whether the rows of a head all lie in one 128x128 block, and so have one scale whatever their order."""
    head = source.value.get("head_dim")
    return isinstance(head, int) and head > 0 and BLOCK % head == 0
