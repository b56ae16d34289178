"""Upgrading a checkpoint in place: shard by shard, so that a loader sees the old one, none, or the new one.

DIR/.requant/journal.json says what every shard was and will be; config.json steps aside; each shard that changes is
written beside the old one and takes its name; then come the index, the new config.json, and the journal goes. What is
done can be told from the headers alone: after an interruption, the same command plans what is left.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from requant.checkpoint.checkpoint import Checkpoint, open_checkpoint
from requant.checkpoint.fsio import naming, sync_folder
from requant.checkpoint.layout import header_bytes
from requant.checkpoint.names import CONFIG_FILES, HF_QUANT_CONFIG
from requant.checkpoint.rehearsal import step
from requant.errors import CallError, CheckpointError, Problem, SurroundingsError
from requant.execute.convert import finish, write_shards
from requant.execute.input_scales import input_amax
from requant.execute.job import scan_job
from requant.execute.journal import Journal, free_space, read_journal
from requant.execute.manifest import manifest_json, source_digest
from requant.execute.pooling import amax, pool_stored
from requant.execute.progress import Progress
from requant.execute.scratch import Scratch
from requant.execute.tiles import read_weight
from requant.execute.values import Values
from requant.execute.workers import run_parallel
from requant.plan.jobs import Job, source_bytes
from requant.plan.plan import Plan, make_plan
from requant.plan.shards import ShardPlan
from requant.recipe.recipe import Recipe
from requant.version import __version__

ASIDE = ".before-requant"
"""What is added to the name of the old config, which stays."""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What is left to do in a checkpoint: a plan of all of it, and the shards that change.

    ``record`` is the journal of an upgrade under way (None: there is none), ``needed`` the most disk space that it
    takes beside what is there, in bytes.
    """

    plan: Plan
    changed: list[ShardPlan]
    record: Mapping[str, Any] | None
    needed: int

    @property
    def nothing_to_do(self) -> bool:
        """Whether the checkpoint is what the recipe makes of it."""
        store = self.plan.checkpoint.store
        here = store.files()
        same = all(name in here and store.read(name, 0, here[name]) == data for name, data in self.plan.files.items())
        return self.record is None and not self.changed and same

    @property
    def lack(self) -> str:
        """Say what is missing where the disk is too full; "" where it is not."""
        free = free_space(self.plan.checkpoint.store.root)
        if self.needed <= free:
            return ""
        return f"rewriting takes up to {self.needed:,} bytes beside what is there; {free:,} are free"

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form: a plan's, but bytes are written and shared in the shards that change."""
        total = sum(shard.layout.data_bytes for shard in self.changed)
        shared = sum(shard.layout.shared_bytes for shard in self.changed)
        written = {"bytes_written": total - shared, "bytes_shared": shared, "shards_rewritten": len(self.changed)}
        return self.plan.to_json() | written


def open_upgrade(folder: Path) -> tuple[Checkpoint, Mapping[str, Any] | None]:
    """Open a checkpoint that is to be upgraded, or that is being upgraded, and return it with the journal.

    CallError for a folder in which something else is under way.
    """
    record = read_journal(folder)
    if record is None:
        return open_checkpoint(folder), None
    if "upgrade" not in record:
        message = f"{folder} holds an unfinished conversion"
        raise CallError(Problem("fingerprint", message, remedy="finish it, then upgrade"))
    config = record["upgrade"]["config"]
    # The old one: killed at the very end, the new one is in its place already.
    read_from = next((name for name in (config, config + ASIDE) if _is_old(folder / name, record)), config)
    return open_checkpoint(folder, under_work=(config, read_from)), record


def _is_old(path: Path, record: Mapping[str, Any]) -> bool:
    """Tell whether a file is the config that an upgrade began with."""
    if not path.is_file():
        return False
    digest: str = record["upgrade"]["config_digest"]
    return xxhash.xxh3_128_hexdigest(path.read_bytes()) == digest


def plan_upgrade(checkpoint: Checkpoint, record: Mapping[str, Any] | None, recipe: Recipe, workers: int) -> Upgrade:
    """Plan what is left of an upgrade; everything in its way is in the plan's problems.

    CallError (``fingerprint``) where an unfinished one had another recipe, or its shards have changed since.
    """
    pooled = {} if record is None else record["upgrade"]["pooled"]
    if record is not None:
        _check_same(checkpoint, record, recipe)
    plan = make_plan(checkpoint, recipe, pooled, in_place=True)
    changed = [shard for shard in plan.shards if not shard.verbatim]
    plan.problems.extend(_unfit(checkpoint, plan, changed))
    if record is not None and not plan.problems:
        _check_shards(checkpoint, record, changed)
    return Upgrade(plan, changed, record, _space(checkpoint.store.root, changed, workers))


