"""Jobs: every weight that changes, the route that it takes, and what it shares with the rest of a fused group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from requant.checkpoint.dtypes import payload_bytes
from requant.dialects import Dialect
from requant.dialects.recognise import Weight
from requant.errors import Problem
from requant.formats import Part
from requant.plan.routes import Route, route_of
from requant.plan.select import Selection, Target
from requant.recipe.recipe import Recipe


class Kind(NamedTuple):
    """What all weights of one format, dtype and shape have in common: their route, and the parts it makes.

    ``outputs`` are the suffix of each part's name, and its dtype, shape and bytes.
    """

    target: Target
    route: Route
    parts: tuple[Part, ...]
    outputs: tuple[tuple[str, tuple[str, tuple[int, ...], int]], ...]


class Into(NamedTuple):
    """Where an unquantized weight lies in a bank: transposed, from element ``first`` of the tensor ``name``.

    ``shape`` is the bank's, ``[experts, in, out]``; a column of the weight is a part of one of its rows.
    """

    name: str
    shape: tuple[int, int, int]
    first: int


class Job(NamedTuple):
    """A weight to convert. ``group`` names the fused group that it pools a number with; "": none.

    ``into`` is the bank that it becomes a part of.
    """

    weight: Weight
    kind: Kind
    group: str
    into: Into | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors that hold it, in the target format's order."""
        if self.into is not None:
            return (self.into.name,)
        return tuple(self.weight.module + suffix for suffix, _ in self.kind.outputs)


HELD_BYTES = 128 << 20
"""A fused group of up to this size is held in memory between pooling and conversion, so that it is read once."""


def make_jobs(
    selection: Selection, recipe: Recipe, dialect: Dialect, dtype: str, groups: Mapping[str, str]
) -> list[Job]:
    """Give every weight its route; the thinking is done once per kind of weight.

    ``dtype`` is the one in which config.json says that the model computes; ``groups``: module → fused group.
    """
    jobs = []
    for target, weights in selection.converted.items():
        kinds: dict[tuple[str, str, tuple[int, ...]], Kind] = {}
        for weight in weights:
            key = weight.format, weight.dtype, weight.shape
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = _kind(weight, target, recipe, dialect, dtype)
            jobs.append(Job(weight, kind, groups.get(weight.module, "") if groups else ""))
    return _agreed(jobs, partial(_rounded, recipe, dialect, dtype)) if groups else jobs


def _agreed(jobs: list[Job], rounded: Callable[[Job], Job]) -> list[Job]:
    """Let a fused group take one kind of route: an exact one and another do not pool the same number."""
    kinds: dict[str, set[bool]] = {}
    for job in jobs:
        if job.group:
            kinds.setdefault(job.group, set()).add(job.kind.route.exact is None)
    torn = {group for group, found in kinds.items() if len(found) > 1}
    return [rounded(job) if job.group in torn else job for job in jobs] if torn else jobs


def _rounded(recipe: Recipe, dialect: Dialect, dtype: str, job: Job) -> Job:
    """Return the job without an exact route; what must not be rounded is still told from it."""
    target = job.kind.target
    kind = _kind(job.weight, replace(target, rule=replace(target.rule, exact="off")), recipe, dialect, dtype)
    route = replace(kind.route, required=job.kind.route.required)
    return job._replace(kind=kind._replace(target=target, route=route))


def _kind(weight: Weight, target: Target, recipe: Recipe, dialect: Dialect, dtype: str) -> Kind:
    route = route_of(weight, target.format, target.rule.exact, recipe, dtype)
    parts = route.target.parts((weight.shape[0], weight.shape[1]), route.scale_dtype)
    spelling = dialect.spelling(target.format)
    assert spelling is not None, "make_recipe refuses a scheme that the dialect cannot write"
    outputs = []
    for part, spelled in zip(parts, spelling, strict=True):
        shape = spelled.shape(part.shape)
        nbytes = payload_bytes(part.dtype, shape)
        outputs.append((f".{spelled.suffix}", (part.dtype, shape, nbytes)))
    return Kind(target, route, parts, tuple(outputs))


def must_round(jobs: Iterable[Job]) -> list[Problem]:
    """Return a problem for every weight that must not be rounded and has no exact route."""
    remedy = "allow rounding (--exact auto), or --ignore it"
    return [
        Problem(
            "over-span",
            f"no exact route leads from {job.kind.route.source.name} to {job.kind.route.target.name}"
            + (" for all of its fused group" if job.group else ""),
            job.weight.module,
            remedy,
        )
        for job in jobs
        if job.kind.route.required and job.kind.route.exact is None
    ]


def pooled_groups(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    """Return the jobs that pool a number, by fused group; one of no group is alone, under its module's name."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        if job.kind.route.pools:
            groups.setdefault(job.group or job.weight.module, []).append(job)
    return groups


def is_held(group: Iterable[Job]) -> bool:
    """Tell whether jobs that pool a number are read into memory as a whole."""
    return sum(map(source_bytes, group)) <= HELD_BYTES


def source_bytes(job: Job) -> int:
    """Return the bytes of the parts that a job reads."""
    return sum([part.nbytes for part in job.weight.parts])
