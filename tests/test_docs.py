"""What the documents say is what the code does."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def test_the_matrix_of_formats_is_the_one_that_its_script_gives() -> None:
    script = runpy.run_path(str(DOCS / "make_formats.py"))
    assert (DOCS / "formats.md").read_text() == script["document"](), "run python docs/make_formats.py"


def commands(document: Path) -> list[str]:
    """Return the lines of a document's shell blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.heavy
def test_every_command_of_the_recipes_page_runs(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in (("requant", "-m requant"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    said = {}
    for command in commands(DOCS / "recipes.md"):
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        said.setdefault(command, []).append(done.stdout + done.stderr)
    first, second = said["requant upgrade served --recipe kimi-k3-fp8-attention-shared --manifest"]
    assert "FP8_DYNAMIC" in first and "nothing to do" in second
