"""Executing a plan into a folder: shards from tiles, then side files, the index, and config.json last."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from requant.checkpoint.fsio import PAGE
from requant.checkpoint.hashing import TensorHashes
from requant.checkpoint.layout import CopyRun, header_bytes
from requant.checkpoint.names import CONFIG_FILES, MANIFEST
from requant.checkpoint.rehearsal import step
from requant.checkpoint.store import LocalStore
from requant.checkpoint.writer import ShardWriter, copy_file, write_atomically
from requant.execute.input_scales import InputAmax
from requant.execute.journal import WORK, Journal
from requant.execute.manifest import keep_hashes
from requant.execute.scratch import Scratch
from requant.execute.tiles import job_tiles
from requant.execute.values import Values
from requant.execute.work import convert_group, convert_tile, start_job
from requant.execute.workers import run_parallel
from requant.plan.jobs import Job, pooled_groups
from requant.plan.lots import StoredInput
from requant.plan.plan import Plan
from requant.plan.shards import ShardPlan

COPY_BYTES = 64 << 20
"""Kept runs are copied in pieces of this size, so that all workers share them."""


@dataclass(slots=True)
class _OpenShard:
    """A shard being written; finished by whoever completes its last item."""

    plan: ShardPlan
    writer: ShardWriter
    hashes: TensorHashes | None = None
    pending: int = 1  # one for the item that says that there are no more
    values: Values = field(default_factory=Values)
    lock: threading.Lock = field(default_factory=threading.Lock)


_Work = Callable[[Scratch], Values]


def write_shards(
    plan: Plan, journal: Journal, amax: InputAmax, workers: int, advance: Callable[[int], None], *, hashing: bool
) -> Values:
    """Write every shard that the journal does not have; return the fate of all converted values.

    With ``hashing`` the hashes of their tensors are kept for the manifest. ``amax`` tells the activations' amax where
    scales of them are written. ``advance`` is told output bytes as they come, from any thread. Whatever interrupts this
    leaves the shards that are done, named in the journal, and nothing else.
    """
    open_shards: dict[str, _OpenShard] = {}
    plan.checkpoint.store.read_once = _outgrows_memory(plan)

    def release(shard: _OpenShard) -> None:
        """Take one off what is pending; the last one puts the shard in place."""
        with shard.lock:
            shard.pending -= 1
            if shard.pending:
                return
        shard.writer.finish()
        del open_shards[shard.plan.name]
        if shard.hashes is not None:
            keep_hashes(journal.folder, shard.plan.name, shard.hashes.result())
        journal.mark_done(shard.plan.name, shard.values)

    def items() -> Iterator[tuple[_OpenShard, _Work, int]]:
        for number, shard_plan in enumerate(plan.shards):
            if _is_done(shard_plan, journal):
                advance(shard_plan.layout.data_bytes)
                continue
            shard = open_shards[shard_plan.name] = _open(
                shard_plan, plan, journal.folder, f"{number}.partial", hashing=hashing
            )
            for work, nbytes in _shard_work(shard, plan, amax):
                with shard.lock:
                    shard.pending += 1
                yield shard, work, nbytes
            yield shard, _nothing, 0

    def run(item: tuple[_OpenShard, _Work, int], scratch: Scratch) -> None:
        shard, work, nbytes = item
        values = work(scratch)
        with shard.lock:
            shard.values.add(values)
        advance(nbytes)
        release(shard)

    try:
        run_parallel(items(), run, workers)
    finally:
        for shard in list(open_shards.values()):
            shard.writer.discard()
    total = Values()
    for values in journal.done.values():
        total.add(values)
    return total


def commit(plan: Plan, journal: Journal, manifest: Callable[[], bytes] | None) -> None:
    """Put side files, the manifest, index and config.json in place, in this order, and remove the journal.

    A loader that looks before the last step finds no config.json.
    """
    for side in plan.side_files:
        copy_file(plan.checkpoint.store, side.source, journal.folder / side.destination)
    finish(plan, journal, manifest)


def finish(plan: Plan, journal: Journal, manifest: Callable[[], bytes] | None) -> None:
    """Put the manifest, the index and config.json in place, in this order, and remove the journal."""
    if manifest is not None:
        write_atomically(journal.folder / MANIFEST, manifest())
    else:
        (journal.folder / MANIFEST).unlink(missing_ok=True)  # of what has been there before
    index = index_json(plan)
    if index is not None:
        name, data = index
        step("index")
        write_atomically(journal.folder / name, data)
    for name, data in sorted(plan.files.items(), key=lambda file: file[0] in CONFIG_FILES):
        step("config")
        write_atomically(journal.folder / name, data)
    journal.close()


def index_json(plan: Plan) -> tuple[str, bytes] | None:
    """Return name and text of the output's index; None for a single file without one."""
    name = _index_name(plan)
    if name is None:
        return None
    index = plan.checkpoint.index
    weight_map = {spec.name: shard.name for shard in plan.shards for spec in shard.layout.tensors}
    total = sum(shard.layout.data_bytes for shard in plan.shards)
    metadata = {**(index.metadata if index else {}), "total_size": total}
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    return name, text.encode() + b"\n"


