"""Patterns over module names, as LLM Compressor writes them: ``re:`` + regex, a literal name, or ``Linear``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
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


def first_matches(patterns: Sequence[Pattern], modules: Sequence[str]) -> dict[str, Pattern]:
    """Return for every module that some pattern names the first that does."""
    found: dict[str, Pattern] = {}
    text = "\n".join(("", *modules, ""))
    one_a_line = text.count("\n") == len(modules) + 1
    for pattern in patterns:
        if pattern.within and one_a_line:  # looked for in all of the names at once: a quarter million experts
            named = _lines_with(pattern.within, text)
        else:
            named = (module for module in modules if pattern.matches(module))
        for module in named:
            found.setdefault(module, pattern)
    return found


def _lines_with(within: str, text: str) -> Iterator[str]:
    """Yield the lines of ``text``, which starts and ends with a line end, that contain ``within``."""
    at = text.find(within)
    while at >= 0:
        end = text.index("\n", at)
        yield text[text.rindex("\n", 0, at + 1) + 1 : end]
        at = text.find(within, end)


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
