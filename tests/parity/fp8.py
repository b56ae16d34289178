"""One FP8 weight through compressed-tensors: as LLM Compressor's model-free PTQ drives it, and decoded again."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.compressors import compress_module
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from llmcompressor.entrypoints.model_free.lifecycle import calibrate_weight, initialize_quantized_linear

if TYPE_CHECKING:
    from numpy.typing import NDArray

VALUES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
BITS = {"BF16": torch.uint16, "F16": torch.uint16, "F32": torch.uint32, "F8_E4M3": torch.uint8}


def from_bits(bits: NDArray[Any], dtype: str) -> torch.Tensor:
    values = torch.float8_e4m3fn if dtype == "F8_E4M3" else VALUES[dtype]
    return torch.from_numpy(bits).view(values)


def to_bits(tensor: torch.Tensor, dtype: str) -> NDArray[Any]:
    bits: NDArray[Any] = tensor.contiguous().view(BITS[dtype]).numpy()
    return bits


def scheme(preset: str) -> QuantizationScheme:
    return preset_name_to_scheme(preset, ["Linear"])


def compress(weight: torch.Tensor, preset: str) -> dict[str, torch.Tensor]:
    """Return the parts of the weight under a preset; activations are left out, as they need calibration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = scheme(preset)
        module = initialize_quantized_linear(weight, args.model_copy(update={"input_activations": None}), "cpu")
        calibrate_weight(module)
        compress_module(module)
    return dict(module.state_dict())


def decompress(parts: dict[str, torch.Tensor], preset: str) -> torch.Tensor:
    """Decode to the dtype of the scale."""
    weight: torch.Tensor = FloatQuantizationCompressor.decompress(parts, scheme(preset))["weight"]
    return weight
