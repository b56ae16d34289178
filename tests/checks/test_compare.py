"""compare: distances against numpy's, and what has no counterpart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import Source, write

if TYPE_CHECKING:
    from pathlib import Path

BF16 = np.dtype(ml_dtypes.bfloat16)


def folder(path: Path, **tensors: Any) -> Path:
    named = {name.replace("__", "."): array for name, array in tensors.items()}
    return write(Source({"model.safetensors": named}, {"model_type": "toy"}), path)


def test_distances_are_numpy_s(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((300, 64)).astype(np.float32)
    b = a + (rng.standard_normal(a.shape) * 0.01 * (rng.random(a.shape) < 0.5)).astype(np.float32)
    one, two = folder(tmp_path / "a", m__weight=a), folder(tmp_path / "b", m__weight=b)
    found = requant.compare(one, two, workers=2).to_json()
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    assert found["values"] == a.size
    assert found["differing"] == int((a != b).sum())
    noise = ((wide_a - wide_b) ** 2).sum()
    assert found["sqnr_db"] == pytest.approx(10 * np.log10((wide_a**2).sum() / noise))
    assert found["max_rel_error"] == pytest.approx(float((np.abs(wide_a - wide_b) / np.abs(wide_a)).max()), rel=1e-5)


def test_equal_values_in_other_formats_are_equal(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5, 0.0, 448.0]], np.float32)
    wide = folder(tmp_path / "wide", m__weight=values, b=np.array(3.0, np.float32), i=np.arange(3))
    narrow = folder(
        tmp_path / "narrow",
        m__weight=(values / 2).astype(ml_dtypes.float8_e4m3fn),
        m__weight_scale=np.array([[2.0]], BF16),
        b=np.array(3.0, BF16),
        i=np.arange(3),
    )
    # -2.5 / 2 and 448 / 2 are E4M3 values, so nothing is lost
    found = requant.compare(wide, narrow)
    assert found.exact
    assert found.to_json()["sqnr_db"] is None
    assert found.to_json()["weights"] == 3


def test_what_has_no_counterpart_is_named(tmp_path: Path) -> None:
    one = folder(tmp_path / "a", m__weight=np.ones((4, 4), BF16), x__weight=np.ones((4, 4), BF16))
    two = folder(tmp_path / "b", m__weight=np.ones((4, 2), BF16), y__weight=np.ones((4, 4), BF16))
    found = requant.compare(one, two)
    assert not found.exact
    assert found.to_json()["unmatched"] == 3
    assert [note.split()[0] for note in found.notes] == ["m", "x", "y"]


def test_bytes_that_nobody_can_decode_are_compared_as_bytes(tmp_path: Path) -> None:
    one = folder(tmp_path / "a", table=np.arange(6), same=np.arange(5))
    two = folder(tmp_path / "b", table=np.arange(6)[::-1].copy(), same=np.arange(5))
    found = requant.compare(one, two).to_json()
    assert (found["values"], found["differing"]) == (11, 6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_on_one_side_is_the_worst_distance_not_the_best(tmp_path: Path, bad: float) -> None:
    broken = np.ones((4, 4), np.float32)
    broken[1, 1] = bad
    one, two = folder(tmp_path / "a", m__weight=np.ones((4, 4), np.float32)), folder(tmp_path / "b", m__weight=broken)
    for first, second in ((one, two), (two, one)):
        found = requant.compare(first, second).to_json()
        assert found["differing"] == 1
        assert found["sqnr_db"] is not None
        assert found["sqnr_db"] < 0


def test_noise_without_a_signal_is_not_perfect(tmp_path: Path) -> None:
    one = folder(tmp_path / "a", m__weight=np.zeros((4, 4), np.float32))
    two = folder(tmp_path / "b", m__weight=np.ones((4, 4), np.float32))
    assert requant.compare(one, two).to_json()["sqnr_db"] < 0


def test_checkpoints_with_broken_weights_are_not_compared(tmp_path: Path) -> None:
    """Two FP8 payloads whose scales are lost are not equal just because nobody can read them."""
    one = folder(tmp_path / "a", m__weight=np.zeros((4, 4), ml_dtypes.float8_e4m3fn))
    with pytest.raises(requant.CheckpointError, match="missing-part"):
        requant.compare(one, one)


def test_a_bank_of_experts_is_compared_value_by_value(tmp_path: Path) -> None:
    bank = np.ones((3, 8, 16), BF16)
    other = bank.copy()
    other[2, 7, 15] = 2
    name = "m__mlp__experts__gate_up_proj"
    one, two = folder(tmp_path / "a", **{name: bank}), folder(tmp_path / "b", **{name: other})
    assert requant.compare(one, two).to_json()["differing"] == 1
