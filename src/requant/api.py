"""The user's verbs, as functions: what the command line does, with the flags as keywords."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from requant.checkpoint.checkpoint import open_checkpoint
from requant.checkpoint.writer import write_atomically
from requant.errors import CallError, CheckpointError, Problem, SurroundingsError
from requant.execute.job import check_input_scales, obstacles, run_job, scan_job
from requant.execute.progress import Progress, unwatched
from requant.execute.values import Values
from requant.execute.workers import default_workers
from requant.formats import ScaleRule
from requant.plan.plan import Plan, make_plan
from requant.recipe.recipe import Arithmetic, Exact, OverSpan, Recipe, adapted, make_recipe

if TYPE_CHECKING:  # a conversion starts without them
    from requant.checks.compare import Comparison
    from requant.checks.verify import Level, Verification
    from requant.execute.upgrade import Upgrade
    from requant.plan.family_draft import FamilyDraft
    from requant.plan.inspection import Inspection
    from requant.plan.present import Present

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """What a conversion did; of a dry run, ``values`` is what a scan foretells, or None without one."""

    plan: Plan = field(repr=False)
    dry_run: bool
    values: Values | None
    seconds: float
    peak_rss: int

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        document = self.plan.to_json()
        if self.values is not None:
            document["values"] = self.values.to_json()
        return document | {"dry_run": self.dry_run, "seconds": round(self.seconds, 3), "peak_rss": self.peak_rss}


def convert(
    src: StrPath,
    dst: StrPath,
    scheme: str | None = None,
    *,
    recipe: StrPath | None = None,
    target: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    exact: Exact = "auto",
    on_over_span: OverSpan = "round",
    arithmetic: Arithmetic = "reference",
    scale: ScaleRule = "amax",
    input_scale: str = "constant:1.0",
    dialect: str = "compressed-tensors",
    family: str | None = None,
    max_shard_size: str | int | None = None,
    workers: int | None = None,
    manifest: bool = False,
    dry_run: bool = False,
    scan: bool = False,
    restart: bool = False,
    progress: Progress = unwatched,
) -> ConvertResult:
    """Write the checkpoint in folder ``src`` to folder ``dst``, its weights under ``scheme``, or as a ``recipe`` says.

    A recipe is one of those that come with requant, or a YAML file; it has rules in place of ``target`` and
    ``ignore``, and those options below that are not their defaults go before what it says. ``target`` and ``ignore``
    are LLM Compressor's patterns. ``exact``: take exact routes where they exist (auto), never (off), or refuse to
    round a microscaled source (required). ``scale``: scales from the largest magnitude (amax), by a search for the
    least error (mse), or powers of two (pow2). ``input_scale``: where scales of activations come from that NVFP4 and
    FP8 store: ``constant:VALUE``, ``bound``, or the path of a checkpoint that has some or of a JSON file with amax by
    module. Weights that have scales of their own keep them under ``constant``. ``dialect``: the output's. ``family``:
    whose facts say which modules are fused, by name or as a YAML file, where config.json's model_type does not.
    Output shards larger than ``max_shard_size`` (``50GB``, or a number of bytes) are split. ``manifest``: write what
    lets someone else make the same again, and check it (`verify`).
    ``dry_run``: plan from headers only; with ``scan`` read the scales of quantized sources, too. An interrupted
    job continues where it was; ``restart`` discards it. Whatever stands in the way is in the error that is raised
    before anything is written; only a NaN or Inf among the values themselves comes to light later.
    """
    started = time.monotonic()
    wish = _wish(
        scheme,
        recipe,
        _texts(target),
        _texts(ignore),
        exact=exact,
        on_over_span=on_over_span,
        arithmetic=arithmetic,
        scale=scale,
        input_scale=os.fspath(input_scale),
        dialect=dialect,
        family=None if family is None else os.fspath(family),
        max_shard_size=max_shard_size,
    )
    workers = _worker_count(workers)
    with os_errors():
        source, destination = existing_folder(src), Path(dst)
        _check_apart(source, destination)
    with os_errors(), open_checkpoint(source) as checkpoint:
        plan = make_plan(checkpoint, wish)
        if plan.problems:
            raise CheckpointError(plan.problems, plan.to_json())
        values = None
        if not dry_run:
            values = run_job(plan, destination, workers, restart, progress, manifest=manifest)
        else:
            check_input_scales(plan)
            plan.notes.extend(obstacles(plan, destination, restart))
            if scan:
                values = scan_job(plan, workers, progress, count_over_span=True)
        return ConvertResult(plan, dry_run, values, time.monotonic() - started, peak_rss())


@dataclass(frozen=True, slots=True)
class UpgradeResult:
    """What an upgrade did, or would do; ``values`` is None without a scan, or where there was nothing to do."""

    upgrade: Upgrade = field(repr=False)
    dry_run: bool
    values: Values | None
    seconds: float
    peak_rss: int

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        document = self.upgrade.to_json()
        if self.values is not None:
            document["values"] = self.values.to_json()
        return document | {"dry_run": self.dry_run, "seconds": round(self.seconds, 3), "peak_rss": self.peak_rss}


def upgrade(
    directory: StrPath,
    *,
    recipe: StrPath,
    exact: Exact = "auto",
    on_over_span: OverSpan = "round",
    arithmetic: Arithmetic = "reference",
    scale: ScaleRule = "amax",
    input_scale: str = "constant:1.0",
    family: str | None = None,
    workers: int | None = None,
    manifest: bool = False,
    dry_run: bool = False,
    scan: bool = False,
    progress: Progress = unwatched,
) -> UpgradeResult:
    """Convert part of the checkpoint in a folder in place, as a recipe says.

    Shards in which nothing changes are not opened. Meanwhile there is no config.json: a loader sees the old
    checkpoint, none, or the new one. An interrupted upgrade is finished by the same call; on a finished one there is
    nothing to do. The options are those of `convert`.
    """
    from requant.execute.journal import locked_folder
    from requant.execute.upgrade import open_upgrade, plan_upgrade, run_upgrade

    started = time.monotonic()
    wish = _wish(
        None,
        recipe,
        [],
        [],
        exact=exact,
        on_over_span=on_over_span,
        arithmetic=arithmetic,
        scale=scale,
        input_scale=os.fspath(input_scale),
        family=None if family is None else os.fspath(family),
    )
    workers = _worker_count(workers)
    with os_errors(), contextlib.ExitStack() as stack:
        folder = existing_folder(directory)
        if not dry_run:
            stack.enter_context(locked_folder(folder))
        checkpoint, record = open_upgrade(folder)
        with checkpoint:
            found = plan_upgrade(checkpoint, record, wish, workers)
            if found.plan.problems:
                raise CheckpointError(found.plan.problems, found.to_json())
            values = None
            if found.nothing_to_do:
                found.plan.notes.append("there is nothing to do: the checkpoint is what the recipe makes of it")
            elif not dry_run:
                values = run_upgrade(found, workers, progress, manifest=manifest)
            elif found.lack:
                found.plan.notes.append(found.lack)
            if scan and dry_run:
                values = scan_job(found.plan, workers, progress, count_over_span=True)
            return UpgradeResult(found, dry_run, values, time.monotonic() - started, peak_rss())


def compare(a: StrPath, b: StrPath, *, workers: int | None = None, progress: Progress = unwatched) -> Comparison:
    """Decode every weight of the checkpoints in two folders and measure how far they are apart."""
    from requant.checks.compare import compare_checkpoints

    with (
        os_errors(),
        open_checkpoint(existing_folder(a)) as first,
        open_checkpoint(existing_folder(b)) as second,
    ):
        return compare_checkpoints(first, second, _worker_count(workers), progress)


def inspect(src: StrPath) -> Inspection:
    """Return what the checkpoint in folder ``src`` holds, from its headers."""
    from requant.plan.inspection import inspect_checkpoint

    with os_errors(), open_checkpoint(existing_folder(src)) as checkpoint:
        return inspect_checkpoint(checkpoint)


def config(directory: StrPath, *, write: bool = False) -> Present:
    """Return the quantization_config that the tensors in a folder call for; with ``write``, put it in place.

    The config.json that was there, if it was another, is then called config.json.before-requant.
    """
    from requant.execute.journal import locked_folder
    from requant.execute.upgrade import ASIDE, open_upgrade
    from requant.plan.present import config_of

    with os_errors(), contextlib.ExitStack() as stack:
        folder = existing_folder(directory)
        if write:
            stack.enter_context(locked_folder(folder))
        checkpoint, record = open_upgrade(folder)
        with checkpoint:
            if record is not None:
                message = f"{folder} is being upgraded"
                raise CallError(Problem("fingerprint", message, remedy="finish that with `requant upgrade`"))
            found = config_of(checkpoint)
            if write and found.files:
                name = checkpoint.config_file
                if name in found.files:
                    write_atomically(folder / (name + ASIDE), checkpoint.config or b"")
                for file, data in sorted(found.files.items(), key=lambda item: item[0] == name):
                    write_atomically(folder / file, data)
            return found


def recipes() -> dict[str, str]:
    """Return the recipes that come with requant: name → description."""
    import yaml

    from requant.recipe.file import library

    return {name: yaml.safe_load(text)["description"] for name, text in library().items()}


def recipe_text(name: str) -> str:
    """Return the YAML of a recipe that comes with requant."""
    from requant.recipe.file import library

    if name not in library():
        raise CallError(Problem("bad-option", f"unknown recipe {name!r}", remedy=f"one of {', '.join(library())}"))
    return library()[name]


def family_init(src: StrPath) -> FamilyDraft:
    """Draft the facts on a model's family from the names in folder ``src``: what engines may fuse into one layer."""
    from requant.plan.family_draft import draft_family

    with os_errors(), open_checkpoint(existing_folder(src)) as checkpoint:
        return draft_family(checkpoint)


