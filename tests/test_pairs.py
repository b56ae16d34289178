"""Every format to every scheme, in every dialect: no value changes where none must, none more than it may elsewhere.

Values are decoded, and bounds derived, from the definitions of the formats, in float64.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import Source, write
from requant.dialects import OUTPUT_DIALECTS
from requant.formats import EXACT_ROUTES, TO_DENSE
from requant.schemes import SCHEMES, can_write, scheme_named
from stored_values import largest, stored

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stored_values import Values

SHAPES = {"gate_proj": (136, 256), "up_proj": (136, 256), "down_proj": (256, 384)}
MODULES = {leaf: f"model.layers.0.mlp.{leaf}" for leaf in SHAPES}

SOURCES = {
    "BF16": (),
    "FP8": (("FP8", {}),),
    "FP8 pow2": (("FP8", {"scale": "pow2"}),),
    "FP8 modelopt": (("FP8", {"dialect": "modelopt"}),),
    "FP8_DYNAMIC": (("FP8_DYNAMIC", {}),),
    "FP8_DYNAMIC pow2": (("FP8_DYNAMIC", {"scale": "pow2"}),),
    "FP8_BLOCK": (("FP8_BLOCK", {}),),
    "FP8_BLOCK pow2": (("FP8_BLOCK", {"scale": "pow2"}),),
    "FP8_BLOCK fp8": (("FP8_BLOCK", {"dialect": "fp8"}),),
    "FP8_BLOCK modelopt": (("FP8_BLOCK", {"dialect": "modelopt"}),),
    "NVFP4": (("NVFP4", {}),),
    "NVFP4 pow2": (("MXFP4A16", {}), ("NVFP4", {})),
    "NVFP4 modelopt": (("NVFP4", {"dialect": "modelopt"}),),
    "NVFP4 modelopt pow2": (("MXFP4A16", {}), ("NVFP4A16", {"dialect": "modelopt"})),
    "MXFP4": (("MXFP4A16", {}),),
    "MXFP8": (("MXFP8A16", {}),),
    "MXFP8 even": (("FP8_BLOCK", {"scale": "pow2"}), ("MXFP8A16", {})),
    "MXFP8 modelopt": (("MXFP8", {"dialect": "modelopt"}),),
    "W8A8": (("W8A8", {}),),
    "W8A16": (("W8A16", {}),),
    "W8A16_G32": (("W8A16_G32", {}),),
    "W4A16": (("W4A16", {}),),
    "W4A16_ASYM": (("W4A16_ASYM", {}),),
}
"""Source → how it is made of the BF16 checkpoint."""

TARGETS = [
    (scheme.name, dialect.name)
    for dialect in OUTPUT_DIALECTS.values()
    for scheme in {(s.format, s.stores_input_scale): s for s in (*SCHEMES.values(), scheme_named("W8A16_G32"))}.values()
    if can_write(dialect, scheme)
]
"""Of the schemes that store the same, one."""

_FP8 = {"fp8-tensor", "fp8-channel", "fp8-block"}
EXACT = {
    "FP8": _FP8,
    "FP8 modelopt": _FP8,
    "FP8 pow2": {*_FP8, "dense"},
    "FP8_DYNAMIC": {"fp8-channel"},
    "FP8_DYNAMIC pow2": {"fp8-channel", "mxfp8", "dense"},
    "FP8_BLOCK": {"fp8-block"},
    "FP8_BLOCK fp8": {"fp8-block"},
    "FP8_BLOCK modelopt": {"fp8-block"},
    "FP8_BLOCK pow2": {"fp8-block", "mxfp8", "dense"},
    "NVFP4 pow2": {"nvfp4", "dense"},
    "NVFP4 modelopt pow2": {"nvfp4", "dense"},
    "MXFP4": {*_FP8, "mxfp4", "mxfp8", "nvfp4", "int8-g32", "dense"},
    "MXFP8": {"mxfp8", "dense"},
    "MXFP8 modelopt": {"mxfp8", "dense"},
    "MXFP8 even": {"mxfp8", "fp8-block", "dense"},
    "W8A8": {"int8-channel"},
    "W8A16": {"int8-g128"},
    "W8A16_G32": {"int8-g32"},
    "W4A16": {"int4-g128"},
    "W4A16_ASYM": {"int4-g128-asym"},
    "BF16": {"dense"},
}
"""Source → the formats that hold all of its values; NVFP4 with any other global scale: in its own dialect only."""

ROUNDINGS = 2.0**-7
"""To BF16 on the way: of a quantized source's values, of the scale, and of the quotient; 2^-9 each, if that much."""


