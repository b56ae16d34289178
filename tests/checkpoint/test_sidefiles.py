"""Side files: everything beside the weights, byte for byte, and only that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from requant.checkpoint.sidefiles import side_files
from requant.checkpoint.store import LocalStore
from requant.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def copies(folder: Path, *files: str) -> dict[str, str]:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"x")
    with LocalStore(folder) as store:
        return {copy.source: copy.destination for copy in side_files(store)}


def test_everything_but_weights_configs_and_tools_is_taken(tmp_path: Path) -> None:
    taken = [
        ".gitattributes",
        "LICENSE",
        "assets/figure 1.png",
        "chat_template.jinja",
        "config_backup.json",
        "generation_config.json",
        "modeling_kimi.py",
        "tiktoken.model",
        "tokenizer/config.json",
        "训练.md",
    ]
    left = [
        *("model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin", "a.pt", "b.pth", "c.GGUF"),
        *("onnx/model.onnx", "tf_model.h5", "flax_model.msgpack", "adapter/model.safetensors"),
        *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
        *(".git/HEAD", ".cache/huggingface/x.json", ".requant/journal.json", "sub/.git/HEAD"),
        *("config.json", "hf_quant_config.json", "quantize_config.json"),
    ]
    assert copies(tmp_path, *taken, *left) == {name: name for name in taken}


def test_links_are_files(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"x")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "tokenizer.json").symlink_to("../blob")
    assert copies(folder) == {"tokenizer.json": "tokenizer.json"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["README.md"], {"README.md": "BASE_README.md"}),
        (["BASE_README.md"], {"BASE_README.md": "BASE_README.md"}),
        (
            ["README.md", "BASE_README.md"],
            {"README.md": "BASE_README.md", "BASE_README.md": "BASE_BASE_README.md"},
        ),
        (["docs/README.md"], {"docs/README.md": "docs/README.md"}),
    ],
)
def test_the_readme_becomes_the_base_s_and_none_is_lost(
    tmp_path: Path, files: list[str], expected: dict[str, str]
) -> None:
    assert copies(tmp_path, *files) == expected


def test_hostile_names_are_refused_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        copies(tmp_path, "fine.txt", "back\\slash.txt", "new\nline.txt", "not\udcffutf8.txt", ".git/a\\b")
    assert [problem.code for problem in caught.value.problems] == ["name-hostile"] * 3
    assert all(problem.module.isprintable() for problem in caught.value.problems)
