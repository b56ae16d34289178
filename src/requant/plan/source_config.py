"""The source's config.json: what it says of the model, and of its own quantization."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from requant.checkpoint.checkpoint import Checkpoint
from requant.checkpoint.strict_json import load_object
from requant.errors import CallError, CheckpointError, Problem
from requant.formats import FLOAT_DTYPES
from requant.recipe.patterns import compile_patterns

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NO_SCOPES = ("quantization_config", "quantization")
_MISTRAL = "mistral"
"""The model type of a checkpoint with a params.json, which names none."""
_EXPERT_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_moe_experts")


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """A config.json: its bytes, its value, and the quantization_config that engines would read ({}: none).

    ``file`` is its name: Mistral's own checkpoints have a params.json. Of a quantization_config in the
    compressed-tensors dialect, groups, targets and ignore have their types.
    """

    raw: bytes
    value: Mapping[str, Any]
    quantization: Mapping[str, Any]
    file: str = "config.json"

    @property
    def key(self) -> str:
        """What the quantization_config is called there."""
        return _key(self.file)

    @property
    def is_mistral(self) -> bool:
        """Whether the checkpoint is one of Mistral's own, with a params.json."""
        return self.file != "config.json"

    @property
    def model_type(self) -> str | None:
        """The model's own model_type."""
        name = self.value.get("model_type", _MISTRAL if self.is_mistral else None)
        return name if isinstance(name, str) else None

    @property
    def model_types(self) -> list[str]:
        """Every model_type, the model's own first, then those of its parts."""
        found = [self.model_type, *(scope.get("model_type") for scope in _scopes(self.value))]
        return [name for name in found if isinstance(name, str)]

    @property
    def dtype(self) -> str:
        """The dtype in which the model computes; BF16 where it does not say."""
        for scope in _scopes(self.value):
            for key in ("dtype", "torch_dtype"):
                name = scope.get(key)
                if isinstance(name, str) and name.removeprefix("torch.") in _DTYPES:
                    return _DTYPES[name.removeprefix("torch.")]
        return FLOAT_DTYPES[0]

    @property
    def experts(self) -> int | None:
        """The number of routed experts."""
        for scope in _scopes(self.value):
            for key in _EXPERT_COUNT_KEYS:
                count = scope.get(key)
                if isinstance(count, int) and count > 1:
                    return count
        return None

    @property
    def expert_sizes(self) -> tuple[int, frozenset[int]]:
        """The hidden size, and the intermediate sizes that an expert may have; 0 and none where it does not say."""
        for scope in _scopes(self.value):
            hidden = scope.get("hidden_size")
            if isinstance(hidden, int) and hidden > 0:
                sizes = [size for key, size in scope.items() if key.endswith("intermediate_size")]
                return hidden, frozenset(size for size in sizes if isinstance(size, int) and size > 0)
        return 0, frozenset()

    @property
    def situ_bound(self) -> float | None:
        """What the output of the activation SiTU cannot exceed in magnitude; None: the activation is another one.

        SiTU is β·tanh(gate/β)·sigmoid(gate) · λ·tanh(up/λ); without a λ its output has no bound.
        """
        for scope in _scopes(self.value):
            if scope.get("hidden_act") == "situ":
                betas = scope.get("activation_situ_beta", 4.0), scope.get("activation_situ_linear_beta", 25.0)
                if all(isinstance(beta, int | float) and 0 < beta < 1e15 for beta in betas):
                    return float(betas[0] * betas[1])
        return None

    @property
    def is_compressed_tensors(self) -> bool:
        """Whether the quantization_config is in the compressed-tensors dialect."""
        return _is_compressed_tensors(self.quantization)


NO_CONFIG = SourceConfig(b"", {}, {})
"""What stands in for a config.json that is not there, or broken, where that may be."""


def parse_config(raw: bytes | None, file: str = "config.json") -> SourceConfig:
    """Parse the bytes of config.json; CheckpointError where it is missing, broken, or malformed."""
    if raw is None:
        remedy = "a checkpoint needs one: the quantization_config is written there"
        raise CheckpointError(Problem("missing-part", f"there is no {file}", file, remedy))
    try:
        value = load_object(raw.removeprefix(codecs.BOM_UTF8), allow_constants=True)
    except ValueError as error:
        raise _broken(str(error), file) from None
    for scope in _scopes(value):
        quantization = scope.get(_key(file))
        if quantization is None:
            continue
        complaint = _complaint(quantization)
        if complaint:
            raise _broken(f"{_key(file)}: {complaint}", file)
        return SourceConfig(raw, value, quantization, file)
    return SourceConfig(raw, value, {}, file)


def config_if_any(checkpoint: Checkpoint) -> SourceConfig:
    """Return what a checkpoint's config says; nothing where there is none."""
    return NO_CONFIG if checkpoint.config is None else parse_config(checkpoint.config, checkpoint.config_file)


def _key(file: str) -> str:
    return "quantization_config" if file == "config.json" else "quantization"


def _is_compressed_tensors(quantization: Mapping[str, Any]) -> bool:
    return str(quantization.get("quant_method")).lower().replace("_", "-") == "compressed-tensors"


def _scopes(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in which a setting may stand, the one that counts most first."""
    yield value
    nested = {key: inner for key, inner in value.items() if isinstance(inner, Mapping) and key not in _NO_SCOPES}
    if "text_config" in nested:
        yield nested.pop("text_config")
    yield from nested.values()


def _complaint(quantization: Any) -> str:
    """Say what in a quantization_config is not of its type; "" if all is well."""
    if not isinstance(quantization, Mapping):
        return "not an object"
    if not _is_compressed_tensors(quantization):
        return ""
    groups = quantization.get("config_groups")
    if groups is not None and not isinstance(groups, Mapping):
        return "config_groups is not an object"
    for name, group in (groups or {}).items():
        if not isinstance(group, Mapping):
            return f"{name} is not an object"
        if not _is_patterns(group.get("targets")):
            return f"the targets of {name} are not a list of names and patterns"
        for part in ("weights", "input_activations"):
            if not isinstance(group.get(part), Mapping | None):
                return f"{part} of {name} is not an object"
    return "" if _is_patterns(quantization.get("ignore")) else "ignore is not a list of names and patterns"


def _is_patterns(value: Any) -> bool:
    if value is None:
        return True
    if not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
        return False
    try:
        compile_patterns(value)
    except CallError:
        return False
    return True


def _broken(what: str, file: str) -> CheckpointError:
    return CheckpointError(Problem("header-invalid", what, file, "restore the file from its source"))