@pytest.fixture(scope="module", autouse=True)
def unsynced() -> Iterator[None]:
    """Leave out what only guards against a crash of the machine: most of the time of so many small conversions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Values]]]:
    """Return the folder and the values of every source."""
    root = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(8)
    arrays = {}
    for leaf, shape in SHAPES.items():
        weight = (rng.standard_t(4, shape) * 0.02).astype(ml_dtypes.bfloat16)
        weight[3, :200] = 0
        weight[128:, :128] *= 2.0**-3
        arrays[f"{MODULES[leaf]}.weight"] = weight
    config = {"model_type": "llama", "dtype": "bfloat16"}
    found = {}
    for name, steps in SOURCES.items():
        folder = write(Source({"model.safetensors": arrays}, config), root / name / "0")
        for number, (scheme, how) in enumerate(steps, 1):
            requant.convert(folder, root / name / str(number), scheme, **how)
            folder = root / name / str(number)
        found[name] = folder, stored(folder)
    return found


@pytest.mark.parametrize(("scheme", "dialect"), TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_pair(
    source: str, scheme: str, dialect: str, made: dict[str, tuple[Path, dict[str, Values]]], tmp_path: Path
) -> None:
    src, before = made[source]
    result = requant.convert(src, tmp_path / "dst", scheme, dialect=dialect).to_json()
    after, target = stored(tmp_path / "dst"), scheme_named(scheme).format
    comparison = requant.compare(src, tmp_path / "dst").total
    assert requant.verify(tmp_path / "dst", against=src).problems == []
    own = source.startswith("NVFP4") and target == "nvfp4" and ("modelopt" in source) == (dialect == "modelopt")
    if own or target in EXACT.get(source, ()):
        assert comparison.differing == 0
        assert (result["values"]["rounded"], result["values"]["over_span"]) == (0, 0)
        for module, values in before.items():
            np.testing.assert_array_equal(after[module], values)
        return
    pooled = max(abs(before[MODULES[leaf]]).max() for leaf in ("gate_proj", "up_proj"))
    for module, values in before.items():
        if source.startswith("NVFP4") and target == "nvfp4":
            bound = 2.0**-23 * abs(values)  # the other dialect's global scale is the rounded reciprocal
        else:
            group = pooled if module != MODULES["down_proj"] else abs(values).max()
            bound = BOUNDS[target](values, group) + ROUNDINGS * abs(values)
        beyond = abs(after[module] - values) > bound
        assert not beyond.any(), (module, values[beyond][:3], after[module][beyond][:3])


def test_every_exact_route_is_among_the_pairs() -> None:
    covered = {
        (scheme_named(SOURCES[source][-1][0]).format, target)
        for source in EXACT
        if SOURCES[source]
        for target in EXACT[source]
    }
    routes = {*EXACT_ROUTES, *((source, "dense") for source, _ in TO_DENSE)}
    assert {tuple(name.removesuffix("-scale2") for name in route) for route in routes} <= covered


def fp8(region: tuple[int, int]):
    """Half a step: of three significant bits 2^-4, below the least normal 2^-10 of the scale, amax / 448."""
    return lambda values, _: 2.0**-4 * abs(values) + 2.0**-10 * largest(abs(values), region) / 448


def mxfp8(values: Values, _group: float) -> Values:
    """As FP8's; the scale is a power of two, with which amax comes to lie between 224 and 448."""
    return 2.0**-4 * abs(values) + 2.0**-10 * largest(abs(values), (1, 32)) / 224


def e2m1(values: Values, scale: Values) -> Values:
    """Half a step is a quarter of the scale, or of the value: between 4 and 6 a fifth; 7 is cut by a seventh."""
    return abs(values) / 4 + scale / 4


def mxfp4(values: Values, _group: float) -> Values:
    """The scale is a power of two, with which amax comes to lie between 3.5 and 7."""
    return e2m1(values, largest(abs(values), (1, 32)) / 3.5)


def nvfp4(values: Values, group: float) -> Values:
    """The scale is amax / 6 in E4M3, over the group's amax / 2688; what it rounds to 0 are values below 6 * 2^-10."""
    unit = group / 2688
    return e2m1(values, largest(abs(values), (1, 16)) / 6 * (1 + 2.0**-4)) + 6 * 2.0**-10 * unit


def integer(region: tuple[int, int], levels: float):
    """Half a step, of which as many as there are levels reach from -amax to amax."""
    return lambda values, _: largest(abs(values), region) / levels


def asymmetric(region: tuple[int, int], levels: float):
    """Half a step, and half a one more by which the zero point is rounded; steps are of the range with zero in it."""

    def bound(values: Values, _group: float) -> Values:
        span = largest(np.maximum(values, 0), region) + largest(np.maximum(-values, 0), region)
        return span / levels * (1 + 2.0**-4)

    return bound


BOUNDS = {
    "dense": lambda values, _: 2.0**-9 * abs(values),
    "fp8-tensor": fp8((0, 0)),
    "fp8-channel": fp8((1, 0)),
    "fp8-block": fp8((128, 128)),
    "mxfp4": mxfp4,
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
    "int8-channel": integer((1, 0), 255),
    "int8-g32": integer((1, 32), 255),
    "int8-g128": integer((1, 128), 255),
    "int4-g128": integer((1, 128), 15),
    "int4-g128-asym": asymmetric((1, 128), 15),
}
