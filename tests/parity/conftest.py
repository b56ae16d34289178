"""The oracle as a fixture: without LLM Compressor the parity tests fail, they are not skipped."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """LLM Compressor; imported here, since the plain test run collects these files without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("parity.oracle")
