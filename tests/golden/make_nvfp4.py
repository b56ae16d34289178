"""Write nvfp4.npz: small weights, and what compressed-tensors and ModelOpt make of them.

Run by hand where compressed-tensors and nvidia-modelopt can be imported. Arrays are named DTYPE/NUMBER/WHAT: bits of
the weight and the amax of its fused group; ``ct-…`` are compressed-tensors' parts and what it decodes them to (BF16
bits), ``mo-…`` ModelOpt's (decoded to the weight's own dtype).
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUMPY = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
COMPRESSOR = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
SCHEME = preset_name_to_scheme("NVFP4A16", ["Linear"])


def weights() -> list[tuple[NDArray[np.float64], float]]:
    """Weights, and by how much the amax of the group they are fused with is larger."""
    rng = np.random.default_rng(20)
    gauss = rng.standard_normal((6, 64)) * 0.02
    tails = np.clip(rng.standard_t(2, (6, 64)), -300, 300)
    deep = rng.standard_normal((6, 64)) * 4.0 ** -np.arange(6)[:, None]
    deep[3, :16] = 0
    deep[5, 16:32] = -0.0
    grid = rng.choice([0, -0.0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -0.25, -2.5], (6, 64))
    return [(gauss * 4, 1), (gauss * 4, 3.7), (tails, 1), (deep, 1), (grid, 1), (grid / 8, 8), (gauss * 2000, 1)]


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    kind = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    return tensor.contiguous().view(kind).numpy()


def compressed_tensors(w: torch.Tensor, amax: torch.Tensor) -> dict[str, NDArray[Any]]:
    groups = w.unflatten(-1, (-1, 16))
    divisor = generate_gparam(-amax.reshape(1), amax.reshape(1))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), SCHEME.weights, divisor)
    parts = COMPRESSOR.compress({"weight": w, "weight_scale": scale, "weight_global_scale": divisor}, SCHEME)
    decoded = COMPRESSOR.decompress(parts, SCHEME)["weight"]
    return {
        "ct-packed": bits(parts["weight_packed"]),
        "ct-scale": bits(parts["weight_scale"]),
        "ct-global": divisor.numpy(),
        "ct-decoded": bits(decoded),
    }


def modelopt(w: torch.Tensor, amax: torch.Tensor) -> dict[str, NDArray[Any]]:
    scale_2 = NVFP4QTensor.get_weights_scaling_factor_2(amax)
    scale, _ = NVFP4QTensor.get_weights_scaling_factor(w, 16, scale_2)
    stored, _, _ = NVFP4QTensor.quantize(w.clone(), 16, scale, scale_2)
    decoded = stored.dequantize(scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    return {
        "mo-packed": bits(stored._quantized_data),
        "mo-scale": bits(scale),
        "mo-global": scale_2.reshape(1).numpy(),
        "mo-decoded": bits(decoded),
    }


def main() -> None:
    """Write the file beside this one."""
    arrays: dict[str, Any] = {
        "versions": f"compressed-tensors {version('compressed-tensors')}, nvidia-modelopt {version('nvidia-modelopt')}"
    }
    for dtype in NUMPY:
        for number, (values, larger) in enumerate(weights()):
            array = values.astype(NUMPY[dtype])
            w = torch.frombuffer(bytearray(array.tobytes()), dtype=TORCH[dtype]).reshape(array.shape)
            amax = (w.abs().max().float() * larger).to(TORCH[dtype])
            found = {"bits": bits(w), "amax": np.float32(amax.item())} | compressed_tensors(w, amax) | modelopt(w, amax)
            arrays |= {f"{dtype}/{number}/{name}": value for name, value in found.items()}
    np.savez_compressed(Path(__file__).with_name("nvfp4.npz"), **arrays)


if __name__ == "__main__":
    main()
