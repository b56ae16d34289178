"""The role of a module, told from its name and shape, and which roles are kept unless a target names them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_EMBEDDINGS = frozenset({"embed", "wte", "wpe", "word_embeddings", "tok_embeddings", "position_embeddings"})
_HEADS = frozenset({"lm_head", "head", "embed_out"})
_VISION = re.compile(
    r"(?:^|\.)(?:vision\w*|visual|vit\w*|image_encoder|image_tower|mm_projector|multi_modal_projector|mm_proj|"
    r"vl_connector|patch_merger|img_projector)(?:\.|$)"
)
_ATTENTION = re.compile(r"(?:^|\.)(?:\w*attn|\w*attention|mixer)\.")
_SHARED_EXPERT = re.compile(r"(?:^|\.)(?:shared_experts?|share_expert|shared_mlp)\.")
_EXPERT = re.compile(r"(?:^|\.)experts?\.(?:\*\.)?")
_MTP = re.compile(r"(?:^|\.)(?:mtp\w*|nextn\w*)\.")


class Role(NamedTuple):
    """What a module is (``name``) and why it is kept by default (``keep``; "" where it is converted)."""

    name: str
    keep: str


class Templates:
    """Templates of module names: every purely numeric component replaced by ``*``. Remembers those of numbered ones."""

    def __init__(self) -> None:
        self._known = {"": ""}

    def of(self, module: str) -> str:
        """Return the template of a module's name."""
        known = self._known.get(module)
        if known is None:
            parent, dot, leaf = module.rpartition(".")
            known = self.of(parent) + dot + ("*" if leaf.isdecimal() else leaf)
            if leaf.isdecimal():
                self._known[module] = known
        return known


@lru_cache(maxsize=65536)
def role_of(name_template: str, shape: tuple[int, ...], experts: int | None) -> Role:
    """Return the role of a module (its template), of its logical shape, in a model of so many experts."""
    parent, _, leaf = name_template.rpartition(".")
    keep = _named_keep(name_template, parent, leaf, shape, experts)
    if keep:
        return Role(keep, keep)
    if len(shape) != 2:
        return Role(_plain_role(name_template), "not-2d")
    return Role(_plain_role(name_template), "one-row" if shape[0] == 1 else "")


def _named_keep(name: str, parent: str, leaf: str, shape: tuple[int, ...], experts: int | None) -> str:
    """Return the role for whose sake the name alone, or with the number of experts, keeps a module."""
    if _VISION.search(name):
        return "vision"
    if leaf.startswith("embed_") or leaf.endswith(("_embedding", "_embeddings")) or leaf in _EMBEDDINGS:
        return "embedding"
    if leaf in _HEADS or name == "output":
        return "head"
    if leaf == "shared_expert_gate":
        return "router"
    gate = leaf in ("gate", "router") or (leaf in ("wg", "gate", "weight") and parent.endswith((".gate", ".router")))
    if gate and len(shape) == 2 and (experts is None or shape[0] == experts):
        return "router"
    if "norm" in leaf or leaf in ("ln_1", "ln_2", "ln_f"):
        return "norm"
    if "conv" in leaf:
        return "conv"
    if leaf == "eh_proj" or (leaf == "fc" and _MTP.search(name)):
        return "mtp"
    if leaf == "weights_proj" and "indexer" in parent:
        return "indexer"
    return ""


def _plain_role(name: str) -> str:
    if _SHARED_EXPERT.search(name):
        return "shared_expert"
    if _EXPERT.search(name):
        return "expert"
    if _ATTENTION.search(name):
        return "attention"
    if ".*." in name:
        return "mlp"
    return "other"