def _index_name(plan: Plan) -> str | None:
    """Return the name of the output's index: the source's, or a new one where a single file is split."""
    if plan.checkpoint.index is not None:
        return plan.checkpoint.index.file
    return None if len(plan.shards) < 2 else f"{plan.checkpoint.shards[0].shard}.index.json"


def output_files(plan: Plan) -> list[str]:
    """Return the names of all files that the job writes, relative to its folder."""
    index = _index_name(plan)
    return [
        *(shard.name for shard in plan.shards),
        *(side.destination for side in plan.side_files),
        *([index] if index else []),
        *plan.files,
        MANIFEST,
    ]


def _outgrows_memory(plan: Plan) -> bool:
    """Tell whether source and output would push everything else out of the page cache."""
    traffic = sum(shard.size for shard in plan.checkpoint.shards) + sum(s.layout.data_bytes for s in plan.shards)
    return traffic > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _is_done(shard: ShardPlan, journal: Journal) -> bool:
    path = journal.folder / shard.name
    return shard.name in journal.done and path.is_file() and path.stat().st_size > shard.layout.data_bytes


def _open(shard: ShardPlan, plan: Plan, folder: Path, temp: str, *, hashing: bool) -> _OpenShard:
    layout = shard.layout
    if shard.verbatim:
        source = next(header for header in plan.checkpoint.shards if header.shard == shard.name)
        header = plan.checkpoint.store.read(shard.name, 0, source.data_start)
    else:
        header = header_bytes(layout)
    final = folder / shard.name
    final.parent.mkdir(parents=True, exist_ok=True)
    hashes = TensorHashes(layout) if hashing else None
    return _OpenShard(shard, ShardWriter(final, folder / WORK / temp, layout, header, hashes), hashes)


def _shard_work(shard: _OpenShard, plan: Plan, amax: InputAmax) -> Iterator[tuple[_Work, int]]:
    """Yield the shard's work in pieces, each with the output bytes that it stands for."""
    store, writer, layout = plan.checkpoint.store, shard.writer, shard.plan.layout
    for run in layout.runs:
        for piece in _pieces(run):
            yield partial(_copy, writer, store, piece), piece.nbytes
    if not shard.plan.jobs and not shard.plan.inputs:
        return
    starts = {spec.name: start for spec, start in zip(layout.tensors, layout.starts(), strict=True)}
    if shard.plan.inputs:
        yield partial(_write_inputs, writer, amax, shard.plan.inputs, starts), 4 * len(shard.plan.inputs)
    for job in shard.plan.jobs:
        if not job.kind.route.pools:
            state = start_job(job, starts)
            for rows in job_tiles(job):
                share = _output_bytes(job) * (rows.last - rows.first) // job.weight.shape[0]
                yield partial(convert_tile, state, rows, store, writer), share
    for group, jobs in pooled_groups(shard.plan.jobs).items():
        states = [start_job(job, starts) for job in jobs]
        together = plan.spread.get(group, jobs)
        known = plan.pooled.get(jobs[0].weight.module)
        yield partial(convert_group, states, together, known, store, writer), sum(map(_output_bytes, jobs))


def _output_bytes(job: Job) -> int:
    return sum(nbytes for _, (_, _, nbytes) in job.kind.outputs)


def _write_inputs(
    writer: ShardWriter, amax: InputAmax, inputs: Iterable[StoredInput], starts: Mapping[str, int], _scratch: Scratch
) -> Values:
    for stored in inputs:
        writer.write(starts[stored.name], np.array([stored.scale.stored(amax(stored))], np.float32))
    return Values()


def _pieces(run: CopyRun) -> Iterator[CopyRun]:
    """Cut a run at whole pages of its source, so that a file system can share what lies between."""
    done = 0
    while done < run.nbytes:
        nbytes = min(COPY_BYTES - (run.source_offset + done) % PAGE, run.nbytes - done)
        yield CopyRun(run.shard, run.source_offset + done, run.start + done, nbytes)
        done += nbytes


def _nothing(_scratch: Scratch) -> Values:
    return Values()


def _copy(writer: ShardWriter, store: LocalStore, piece: CopyRun, _scratch: Scratch) -> Values:
    writer.copy(store, piece)
    return Values()
