"""Whatever goes wrong on the way, running the same command again ends in the bytes of an undisturbed run."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import requant
from execute.folders import contents
from parity.checkpoints import Source, write
from requant import demo
from requant.checkpoint import fsio

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards, a bit of everything."""
    rng = np.random.default_rng(0)
    shards: dict[str, Any] = {}
    for number in (1, 2):
        prefix = f"model.layers.{number}."
        shards[f"model-{number}.safetensors"] = {
            prefix + "mlp.up_proj.weight": rng.standard_normal((300, 128)).astype(BF16),
            prefix + "experts.0.w1.weight_packed": rng.integers(0, 256, (128, 64), np.uint8),
            prefix + "experts.0.w1.weight_scale": rng.integers(118, 122, (128, 4), np.uint8),
            prefix + "norm.weight": rng.standard_normal(64).astype(BF16),
        }
    folder = write(Source(shards, {"model_type": "toy"}), tmp_path_factory.mktemp("faults") / "src")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def undisturbed(src: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    dst = tmp_path_factory.mktemp("faults") / "dst"
    requant.convert(src, dst, "FP8_BLOCK")
    return contents(dst)


WRITING = ["pwrite", "copy_file_range", "fsync", "replace", "fallocate"]


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, nth: int, code: int) -> Callable[[], bool]:
    """Let the nth call of ``os.name`` fail; return a function that tells whether it came to that."""
    owner = fsio if name == "fallocate" else os
    real, calls = getattr(owner, name), 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)
    return lambda: calls >= nth


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", WRITING)
def test_a_full_or_broken_disk_at_any_write_is_named_and_survived(
    src: Path, undisturbed: dict[str, bytes], tmp_path: Path, name: str, code: int
) -> None:
    for nth in range(1, 100):
        dst = tmp_path / str(nth)
        with pytest.MonkeyPatch.context() as patch:
            reached = fail_at(patch, name, nth, code)
            try:
                requant.convert(src, dst, "FP8_BLOCK", workers=1 + nth % 2)
            except requant.SurroundingsError as error:
                assert error.problems[0].code == ("no-space" if code == errno.ENOSPC else "io")
                assert "config.json" not in os.listdir(dst) or ".requant" in os.listdir(dst)
                assert all(not file.endswith(".safetensors") for file in os.listdir(dst / ".requant"))
            if not reached():
                assert nth > 1, f"{name} is never called"
                break
        if ".requant" in os.listdir(dst):
            requant.convert(src, dst, "FP8_BLOCK")
        assert contents(dst) == undisturbed
    else:
        pytest.fail("more writes than this checkpoint can need")


def convert_command(src: Path, dst: Path) -> list[str]:
    return [sys.executable, "-m", "requant", "convert", str(src), str(dst), "--scheme", "FP8_BLOCK", "--json"]


@pytest.mark.heavy
def test_kill_9_at_random_times(small_k3: Path, tmp_path: Path) -> None:
    """Kills spread over the time in which there is something to lose; between kill and re-run nothing looks whole."""
    ignore = [word for pattern in demo.IGNORE for word in ("--ignore", pattern)]
    subprocess.run(convert_command(small_k3, tmp_path / "whole") + ignore, check=True, capture_output=True)
    wanted = contents(tmp_path / "whole")
    rng, in_progress = random.Random(0), 0
    for attempt in (0, 1, 3, 5):
        dst = tmp_path / str(attempt)
        journal = dst / ".requant" / "journal.json"
        command = convert_command(small_k3, dst) + ignore
        for kill in range(2):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while not journal.exists() and process.poll() is None:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.02 * attempt * (kill + 1)))  # the first attempt: as soon as there is a journal
            process.send_signal(signal.SIGKILL)
            process.wait()
            if not journal.exists():
                break  # it was done
            in_progress += 1
            assert requant.verify(dst).state == "in-progress"
        if journal.exists():
            subprocess.run(command, check=True, capture_output=True)
        shutil.rmtree(dst / ".requant", ignore_errors=True)  # a kill between the last two steps of a finished job
        assert contents(dst) == wanted
    assert in_progress


