"""What engines call the modules of a checkpoint: where they hang them, and how they rename what is in a layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

TEXT_ROOTS = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
"""Where engines and checkpoints hang the text model: what comes before ``layers.N`` or ``lm_head``."""

_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_CONTAINER_NAMES = {"block_sparse_moe": "mlp"}
_MISTRAL_BLOCKS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "attention": (
        "self_attn",
        {
            "wq": "q_proj",
            "wk": "k_proj",
            "wv": "v_proj",
            "wo": "o_proj",
            "wq_a": "q_a_proj",
            "wq_b": "q_b_proj",
            "wkv_a_with_mqa": "kv_a_proj_with_mqa",
            "wkv_b": "kv_b_proj",
        },
    ),
    "feed_forward": ("mlp", _EXPERT_NAMES),
    "shared_experts": ("mlp.shared_experts", _EXPERT_NAMES),
    "experts": ("mlp.experts", {}),
    "gate": ("mlp.gate", {}),
}
"""What Mistral's own checkpoints have directly below ``layers.N``: vLLM's names for it, and for what is in it."""

MISTRAL_HEAD = "output"
"""What Mistral's own checkpoints call ``lm_head``."""


def name_variants(module: str) -> Iterator[str]:
    """Yield every spelling under which engines may know a module, its own first, none twice.

    Modules of the text model are known under each of `TEXT_ROOTS`; SGLang says ``mlp`` for
    ``block_sparse_moe``; a routed expert's ``w1``, ``w2``, ``w3`` are ``gate_proj``, ``down_proj``,
    ``up_proj``; vLLM gives the names in Mistral's own checkpoints its usual ones.
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
        case ["layers", _, block, *rest] if block in _MISTRAL_BLOCKS and (not rest) == (block == "gate"):
            block_name, leaves = _MISTRAL_BLOCKS[block]
            if not leaves or rest[0] in leaves:
                spellings[2] = (block, block_name)
            if len(rest) == 1 and rest[0] in leaves:
                spellings[3] = (rest[0], leaves[rest[0]])
        case [name] if name == MISTRAL_HEAD:
            spellings[0] = (name, "lm_head")
    return spellings
