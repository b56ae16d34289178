"""Mistral: FP8 per tensor, scales 0-d; in its own checkpoints (params.json) and in those for Hugging Face."""

from __future__ import annotations

from types import MappingProxyType

from requant.dialects.base import Dialect, InputScale, Spelling, scalar

_REACH = 448.0

MISTRAL = Dialect(
    "mistral",
    MappingProxyType({"fp8-tensor": (Spelling("weight"), Spelling("qscale_weight", shape=scalar))}),
    MappingProxyType({"fp8-tensor": InputScale("qscale_act", (), _REACH, divisor=False)}),
)

MISTRAL_HF = Dialect(
    "mistral-hf",
    MappingProxyType({"fp8-tensor": (Spelling("weight"), Spelling("weight_scale_inv", shape=scalar))}),
    MappingProxyType({"fp8-tensor": InputScale("activation_scale", (), _REACH, divisor=False)}),
)
