"""The command line as its user sees it: exit codes, JSON on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from parity.checkpoints import Source, write
from requant import demo

if TYPE_CHECKING:
    from pathlib import Path

IGNORE = [word for pattern in demo.IGNORE for word in ("--ignore", pattern)]


def run(*arguments: object, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "requant", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done


def run_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    document = json.loads(run(*arguments, "--json", code=code).stdout)
    assert isinstance(document, dict)
    return document


def test_convert_verify_compare_inspect(small_k3: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    result = run_json("convert", small_k3, dst, "--scheme", "FP8_BLOCK", *IGNORE)
    assert result["ok"]
    assert result["converted"] == {"FP8_BLOCK": 119}
    assert set(result["values"]) == {"exact", "rounded", "over_span"}
    assert result["seconds"] > 0
    assert result["peak_rss"] > 0
    assert run_json("verify", dst, "--data") == {"ok": True, "state": "complete", "problems": [], "notes": []}
    compared = run_json("compare", small_k3, dst)
    assert compared["classes"]["expert"] == {
        "weights": 96,
        "values": 96 * 384 * 256,
        "differing": 0,
        "sqnr_db": None,
        "max_rel_error": 0.0,
    }
    assert run_json("compare", small_k3, dst, "--expect", "exact", code=1)["differing"] > 0
    assert run_json("compare", dst, dst, "--expect", "exact")["differing"] == 0
    inspected = run_json("inspect", dst)
    assert inspected["family"] == "kimi_k3"
    assert inspected["formats"]["fp8-block"]["weights"] == 119
    assert inspected["classes"]["expert"]["formats"] == {"fp8-block": 96}
    assert inspected["bytes"] == result["bytes_out"]
    assert sum(entry["bytes"] for entry in inspected["formats"].values()) == inspected["bytes"]


def test_people_get_tables(small_k3: Path, tmp_path: Path) -> None:
    text = run("convert", small_k3, tmp_path / "dst", "--scheme", "FP8_BLOCK", *IGNORE).stdout
    assert "119 weights → FP8_BLOCK" in text
    assert "0 over-span" in text
    assert "expert" in run("inspect", small_k3).stdout
    assert "whole" in run("verify", tmp_path / "dst").stdout
    assert "exact" in run("compare", small_k3, tmp_path / "dst").stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["convert", "{src}", "{dst}", "--scheme", "FP8_BLOCK", "--ignore", "re:("], 2),
        (["convert", "{src}", "{dst}", "--scheme", "NO_SUCH"], 2),
        (["convert", "{src}", "{src}", "--scheme", "FP8_BLOCK"], 2),
        (["convert", "{dst}/nowhere", "{dst}", "--scheme", "FP8_BLOCK"], 2),
        (["convert", "{src}", "{dst}", "--scheme", "FP8_BLOCK", "--target", "nowhere"], 1),
        (["inspect", "{dst}/nowhere"], 2),
        (["verify", "{dst}/nowhere"], 2),
        (["compare", "{src}", "{dst}/nowhere"], 2),
    ],
)
def test_every_failure_is_one_json_document_with_its_exit_code(
    small_k3: Path, tmp_path: Path, arguments: list[str], code: int
) -> None:
    filled = [word.format(src=small_k3, dst=tmp_path / "dst") for word in arguments]
    document = run_json(*filled, code=code)
    assert document["ok"] is False
    assert document["problems"]
    assert all({"code", "severity", "module", "message", "remedy"} == set(entry) for entry in document["problems"])
    plain = run(*filled, code=code)
    assert plain.stdout == ""
    assert document["problems"][0]["code"] in plain.stderr


def test_a_plan_with_problems_still_says_what_it_knows(small_k3: Path, tmp_path: Path) -> None:
    document = run_json(
        "convert", small_k3, tmp_path / "dst", "--scheme", "FP8_BLOCK", "--target", "nowhere", "--dry-run", code=1
    )
    assert document["tensors_in"] == 338
    assert document["problems"][0]["code"] == "target-matches-nothing"


@pytest.mark.parametrize("arguments", [["--no-such-option"], ["no-such-command"], ["convert"]])
def test_a_call_that_cannot_be_parsed_exits_with_2(arguments: list[str]) -> None:
    assert run(*arguments, code=2).stderr


def test_a_call_that_cannot_be_parsed_is_json_too_if_asked() -> None:
    assert json.loads(run("convert", "--json", code=2).stdout)["ok"] is False
    assert json.loads(run("verify", "x", "--headers", "--data", "--json", code=2).stdout)["ok"] is False


def test_help_needs_neither_numpy_nor_numba() -> None:
    script = (
        "import sys\n"
        "from requant.cli import main\n"
        "sys.argv = ['requant', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'numba', 'ml_dtypes', 'rich.progress'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "convert" in done.stdout


def test_a_dry_run_needs_no_numba(small_k3: Path) -> None:
    script = (
        "import sys, requant\n"
        f"requant.convert({str(small_k3)!r}, '/unused', 'FP8_BLOCK', dry_run=True)\n"
        "sys.exit('numba' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_demo_runs(tmp_path: Path) -> None:
    document = run_json("demo")
    assert document["exact"]["compared"]["classes"]["expert"]["differing"] == 0
    assert 29 < document["rounded"]["compared"]["classes"]["expert"]["sqnr_db"] < 32
    assert document["exact"]["verified"]["ok"]
    assert document["rounded"]["verified"]["ok"]
    assert "exact" in run("demo").stdout


def test_the_demo_does_not_write_over_anything(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    assert run_json("demo", "--full-size", tmp_path, code=2)["problems"]


def test_the_first_run_says_that_it_compiles_also_where_home_cannot_be_written(small_k3: Path, tmp_path: Path) -> None:
    """The unwritable home is a file, which stops root, too; the cache is then found in the temp folder."""
    (tmp_path / "home").write_text("no folder")
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "requant", "verify", str(small_k3)]
    said = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        said.append("compiling kernels" in done.stderr)
    assert said == [True, False]


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = line.replace("requant", f"{sys.executable} -m requant")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env={**os.environ, **environment})


def test_a_stream_that_is_closed_full_or_ascii_does_not_fail_the_job(small_k3: Path, tmp_path: Path) -> None:
    assert shell(f"requant convert {small_k3} {tmp_path / 'a'} --scheme FP8_BLOCK 2>&-").returncode == 0
    assert shell(f"requant inspect {small_k3} >&-").returncode == 0
    assert shell(f"requant inspect {small_k3} | head -0; exit ${{PIPESTATUS[0]}}").returncode == 0
    full = shell(f"requant inspect {small_k3} > /dev/full")
    assert (full.returncode, "No space left" in full.stderr, "Traceback" in full.stderr) == (3, True, False)
    done = shell(f"requant convert {small_k3} {tmp_path / 'b'} --scheme FP8_BLOCK", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


def test_json_also_where_it_was_taken_for_a_value(small_k3: Path, tmp_path: Path) -> None:
    done = run("convert", small_k3, tmp_path / "dst", "--scheme", "--json", code=2)
    assert json.loads(done.stdout)["problems"]


def test_names_from_a_checkpoint_do_not_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    names = ["a[red]b.weight_scale", ":warning:.weight_scale", "esc\x1b[31m.weight_scale"]
    tensors = {name: np.ones((1, 1), np.float32) for name in names}
    src = write(Source({"model.safetensors": tensors}, {"model_type": ":smile:"}), tmp_path / "src")
    said = run("inspect", src).stderr
    assert "a[red]b" in said
    assert ":warning:" in said
    assert "\x1b" not in said
    assert "esc\\x1b[31m" in said
