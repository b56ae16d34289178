"""compressed-tensors' own integer formats: weights as LLM Compressor calibrates and compresses them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from parity import sources

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from requant.formats import Format

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from llmcompressor.entrypoints.model_free.lifecycle import calibrate_weight, initialize_quantized_linear

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


def weight(dtype: str, shape: tuple[int, int], group: int, symmetric: bool, seed: int = 0) -> NDArray[Any]:
    """Awkward values, another kind for every group; none whose range overflows, which LLM Compressor cannot do."""
    kinds = list(sources.INTEGER_KINDS)
    if not symmetric:
        kinds.remove(sources.huge)
    numpy_dtype = sources.DTYPES[dtype]
    return sources.mosaic(np.random.default_rng(seed), shape, numpy_dtype, (1, group if group > 0 else shape[1]), kinds)


def tensor(array: NDArray[Any], dtype: str) -> torch.Tensor:
    bits = torch.from_numpy(array.view(f"i{array.itemsize}").copy())
    return bits.view(TORCH[dtype])


def bits(value: torch.Tensor) -> NDArray[Any]:
    """Return a tensor's bits as unsigned integers."""
    integer = value.view(getattr(torch, f"int{8 * value.itemsize}")).numpy()
    return np.ascontiguousarray(integer).view(f"u{value.itemsize}").reshape(value.shape)


def scheme(format: Format) -> tuple[QuantizationScheme, str]:
    """Return what compressed-tensors calls a format, and the name of its compressor."""
    group = getattr(format, "group", -1)
    bits = 32 // format.packing if format.packing > 1 else 8
    args = {"strategy": "channel"} if group < 0 else {"strategy": "group", "group_size": group}
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=getattr(format, "symmetric", True), **args)
    name = "pack-quantized" if format.packing > 1 else "int-quantized"
    return QuantizationScheme(targets=["Linear"], weights=weights, format=name), name


def compress(array: NDArray[Any], dtype: str, format: Format) -> list[torch.Tensor]:
    """Return the parts of a weight, in the format's order."""
    quantization, name = scheme(format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = initialize_quantized_linear(tensor(array, dtype), quantization, "cpu")
        calibrate_weight(module)
    state = {key: value.data for key, value in module.state_dict(keep_vars=True).items()}
    parts = BaseCompressor.get_value_from_registry(name).compress(state, quantization)
    return [parts[suffix] for suffix in ("weight", *SUFFIXES) if suffix in parts]


def decompress(parts: list[torch.Tensor], format: Format) -> torch.Tensor:
    quantization, name = scheme(format)
    suffixes = ("weight", "weight_scale") if format.packing == 1 else SUFFIXES
    if len(parts) == 3:
        suffixes = tuple(suffix for suffix in suffixes if suffix != "weight_zero_point")
    state = dict(zip(suffixes, parts, strict=True))
    value: torch.Tensor = BaseCompressor.get_value_from_registry(name).decompress(state, quantization)["weight"]
    return value
