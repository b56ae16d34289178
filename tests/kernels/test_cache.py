"""Where compiled kernels go, seen from fresh processes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import requant.kernels.cache as kernel_cache
from requant.kernels import fp8
from requant.kernels.compiler import compile_kernel
from requant.kernels.loops.jit import kernel
from requant.kernels.native import target_machine

USE_ONE = """
import numpy as np
from requant.kernels.compare import first_nonfinite
print(first_nonfinite(np.zeros(1, np.uint8), "F8_E8M0"))
"""
ASK = """
import sys
from requant.kernels.cache import cache_directory, kernels_cached
print(kernels_cached(), cache_directory(), "numba" in sys.modules)
"""
TELL = """
import sys
print("numba" in sys.modules)
"""
EVERY_KERNEL = """
import importlib
import pkgutil
import numpy as np
import requant.kernels
from requant.kernels import bounds, compare, dense, floats, fp8, fp8_search, ints, mxfp4, mxfp4_to_nvfp4, mxfp8, nvfp4
from requant.kernels import transpose
from requant.kernels.native import Kernel

def room(dtype, *shape):
    return np.ones(shape, dtype)

u8, u16, u32 = np.uint8, np.uint16, np.uint32
rows, cols, block = 130, 160, (128, 128)
codes, packed, exponents = room(u8, rows, cols), room(u8, rows, cols // 2), room(u8, rows, cols // 32)
nvfp4_scales, words = room(u8, rows, cols // 16), room(u32, rows, cols // 8)
groups, zeros = room(u16, rows, 5), room(u32, 17, 5)
w, channels, blocks, errors = room(u16, rows, cols), room(u16, rows, 1), room(u16, 2, 2), np.zeros(2)
nan = np.full((rows, cols), 0xFFFF, u16)
compare.first_nonfinite(w, "BF16")
transpose.transpose(w, room(u16, cols, rows))
one = room(np.float32, 1, 1)
allowance = bounds.Allowance(*map(np.float32, [0] * 10))
bounds.beyond(room(np.float32, 9, 9), 2 * room(np.float32, 9, 9), (0, 0), one, -one, one, 1.0, allowance)
floats.amax(nan, "BF16")
floats.widen(w, "F16")
dense.convert(w, "BF16", w.copy(), "F16")
fp8.encode_channel(w, "BF16", True, codes, channels)
fp8.encode_block(w, "BF16", True, codes, blocks)
fp8.encode_tensor(w, "BF16", True, 1.0, codes, room(u16, 1))
fp8.decode(codes, blocks, "BF16", block, w, "BF16")
fp8_search.encode(w, "BF16", True, block, codes, blocks, "BF16", errors)
mxfp4.encode(w, "BF16", packed, exponents)
mxfp4.decode(packed, exponents, w, "BF16")
mxfp8.encode(w, "BF16", True, codes, exponents, True, errors)
mxfp8.decode(codes, exponents, w, "BF16")
nvfp4.encode(nan, "BF16", "BF16", 1.0, True, True, packed, nvfp4_scales, errors)
nvfp4.decode(packed, nvfp4_scales, 1.0, True, w, "BF16")
ints.encode(w, "BF16", True, ints.PACKED[4], words, groups, zeros, True, errors)
ints.decode(words, groups, "BF16", ints.PACKED[4], w, "BF16")
compare.accumulate(room(np.float32, 9), room(np.float32, 9))
mxfp4.to_fp8_block(packed, exponents, codes, room(u16, 2, 2))
mxfp4.to_fp8_tensor(packed, exponents, mxfp4.log2_amax(packed, exponents), codes, room(u16, 1))
mxfp4.suspects(exponents, True)
mxfp8.from_mxfp4(packed, exponents, codes, exponents.copy())
mxfp8.block_exponents(codes, exponents)
kmax = mxfp4_to_nvfp4.largest_exponent(packed, exponents) - 127
mxfp4_to_nvfp4.to_nvfp4(packed, exponents, kmax, packed.copy(), nvfp4_scales)
ints.from_mxfp4(packed, exponents, room(u32, rows, cols // 4), groups, "BF16")

modules = [importlib.import_module(f"requant.kernels.{m.name}") for m in pkgutil.iter_modules(requant.kernels.__path__)
           if m.name not in ("compiler", "loops")]
kernels = {f"{m.__name__}.{name}": kernel for m in modules for name, kernel in vars(m).items()
           if isinstance(kernel, Kernel)}
print(len(kernels), [name for name, kernel in kernels.items() if not kernel._functions])
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


def test_a_second_process_does_without_numba(tmp_path):
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    assert python(USE_ONE + TELL, **place) == ["-1", "True"]
    assert python(USE_ONE + TELL, **place) == ["-1", "False"]


def test_no_kernel_needs_numba_again():
    first = python(EVERY_KERNEL)  # in the cache that the other tests use: to compile every kernel takes a while
    assert int(first[0]) > 20
    assert first[1:] == ["[]"], "kernels that this test does not run"
    assert python(EVERY_KERNEL + TELL)[-1] == "False"


@pytest.mark.heavy
def test_a_damaged_cache_entry_is_compiled_again(tmp_path):
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    python(USE_ONE, **place)
    (entry,) = tmp_path.rglob("*.o")
    code = entry.read_bytes()
    for damaged in (
        b"",
        code[: len(code) // 2],
        code[:100] + bytes([code[100] ^ 1]) + code[101:],
        code + b"\0",
        hashlib.sha256(code[32:200]).digest() + code[32:200],  # whole, and no object code
    ):
        entry.write_bytes(damaged)
        assert python(USE_ONE + TELL, **place) == ["-1", "True"]
    assert python(USE_ONE + TELL, **place) == ["-1", "False"]


@pytest.mark.heavy
def test_processes_that_find_the_cache_empty_at_once_all_work(tmp_path):
    place = {"XDG_CACHE_HOME": str(tmp_path)}
    with ThreadPoolExecutor(4) as pool:
        assert [run.result() for run in [pool.submit(python, USE_ONE, **place) for _ in range(4)]] == [["-1"]] * 4
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
    assert python(USE_ONE + TELL, **place) == ["-1", "False"]


def test_threads_that_call_a_kernel_first_at_once_compile_it_once(tmp_path):
    code = """
import numpy as np
from concurrent.futures import ThreadPoolExecutor
from requant.kernels.compare import first_nonfinite
bits = np.zeros(5, np.uint8)
bits[3] = 255
with ThreadPoolExecutor(8) as pool:
    print(set(pool.map(lambda _: first_nonfinite(bits, "F8_E8M0"), range(8))))
"""
    assert python(code, XDG_CACHE_HOME=str(tmp_path)) == ["{3}"]


def test_an_array_with_gaps_is_refused():
    codes, scales = np.empty((4, 4), np.uint8), np.empty((4, 1), np.uint16)
    with pytest.raises(ValueError, match="contiguous"):
        fp8.encode_channel(np.zeros((4, 8), np.uint16)[:, ::2], "BF16", True, codes, scales)


def test_what_only_numba_or_python_can_provide_is_refused():
    @kernel
    def allocates(a: Any) -> Any:
        return np.empty(a.size)[0]

    @kernel
    def raises(a: Any) -> Any:
        if a.size:
            raise ValueError
        return 0

    for function in allocates, raises:
        with pytest.raises(NotImplementedError, match="a kernel that"):
            compile_kernel(function, (np.zeros(3),), target_machine())
