from __future__ import annotations

import numpy as np
import pytest

from requant.kernels.bounds import Allowance, Beyond, beyond


def allowance(**changed: float) -> Allowance:
    """Return the grid 0, 1/2, 1, 3/2, 2, 3, 4, 6 without anything that is rounded on the way."""
    exact = {"relative": 0.25, "least": 0.25, "coarsest": 1.0, "vanishing": 0.0}
    numbers = dict.fromkeys(Allowance._fields, 0.0) | exact | changed
    return Allowance(**{name: np.float32(number) for name, number in numbers.items()})


def check(value: float, stored: float, scale: float = 1.0, amax: float = 6.0, **changed: float) -> int:
    """Tell whether a value beside zeros is beyond its bound."""
    values, codes = np.zeros((3, 20), np.float32), np.zeros((3, 20), np.float32)
    values[1, 7], codes[1, 7] = value, stored
    one = np.full((1, 1), scale, np.float32)
    found = beyond(values, codes, (0, 0), one, -6 * one, 6 * one, amax, allowance(**changed))
    assert (found == Beyond(0, -1, 0.0)) if not found.values else found.worst == 27
    return found.values


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-140, 2.0**100])
@pytest.mark.parametrize(
    ("code", "low", "high"),
    [(0, 0, 0.25), (0.5, 0.25, 0.75), (1, 0.75, 1.25), (2, 1.75, 2.5), (3, 2.5, 3.5), (4, 3.5, 5), (6, 5, 7)],
)
def test_a_value_lies_half_a_gap_from_its_code_at_most(
    code: float, low: float, high: float, scale: float, sign: int
) -> None:
    stored = sign * code * scale
    for value, wrong in ((low * 1.01, 0), (high * 0.99, 0), (low * 0.98 - 0.01, low > 0), (high * 1.02, 1)):
        assert check(sign * value * scale, stored, scale, 6 * scale) == wrong


def test_rounding_clipping_and_losses_before_widen_the_bound() -> None:
    assert check(2.51, 2) == 1
    assert check(2.51, 2, rounding=2.0**-7) == 0
    assert check(2.51, 2, offset=0.02) == 0
    assert check(2.51, 2, source=2.0**-7) == 0
    assert check(2.51, 2, smallest=0.02) == 0
    assert check(9, 6) == 1
    assert check(9, 6, clip=3) == 0
    assert check(9, 6, cut=3.01) == 0
    assert check(-9, 6, clip=30) == 1
    assert check(9, 4, clip=30) == 1


def test_a_scale_too_coarse_for_its_region_allows_no_more_than_the_coarsest() -> None:
    assert check(0.2, 0, 1.0, 0.2, coarsest=1 / 3) == 1
    assert check(0.2, 0, 1.0, 3.0, coarsest=1 / 3) == 0
    assert check(0.2, 0, 1.0, 0.2, coarsest=1 / 3, vanishing=0.2) == 0


@pytest.mark.parametrize(
    ("value", "stored", "wrong"),
    [(np.nan, np.nan, 0), (np.inf, np.inf, 0), (np.nan, 1, 1), (1, np.nan, 1), (np.inf, 6, 1), (6, np.inf, 1)],
)
def test_what_is_not_finite(value: float, stored: float, wrong: int) -> None:
    assert check(value, stored, clip=30) == wrong


def test_regions_at_the_edge_are_smaller() -> None:
    scales = np.array([[1, 2], [4, 8]], np.float32)
    spread = scales.repeat(4, 0).repeat(16, 1)[:6, :20]
    values = spread * np.float32(0.3)
    stored = spread * np.float32(0.5)
    stored[5, 19] = 8 * 1.0
    found = beyond(values, stored, (4, 16), scales, -6 * scales, 6 * scales, 1e3, allowance())
    assert found == Beyond(1, 5 * 20 + 19, 2.0)
