"""Write fp8-tensor.safetensors: small weights, and what LLM Compressor and ModelOpt make of them, FP8 per tensor.

Run by hand where the extra [parity] and nvidia-modelopt (0.47.0) are installed. Names are
``DTYPE.KIND.{source,llmcompressor,modelopt}.{weight,scale}``, arrays the bits of their values.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import modelopt.torch.quantization as mtq
import numpy as np
import torch
from modelopt.torch.export.unified_export_hf import _export_quantized_weight
from safetensors.numpy import save_file

from parity import fp8, sources
from requant.formats import NUMPY_BITS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def model_optimizer(weight: Tensor) -> tuple[Tensor, Tensor]:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    model = torch.nn.Sequential(linear)
    linear.weight.data.copy_(weight)
    mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda model: model(torch.ones(1, weight.shape[1], dtype=weight.dtype)))
    _export_quantized_weight(linear, weight.dtype)
    return linear.weight.data, linear.weight_scale


def main() -> None:
    warnings.simplefilter("ignore")
    golden: dict[str, NDArray[Any]] = {}
    rng = np.random.default_rng(0)
    for dtype, numpy_dtype in sources.DTYPES.items():
        for kind in (sources.gaussian, sources.heavy_tailed, sources.outlier, sources.midpoints):
            bits = kind(rng, (20, 33), numpy_dtype).astype(numpy_dtype).view(NUMPY_BITS[dtype])
            weight = fp8.from_bits(bits, dtype)
            compressed = fp8.compress(weight, "FP8")
            codes, scale = model_optimizer(weight)
            golden |= {
                f"{dtype}.{kind.__name__}.source.weight": bits,
                f"{dtype}.{kind.__name__}.llmcompressor.weight": fp8.to_bits(compressed["weight"], "F8_E4M3"),
                f"{dtype}.{kind.__name__}.llmcompressor.scale": fp8.to_bits(compressed["weight_scale"], dtype),
                f"{dtype}.{kind.__name__}.modelopt.weight": fp8.to_bits(codes, "F8_E4M3"),
                f"{dtype}.{kind.__name__}.modelopt.scale": fp8.to_bits(scale.reshape(1), "F32"),
            }
    save_file(golden, Path(__file__).with_name("fp8-tensor.safetensors"))


if __name__ == "__main__":
    main()
