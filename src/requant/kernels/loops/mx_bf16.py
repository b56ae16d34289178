"""Microscaled codes of BF16 values from their patterns, in 16-bit integers: twice as many to a vector as floats.

A pattern less the scale's exponent is that of the quotient, as long as the value is a normal number or its code is
zero anyway. So groups near the lower end of BF16's range do not go this way, but through float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from requant.kernels.mx import GROUP

from .groups import largest, spread
from .jit import kernel

i16 = np.int16
u16 = np.uint16

_ONE = 127 << 7
"""The pattern of 1.0; 1 << 7 is a binade, 1 << 6 half of its lower power of two."""


@kernel
def _quotient(w: Any, shift: Any, most: Any) -> Any:
    quotient = i16(i16(w & u16(0x7FFF)) - shift)
    return quotient if quotient < most else most


@kernel
def _e2m1(w: Any, shifts: Any, codes: Any) -> None:
    for i in range(w.size):
        q = _quotient(w[i], shifts[i], i16(_ONE + (2 << 7) + 64))
        # One bit of the significand stays: from 1.0 on, the code but for a constant. Below, that is too small.
        rounded = i16(q + i16(31) + i16(i16(q >> 6) & i16(1)))
        normal = i16(i16(rounded >> 6) - i16((_ONE >> 6) - 2))
        subnormal = i16(i16(q > i16(_ONE - 256)) + i16(q >= i16(_ONE - 64)))  # above 0.25, from 0.75 on
        code = normal if normal > subnormal else subnormal
        sign = i16(u16(w[i] >> u16(12)) & u16(8))
        codes[i] = np.uint8(code | (sign if w[i] & u16(0x7FFF) else i16(0)))


_TINY = _ONE - (9 << 7)
"""The pattern of 2^-9, E4M3's smallest subnormal."""


@kernel
def _e4m3(w: Any, shifts: Any, codes: Any) -> None:
    for i in range(w.size):
        q = _quotient(w[i], shifts[i], i16(_ONE + (8 << 7) + 96))
        # Three bits of the significand stay: from 2^-6 on, the code but for a constant. Below, that is too small.
        rounded = i16(q + i16(7) + i16(i16(q >> 4) & i16(1)))
        normal = i16(i16(rounded >> 4) - i16((_TINY + (2 << 7)) >> 4))
        # How many of 0.5, 1.5, ... 7.5 times 2^-9 are below; a tie goes to the even code.
        low = i16(i16(q > i16(_TINY - 128)) + i16(q >= i16(_TINY + 64)))
        middle = i16(i16(q > i16(_TINY + 128 + 32)) + i16(q >= i16(_TINY + 128 + 96)))
        high = i16(i16(q > i16(_TINY + 256 + 16)) + i16(q >= i16(_TINY + 256 + 48)))
        top = i16(i16(q > i16(_TINY + 256 + 80)) + i16(q >= i16(_TINY + 256 + 112)))
        subnormal = i16(i16(low + middle) + i16(high + top))
        code = normal if normal > subnormal else subnormal
        codes[i] = np.uint8(code | i16(u16(w[i] >> u16(8)) & u16(0x80)))


@kernel
def _shifts(w: Any, exponents: Any, least: Any, most: Any, shifts: Any) -> Any:
    """Write the exponents as patterns; tell whether all groups may go this way."""
    for g in range(exponents.size):
        exponent = np.int64(exponents[g])
        if least <= exponent <= most:
            spread(shifts, g * GROUP, i16((exponent - 127) << 7))
        elif largest(w, g * GROUP) == 0:
            spread(shifts, g * GROUP, i16(0))
        else:
            return False
    return True


@kernel
def write_codes(w: Any, exponents: Any, e2m1: bool, shifts: Any, codes: Any) -> Any:
    """Write the E2M1 or E4M3 codes of BF16 patterns; return False, with nothing written, if they are not to be had so.

    ``w`` [n], ``codes`` uint8 [n], ``shifts`` int16 [n], which is scratch.
    """
    if e2m1:
        # A subnormal under a scale of 2^-123 or more is less than 0.125; up to 1, no negative value loses its sign.
        possible = _shifts(w, exponents, 4, 127, shifts)
        if possible:
            _e2m1(w, shifts, codes)
    else:
        # A subnormal under a scale of 2^-116 or more is less than 2^-10, which rounds to zero.
        possible = _shifts(w, exponents, 11, 254, shifts)
        if possible:
            _e4m3(w, shifts, codes)
    return possible