def run_upgrade(upgrade: Upgrade, workers: int, progress: Progress, *, manifest: bool) -> Values:
    """Carry out an upgrade without problems, or what is left of it; the folder is locked by the caller.

    With ``manifest`` there is one in the end, for which all shards are read.
    """
    plan, folder = upgrade.plan, upgrade.plan.checkpoint.store.root
    scales = input_amax(plan)
    if upgrade.lack:
        raise SurroundingsError(Problem("no-space", upgrade.lack, str(folder), "free some space"), plan.to_json())
    if upgrade.record is None:
        scan_job(plan, workers, progress, count_over_span=plan.recipe.refuses_over_span)
        _scan_values(plan, workers, progress)
    record = upgrade.record["upgrade"] if upgrade.record is not None else _new_record(upgrade, workers)
    done = {} if upgrade.record is None else upgrade.record["done"]
    # Of what is to be rewritten nothing is done, whatever the journal says: the headers know.
    changed = {shard.name for shard in upgrade.changed}
    journal = Journal(
        folder,
        _fingerprint(plan.recipe, record["shards"]),
        [],
        {shard: Values(**values) for shard, values in done.items() if shard not in changed},
        record,
        plan.checkpoint.store.forget,
    )
    journal.begin()
    _set_aside(folder, record["config"], {"upgrade": record})
    left = dataclasses.replace(plan, shards=upgrade.changed, pooled=record["pooled"], spread={})
    with progress("upgrading", sum(shard.layout.data_bytes for shard in upgrade.changed)) as advance:
        values = write_shards(left, journal, scales, workers, advance, hashing=manifest)
    if HF_QUANT_CONFIG not in plan.files:
        (folder / HF_QUANT_CONFIG).unlink(missing_ok=True)
    source = source_digest((name, digests[0]) for name, digests in record["shards"].items())
    wanted = partial(manifest_json, plan, folder, source, workers, progress)
    finish(plan, journal, wanted if manifest else None)
    return values


def _scan_values(plan: Plan, workers: int, progress: Progress) -> None:
    """Raise CheckpointError for every unquantized weight with a NaN or Inf: half way through, there is no way back."""
    store, problems, lock = plan.checkpoint.store, list[Problem](), threading.Lock()
    jobs = [job for job in plan.jobs() if job.kind.route.source.name == "dense"]

    def look_at(job: Job, scratch: Scratch) -> None:
        try:
            amax(job, lambda job, rows: read_weight(store, job.weight, rows, scratch), scratch)
        except CheckpointError as error:
            with lock:
                problems.extend(error.problems)
        advance(source_bytes(job))

    with progress("looking for NaN", sum(map(source_bytes, jobs))) as advance:
        run_parallel(jobs, look_at, workers)
    if problems:
        raise CheckpointError(sorted(problems, key=lambda problem: problem.module), plan.to_json())


def _unfit(checkpoint: Checkpoint, plan: Plan, changed: list[ShardPlan]) -> list[Problem]:
    """Return what keeps a checkpoint from being upgraded in place, whatever the recipe."""
    folder = checkpoint.store.root
    problems = []
    links = [shard.shard for shard in checkpoint.shards if (folder / shard.shard).is_symlink()]
    links += [file for file in CONFIG_FILES if (folder / file).is_symlink()]
    if links:
        message = f"{len(links)} files are links (the first: {links[0]}), as in the hub's cache: others may share them"
        problems.append(Problem("cache-links", message, str(folder), "copy it: cp -rL, or hf download --local-dir"))
    if len(plan.files.keys() & set(CONFIG_FILES)) > 1:
        message = f"{' and '.join(CONFIG_FILES)} are there, of which an upgrade can put only one aside"
        problems.append(Problem("bad-source", message, str(folder), "use convert, or move one away"))
    for shard in changed:
        for job in shard.jobs:
            if any(part.shard != shard.name for part in (*job.weight.parts, *job.weight.inputs)):
                message = f"its parts lie in several shards, of which {shard.name} would be rewritten first"
                problems.append(Problem("index-mismatch", message, job.weight.module, "use convert"))
    gone = {shard.shard for shard in checkpoint.shards} - {shard.name for shard in plan.shards}
    problems += [Problem("index-mismatch", "nothing would be left in it", name, "use convert") for name in sorted(gone)]
    mixed = [group for group, jobs in plan.spread.items() if len({job.weight.format for job in jobs}) > 1]
    problems += [
        Problem("fused-split", "the group lies in several shards and formats", group, "use convert") for group in mixed
    ]
    return problems


