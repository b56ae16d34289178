"""Which scheme an engine gives a Linear, from a compressed-tensors ``quantization_config`` and a module name.

The order is vLLM's (``compressed_tensors/utils.py``): ``ignore`` by name, then the targets by name, then the
targets by class name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from requant.errors import CheckpointError, Problem

_ROUTED_EXPERT = re.compile(r"(?:.*\.)?experts\.\d+\.")


class Resolver:
    """The rules of one ``quantization_config``, compiled; ``resolver(module)`` applies them.

    The module's name is taken as given: vLLM asks for routed experts as ``….experts.0.gate_proj``,
    ``up_proj`` and ``down_proj`` whatever their tensors are called (see `requant.engines.names`), and for a fused
    layer it asks for each of its members.

    Raises CheckpointError (``bad-pattern``) for a pattern that is no regular expression.
    """

    def __init__(self, quantization_config: Mapping[str, Any]) -> None:
        groups: Mapping[str, Mapping[str, Any]] = quantization_config.get("config_groups") or {}
        # A dict as in vLLM: of equal targets the first keeps its place and the last names the group.
        targets = {target: name for name, group in groups.items() for target in group.get("targets") or ()}
        self._ignore = _compile(quantization_config.get("ignore") or ())
        self._targets = list(zip(_compile(targets), targets.values(), strict=True))
        self._linear = self._by_class("Linear")
        # vLLM lets the target "Linear" stand for the fused experts, too, unless they have one of their own.
        self._routed_experts = self._by_class("RoutedExperts") or targets.get("Linear")

    def __call__(self, module: str) -> str | None:
        """Return the config group whose scheme vLLM gives a Linear of that name; None: unquantised."""
        if any(_names(pattern, module) for pattern in self._ignore):
            return None
        for pattern, group in self._targets:
            if _names(pattern, module):
                return group
        return self._routed_experts if _ROUTED_EXPERT.match(module) else self._linear

    def _by_class(self, class_name: str) -> str | None:
        for pattern, group in self._targets:
            if isinstance(pattern, str):
                hit = pattern.lower() in class_name.lower()
            else:
                hit = pattern.match(class_name) is not None
            if hit:
                return group
        return None


def _compile(patterns: Iterable[str]) -> list[re.Pattern[str] | str]:
    return [_regex(pattern) if pattern.startswith("re:") else pattern for pattern in patterns]


def _regex(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            Problem("bad-pattern", f"quantization_config has the pattern {pattern!r}: {error}", "config.json")
        ) from error


def _names(pattern: re.Pattern[str] | str, module: str) -> bool:
    return pattern == module if isinstance(pattern, str) else pattern.match(module) is not None
