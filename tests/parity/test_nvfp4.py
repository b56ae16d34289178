"""NVFP4, byte for byte against compressed-tensors' own observer arithmetic, compressor and decompressor."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from requant.formats import FORMATS, Encoding, Tile

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = pytest.mark.parity

NUMPY = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}


@pytest.fixture(scope="module")
def torch() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        return torch


def weights(dtype: str) -> list[NDArray[Any]]:
    """Gaussian, heavy-tailed, with zero groups, all-zero, on midpoints, of extreme scale, and every 16-bit pattern."""
    rng = np.random.default_rng(7)
    low, high = (-9, 9) if dtype == "F16" else (-100, 100)
    found = [rng.standard_normal((128, 512)) * 2.0**e for e in np.linspace(low, high / 2, 7)]
    found += [rng.standard_t(2, (64, 256)) * 0.02, np.zeros((3, 32)), rng.choice([0.0, -0.0, 1.0, -1.0], (40, 64))]
    spread = rng.standard_normal((200, 256)) * 2.0 ** rng.integers(low, high // 2, (200, 1))
    found.append(spread * (rng.random((200, 256)) < 0.9))
    grid = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6])
    midpoints = rng.choice(grid, (64, 256)) * rng.choice([-1, 1], (64, 256)) * 2.0 ** rng.integers(-4, 4, (64, 1))
    found.append(midpoints)
    tiles = [np.ascontiguousarray(w.astype(NUMPY[dtype]).view(BITS[dtype])) for w in found]
    if dtype != "F32":
        patterns = np.arange(65536, dtype=np.uint16)
        infinity = 0x7F80 if dtype == "BF16" else 0x7C00
        finite = patterns[(patterns & 0x7FFF) < infinity]
        tiles += [
            rng.permutation(finite[(finite & 0x7FFF) <= top])[: top // 16 * 16].reshape(1, -1)
            for top in (infinity - 1, infinity - 0x400, 0x3F80, 0x3000)
        ]
    one_ulp = tiles[-1 if dtype == "F32" else -5]
    tiles += [one_ulp + one_ulp.dtype.type(1), one_ulp - (one_ulp & 1)]
    return tiles


@pytest.mark.parametrize("dtype", NUMPY)
def test_nvfp4_bytes(torch: Any, dtype: str) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    torch_dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    fmt = FORMATS["nvfp4"]
    replaced = 0
    for bits in weights(dtype):
        w = torch.frombuffer(bytearray(bits.tobytes()), dtype=torch_dtype).reshape(bits.shape)
        groups = w.unflatten(-1, (-1, 16))
        amax = w.abs().max()
        gparam = generate_gparam(-amax.reshape(1), amax.reshape(1))
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, gparam)
        want = compressor.compress(
            {"weight": w, "weight_scale": scale.to(torch_dtype), "weight_global_scale": gparam}, scheme
        )
        shapes = fmt.parts(bits.shape, dtype)
        parts = [Tile(np.empty(p.shape, {"F32": np.uint32}.get(p.dtype, np.uint8)), p.dtype) for p in shapes]
        how = Encoding(True, amax=float(amax))
        assert fmt.encode(Tile(bits, dtype), parts, how) == -1
        if fmt.replaces_reference(float(amax), dtype):  # type: ignore[attr-defined]
            assert float(gparam) == 1
            replaced += 1
        else:
            assert parts[2].bits.view(np.float32)[0] == float(gparam)
            np.testing.assert_array_equal(parts[1].bits, want["weight_scale"].view(torch.uint8).numpy())
            np.testing.assert_array_equal(parts[0].bits, want["weight_packed"].numpy())
        stored = {
            "weight_packed": torch.from_numpy(parts[0].bits),
            "weight_scale": torch.from_numpy(parts[1].bits).view(torch.float8_e4m3fn),
            "weight_global_scale": torch.from_numpy(parts[2].bits.view(np.float32)),
        }
        decoded = compressor.decompress(stored, scheme)["weight"]
        for to, kind in (("BF16", torch.bfloat16), ("F16", torch.float16)):
            out = np.empty(bits.shape, np.uint16)
            fmt.decode(parts, Tile(out, to))
            np.testing.assert_array_equal(out, decoded.to(kind).view(torch.uint16).numpy())
    assert (replaced > 0) == (dtype == "F16")
