"""Write ints.safetensors: awkward weights, their integer formats by compressed-tensors, and what it decodes.

Run by hand where the extra [parity] is installed: ``PYTHONPATH=tests python tests/golden/make_ints.py``. All arrays
are bits; the metadata names each case's format, dtype and shape.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from parity import integers
from requant.formats import format_named

CASES = {
    "int8-channel": (20, 37),
    "int8-channel-packed": (10, 21),
    "int4-channel": (10, 21),
    "int4-g128": (3, 256),
    "int4-g128-asym": (3, 256),
    "int8-g32": (9, 64),
    "int8-g32-asym": (9, 64),
    "int4-g12-asym": (10, 36),
}


def main() -> None:
    arrays, cases = {}, {}
    for name, shape in CASES.items():
        kind = format_named(name)
        for dtype in integers.TORCH:
            case = f"{name}.{dtype}"
            group = getattr(kind, "group", -1)
            weight = integers.weight(dtype, shape, group, "asym" not in name)
            parts = integers.compress(weight, dtype, kind)
            cases[case] = (name, dtype, shape)
            arrays[f"{case}.source"] = weight.view(f"u{weight.itemsize}")
            arrays |= {f"{case}.part{index}": integers.bits(part) for index, part in enumerate(parts)}
            arrays[f"{case}.value"] = integers.bits(integers.decompress(parts, kind))
    arrays = {name: array.view(np.uint8) if array.dtype == np.int8 else array for name, array in arrays.items()}
    save_file(arrays, Path(__file__).parent / "ints.safetensors", metadata={"cases": json.dumps(cases)})


if __name__ == "__main__":
    main()
