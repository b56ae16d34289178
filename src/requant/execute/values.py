"""What became of the values of converted weights: counted tile by tile, kept in the journal, reported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Values:
    """How the values of the converted weights fared.

    ``amax_error`` and ``error`` are summed squared errors where scales were searched for: of amax's and of those
    that were chosen. ``unlike_reference`` counts weights encoded in float32 because the reference's scale overflows.
    """

    exact: int = 0
    rounded: int = 0
    over_span: int = 0
    amax_error: float = 0.0
    error: float = 0.0
    unlike_reference: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form: the counts and, where scales were searched for, the gain in dB."""
        document: dict[str, Any] = {"exact": self.exact, "rounded": self.rounded, "over_span": self.over_span}
        if self.error > 0:
            document["gain_db"] = 10 * math.log10(self.amax_error / self.error)
        return document

    def add(self, other: Values) -> None:
        """Add another count to this one."""
        self.exact += other.exact
        self.rounded += other.rounded
        self.over_span += other.over_span
        self.amax_error += other.amax_error
        self.error += other.error
        self.unlike_reference += other.unlike_reference
