"""What the documents say is what the code does."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_matrix_of_formats_is_the_one_that_its_script_gives() -> None:
    script = runpy.run_path(str(DOCS / "make_formats.py"))
    assert (DOCS / "formats.md").read_text() == script["document"](), "run python docs/make_formats.py"
