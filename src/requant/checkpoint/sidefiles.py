"""The files beside the weights that a new checkpoint takes over byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from requant.checkpoint.faults import Faults
from requant.checkpoint.names import HF_QUANT_CONFIG, MANIFEST, WEIGHT_SUFFIXES, is_hostile, is_private, is_weight_file

if TYPE_CHECKING:
    from requant.checkpoint.store import LocalStore

_INDEX_SUFFIXES = tuple(f"{suffix}.index.json" for suffix in WEIGHT_SUFFIXES)
_REWRITTEN = frozenset(
    {
        "config.json",
        MANIFEST,
        HF_QUANT_CONFIG,
        "quant_config.json",  # AutoAWQ
        "quantize_config.json",  # AutoGPTQ
    }
)
_README = "README.md"
_BASE = "BASE_"


class SideFile(NamedTuple):
    """A file to copy: its name in the source and in the destination."""

    source: str
    destination: str


def side_files(store: LocalStore, config_file: str = "config.json") -> list[SideFile]:
    """Return what is copied beside the weights, sorted: all but weights, their indexes, and configs.

    The source's README.md becomes BASE_README.md; if there is such a file already, from the source's own
    source, it becomes BASE_BASE_README.md, and so on. Raises CheckpointError (``name-hostile``).
    """
    files = store.files()
    faults = Faults()
    copies = []
    rewritten = {*_REWRITTEN, config_file}
    for file in files:
        if is_private(file) or is_weight_file(file) or file.endswith(_INDEX_SUFFIXES) or file in rewritten:
            continue
        if is_hostile(file):
            faults.add("name-hostile", "not a file name that every system can hold", repr(file)[1:-1])
        copies.append(SideFile(file, file))
    faults.check()
    if _README in files:
        copies = [_one_base_more(copy) for copy in copies]
    return sorted(copies)


def _one_base_more(copy: SideFile) -> SideFile:
    name = copy.source
    while name.startswith(_BASE):
        name = name.removeprefix(_BASE)
    return SideFile(copy.source, _BASE + copy.source) if name == _README else copy
