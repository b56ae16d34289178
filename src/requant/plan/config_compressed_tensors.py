"""The ``quantization_config`` of the dialect compressed-tensors: a scheme for every module, and the proof of it.

Modules are described by name patterns, one for each template (a name whose numbers are left open), so that
250,000 modules need a page. The patterns hold under every name that engines have for a module; the proof puts
all of those to `requant.engines.resolver`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from requant.dialects.compressed_tensors import ConfigGroup
from requant.engines.names import TEXT_ROOTS, component_spellings, name_variants, split_root
from requant.engines.resolver import Resolver
from requant.errors import CheckpointError, Problem

Numbers = tuple[str, ...]
"""The numeric components of a module's name, from left to right."""

Box = tuple[frozenset[str] | None, ...]
"""What each of the `Numbers` may be; None: any."""

_KEPT = -1
"""Stands for "unquantised" where schemes are counted as their groups are, from 0."""

_ANYWHERE = r"(?:.*\.)?"
_UNDER_A_TEXT_ROOT = f"(?:{'|'.join(re.escape(root) for root in TEXT_ROOTS if root)})?"


def synthesize(schemes: Mapping[str, ConfigGroup | None]) -> dict[str, Any]:
    """Return the compressed-tensors ``quantization_config`` that says exactly what ``schemes`` says.

    ``schemes`` holds every module that an engine could take for a Linear (weights of two and more dimensions,
    converted or kept): its scheme, or None where it stays unquantised. One scheme gives
    ``targets: ["Linear"]`` and a complete ``ignore``. Of several, the one of most modules is ``group_0``, and
    each group lists its modules by patterns. The order of the modules makes no difference.

    Raises CheckpointError (``engine-refuses``) where modules of two schemes share a name in some engine, and
    ValueError if no module has a scheme.
    """
    ranked, scheme_number = _rank(schemes.values())
    if not ranked:
        raise ValueError("no module has a scheme")
    templates = _templates(one_expert_of_each(schemes), scheme_number)
    verdicts = _verdicts_by_suffix(templates)
    if len(ranked) == 1:
        targets = [["Linear"]]
    else:
        targets = [_patterns(templates, number, verdicts) for number in range(len(ranked))]
    config = _envelope(ranked, targets, ignore=_patterns(templates, _KEPT, verdicts))
    _prove(config, templates)
    return config


def one_expert_of_each(schemes: Mapping[str, ConfigGroup | None]) -> Mapping[str, ConfigGroup | None]:
    """Leave one expert to stand for its layer, if in no layer the experts differ: hundreds say the same."""
    told: dict[tuple[str, str], ConfigGroup | None] = {}
    few: dict[str, ConfigGroup | None] = {}
    for module, scheme in schemes.items():
        layer, dot, expert = module.rpartition(".experts.")
        number, _, leaf = expert.partition(".")
        if not dot or not number.isdecimal():
            few[module] = scheme
        elif (layer, leaf) not in told:
            told[layer, leaf] = few[module] = scheme
        elif told[layer, leaf] is not scheme and told[layer, leaf] != scheme:
            return schemes
    return few


