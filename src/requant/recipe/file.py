"""Recipes as YAML files: those that come with requant, and those that people write.

description: what it makes, of which model, and why
engine: vllm>=0.28
rules:                                   # the first that names a module holds
  - keep: why these stay as they are
    modules: ['re:.*kv_b_proj$']
  - scheme: FP8_DYNAMIC
    roles: [attention]                   # or modules: LLM Compressor's patterns
    exact: auto
on_over_span: round                      # these and the next are the command line's options
input_scale: constant:1.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from requant.dialects import OUTPUT_DIALECTS
from requant.errors import CallError, Problem
from requant.formats import ScaleRule
from requant.recipe.input_scale import parse_input_scale
from requant.recipe.patterns import compile_patterns
from requant.recipe.recipe import Arithmetic, Exact, OverSpan, Recipe, Rule, unspeakable
from requant.schemes import SCHEMES, scheme_named
from requant.yaml_text import compose, line_of, malformed

_STRICT = ConfigDict(extra="forbid", strict=True)


class _Rule(BaseModel):
    model_config = _STRICT

    scheme: str | None = None
    keep: str | None = Field(None, min_length=1)
    modules: list[str] = []
    roles: list[str] = []
    exact: Exact = "auto"

    @model_validator(mode="after")
    def _is_one_thing(self) -> _Rule:
        if (self.scheme is None) == (self.keep is None):
            raise ValueError("a rule has either a scheme, or keep with a reason")
        if not (self.modules or self.roles):
            raise ValueError("a rule names modules or roles")
        return self


class _Recipe(BaseModel):
    model_config = _STRICT

    description: str
    engine: str | None = None
    rules: list[_Rule] = Field(min_length=1)
    on_over_span: OverSpan = "round"
    arithmetic: Arithmetic = "reference"
    scale: ScaleRule = "amax"
    input_scale: str = "constant:1.0"
    dialect: Literal["compressed-tensors", "fp8", "modelopt"] = "compressed-tensors"


@cache
def library() -> Mapping[str, str]:
    """Return the texts of the recipes that come with requant, by name."""
    folder = files(__package__) / "library"
    found = (entry for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return {entry.name.removesuffix(".yaml"): entry.read_text() for entry in sorted(found, key=lambda e: e.name)}


def recipe_named(name: str) -> Recipe:
    """Return a recipe by its name, or from the YAML file at a path; CallError where it is neither, or is wrong."""
    if name in library():
        return parse_recipe(name, library()[name])
    path = Path(name)
    try:
        if path.is_file():
            return parse_recipe(name, path.read_text())
    except (OSError, ValueError) as error:
        raise malformed("recipe", name, 0, str(error)) from None
    remedy = f"one of {', '.join(library())}, or a YAML file"
    raise CallError(Problem("bad-option", f"unknown recipe {name!r}", remedy=remedy))


def parse_recipe(file: str, text: str) -> Recipe:
    """Parse the text of a recipe; everything wrong with it is in the CallError, with its line."""
    import yaml

    top = compose("recipe", file, text)
    try:
        document = _Recipe.model_validate(yaml.safe_load(text))
    except ValidationError as error:
        problems = [_said(file, top, tuple(fault["loc"]), fault["msg"]) for fault in error.errors()]
        raise CallError(problems) from None
    problems = []
    rules = []
    for place, rule in enumerate(document.rules):
        try:
            rules.append(_rule(rule, document.dialect))
        except CallError as error:
            problems += [_said(file, top, ("rules", place), problem.message) for problem in error.problems]
    try:
        source = parse_input_scale(document.input_scale)
    except CallError as error:
        problems += [_said(file, top, ("input_scale",), problem.message) for problem in error.problems]
    if problems:
        raise CallError(problems)
    return Recipe(
        tuple(rules),
        document.on_over_span,
        document.arithmetic,
        document.scale,
        source,
        document.dialect,
        name=Path(file).name.removesuffix(".yaml"),
        engine=document.engine,
    )


def _rule(rule: _Rule, dialect: str) -> Rule:
    patterns, roles = compile_patterns(rule.modules), frozenset(rule.roles)
    if rule.scheme is None:
        return Rule(patterns, None, reason=rule.keep or "", roles=roles)
    scheme = scheme_named(rule.scheme)
    if scheme is None:
        raise CallError(Problem("bad-option", f"unknown scheme {rule.scheme!r}; one of {', '.join(SCHEMES)}"))
    faults = unspeakable(scheme, OUTPUT_DIALECTS[dialect])
    if faults:
        raise CallError(faults)
    return Rule(patterns, scheme, rule.exact, roles=roles)


def _said(file: str, top: Any, path: Sequence[str | int], what: str) -> Problem:
    [problem] = malformed("recipe", file, line_of(top, path), what.removeprefix("Value error, ")).problems
    steps = ".".join(map(str, path))
    return replace(problem, message=f"{problem.message} ({steps})" if steps else problem.message)