def verify(
    src: StrPath,
    level: Level = "scales",
    *,
    against: StrPath | None = None,
    manifest: StrPath | None = None,
    strict: bool = False,
    workers: int | None = None,
    progress: Progress = unwatched,
) -> Verification:
    """Check the checkpoint in folder ``src``: headers and config, all scales on top, or all data.

    ``against``: the folder of the checkpoint that it was made of. Every tensor and every value is then accounted for:
    what was kept has its bytes, a weight that changed its format lies within that format's bound. ``manifest``: the
    file with the hashes that its tensors should have.

    Nothing that is wrong with it is raised: it is in the result. ``strict`` makes the notes problems.
    """
    from requant.checks.verify import Verification, verify_folder

    with os_errors():
        folder = existing_folder(src)
        source = None if against is None else existing_folder(against)
        listed = None if manifest is None else Path(manifest)
        found = verify_folder(folder, level, _worker_count(workers), progress, source, listed)
    if strict:
        notes = [Problem("index-mismatch", note) for note in found.notes]
        return Verification(found.state, found.problems + notes, [])
    return found


def _wish(scheme: str | None, recipe: StrPath | None, target: list[str], ignore: list[str], **options: Any) -> Recipe:
    """Return the recipe that a call spells out, or names."""
    if (scheme is None) == (recipe is None):
        raise CallError(Problem("bad-option", "give either a scheme or a recipe", remedy="--scheme S or --recipe R"))
    if recipe is None:
        assert scheme is not None
        return make_recipe(scheme, target, ignore, **options)
    from requant.recipe.file import recipe_named

    if target or ignore:
        message = "a recipe has rules of its own, in place of --target and --ignore"
        raise CallError(Problem("bad-option", message, remedy="add a rule to a copy of the recipe"))
    return adapted(recipe_named(os.fspath(recipe)), **options)


