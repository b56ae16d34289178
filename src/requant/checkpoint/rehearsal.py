"""Rehearsed deaths: ``REQUANT_FAULT=rename:3`` kills the process, as SIGKILL does, just before its third rename.

For tests of what an interruption leaves behind. The steps are ``write``, ``fsync``, ``rename``, ``index`` and
``config``.
"""

from __future__ import annotations

import os
import signal
import threading

_KIND, _, _COUNT = os.environ.get("REQUANT_FAULT", "").partition(":")
_LEFT = [int(_COUNT) if _COUNT.isdecimal() else 0]
_LOCK = threading.Lock()


def step(kind: str) -> None:
    """Die if this is the step that the environment names."""
    if kind != _KIND:
        return
    with _LOCK:
        _LEFT[0] -= 1
        if not _LEFT[0]:
            os.kill(os.getpid(), signal.SIGKILL)
