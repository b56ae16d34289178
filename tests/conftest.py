"""Checkpoints that many tests read; none may change them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from requant import demo

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def small_k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Kimi-K3: three shards, the routed experts in MXFP4, everything else as in the model."""
    folder = tmp_path_factory.mktemp("kimi") / "small"
    demo.write_small(folder)
    return folder


@pytest.fixture(scope="session")
def full_size_k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kimi-K3 at its full size, headers real and data sparse."""
    folder = tmp_path_factory.mktemp("kimi") / "full"
    demo.write_full_size(folder)
    return folder
