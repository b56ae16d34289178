"""Calling compiled kernels: from object code kept in the cache, without importing numba, or compiled on first use."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

from .cache import cache_directory

ENTRY = "entry"
"""The name of the C function in a kernel's object code."""

# What `struct` calls the types of scalars.
_FORMATS: dict[type, str] = {int: "q", bool: "?", np.bool_: "?", np.float32: "f", np.float64: "d"}
_FORMATS |= {np.uint8: "B", np.uint16: "H", np.uint32: "I", np.uint64: "Q"}

_Signature = tuple[Any, ...]
_preparing = Lock()


class Kernel:
    """A function of the package ``loops`` as a C function: one per signature, each compiled when first called.

    It takes C-contiguous arrays, numpy scalars, bools, ints (as int64), and named tuples either of arrays or of numpy
    scalars, each with its type. An array that it writes to overlaps no other. It allocates nothing, does not raise,
    and returns an int64 or nothing (then 0). The GIL is released while it runs.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        self._functions: dict[_Signature, tuple[Callable[..., int], Struct]] = {}

    def __call__(self, *arguments: Any) -> int:
        """Run the kernel; ValueError for an array that is not C-contiguous."""
        types: list[Any] = []
        arrays: list[NDArray[Any]] = []
        scalars: list[Any] = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                types.append((argument.dtype, argument.ndim))
                arrays.append(argument)
            elif not isinstance(argument, tuple):
                types.append(type(argument))
                scalars.append(argument)
            elif isinstance(argument[0], np.ndarray):
                types.extend((array.dtype, array.ndim) for array in argument)
                arrays.extend(argument)
            else:
                types.append(type(argument))
                scalars.extend(argument)
        for array in arrays:
            if not array.flags.c_contiguous:
                raise ValueError("kernels take C-contiguous arrays")
        signature = tuple(types)
        found = self._functions.get(signature)
        if found is None:
            with _preparing:  # not twice; and numba's compiler has a lock of its own
                found = self._functions.get(signature)
                if found is None:
                    found = self._functions[signature] = self._prepare(signature, arguments, len(arrays), scalars)
        function, layout = found
        return function(*map(id, arrays), layout.pack(*scalars))

    def _prepare(
        self, signature: _Signature, arguments: tuple[Any, ...], arrays: int, scalars: list[Any]
    ) -> tuple[Callable[..., int], Struct]:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_void_p,) * (arrays + 1))
        layout = Struct(scalar_format(scalars))
        key = hashlib.sha256("\n".join((repr(signature), *_surroundings())).encode()).hexdigest()[:16]
        path = cache_directory() / f"{self._module}.{self._name}-{key}.o"
        code = _load(path)
        if code is not None:
            try:
                return prototype(_link(code)), layout
            except RuntimeError:
                pass  # of another LLVM, say; what numba makes now takes its place
        from .compiler import compile_kernel

        loops = importlib.import_module(f".loops.{self._module}", __package__)
        code = compile_kernel(getattr(loops, self._name), arguments, target_machine())
        _store(path, code)
        return prototype(_link(code)), layout


def scalar_format(scalars: list[Any]) -> str:
    """Return how `struct` packs scalars for a kernel, one after the other."""
    return "=" + "".join(_FORMATS[type(scalar)] for scalar in scalars)


@cache
def _surroundings() -> tuple[str, ...]:
    """Return what object code depends on besides the sources, which name the directory, and the signature."""
    packages = (f"{name} {importlib.metadata.version(name)}" for name in ("numba", "llvmlite", "numpy"))
    head = f"object head {object.__basicsize__}"
    return *packages, head, llvm.get_default_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def target_machine() -> Any:
    """Return LLVM's code generator for this very CPU."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="small",
        jit=True,
    )


def _link(code: bytes) -> int:
    """Load object code and return its entry's address; RuntimeError if LLVM cannot."""
    jit = llvm.create_lljit_compiler(target_machine())
    library = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(ENTRY)
    loaded = library.link(jit, ENTRY)
    address: int = loaded[ENTRY]
    # Not owned from here on: nothing unloads code that a thread may be running when the interpreter exits.
    loaded.detach()
    jit.detach()
    return address


def _load(path: Path) -> bytes | None:
    """Return object code from the cache; None if it is not there, or not whole."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, code = stored[:32], stored[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _store(path: Path, code: bytes) -> None:
    """Put object code into the cache, whole or not at all; without room for it there is simply no cache."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink()
            raise
    except OSError:
        return