def _new_record(upgrade: Upgrade, workers: int) -> dict[str, Any]:
    """Return what the journal must say before the first shard is touched."""
    checkpoint = upgrade.plan.checkpoint
    planned = {shard.name: xxhash.xxh3_128_hexdigest(header_bytes(shard.layout)) for shard in upgrade.changed}
    return {
        "config": checkpoint.config_file,
        "config_digest": xxhash.xxh3_128_hexdigest(checkpoint.config or b""),
        "shards": {header.shard: [header.digest, planned.get(header.shard)] for header in checkpoint.shards},
        "pooled": _pool_spread(upgrade.plan, workers),
    }


def _pool_spread(plan: Plan, workers: int) -> dict[str, float]:
    """Return by module what fused groups in several shards pool: later, some of their members will be gone."""
    store, found, lock = plan.checkpoint.store, dict[str, float](), threading.Lock()

    def look_at(jobs: list[Job], scratch: Scratch) -> None:
        number = pool_stored(jobs, store, scratch)
        with lock:
            found.update((job.weight.module, number) for job in jobs)

    run_parallel(plan.spread.values(), look_at, workers)
    return found


def _check_same(checkpoint: Checkpoint, record: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise CallError unless what is unfinished was begun with this recipe, on this checkpoint."""
    digest = xxhash.xxh3_128_hexdigest(checkpoint.config or b"")
    same = record["fingerprint"] == _fingerprint(recipe, record["upgrade"]["shards"])
    if not same or digest != record["upgrade"]["config_digest"]:
        message = "an upgrade with another recipe, other options or another version is unfinished here"
        raise CallError(Problem("fingerprint", message, remedy="finish it with its own recipe and options first"))


def _check_shards(checkpoint: Checkpoint, record: Mapping[str, Any], changed: list[ShardPlan]) -> None:
    """Raise CallError unless every shard is as it was, or as it was to be, and will be what it was to be."""
    shards = record["upgrade"]["shards"]
    strange = [header.shard for header in checkpoint.shards if header.digest not in shards.get(header.shard, ())]
    strange += [
        shard.name
        for shard in changed
        if shard.name in shards and xxhash.xxh3_128_hexdigest(header_bytes(shard.layout)) != shards[shard.name][1]
    ]
    if strange or len(shards) != len(checkpoint.shards):
        message = f"shards have changed since the upgrade began: {', '.join(strange) or 'their number'}"
        raise CallError(Problem("fingerprint", message, remedy="restore them from the source"))


def _fingerprint(recipe: Recipe, shards: Mapping[str, list[str | None]]) -> str:
    before = [(name, digests[0]) for name, digests in sorted(shards.items())]
    return xxhash.xxh3_128_hexdigest(json.dumps([__version__, recipe.to_json(), before]).encode())


def _set_aside(folder: Path, config: str, record: Mapping[str, Any]) -> None:
    """Take the config's name away: from here on there is no checkpoint, until there is the new one."""
    if _is_old(folder / config, record):
        step("rename")
        with naming(folder / config):
            (folder / config).replace(folder / (config + ASIDE))
            sync_folder(folder)


def _space(folder: Path, changed: list[ShardPlan], workers: int) -> int:
    """Return the most bytes that are on the disk at a time beyond those of the old shards.

    As many new shards as there are workers stand beside their old ones, what grows has grown, and the bytes of an old
    shard that has another name somewhere do not go with this one.
    """
    sizes = sorted((shard.layout.data_bytes + len(header_bytes(shard.layout)) for shard in changed), reverse=True)
    grown = 0
    for shard in changed:
        old = (folder / shard.name).stat()
        grown += shard.layout.data_bytes - (old.st_size if old.st_nlink == 1 else 0)
    return sum(sizes[:workers]) + max(0, grown)
