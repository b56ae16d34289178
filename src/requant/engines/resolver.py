"""Which scheme an engine gives a Linear, from a compressed-tensors ``quantization_config`` and a module name.

The order is vLLM's (``compressed_tensors/utils.py``): ``ignore`` by name, then the targets by name, then the
targets by class name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from requant.errors import CheckpointError, Problem

TEXT_ROOTS = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
"""Where engines and checkpoints hang the text model: what comes before ``layers.N`` or ``lm_head``."""

_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_CONTAINER_NAMES = {"block_sparse_moe": "mlp"}
_MISTRAL_LEAVES = {
    "attention": {
        "wq": "q_proj",
        "wk": "k_proj",
        "wv": "v_proj",
        "wo": "o_proj",
        "wq_a": "q_a_proj",
        "wq_b": "q_b_proj",
        "wkv_a_with_mqa": "kv_a_proj_with_mqa",
        "wkv_b": "kv_b_proj",
    },
    "feed_forward": _EXPERT_NAMES,
    "shared_experts": _EXPERT_NAMES,
    "experts": {},
    "gate": {},
}
"""What Mistral's own checkpoints have directly below ``layers.N``, and in it; vLLM gives both its usual names."""
_MISTRAL_BLOCKS = {
    "attention": "self_attn",
    "feed_forward": "mlp",
    "shared_experts": "mlp.shared_experts",
    "experts": "mlp.experts",
    "gate": "mlp.gate",
}
MISTRAL_HEAD = "output"
"""What Mistral's own checkpoints call ``lm_head``."""
_ROUTED_EXPERT = re.compile(r"(?:.*\.)?experts\.\d+\.")


class Resolver:
    """The rules of one ``quantization_config``, compiled; ``resolver(module)`` applies them.

    The module's name is taken as given: vLLM asks for routed experts as ``….experts.0.gate_proj``,
    ``up_proj`` and ``down_proj`` whatever their tensors are called (see `name_variants`), and for a fused
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


def resolve(quantization_config: Mapping[str, Any], module: str) -> str | None:
    """Return what a `Resolver` answers for one module; build one yourself for many."""
    return Resolver(quantization_config)(module)


def name_variants(module: str) -> Iterator[str]:
    """Yield every spelling under which engines may know a module, its own first, none twice.

    Modules of the text model are known under each of `TEXT_ROOTS`; SGLang says ``mlp`` for
    ``block_sparse_moe``; a routed expert's ``w1``, ``w2``, ``w3`` are ``gate_proj``, ``down_proj``,
    ``up_proj``.
    """
    roots, path = split_root(module)
    for root in roots:
        for spelling in itertools.product(*component_spellings(path)):
            yield root + ".".join(spelling)


def split_root(module: str) -> tuple[tuple[str, ...], str]:
    """Return the roots under which engines may hang a module, its own first, and its path below them.

    The text model is ``layers.N.…`` under one of `TEXT_ROOTS` and what stands directly under one
    (``lm_head``, ``embed_tokens``); every other module stays where it is, with "" as its only root.
    """
    own = max((root for root in TEXT_ROOTS if module.startswith(root)), key=len)
    path = module[len(own) :]
    if path.startswith("layers.") or "." not in path:
        return tuple(dict.fromkeys((own, *TEXT_ROOTS))), path
    return ("",), module


def component_spellings(path: str) -> list[tuple[str, ...]]:
    """Return for each component of a dotted path the names it goes by, its own first."""
    components = path.split(".")
    spellings: list[tuple[str, ...]] = [(name,) for name in components]
    for container, alias in _CONTAINER_NAMES.items():
        if container in components:
            spellings[components.index(container)] = (container, alias)
    match components:
        case [*_, "experts", number, leaf] if number.isdecimal() and leaf in _EXPERT_NAMES:
            spellings[-1] = (leaf, _EXPERT_NAMES[leaf])
    match components:
        case ["layers", number, block, *rest] if block in _MISTRAL_BLOCKS and (not rest) == (block == "gate"):
            leaves = _MISTRAL_LEAVES[block]
            if not leaves or rest[0] in leaves:
                spellings[2] = (block, _MISTRAL_BLOCKS[block])
            if len(rest) == 1 and rest[0] in leaves:
                spellings[3] = (rest[0], leaves[rest[0]])
        case [name] if name == MISTRAL_HEAD:
            spellings[0] = (name, "lm_head")
    return spellings


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
