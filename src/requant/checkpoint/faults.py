"""Collects problems, so that all are told at once and thousands of one kind do not drown the others."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from requant.errors import CheckpointError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

LISTED = 50
"""Problems of one kind that are told one by one; the rest are counted."""


class Faults:
    """The problems found so far, by code and kind."""

    def __init__(self) -> None:
        self._problems: defaultdict[tuple[str, str], list[Problem]] = defaultdict(list)

    def add(self, code: str, kind: str, module: str, detail: str = "", remedy: str = "") -> None:
        """Record one problem; ``kind`` is its first words and what it is counted under."""
        message = f"{kind}: {detail}" if detail else kind
        self._problems[code, kind].append(Problem(code, message, module, remedy))

    def __len__(self) -> int:
        return sum(map(len, self._problems.values()))

    def problems(self) -> Iterator[Problem]:
        """Yield up to ``LISTED`` problems of each kind, then one that says how many more there are."""
        for (code, kind), problems in self._problems.items():
            yield from problems[:LISTED]
            if len(problems) > LISTED:
                yield Problem(code, f"{kind}: {len(problems) - LISTED:,} more", remedy=problems[-1].remedy)

    def check(self) -> None:
        """Raise CheckpointError with all of them, if there are any."""
        if self._problems:
            raise CheckpointError(self.problems())
