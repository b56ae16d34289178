"""LLM Compressor itself, as the oracle: its ``model_free_ptq`` on the CPU, in this process."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.utils.match import match_name
from llmcompressor.entrypoints import model_free
from loguru import logger
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from parity.checkpoints import Stored

PARTS = ("weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_zero_point", "weight_shape")
TORCH_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}

logger.disable("llmcompressor")
logger.disable("compressed_tensors")


def _save_contiguous(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Save what LLM Compressor computed where it cannot itself.

    It crops padded FP8 blocks by slicing; where ``in`` is no multiple of 128 the slice is not contiguous, and
    safetensors refuses to save it.
    """
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def weight_only(preset: str) -> QuantizationScheme:
    """Return a preset without its activations, which LLM Compressor cannot calibrate without running a model."""
    return preset_name_to_scheme(preset, []).model_copy(update={"input_activations": None})


def quantize(
    src: Path, dst: Path, scheme: str | QuantizationScheme, ignore: Sequence[str], *, decode_to: str | None = None
) -> Path:
    """Run LLM Compressor's model-free PTQ; ``decode_to`` names the dtype to which it first decodes ``src``.

    Its dequantizer decodes to bfloat16 unless told otherwise, whatever the checkpoint's own dtype.
    """
    with warnings.catch_warnings(), mock.patch.object(model_free, "save_file", _save_contiguous):
        warnings.simplefilter("ignore")
        converter = None
        if decode_to is not None:
            converter = CompressedTensorsDequantizer(str(src), ignore=ignore, dtype=getattr(torch, decode_to))
        model_free.model_free_ptq(
            model_stub=str(src),
            save_directory=str(dst),
            scheme=scheme,
            ignore=ignore,
            device="cpu",
            converter=converter,
        )
    return dst


def quantization_config(folder: Path) -> QuantizationConfig:
    """Parse a checkpoint's quantization_config by compressed-tensors' own schema, which forbids unknown keys."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config.pop("version", None)
    return QuantizationConfig.model_validate(config)


def meaning(config: QuantizationConfig, modules: Iterable[str]) -> dict[str, tuple[Any, ...] | None]:
    """Say what ``config`` makes of linear modules of these names: format, weights and activations, or None.

    How a scale was once observed is left out: no reader of the checkpoint needs it.
    """

    def arguments(args: Any) -> dict[str, Any] | None:
        return None if args is None else args.model_dump(exclude={"observer", "observer_kwargs"})

    def resolve(module: str) -> tuple[Any, ...] | None:
        if any(match_name(module, pattern) for pattern in config.ignore or ()):
            return None
        for scheme in config.config_groups.values():
            if any(target == "Linear" or match_name(module, target) for target in scheme.targets):
                return (
                    scheme.format or config.format,
                    arguments(scheme.weights),
                    arguments(scheme.input_activations),
                    arguments(scheme.output_activations),
                )
        return None

    return {module: resolve(module) for module in modules}


def decompress(parts: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """Decode one weight with compressed-tensors, by the first group of a quantization_config."""
    scheme = next(iter(QuantizationConfig.model_validate(config).config_groups.values()))
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    weight: torch.Tensor = compressor.decompress(parts, scheme)["weight"]
    return weight


def decode(tensors: Mapping[str, Stored], module: str, config: dict[str, Any]) -> torch.Tensor:
    """Decode a stored module's weight with compressed-tensors."""
    stored = {name: tensors[f"{module}.{name}"] for name in PARTS if f"{module}.{name}" in tensors}
    parts = {
        name: torch.frombuffer(bytearray(tensor.data), dtype=TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)
        for name, tensor in stored.items()
    }
    return decompress(parts, config)
