"""From a selection to what the output says of itself: its quantization_config, and what goes with that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from requant.dialects import Dialect
from requant.dialects.compressed_tensors import COMPRESSED_TENSORS, ConfigGroup
from requant.dialects.fp8 import FP8
from requant.dialects.modelopt import MODELOPT
from requant.dialects.recognise import Weight
from requant.engines.names import MISTRAL_HEAD
from requant.engines.resolver import Resolver
from requant.errors import CheckpointError, Problem
from requant.families.family import Family
from requant.plan.config_compressed_tensors import synthesize
from requant.plan.config_fp8 import fp8_config
from requant.plan.config_modelopt import hf_quant_files, modelopt_config
from requant.plan.select import Selection
from requant.plan.source_config import SourceConfig
from requant.schemes import SCHEMES, scheme_of

_CONFIGS: Mapping[str, Callable[[Mapping[str, ConfigGroup | None]], dict[str, Any]]] = MappingProxyType(
    {COMPRESSED_TENSORS.name: synthesize, FP8.name: fp8_config, MODELOPT.name: modelopt_config}
)
"""Dialect → what makes its quantization_config, given the group of every module."""

_ROUTED = ".experts."
_FOUR_BITS = frozenset({"mxfp4", "nvfp4", "nvfp4-scale2"})

TIED_HEAD = "lm_head"
"""The output head that engines build for every model; tied to the embeddings, it has no tensor on disk."""


@dataclass(frozen=True, slots=True)
class Description:
    """What the output says of itself: its quantization_config (None: nothing is quantized), and ``files`` beside it.

    ``settings`` are other keys of config.json.
    """

    quantization_config: dict[str, Any] | None
    files: Mapping[str, bytes] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


def describe(
    selection: Selection, dialect: Dialect, source: SourceConfig, family: Family | None, *, native_activations: bool
) -> Description:
    """Describe the output in the words of ``dialect``.

    A kept weight that is quantized keeps its source's activation settings; one of a format unknown here keeps
    the group that the source's config gives it, without which it cannot be described (CheckpointError).
    """
    groups = _config_groups(selection, source, native_activations=native_activations)
    settings = {"expert_dtype": _expert_dtype(selection)} if family is not None and family.expert_dtype else {}
    if not any(groups.values()):
        return Description(None, settings=settings)
    config = _CONFIGS[dialect.name](groups)
    return Description(config, hf_quant_files(config) if dialect is MODELOPT else {}, settings)


def _expert_dtype(selection: Selection) -> str:
    """Return what DeepSeek-V4 calls the format of the routed experts: vLLM takes fp4 for granted where it is not told.

    It has two values. Experts that are not quantized go with fp8: under fp4 the scales of all other weights are
    expected as E8M0.
    """
    lying = ((target.format, weights) for target, weights in selection.under_schemes())
    formats = {name for name, weights in lying if any(_ROUTED in weight.module for weight in weights)}
    formats |= {weight.format for weight in selection.kept if _ROUTED in weight.module}
    return "fp4" if formats & _FOUR_BITS else "fp8"


def _config_groups(
    selection: Selection, source: SourceConfig, *, native_activations: bool
) -> dict[str, ConfigGroup | None]:
    """Return the config group of every module that an engine could take for a Linear; None: unquantized.

    ``native_activations``: MXFP4 weights that stay beside others are given MXFP8 activations, without which vLLM
    (0.32) does not take its own MXFP4 path for them.
    """
    mixed = native_activations and any(
        weights and target.scheme.weights for target, weights in selection.under_schemes()
    )
    quantization = source.quantization if source.is_compressed_tensors else {}
    resolver = Resolver(quantization)
    groups: dict[str, ConfigGroup | None] = {}
    for target, weights in selection.under_schemes():
        groups.update(dict.fromkeys(chain.from_iterable(map(_asked_as, weights)), target.scheme.config_group))
    known: dict[tuple[str, str | None, bool], ConfigGroup | None] = {}
    problems = []
    for weight in selection.kept:
        if weight.format == "dense" or (not weight.format and len(weight.parts) == 1):
            if len(weight.shape) >= 2:
                groups.update(dict.fromkeys(_asked_as(weight), None))
            continue
        name = resolver(weight.module)
        key = weight.format, name, bool(weight.inputs)
        if key not in known:
            group = _kept_group(weight, quantization, name)
            if mixed and group is not None and weight.format == "mxfp4" and group.input_activations is None:
                group = replace(group, input_activations=SCHEMES["MXFP8"].input_activations)
            known[key] = group
        if known[key] is None:
            message = "it stays in a format unknown here, and the source's config does not describe it"
            remedy = "add it to the source's quantization_config, or leave it out of the checkpoint"
            problems.append(Problem("unknown-format", message, weight.module, remedy))
        groups[weight.module] = known[key]
    if problems:
        raise CheckpointError(problems)
    if not any(module.endswith(TIED_HEAD) or module == MISTRAL_HEAD for module in groups):
        groups[TIED_HEAD] = None
    return groups


def _asked_as(weight: Weight) -> list[str]:
    """Return the names by which engines ask for a weight: those of one expert for a bank that is not taken apart."""
    bank = weight.bank
    if bank is None or not (bank.whole or bank.refusal):
        return [weight.module]
    parent, _, leaf = weight.module.rpartition(".")
    members = ("gate_proj", "up_proj") if "gate_up" in leaf else (leaf,)
    return [f"{parent}{'' if len(weight.shape) == 2 else '.0'}.{member}" for member in members]


def _kept_group(weight: Weight, quantization: Mapping[str, Any], name: str | None) -> ConfigGroup | None:
    """Return the group of a quantized weight that stays; ``name`` is its group in the source's config."""
    declared = quantization["config_groups"][name] if name else None
    scheme = scheme_of(weight.format, stores_input_scale=bool(weight.inputs))
    preset = None if scheme is None else scheme.config_group
    if preset is not None:
        return preset if declared is None else replace(preset, input_activations=declared.get("input_activations"))
    if declared is None or not declared.get("weights"):
        return None
    ct_format = declared.get("format") or quantization.get("format")
    return ConfigGroup(str(ct_format), declared["weights"], declared.get("input_activations"))
