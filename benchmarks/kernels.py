"""GB/s of every kernel on one core, over its input: ``python benchmarks/kernels.py [rows] [cols]``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np

from requant.kernels import compare, dense, fp8, mxfp4, mxfp8


def fastest(call: Callable[[], object], seconds: float = 1.0) -> float:
    call()  # compile
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.thread_time()  # not the wall clock: other processes may want this core
        call()
        best = min(best, time.thread_time() - start)
    return best


def main(rows: int = 512, cols: int = 7168) -> None:
    w = (np.random.default_rng(0).standard_normal((rows, cols)) * 0.02).astype(ml_dtypes.bfloat16)
    bf16, f32 = w.view(np.uint16), w.astype(np.float32)
    codes, channel = np.empty((rows, cols), np.uint8), np.empty((rows, 1), np.uint16)
    block = np.empty((-(-rows // 128), -(-cols // 128)), np.uint16)
    packed, exponents = np.empty((rows, cols // 2), np.uint8), np.empty((rows, cols // 32), np.uint8)
    lowered = np.empty_like(exponents)
    out16, out32 = np.empty((rows, cols), np.uint16), np.empty((rows, cols), np.uint32)
    fp8.encode_block(bf16, "BF16", True, codes, block)
    mxfp4.encode(bf16, "BF16", packed, exponents)
    f32_block, size = np.empty(block.shape, np.uint32), (128, 128)
    for name, source, call in [
        ("BF16 -> FP8 channel", bf16, lambda: fp8.encode_channel(bf16, "BF16", True, codes, channel)),
        ("BF16 -> FP8 block", bf16, lambda: fp8.encode_block(bf16, "BF16", True, codes, block)),
        ("F32 -> FP8 block", f32, lambda: fp8.encode_block(f32.view(np.uint32), "F32", True, codes, f32_block)),
        ("FP8 block -> BF16", codes, lambda: fp8.decode(codes, block, "BF16", size, out16, "BF16")),
        ("FP8 block -> F32", codes, lambda: fp8.decode(codes, block, "BF16", size, out32, "F32")),
        ("BF16 -> MXFP4", bf16, lambda: mxfp4.encode(bf16, "BF16", packed, exponents)),
        ("MXFP4 -> BF16", packed, lambda: mxfp4.decode(packed, exponents, out16, "BF16")),
        ("MXFP4 -> F32", packed, lambda: mxfp4.decode(packed, exponents, out32, "F32")),
        ("BF16 -> MXFP4 mse", bf16, lambda: mxfp4.encode(bf16, "BF16", packed, exponents, search=True)),
        ("BF16 -> MXFP8", bf16, lambda: mxfp8.encode(bf16, "BF16", True, codes, lowered)),
        ("MXFP8 -> BF16", codes, lambda: mxfp8.decode(codes, exponents, out16, "BF16")),
        ("MXFP4 -> MXFP8", packed, lambda: mxfp8.from_mxfp4(packed, exponents, codes, lowered)),
        ("F32 -> F16", f32, lambda: dense.convert(f32.view(np.uint32), "F32", out16, "F16")),
        ("MXFP4 -> FP8 block", packed, lambda: mxfp4.to_fp8_block(packed, exponents, codes, block)),
        ("MXFP4 -> FP8 channel", packed, lambda: mxfp4.to_fp8_channel(packed, exponents, codes, channel)),
        ("MXFP4 over-span", packed, lambda: mxfp4.over_span(packed, exponents, True)),
        ("E8M0 suspects", exponents, lambda: mxfp4.suspects(exponents, True)),
        ("BF16 first non-finite", bf16, lambda: compare.first_nonfinite(bf16, "BF16")),
        ("compare F32", f32, lambda: compare.accumulate(f32, f32)),
    ]:
        print(f"{name:22} {source.nbytes / fastest(call) / 1e9:6.2f} GB/s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
