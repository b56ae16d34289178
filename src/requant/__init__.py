"""requant rewrites quantized checkpoints straight on the safetensors bytes.

The verbs of the command line as functions: `convert`, `inspect`, `verify`, `compare`, `upgrade`, `config`,
`family_init`. They
raise `CheckpointError`, `CallError` or `SurroundingsError`, each with its ``problems``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from requant.errors import CallError, CheckpointError, Problem, RequantError, SurroundingsError
from requant.version import __version__

if TYPE_CHECKING:
    from requant.api import compare, config, convert, family_init, inspect, upgrade, verify

__all__ = [
    "CallError",
    "CheckpointError",
    "Problem",
    "RequantError",
    "SurroundingsError",
    "__version__",
    "compare",
    "config",
    "convert",
    "family_init",
    "inspect",
    "upgrade",
    "verify",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Load the verbs when they are first used, so that ``import requant`` and ``--help`` stay instant."""
    if name in __all__:
        from requant import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
