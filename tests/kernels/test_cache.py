"""Where compiled kernels go, seen from fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import requant.kernels.cache as kernel_cache

USE_ONE = """
import numpy as np
from requant.kernels.compare import first_nonfinite
first_nonfinite(np.zeros(1, np.uint8), "F8_E8M0")
"""
ASK = """
import sys
from requant.kernels.cache import cache_directory, kernels_cached
print(kernels_cached(), cache_directory(), "numba" in sys.modules)
"""


def python(code, **environment):
    inherited = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR")}
    source = str(Path(kernel_cache.__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split()


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "HOME"])
def test_kernels_are_kept_where_the_user_keeps_caches(tmp_path, variable):
    place = {variable: str(tmp_path)}
    cached, directory, numba_imported = python(ASK, **place)
    assert (cached, numba_imported) == ("False", "False")
    assert Path(directory).is_relative_to(tmp_path)
    python(USE_ONE, **place)
    assert python(ASK, **place)[0] == "True"


def test_a_read_only_home_is_answered_by_a_private_temporary_directory(tmp_path):
    place = {"XDG_CACHE_HOME": "/proc/no-such-place", "TMPDIR": str(tmp_path)}
    python(USE_ONE, **place)
    cached, directory, _ = python(ASK, **place)
    assert cached == "True"
    assert Path(directory).parent == tmp_path / f"requant-{os.getuid()}"
    assert Path(directory).parent.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def nowhere_but_temporary(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no-such-place")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kernel_cache.cache_directory.cache_clear()
    yield tmp_path / f"requant-{os.getuid()}"
    kernel_cache.cache_directory.cache_clear()


def test_a_temporary_directory_open_to_others_is_not_used(nowhere_but_temporary):
    nowhere_but_temporary.mkdir()
    nowhere_but_temporary.chmod(0o777)
    assert not kernel_cache.cache_directory().is_relative_to(nowhere_but_temporary)


def test_a_link_in_the_temporary_directory_is_not_followed(nowhere_but_temporary, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    nowhere_but_temporary.symlink_to(tmp_path / "elsewhere")
    assert not kernel_cache.cache_directory().is_relative_to(nowhere_but_temporary)


def test_numba_keeps_its_own_setting():
    lines = python("import numba; before = numba.config.CACHE_DIR; import requant.kernels.fp8; "
                   "print(numba.config.CACHE_DIR == before)")  # fmt: skip
    assert lines == ["True"]
