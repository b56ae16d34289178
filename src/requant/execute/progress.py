"""Progress on stderr: a bar on a terminal, a plain line every 30 seconds elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

LINE_EVERY = 30.0
"""Seconds between plain lines."""


Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Given what is being done and how many bytes it takes, a context whose value is told the bytes done."""


@contextlib.contextmanager
def unwatched(_what: str, _total: int) -> Iterator[Callable[[int], None]]:
    """Show nothing: the progress of a caller who does not watch."""
    yield lambda _nbytes: None


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a thread-safe function that is told how many of ``total`` bytes have been done."""
    show = unwatched if not total else _bar if sys.stderr.isatty() else _lines
    with show(what, total) as advance:
        yield advance


@contextlib.contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


@contextlib.contextmanager
def _lines(what: str, total: int) -> Iterator[Callable[[int], None]]:
    lock = threading.Lock()
    start = last = time.monotonic()
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done, last
        with lock:
            done += nbytes
            now = time.monotonic()
            if now - last < LINE_EVERY:
                return
            last = now
            speed = done / (now - start)
            left = (total - done) / speed if speed else 0.0
            print(
                f"{what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {speed / 1e9:.2f} GB/s, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    yield advance
