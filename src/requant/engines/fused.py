"""What engines call the layers that they fuse: config.json has to say what becomes of those, too."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Verdict = TypeVar("Verdict", bound=Hashable)

_FUSED = (
    ("qkv_proj", "q_proj", "k_proj"),
    ("gate_up_proj", "gate_proj", "up_proj"),
    ("gate_up_proj", "w1", "w3"),
    ("fused_qkv_a_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    ("fused_qkv_a_proj_with_mqa", "q_a_proj", "kv_a_proj_with_mqa"),
    ("fused_qkv_a_g_proj", "q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    ("in_proj_qkvgfab", "q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj"),
    ("in_proj_qkvbfg_a", "q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
    ("fused_qkvg_proj", "q_proj", "k_proj", "v_proj", "g_proj"),
    ("in_proj_qkvz", "in_proj_qkv", "in_proj_z"),
    ("in_proj_ba", "in_proj_b", "in_proj_a"),
    ("fused_wqa_wkv", "wq_a", "wkv"),
)
"""Name of a fused layer in vLLM or SGLang, and the members by whose presence it is known."""


def fused_layers(verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """Return name → verdict for the layers that engines fuse from modules of one verdict.

    Routed experts are one such layer, the ``experts`` of a block.
    """
    layers: dict[str, Verdict] = {}
    below: dict[str, dict[str, Verdict]] = {}
    experts: dict[str, set[Verdict]] = {}
    for module, verdict in verdicts.items():
        parent, _, leaf = module.rpartition(".")
        container, _, number = parent.rpartition(".")
        if number.isdecimal() and container.endswith(".experts"):
            experts.setdefault(container, set()).add(verdict)
        else:
            below.setdefault(parent, {})[leaf] = verdict
    for parent, leaves in below.items():
        for name, *members in _FUSED:
            found = {leaves[member] for member in members if member in leaves}
            if len(found) == 1 and all(member in leaves for member in members):
                layers[f"{parent}.{name}"] = found.pop()
    layers.update((container, found.pop()) for container, found in experts.items() if len(found) == 1)
    return layers
