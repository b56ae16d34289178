"""YAML files that people write: read so that whatever is wrong can be said with its line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from requant.errors import CallError, Problem


def compose(kind: str, file: str, text: str) -> Any:
    """Return the YAML node of a mapping in which no key is twice; CallError, with file and line, where it is none.

    ``kind`` says what the file should be: family, recipe.
    """
    import yaml

    try:
        top = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise malformed(kind, file, mark.line + 1 if mark else 0, error.problem or str(error)) from None
    except RecursionError:
        raise malformed(kind, file, 0, "nested too deeply") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow has no line
        raise malformed(kind, file, 0, " ".join(str(error).split())) from None
    if not isinstance(top, yaml.MappingNode):
        raise malformed(kind, file, 1, "it is no mapping")
    _check_keys(kind, file, top)
    return top


def _check_keys(kind: str, file: str, node: Any) -> None:
    import yaml

    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                raise malformed(kind, file, key.start_mark.line + 1, f"{key.value} is there twice")
            seen.add(key.value)
            _check_keys(kind, file, value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(kind, file, item)


def line_of(top: Any, path: Sequence[str | int]) -> int:
    """Return the line of what ``path`` (keys and places) leads to in a composed mapping, or of what it gets to."""
    node, line = top, top.start_mark.line
    for step in path:
        if isinstance(step, int) and isinstance(node.value, list) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line
        elif isinstance(node.value, list):
            found = next(((key, value) for key, value in node.value if key.value == step), None)
            if found is None:
                break
            line, node = found[0].start_mark.line, found[1]
        else:
            break
    return int(line) + 1


def malformed(kind: str, file: str, line: int, what: str) -> CallError:
    """Return the error of a file that is wrong at a line (0: none is known)."""
    place = f"{file}, line {line}" if line else file
    return CallError(Problem("bad-option", f"{kind} {place}: {what}", remedy="correct the file"))
