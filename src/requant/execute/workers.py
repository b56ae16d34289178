"""Workers: threads that take items from one iterator until it ends, one of them fails, or Ctrl-C."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from requant.execute.scratch import Scratch

Item = TypeVar("Item")


def default_workers() -> int:
    """Return the number of CPUs in this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_parallel(items: Iterable[Item], work: Callable[[Item, Scratch], None], workers: int) -> None:
    """Call ``work(item, the thread's scratch)`` for every item on ``workers`` threads.

    Items are drawn lazily, one at a time and in order. The first exception, of the iterator or of the work,
    lets the items under way finish, takes no more, and is raised here; so is KeyboardInterrupt.
    """
    source = iter(items)
    drawing = threading.Lock()
    stop = threading.Event()
    failures: list[BaseException] = []

    def draw_and_work() -> None:
        scratch = Scratch()
        try:
            while not stop.is_set():
                with drawing:
                    if stop.is_set():
                        return
                    try:
                        item = next(source)
                    except StopIteration:
                        return
                work(item, scratch)
        except BaseException as error:  # carried to the caller's thread, whatever it is
            failures.append(error)
            stop.set()

    threads = [threading.Thread(target=draw_and_work, name=f"requant-{n}", daemon=True) for n in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # a bare join would not let Ctrl-C through on every platform
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
