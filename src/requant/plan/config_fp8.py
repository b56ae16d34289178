"""The ``quantization_config`` of the dialect fp8: what is not converted, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from requant.dialects.compressed_tensors import ConfigGroup
from requant.engines.names import name_variants


def fp8_config(groups: Mapping[str, ConfigGroup | None]) -> dict[str, Any]:
    """Return the config of a checkpoint whose modules are FP8 blocks but for those without a group.

    vLLM (``quantization/fp8.py``) compares the listed names exactly, and knows no patterns: every name that an
    engine may have for a module is there.
    """
    kept = {name for module, group in groups.items() if group is None for name in name_variants(module)}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": sorted(kept),
    }