def _worker_count(workers: int | None) -> int:
    if workers is None:
        return default_workers()
    if not isinstance(workers, int) or workers < 1:
        raise CallError(Problem("bad-option", f"workers {workers}", remedy="at least 1"))
    return workers


def existing_folder(src: StrPath) -> Path:
    """Return ``src`` as a path; CallError where it is no folder."""
    path = Path(src)
    if not path.is_dir():
        remedy = "name the folder of a checkpoint; one on the hub is to be downloaded first"
        raise CallError(Problem("bad-source", f"{path} is not a folder", remedy=remedy))
    return path


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Turn an OSError that nobody has named better into a SurroundingsError, a path with a NUL into a CallError."""
    try:
        yield
    except ValueError as error:
        if "null byte" not in str(error):
            raise
        raise CallError(Problem("bad-source", "a path has a NUL in it")) from error
    except OSError as error:
        raise SurroundingsError(Problem("io", f"{error.filename or 'I/O'}: {error.strerror or error}")) from error


def peak_rss() -> int:
    """Return this process's peak resident set in bytes."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):  # unlike ru_maxrss, not inherited from the process that started this one
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _texts(patterns: str | Sequence[str] | None) -> list[str]:
    texts = [patterns] if isinstance(patterns, str) else list(patterns or ())
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        raise CallError([Problem("bad-pattern", f"{pattern!r} is no text") for pattern in wrong])
    return texts


def _check_apart(source: Path, destination: Path) -> None:
    src, dst = Path(os.path.realpath(source)), Path(os.path.realpath(destination))
    if src == dst or src in dst.parents or dst in src.parents:
        message = f"{destination} and the source {source} lie one in the other"
        raise CallError(Problem("bad-destination", message, remedy="name a folder of its own"))