def _envelope(ranked: Sequence[ConfigGroup], targets: Sequence[list[str]], ignore: list[str]) -> dict[str, Any]:
    formats = {scheme.format for scheme in ranked}
    mixed = len(formats) > 1
    groups = {}
    for number, (scheme, names) in enumerate(zip(ranked, targets, strict=True)):
        activations = scheme.input_activations
        groups[f"group_{number}"] = {
            **({"format": scheme.format} if mixed else {}),
            "targets": names,
            "weights": dict(scheme.weights),
            "input_activations": None if activations is None else dict(activations),
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if mixed else formats.pop(),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _rank(schemes: Collection[ConfigGroup | None]) -> tuple[list[ConfigGroup], Callable[[ConfigGroup | None], int]]:
    """Return the distinct schemes, the one of most modules first, and a function from scheme to place."""
    modules = Counter(map(id, schemes))
    objects = {id(scheme): scheme for scheme in schemes if scheme is not None}
    distinct: dict[str, ConfigGroup] = {}
    size: Counter[str] = Counter()
    for key, scheme in objects.items():
        distinct[_spelled(scheme)] = scheme
        size[_spelled(scheme)] += modules[key]
    ranked = sorted(distinct, key=lambda text: (-size[text], text))
    numbers = {key: ranked.index(_spelled(scheme)) for key, scheme in objects.items()}
    return [distinct[text] for text in ranked], lambda scheme: numbers.get(id(scheme), _KEPT)


def _spelled(scheme: ConfigGroup) -> str:
    """Return what is the same of schemes that say the same, in whatever order."""
    return json.dumps([scheme.format, scheme.weights, scheme.input_activations], sort_keys=True, default=dict)


# Templates: names without their numbers, and the numbers of each scheme where a template has several.


@dataclass(frozen=True, slots=True)
class _Template:
    """The modules whose names differ in their numbers only.

    ``name`` has 0 in place of every number, which makes it a possible name itself. ``modules`` are those of
    each scheme, by their numbers; its ``boxes`` hold all of these and no other scheme's.
    """

    name: str
    modules: Mapping[int, Mapping[Numbers, str]]
    boxes: Mapping[int, Sequence[Box]]

    @property
    def verdict(self) -> int | str:
        """The number of its scheme; of several, the template's own name: it goes together with no other."""
        return next(iter(self.modules)) if len(self.modules) == 1 else self.name


def _templates(
    schemes: Mapping[str, ConfigGroup | None], scheme_number: Callable[[ConfigGroup | None], int]
) -> list[_Template]:
    templates: dict[str, dict[int, dict[Numbers, str]]] = {}
    parents: dict[str, tuple[str, Numbers]] = {"": ("", ())}

    def generalise(name: str) -> tuple[str, Numbers]:
        parent, dot, leaf = name.rpartition(".")
        if parent not in parents:
            parents[parent] = generalise(parent)
        template, numbers = parents[parent]
        if leaf.isdecimal():
            return f"{template}{dot}0", (*numbers, leaf)
        return f"{template}{dot}{leaf}", numbers

    for module, scheme in schemes.items():
        template, numbers = generalise(module)
        templates.setdefault(template, {}).setdefault(scheme_number(scheme), {})[numbers] = module
    return [_Template(name, modules, _boxes(modules)) for name, modules in templates.items()]


def _boxes(schemes: Mapping[int, Collection[Numbers]]) -> dict[int, list[Box]]:
    """Divide the numbers of each scheme into disjoint boxes, open where they do not matter."""
    if len(schemes) == 1:
        return {scheme: [(None,) * len(next(iter(members)))] for scheme, members in schemes.items()}
    by_first: dict[str, dict[int, list[Numbers]]] = {}
    for scheme, members in schemes.items():
        for first, *rest in members:
            by_first.setdefault(first, {}).setdefault(scheme, []).append(tuple(rest))
    alike: dict[tuple[int, tuple[Box, ...]], set[str]] = {}
    for first, below in by_first.items():
        for scheme, boxes in _boxes(below).items():
            alike.setdefault((scheme, tuple(boxes)), set()).add(first)
    found: dict[int, list[Box]] = {scheme: [] for scheme in schemes}
    for (scheme, boxes_below), firsts in alike.items():
        choice = None if firsts == by_first.keys() else frozenset(firsts)
        found[scheme] += [(choice, *box) for box in boxes_below]
    return found


# Patterns: a template, or the boxes of it that have one scheme, as regular expressions.


def _verdicts_by_suffix(templates: Iterable[_Template]) -> dict[str, set[int | str]]:
    """Map every tail, cut at a dot, of the names engines have for templates to the verdicts found there."""
    verdicts: dict[str, set[int | str]] = {}
    for template in templates:
        for name in name_variants(template.name):
            suffix, dot = name, "."
            while dot:
                verdicts.setdefault(suffix, set()).add(template.verdict)
                _, dot, suffix = suffix.partition(".")
    return verdicts


def _patterns(templates: Iterable[_Template], scheme: int, verdicts: Mapping[str, set[int | str]]) -> list[str]:
    """Return the patterns of one scheme; leaves of the same parent share one."""
    leaves: dict[str, set[str]] = {}
    for template in templates:
        prefix, path = _anchor(template, verdicts)
        for box in template.boxes.get(scheme, ()):
            *parents, names = _components(path, box)
            stem = prefix + "".join(f"{_either(parent)}\\." for parent in parents)
            leaves.setdefault(stem, set()).update(names)
    return sorted(f"re:{stem}{_either(sorted(names))}$" for stem, names in leaves.items())


def _anchor(template: _Template, verdicts: Mapping[str, set[int | str]]) -> tuple[str, str]:
    """Return the regex for what may come before a template's path, and that path.

    Anything may, unless a module with another verdict ends in the same path: vision towers and MTP blocks
    have ``layers.N.self_attn.q_proj``, too.
    """
    roots, path = split_root(template.name)
    is_text = len(roots) > 1
    # One unknown component before layers.N is a root that engines rename: backbone.layers -> model.layers.
    short = path if is_text else re.sub(r"^[^.]*[^.\d][^.]*\.(?=layers\.0\.)", "", path)
    spellings = map(".".join, itertools.product(*component_spellings(short)))
    if all(verdicts.get(name, {template.verdict}) == {template.verdict} for name in spellings):
        return _ANYWHERE, short
    return (_UNDER_A_TEXT_ROOT, path) if is_text else ("", path)


def _components(path: str, box: Box) -> Iterator[list[str]]:
    """Yield for each component of a path the regexes of what it may be."""
    numbers = iter(box)
    for names in component_spellings(path):
        if not names[0].isdecimal():
            yield [re.escape(name) for name in names]
        elif (listed := next(numbers)) is None:
            yield [r"\d+"]
        else:
            yield sorted(listed, key=lambda number: (len(number), number))


def _either(regexes: Sequence[str]) -> str:
    return regexes[0] if len(regexes) == 1 else f"(?:{'|'.join(regexes)})"


def _prove(config: Mapping[str, Any], templates: Iterable[_Template]) -> None:
    """Resolve witnesses of every template under all their names; raise CheckpointError for wrong answers."""
    resolve = Resolver(config)
    problems = []
    for template in templates:
        for scheme in template.modules:
            wanted = None if scheme == _KEPT else f"group_{scheme}"
            for module in _witnesses(template, scheme):
                wrong = [name for name in name_variants(module) if resolve(name) != wanted]
                if wrong:
                    problems.append(_refused(module, wrong[0], wanted, resolve(wrong[0])))
    if problems:
        raise CheckpointError(problems)


def _refused(module: str, name: str, wanted: str | None, got: str | None) -> Problem:
    return Problem(
        "engine-refuses",
        f"an engine that calls it {name!r} gives it {got or 'no scheme'} instead of {wanted or 'no scheme'}",
        module,
        "give the modules that share this name one scheme",
    )


def _witnesses(template: _Template, scheme: int) -> Iterator[str]:
    """Yield modules of one scheme: from every box one for each number listed, and any that is in no box."""
    modules, boxes = template.modules[scheme], template.boxes[scheme]
    if len(template.modules) == 1:
        yield next(iter(modules.values()))
        return
    seen: set[tuple[int, int, str]] = set()
    for numbers, module in modules.items():
        listed = {
            (which, place, number)
            for which, box in enumerate(boxes)
            if all(choice is None or number in choice for number, choice in zip(numbers, box, strict=True))
            for place, number in enumerate(numbers)
            if box[place] is not None
        }
        if not listed or not listed <= seen:
            seen |= listed
            yield module
