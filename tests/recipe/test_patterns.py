"""Patterns against ``re.match`` itself."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import requant
from requant.recipe.patterns import compile_patterns, first_matches

WORDS = st.sampled_from(["self_attn", "mlp", "gate", "q_proj", ".", "\\.", ".*", "[0-9]", "\n", "-", "lm_head", "x"])
REGEXES = st.lists(WORDS, min_size=1, max_size=5).map("".join)
NAMES = st.lists(st.sampled_from(["self_attn", "mlp", "gate", ".", "3", "\n", "-", "x"]), max_size=6).map("".join)


@given(st.lists(REGEXES, min_size=1, max_size=4), NAMES)
def test_a_pattern_is_re_match_whatever_its_shape(regexes: list[str], name: str) -> None:
    patterns = compile_patterns([f"re:{regex}" for regex in regexes])
    wanted = [re.match(regex, name) is not None for regex in regexes]
    assert [pattern.matches(name) for pattern in patterns] == wanted
    modules = [name, "between", name + ".x", name]
    found = first_matches(patterns, modules)
    assert found.get(name) is (patterns[wanted.index(True)] if any(wanted) else None)
    assert found.keys() == {module for module in modules if any(re.match(regex, module) for regex in regexes)}


def test_a_literal_is_exactly_that_module() -> None:
    (pattern,) = compile_patterns(["model.a.b"])
    assert pattern.matches("model.a.b")
    assert not any(map(pattern.matches, ("model.a.b.c", "model.aXb", "x.model.a.b", "")))


def test_every_bad_pattern_is_named() -> None:
    with pytest.raises(requant.CallError) as error:
        compile_patterns(["re:(", "fine", "re:*", "re:.*"])
    assert [problem.code for problem in error.value.problems] == ["bad-pattern", "bad-pattern"]
