"""Names of files: which are harmless, which hold weights."""

from __future__ import annotations

import re

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Files that hold weights, in this format or another."""

CONFIG_FILES = ("config.json", "params.json")
"""The file without which a checkpoint is none: Hugging Face's, or else Mistral's."""

HF_QUANT_CONFIG = "hf_quant_config.json"
"""What ModelOpt's checkpoints say of their quantization beside config.json, or in its place."""

MANIFEST = "requant-manifest.json"
"""What requant writes beside a checkpoint so that it can be made again."""

MISTRAL_WEIGHTS = "consolidated"
"""What the names of Mistral's own weight files begin with: engines tell from it which config they read."""

PRIVATE_FOLDERS = frozenset({".git", ".cache", ".requant"})
"""Folders of tools, not of the checkpoint."""

# Backslashes, control characters, and bytes that are no text (which Python reads as lone surrogates).
_UNSAFE = re.compile("[\x00-\x1f\x7f\\\\\ud800-\udfff]")


def is_hostile(file: str) -> bool:
    """Whether the relative name could leave its folder, or holds what no name should."""
    return bool(_UNSAFE.search(file)) or not {"", ".", ".."}.isdisjoint(file.split("/"))


def is_weight_file(file: str) -> bool:
    """Whether the file holds weights, by its suffix."""
    return file.lower().endswith(WEIGHT_SUFFIXES)


def is_private(file: str) -> bool:
    """Whether the file lies in a folder that belongs to a tool."""
    return not PRIVATE_FOLDERS.isdisjoint(file.split("/")[:-1])
