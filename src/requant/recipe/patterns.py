"""Patterns over module names, as LLM Compressor writes them: ``re:`` + regex, a literal name, or ``Linear``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from requant.errors import CallError, Problem

LINEAR = "Linear"
"""The pattern that means every 2-D weight."""


_CONTAINS = re.compile(r"\.\*((?:[\w-]|\\\.)+)\.\*")


@dataclass(frozen=True, slots=True)
class Pattern:
    """One pattern; ``regex`` is None for a literal, ``within`` the text X of the everyday regex ``.*X.*``.

    The latter is looked for as plain text, which is ten times as fast.
    """

    text: str
    regex: re.Pattern[str] | None
    within: str = ""

    def matches(self, module: str) -> bool:
        """Tell whether the pattern names ``module``: ``re.match`` from its start, or exactly it."""
        if self.within and "\n" not in module:
            return self.within in module
        if self.regex is None:
            return self.text == module
        return self.regex.match(module) is not None


class PatternSet:
    """Several patterns, asked together."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self._patterns = tuple(patterns)
        self._within = tuple(pattern.within for pattern in self._patterns if pattern.within)
        self._others = any(not pattern.within for pattern in self._patterns)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def first(self, module: str) -> Pattern | None:
        """Return the first pattern that names ``module``."""
        if not self._others and not any(map(module.__contains__, self._within)):
            return None  # a quarter million experts go this way
        for pattern in self._patterns:
            if pattern.matches(module):
                return pattern
        return None


def compile_patterns(texts: Iterable[str]) -> tuple[Pattern, ...]:
    """Compile patterns; every one that is not a regular expression is in the CallError."""
    patterns, problems = [], []
    for text in texts:
        if not text.startswith("re:"):
            patterns.append(Pattern(text, None))
            continue
        try:
            contains = _CONTAINS.fullmatch(text, 3)
            within = contains[1].replace("\\.", ".") if contains else ""
            patterns.append(Pattern(text, re.compile(text[3:]), within))
        except (re.error, RecursionError, OverflowError) as error:
            problems.append(Problem("bad-pattern", f"{text!r}: {error}", remedy="correct the regular expression"))
    if problems:
        raise CallError(problems)
    return tuple(patterns)
