"""How far a source's own quantization_config is from its tensors, which decide."""

from __future__ import annotations

from collections.abc import Iterable

from requant.dialects.recognise import Weight
from requant.engines.resolver import Resolver
from requant.plan.source_config import SourceConfig


def disagreements(source: SourceConfig, weights: Iterable[Weight]) -> list[str]:
    """Return a note for each way in which a compressed-tensors config disagrees with the tensors."""
    quantized = [weight for weight in weights if weight.format != "dense"]
    if not source.quantization:
        if not quantized:
            return []
        return [f"config.json declares no quantization, yet {len(quantized)} weights are quantized on disk"]
    if not source.is_compressed_tensors:
        return []
    resolver = Resolver(source.quantization)
    claims: dict[tuple[str, str], bool] = {}
    dense_claimed: list[str] = []
    quantized_unclaimed: list[str] = []
    for weight in weights:
        if len(weight.shape) != 2:
            continue
        layer, _, expert = weight.module.rpartition(".experts.")
        name = layer, expert.partition(".")[2] if layer else expert  # engines ask for one expert of a layer
        if name not in claims:
            claims[name] = resolver(weight.module) is not None
        if claims[name] and weight.format == "dense":
            dense_claimed.append(weight.module)
        elif not claims[name] and weight.format != "dense":
            quantized_unclaimed.append(weight.module)
    notes = []
    for modules, what in (
        (dense_claimed, "config.json counts {} weights as quantized that are stored unquantized"),
        (quantized_unclaimed, "config.json leaves out {} weights that are stored quantized"),
    ):
        if modules:
            notes.append(f"{what.format(len(modules))} (the first: {modules[0]}); the tensors decide")
    return notes