def test_ctrl_c_stops_and_the_same_command_continues(src: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    script = (
        "import os, signal, sys\n"
        "from requant.checkpoint import writer\n"
        "real = writer.ShardWriter.finish\n"
        "def finish(self):\n"
        "    real(self)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "writer.ShardWriter.finish = finish\n"
        "from requant.cli import main\n"
        "main()\n"
    )
    command = convert_command(src, dst)
    done = subprocess.run(
        [sys.executable, "-c", script, *command[3:], "--workers", "1"], capture_output=True, text=True
    )
    assert done.returncode == 130
    assert '"ok": false' in done.stdout
    assert not (dst / "config.json").exists()
    subprocess.run(command, check=True, capture_output=True)
    assert contents(dst) == undisturbed


def interrupt(src: Path, dst: Path) -> None:
    """Leave a job half done in ``dst``."""
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, "replace", 4, errno.EIO)
        with pytest.raises(requant.SurroundingsError):
            requant.convert(src, dst, "FP8_BLOCK", workers=1)


def test_done_shards_are_not_written_again(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    interrupt(src, dst)
    before = {path.name: path.stat().st_ino for path in dst.glob("*.safetensors")}
    assert before
    requant.convert(src, dst, "FP8_BLOCK")
    after = {path.name: path.stat().st_ino for path in dst.glob("*.safetensors")}
    assert len(after) == 2
    assert before.items() <= after.items()


def test_the_counts_of_a_continued_run_are_those_of_the_whole_job(src: Path, tmp_path: Path) -> None:
    interrupt(src, tmp_path / "dst")
    whole = requant.convert(src, tmp_path / "other", "FP8_BLOCK").to_json()["values"]
    assert requant.convert(src, tmp_path / "dst", "FP8_BLOCK").to_json()["values"] == whole


def test_another_job_in_the_same_folder_is_refused_until_restart(
    src: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    dst = tmp_path / "dst"
    interrupt(src, dst)
    (dst / "mine.txt").write_text("not requant's")
    with pytest.raises(requant.CallError) as error:
        requant.convert(src, dst, "FP8_DYNAMIC")
    assert [problem.code for problem in error.value.problems] == ["fingerprint"]
    requant.convert(src, dst, "FP8_DYNAMIC", restart=True)
    assert (dst / "mine.txt").read_text() == "not requant's"
    assert requant.verify(dst).ok


def test_a_changed_source_is_another_job(src: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(src, tmp_path / "copy")
    interrupt(copy, tmp_path / "dst")
    (copy / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(requant.CallError, match="fingerprint"):
        requant.convert(copy, tmp_path / "dst", "FP8_BLOCK")


def test_a_folder_that_is_not_ours_is_never_touched(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / "precious.txt").write_text("x")
    for restart in (False, True):
        with pytest.raises(requant.CallError, match="neither empty nor"):
            requant.convert(src, dst, "FP8_BLOCK", restart=restart)
    assert contents(dst) == {"precious.txt": b"x"}


def test_a_mount_point_will_do(src: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    (dst / "lost+found").mkdir(parents=True)
    requant.convert(src, dst, "FP8_BLOCK")
    assert contents(dst) == undisturbed


def test_source_and_destination_must_lie_apart(src: Path) -> None:
    for dst in (src, src / "out", src.parent):
        with pytest.raises(requant.CallError, match="bad-destination"):
            requant.convert(src, dst, "FP8_BLOCK")


def test_two_processes_do_not_work_in_one_folder(src: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    (dst / ".requant").mkdir(parents=True)
    with open(dst / ".requant" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(requant.SurroundingsError) as error:
            requant.convert(src, dst, "FP8_BLOCK")
    assert [problem.code for problem in error.value.problems] == ["locked"]
    requant.convert(src, dst, "FP8_BLOCK")
    assert requant.verify(dst).ok


def test_too_small_a_disk_is_refused_before_anything_is_written(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(requant.SurroundingsError) as error:
        requant.convert(src, tmp_path / "dst", "FP8_BLOCK")
    assert [problem.code for problem in error.value.problems] == ["no-space"]
    assert not (tmp_path / "dst").exists()
    notes = requant.convert(src, tmp_path / "dst", "FP8_BLOCK", dry_run=True).to_json()["notes"]
    assert any("1,000 are free" in note for note in notes)
