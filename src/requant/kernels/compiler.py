"""Compiling kernels with numba, to object code that needs neither numba nor Python."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba
import numba.core.compiler_lock
import numpy as np

from .native import ENTRY, scalar_format

_numba: Any = numba  # typed in part, and not for this
_lock: Any = numba.core.compiler_lock.global_compiler_lock


class _Parameter(NamedTuple):
    """A parameter of the function that numba compiles; the LLVM code that loads it, given a name and a type."""

    type: Any
    load: str


class _ArrayObject(ctypes.Structure):
    """How an array begins: NumPy's C API has these places compiled into every extension module."""

    _fields_ = (
        ("head", ctypes.c_char * object.__basicsize__),
        ("data", ctypes.c_void_p),
        ("nd", ctypes.c_int),
        ("dimensions", ctypes.c_void_p),
    )


_LOAD_DATA = f"""
    {{name}}.place = getelementptr i8, ptr {{array}}, i64 {_ArrayObject.data.offset}
    {{name}} = load ptr, ptr {{name}}.place
"""
_LOAD_LENGTH = f"""
    {{name}}.place = getelementptr i8, ptr {{array}}, i64 {_ArrayObject.dimensions.offset}
    {{name}}.lengths = load ptr, ptr {{name}}.place
    {{name}}.length = getelementptr i64, ptr {{name}}.lengths, i64 {{axis}}
    {{name}} = load i64, ptr {{name}}.length
"""
_LOAD_SCALAR = """
    {name}.place = getelementptr i8, ptr %scalars, i64 {offset}
    {name} = load {type}, ptr {name}.place, align 1
"""


def compile_kernel(kernel: Any, arguments: tuple[Any, ...], machine: Any) -> bytes:
    """Compile a function of ``loops`` to what `Kernel` calls with arguments like these.

    NotImplementedError if there is something left in it that only numba or Python can provide.
    """
    function, parameters, arrays = _flattened(kernel, arguments)
    with _lock:
        before = _numba.config.OPT
        # numba would optimise each function before it knows its caller, and so which arrays may overlap.
        _numba.config.OPT = type(before)(0)
        try:
            signature = _numba.types.int64(*(parameter.type for parameter in parameters))
            compiled = _numba.cfunc(signature, error_model="numpy")(function)
        finally:
            _numba.config.OPT = before
    module = llvm.parse_assembly(_without_overlap(compiled.inspect_llvm(), compiled.native_name))
    inner = module.get_function(compiled.native_name)
    inner.add_function_attribute("noinline")  # what is known about its pointers would get lost with it
    entry = llvm.parse_assembly(_entry(inner, parameters, arrays))
    entry.triple, entry.data_layout = module.triple, module.data_layout
    module.link_in(entry)
    return _optimised(module, machine)


def _flattened(kernel: Any, arguments: tuple[Any, ...]) -> tuple[Callable[..., int], list[_Parameter], int]:
    """Return a function that builds a kernel's arguments from pointers, lengths and scalars; these; how many arrays."""
    parameters: list[_Parameter] = []
    names: dict[str, Any] = {"kernel": kernel, "carray": _numba.carray}
    arrays = offset = 0

    def parameter(type_: Any, load: str, **places: object) -> str:
        parameters.append(_Parameter(type_, load.format(name="{name}", type="{type}", **places)))
        return f"p{len(parameters)}"

    def expression(argument: Any) -> str:
        nonlocal arrays, offset
        if isinstance(argument, np.ndarray):
            array, arrays = f"%array{arrays}", arrays + 1
            pointer = parameter(_numba.types.CPointer(_numba.from_dtype(argument.dtype)), _LOAD_DATA, array=array)
            axes = range(argument.ndim)
            lengths = [parameter(_numba.types.int64, _LOAD_LENGTH, array=array, axis=axis) for axis in axes]
            return f"carray({pointer}, ({', '.join(lengths)},))"
        if isinstance(argument, tuple):
            names[type(argument).__name__] = type(argument)
            return f"{type(argument).__name__}({', '.join(map(expression, argument))})"
        place, offset = offset, offset + struct.calcsize(scalar_format([argument]))
        return parameter(_numba.typeof(argument), _LOAD_SCALAR, offset=place)

    call = f"kernel({', '.join(map(expression, arguments))})"
    returns = f"{call}; return 0" if kernel.py_func.__annotations__["return"] == "None" else f"return {call}"
    exec(f"def flattened({', '.join(f'p{n + 1}' for n in range(len(parameters)))}): {returns}", names)
    return names["flattened"], parameters, arrays


def _without_overlap(text: str, name: str) -> str:
    """Tell LLVM that none of the arrays that a C function takes overlaps another."""
    definition = re.compile(rf'^define .*@"?{re.escape(name)}"?\(.*$', re.MULTILINE)
    return definition.sub(lambda line: re.sub(r"\bptr (?=%)", "ptr noalias ", line[0]), text)


def _entry(inner: Any, parameters: list[_Parameter], arrays: int) -> str:
    """Return LLVM code that calls ``inner`` with what it finds in array objects and in packed scalars."""
    types = [str(argument.type) for argument in inner.arguments]
    loads = [
        parameter.load.format(name=f"%p{n}", type=type_)
        for n, (parameter, type_) in enumerate(zip(parameters, types, strict=True))
    ]
    return f"""
        declare i64 @"{inner.name}"({", ".join(types)})
        define i64 @{ENTRY}({", ".join([f"ptr %array{n}" for n in range(arrays)] + ["ptr %scalars"])}) {{
            {"".join(loads)}
            %result = call i64 @"{inner.name}"({", ".join(f"{type_} %p{n}" for n, type_ in enumerate(types))})
            ret i64 %result
        }}
    """


def _optimised(module: Any, machine: Any) -> bytes:
    """Return the object code of a module.

    What numba emits comes with its reference counts and error handling. Once nothing but the entry can be called
    from outside, LLVM sees that none of it is used: the second time, when it knows what every function returns.
    """
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != ENTRY:
            value.linkage = "internal"
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    for _ in range(2):
        builder.getModulePassManager().run(module, builder)
    foreign = [
        value.name
        for value in (*module.functions, *module.global_variables)
        if value.is_declaration and not value.name.startswith("llvm.")
    ]
    if foreign:
        raise NotImplementedError(f"a kernel that allocates, raises or calls Python: {', '.join(foreign)}")
    return bytes(machine.emit_object(module))
