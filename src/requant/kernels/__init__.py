"""Bit patterns to bit patterns: the arithmetic of every storage format.

A module here has the functions to call; its namesake in ``loops`` what numba compiles of them, which `native` runs.
No I/O and no names. Arrays are C-contiguous; two-dimensional ones hold whole rows (output channels). Floats travel
as their bits: BF16 and F16 as uint16, F32 as uint32, FP8 E4M3 codes, E8M0 exponents and packed FP4 as uint8.
Every kernel releases the GIL and runs on one core.
"""
