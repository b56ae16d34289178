"""From weights to the new quantization_config, and how far the source's own config is from its tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from requant.dialects.recognise import Weight
from requant.engines.resolver import Resolver
from requant.errors import CheckpointError, Problem
from requant.plan.config import synthesize
from requant.schemes import SCHEMES, Scheme

TIED_HEAD = "lm_head"
"""The output head that engines build for every model; tied to the embeddings, it has no tensor on disk."""

_EXPERT = re.compile(r"\.experts\.\d+\.")

FORMAT_SCHEME: Mapping[str, Scheme] = {scheme.format: scheme for scheme in SCHEMES.values()}


def source_quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization_config that engines would read: the top level's, else a nested one; {} without."""
    for scope in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        found = scope.get("quantization_config")
        if isinstance(found, Mapping):
            return found
    return {}


def describe(
    converted: Iterable[Weight], kept: Iterable[Weight], scheme: Scheme, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the quantization_config of the output.

    A kept weight that is quantized keeps its source's activation settings; one of a format unknown here keeps
    the group that the source's config gives it, without which it cannot be described (CheckpointError).
    """
    source = source_quantization(config)
    resolver = Resolver(source)
    schemes: dict[str, Scheme | None] = {weight.module: scheme for weight in converted}
    known: dict[tuple[str, str | None], Scheme] = {}
    problems = []
    for weight in kept:
        if weight.format == "dense" or (not weight.format and len(weight.parts) == 1):
            if len(weight.shape) >= 2:
                schemes.update(dict.fromkeys(_asked_as(weight), None))
            continue
        group = resolver(weight.module)
        key = weight.format, group
        if key not in known:
            found = _kept_scheme(weight.format, source["config_groups"][group] if group else None)
            if found is None:
                message = "it stays in a format unknown here, and the source's config does not describe it"
                remedy = "add it to the source's quantization_config, or leave it out of the checkpoint"
                problems.append(Problem("unknown-format", message, weight.module, remedy))
                continue
            known[key] = found
        schemes[weight.module] = known[key]
    if problems:
        raise CheckpointError(problems)
    if not any(module.rpartition(".")[2] == TIED_HEAD for module in schemes):
        schemes[TIED_HEAD] = None
    return synthesize(schemes)


def disagreements(config: Mapping[str, Any], weights: Iterable[Weight]) -> list[str]:
    """Return a note for each way in which a compressed-tensors config disagrees with the tensors."""
    source = source_quantization(config)
    quantized = [weight for weight in weights if weight.format != "dense"]
    if not source:
        if not quantized:
            return []
        return [f"config.json declares no quantization, yet {len(quantized)} weights are quantized on disk"]
    if source.get("quant_method") != "compressed-tensors":
        return []
    resolver = Resolver(source)
    claims: dict[str, bool] = {}
    dense_claimed: list[str] = []
    quantized_unclaimed: list[str] = []
    for weight in weights:
        if len(weight.shape) != 2:
            continue
        name = _EXPERT.sub(".experts.*.", weight.module)  # engines ask for expert 0 only
        if name not in claims:
            claims[name] = resolver(weight.module) is not None
        if claims[name] and weight.format == "dense":
            dense_claimed.append(weight.module)
        elif not claims[name] and weight.format != "dense":
            quantized_unclaimed.append(weight.module)
    notes = []
    for modules, what in (
        (dense_claimed, "config.json calls {} weights quantized that are not on disk"),
        (quantized_unclaimed, "config.json leaves out {} weights that are quantized on disk"),
    ):
        if modules:
            notes.append(f"{what.format(len(modules))} (the first: {modules[0]}); the tensors decide")
    return notes


def _asked_as(weight: Weight) -> list[str]:
    """Return the names by which engines ask for a weight: those of its experts for a 3-D bank."""
    parent, _, leaf = weight.module.rpartition(".")
    if len(weight.shape) == 3 and parent.endswith(".experts"):
        members = ("gate_proj", "up_proj") if "gate_up" in leaf else (leaf,)
        return [f"{parent}.0.{member}" for member in members]
    return [weight.module]


def _kept_scheme(format_name: str, group: Mapping[str, Any] | None) -> Scheme | None:
    preset = FORMAT_SCHEME.get(format_name)
    if preset is not None:
        return preset if group is None else replace(preset, input_activations=group.get("input_activations"))
    if group is None:
        return None
    declared = json.dumps(group, sort_keys=True)
    return Scheme(declared, str(group.get("format", "")), group["weights"], group.get("input_activations"))
