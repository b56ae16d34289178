"""Where the activation scales come from that a scheme stores beside its weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from requant.errors import CallError, Problem


@dataclass(frozen=True, slots=True)
class InputScaleSource:
    """``constant``: the same ``value`` everywhere; ``path``: a checkpoint with scales, or a JSON of amax by module;
    ``bound``: what the model's own arithmetic bounds the activations by.
    """

    kind: Literal["constant", "path", "bound"]
    value: float = 0.0
    path: Path | None = None

    @property
    def overrides(self) -> bool:
        """Whether it is meant to replace scales that weights have already: a constant only fills gaps."""
        return self.kind != "constant"


_NUMBER = re.compile(r"[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+\.", re.ASCII)

NO_CALIBRATION = InputScaleSource("constant", 1.0)
"""What is stored where nobody has measured anything."""


def parse_input_scale(text: str) -> InputScaleSource:
    """Parse ``constant:VALUE``, ``bound`` or a path; CallError where it is none of them."""
    if text == "bound":
        return InputScaleSource("bound")
    if isinstance(text, str) and text.startswith("constant:"):
        number = text.removeprefix("constant:")
        value = float(number) if _NUMBER.fullmatch(number) else math.nan
        if 1e-30 < value < 1e30:
            return InputScaleSource("constant", value)
    elif isinstance(text, str) and _is_readable(text):
        return InputScaleSource("path", path=Path(text))
    remedy = "constant:1.0, bound, the folder of a checkpoint with input scales, or a JSON file of amax by module"
    raise CallError(Problem("bad-option", f"input-scale {text!r} is no positive number, and no path", remedy=remedy))


def _is_readable(text: str) -> bool:
    """Tell whether a path names a folder or a file; not a pipe, which would be waited for."""
    try:
        return bool(text) and (Path(text).is_dir() or Path(text).is_file())
    except (OSError, ValueError):  # too long a name, a NUL in it
        return False
