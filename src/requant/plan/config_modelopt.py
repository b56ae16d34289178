"""The ``quantization_config`` of the dialect modelopt: one algorithm and what it leaves out, or a table of layers.

vLLM (``quantization/modelopt.py``) matches ``ignore`` as globs against its own names, those of fused layers included,
and looks its layers up in ``quantized_layers``. It calls the key ``ignore``, SGLang ``exclude_modules``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from requant.checkpoint.names import HF_QUANT_CONFIG
from requant.dialects.compressed_tensors import ConfigGroup
from requant.engines.fused import fused_layers
from requant.engines.names import TEXT_ROOTS, component_spellings, name_variants, split_root
from requant.plan.config_compressed_tensors import one_expert_of_each
from requant.version import __version__

Algorithm = tuple[str, int | None]
"""ModelOpt's name for a group, and its group size."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_ROOT_NAMES = frozenset(name for root in TEXT_ROOTS for name in root.split("."))


def modelopt_config(groups: Mapping[str, ConfigGroup | None]) -> dict[str, Any]:
    """Return the config of a checkpoint whose modules are quantized as their groups say (None: they are not)."""
    algorithms = {module: _algorithm(group) for module, group in one_expert_of_each(groups).items()}
    algorithms |= fused_layers(algorithms)
    used = sorted({found[0] for found in algorithms.values() if found})
    config: dict[str, Any] = {"producer": {"name": "requant", "version": __version__}}
    if len(used) == 1:
        config |= {"quant_method": "modelopt", "quant_algo": used[0]}
    else:
        config |= {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION"}
    for name, size in filter(None, algorithms.values()):
        if size and (len(used) == 1 or name.endswith("NVFP4")):
            config["group_size"] = size
    if len(used) > 1:
        layers = {
            name: {"quant_algo": found[0], **({"group_size": found[1]} if found[1] else {})}
            for module, found in algorithms.items()
            if found
            for name in name_variants(module)
        }
        config["quantized_layers"] = dict(sorted(layers.items()))
    globs = _globs(algorithms)
    return {**config, "ignore": globs, "exclude_modules": globs, "kv_cache_scheme": None}


def hf_quant_files(config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return hf_quant_config.json, by its name: the older form of a config from `modelopt_config`."""
    kept = {key: config[key] for key in ("quant_algo", "group_size", "quantized_layers") if key in config}
    rest = {"kv_cache_quant_algo": None, "exclude_modules": config["exclude_modules"]}
    older = {"producer": config["producer"], "quantization": {**kept, **rest}}
    return {HF_QUANT_CONFIG: json.dumps(older, indent=2).encode() + b"\n"}


def _algorithm(group: ConfigGroup | None) -> Algorithm | None:
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


def _globs(algorithms: Mapping[str, Algorithm | None]) -> list[str]:
    """Return globs for the modules that are not quantized: open where no quantized one matches, else literal names."""
    kept = [module for module, found in algorithms.items() if not found]
    others = [module for module, found in algorithms.items() if found]
    quantized = {_NUMBER.sub("0", name) for module in others for name in name_variants(module)}
    foreign = [module for module in others if len(split_root(module)[0]) == 1]
    safe: dict[str, bool] = {}

    def is_safe(glob: str) -> bool:
        if glob not in safe:
            safe[glob] = not any(fnmatchcase(name, glob) for name in quantized)
        return safe[glob]

    globs: set[str] = set()
    for module in kept:
        whole = next(filter(is_safe, _subtrees(module)), None)
        template = [whole] if whole else _templates(module)
        if all(map(is_safe, template)):
            globs.update(template)
        else:  # vLLM takes names for parts of names, too
            names = (name for name in name_variants(module) if not any(name in other for other in foreign))
            globs.update(map(_literal, names))
    return sorted(globs)


def _subtrees(module: str) -> Iterator[str]:
    """Yield globs for all that is below a module outside of the text model: engines rename what is in there."""
    if len(split_root(module)[0]) == 1:
        for name in module.split(".")[:-1]:
            if not (name.isdecimal() or name in _ROOT_NAMES or name == "layers"):
                yield f"*{name}.*"


def _templates(module: str) -> list[str]:
    """Return globs for a module under each of its names, open in its numbers and in where the layers hang."""
    _, path = split_root(module)
    path = path[path.index("layers.") :] if "layers." in path else path
    return ["*" + _NUMBER.sub("*", ".".join(spelling)) for spelling in itertools.product(*component_spellings(path))]


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
