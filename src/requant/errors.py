"""What can go wrong, as data: problems and notes, and the three errors that carry them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that stops the job before anything is written.

    ``code`` is one of the documented codes, ``module`` the tensor, module or file at fault ("" if none),
    ``remedy`` what the user can do about it.
    """

    code: str
    message: str
    module: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the documented JSON form."""
        return {"code": self.code, "severity": "error", **asdict(self)}

    def __str__(self) -> str:
        place = f"{self.module}: " if self.module else ""
        remedy = f" [{self.remedy}]" if self.remedy else ""
        return f"{self.code}: {place}{self.message}{remedy}"


class RequantError(Exception):
    """A job that did not happen; ``problems`` lists every reason at once.

    ``document`` is what was known by then, in the documented JSON form of the job's result ({}: nothing).
    """

    exit_code = 1

    def __init__(self, problems: Problem | Iterable[Problem], document: Mapping[str, Any] | None = None) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.document = document or {}
        super().__init__("\n".join(map(str, self.problems)))


class CheckpointError(RequantError):
    """The checkpoint, or the plan made from it, is at fault."""


class CallError(RequantError):
    """The call is at fault: an option, a pattern, a destination that is not ours."""

    exit_code = 2


class SurroundingsError(RequantError):
    """The surroundings are at fault: disk, lock, missing tool."""

    exit_code = 3
