"""The ``quantization_config`` of the dialect modelopt: one algorithm and what it leaves out, or a table of layers.

vLLM (``quantization/modelopt.py``) matches ``ignore`` as globs against its own names, looks up the members of a fused
layer in ``quantized_layers`` one by one, and finds routed experts there by their common prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from requant.dialects.compressed_tensors import Group
from requant.engines.resolver import name_variants
from requant.version import __version__

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_EXPERT = re.compile(r"(.*\.experts\.)\d+(\..*)")


def modelopt_config(groups: Mapping[str, Group | None]) -> dict[str, Any]:
    """Return the config of a checkpoint whose modules are quantized as their groups say (None: they are not)."""
    algorithms = {module: _algorithm(group) for module, group in _one_expert(groups).items()}
    used = sorted({algorithm for algorithm, _ in filter(None, algorithms.values())})
    config: dict[str, Any] = {"producer": {"name": "requant", "version": __version__}}
    if len(used) == 1:
        group_size = next(size for found in algorithms.values() if found for size in found[1:])
        sizes = {"group_size": group_size} if group_size else {}
        config |= {"quant_method": "modelopt", "quant_algo": used[0], **sizes}
    else:
        layers = {
            name: {"quant_algo": found[0], **({"group_size": found[1]} if found[1] else {})}
            for module, found in algorithms.items()
            if found
            for name in name_variants(module)
        }
        config |= {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION"}
        config["quantized_layers"] = dict(sorted(layers.items()))
    config["ignore"] = _globs(algorithms)
    config["kv_cache_scheme"] = None
    return config


def _algorithm(group: Group | None) -> tuple[str, int | None] | None:
    """Return ModelOpt's name for a group, and its group size."""
    if group is None:
        return None
    weights = group.weights
    size = weights.get("group_size")
    match weights["strategy"]:
        case "tensor_group":
            return ("W4A16_NVFP4" if group.input_activations is None else "NVFP4"), size
        case "block":
            return "FP8_PB_WO", None
        case "group":
            return "MXFP8", size
        case _:
            return "FP8", None


def _one_expert(groups: Mapping[str, Group | None]) -> dict[str, Group | None]:
    """Leave the first expert of every layer: an engine asks for the layer's experts as one."""
    few: dict[str, Group | None] = {}
    for module, group in groups.items():
        match = _EXPERT.fullmatch(module) if ".experts." in module else None
        few.setdefault(module if match is None else f"{match[1]}0{match[2]}", group)
    return few


def _globs(algorithms: Mapping[str, object]) -> list[str]:
    """Return globs for the modules that are not quantized: open in their numbers where no quantized one matches."""
    kept = [module for module, found in algorithms.items() if not found]
    others = [module for module, found in algorithms.items() if found]
    quantized = sorted({_NUMBER.sub("0", name) for module in others for name in name_variants(module)})
    safe: dict[str, bool] = {}
    globs: set[str] = set()
    for module in kept:
        path = _NUMBER.sub("*", module)
        glob = "*" + path[path.index("layers.") :] if "layers." in path else f"*{path}"
        if glob not in safe:
            safe[glob] = not _matches_any(glob, quantized)
        globs.update([glob] if safe[glob] else map(_literal, name_variants(module)))
    return sorted(globs)


def _matches_any(glob: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for name in names)


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
