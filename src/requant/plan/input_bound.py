"""Where a bound on the input of Kimi-K3's routed experts can be found without running the model.

Their input is x = D·y, where y = g ∘ u is the output of the RMSNorm before the layer's MLP (its gain g is the weight of
``post_attention_layernorm``) and D the weight of ``routed_expert_down_proj``; ``routed_expert_norm`` acts on what the
experts put out. u has a mean square of at most 1, so |x_i| ≤ √n · ‖D_i ∘ g‖₂. The input of w2 is the output of SiTU,
bounded by the product of its betas: ``activation_situ_beta · activation_situ_linear_beta`` = 4 · 25.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from requant.checkpoint.header import TensorRef
from requant.dialects.recognise import Weight
from requant.errors import Problem
from requant.formats import FLOAT_DTYPES
from requant.plan.source_config import SourceConfig

_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?layers\.\d+\.)block_sparse_moe\.experts\.\d+\.w(?P<leaf>[123])")
_NORM = "post_attention_layernorm.weight"
_DOWN = "block_sparse_moe.routed_expert_down_proj.weight"
_REMEDY = "--input-scale constant:1.0 or a PATH"


@dataclass(frozen=True, slots=True)
class Latent:
    """What bounds the input of a layer's w1 and w3: the norm's gain ``[hidden]``, projection ``[latent, hidden]``."""

    norm: TensorRef
    down: TensorRef


@dataclass(frozen=True, slots=True)
class InputBounds:
    """What bounds the input of every routed expert: ``situ`` that of w2, ``latents`` by module that of w1 and w3."""

    situ: float
    latents: Mapping[str, Latent]


def find_bounds(
    modules: Iterable[str], weights: Iterable[Weight], source: SourceConfig
) -> tuple[InputBounds, list[Problem]]:
    """Find what bounds the inputs of ``modules``; each that is no routed expert of Kimi-K3 is a problem."""
    situ = source.situ_bound
    if situ is None:
        message = (
            "--input-scale bound is known for the SiTU experts of Kimi-K3 only, which config.json does not describe"
        )
        return InputBounds(0.0, {}), [Problem("bad-option", message, "config.json", _REMEDY)]
    stored = {
        weight.parts[0].name: weight
        for weight in weights
        if weight.format == "dense" and weight.parts[0].name.endswith((_NORM, _DOWN))
    }
    of_layer: dict[str, Latent | Problem] = {}
    latents: dict[str, Latent] = {}
    problems = []
    for module in modules:
        match = _EXPERT.fullmatch(module)
        if match is None:
            message = "--input-scale bound is known for routed experts (block_sparse_moe.experts.N.w1, w2, w3) only"
            problems.append(Problem("bad-option", message, module, f"{_REMEDY}, or --ignore it"))
        elif match["leaf"] != "2":
            layer = match["layer"]
            if layer not in of_layer:
                of_layer[layer] = _latent(layer, stored)
            latent = of_layer[layer]
            if isinstance(latent, Latent):
                latents[module] = latent
    problems += [found for found in of_layer.values() if isinstance(found, Problem)]
    return InputBounds(situ, latents), problems


def _latent(layer: str, stored: Mapping[str, Weight]) -> Latent | Problem:
    found = [stored.get(layer + name) for name in (_NORM, _DOWN)]
    for name, weight in zip((_NORM, _DOWN), found, strict=True):
        if weight is None or weight.dtype not in FLOAT_DTYPES:
            message = "--input-scale bound needs this tensor, unquantized"
            return Problem("missing-part", message, layer + name, _REMEDY)
    norm, down = (weight for weight in found if weight is not None)
    if len(down.shape) != 2 or norm.shape != down.shape[1:]:
        message = f"{list(down.shape)} does not go with {list(norm.shape)} of {norm.parts[0].name}"
        return Problem("missing-part", message, down.parts[0].name, _REMEDY)
    return Latent(norm.parts[0], down.parts[0])
