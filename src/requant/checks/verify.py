"""Is a checkpoint whole: headers, index and config agree, every weight has its parts, no scale or value is NaN."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from requant.checkpoint.checkpoint import Checkpoint, open_checkpoint
from requant.checkpoint.header import TensorRef
from requant.checkpoint.names import CONFIG_FILES
from requant.errors import CallError, CheckpointError, Problem
from requant.execute.journal import read_journal
from requant.execute.progress import Progress
from requant.execute.scratch import Scratch
from requant.execute.workers import run_parallel
from requant.formats import FLOAT_DTYPES, NUMPY_BITS, format_named
from requant.plan.disagreements import disagreements
from requant.plan.inventory import Inventory, take_inventory
from requant.plan.source_config import parse_config

Level = Literal["headers", "scales", "data"]
State = Literal["complete", "in-progress", "foreign"]

_PIECE = 8 << 20
_DIVISORS = (".weight_global_scale", ".input_global_scale")


@dataclass(frozen=True, slots=True)
class Verification:
    """``state``: complete, under work by requant (in-progress), or neither (foreign: no config.json)."""

    state: State
    problems: list[Problem]
    notes: list[str]

    @property
    def ok(self) -> bool:
        """Whether the checkpoint is complete and nothing is wrong with it."""
        return self.state == "complete" and not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        problems = [problem.to_json() for problem in self.problems]
        return {"ok": self.ok, "state": self.state, "problems": problems, "notes": self.notes}


def verify_folder(
    folder: Path,
    level: Level,
    workers: int,
    progress: Progress,
    against: Path | None = None,
    manifest: Path | None = None,
) -> Verification:
    """Verify the checkpoint in ``folder``: its headers, and on top of that all scales, or all data.

    ``against``: and whether it is what a conversion may have made of the checkpoint in that folder. What is wrong with
    that one is a CheckpointError. ``manifest``: and whether every tensor has the hash that this file gives it.
    """
    if level not in get_args(Level):
        raise CallError(Problem("bad-option", f"level {level!r}", remedy=f"one of {', '.join(get_args(Level))}"))
    if against is not None and level == "headers":
        remedy = "leave --headers away, or --against"
        raise CallError(Problem("bad-option", "--against reads all data, --headers none", remedy=remedy))
    try:
        journal = read_journal(folder)
    except CallError as error:
        return Verification("in-progress", list(error.problems), [])
    if journal is not None:
        message = f"work is under way, {len(journal['done'])} shards are done"
        remedy = "run the same command again to finish"
        return Verification("in-progress", [Problem("missing-part", message, "config.json", remedy)], [])
    complete = any((folder / file).is_file() for file in CONFIG_FILES)
    state: State = "complete" if complete else "foreign"
    with contextlib.ExitStack() as stack:
        source = None if against is None else stack.enter_context(open_checkpoint(against))
        if source is not None:
            _check_whole(source)
        try:
            checkpoint = stack.enter_context(open_checkpoint(folder))
            found = _verify(checkpoint, state, level, workers, progress)
            if source is not None and not any(problem.code != "nan-or-inf" for problem in found.problems):
                from requant.checks.against import check_against

                found.problems.extend(check_against(checkpoint, source, workers, progress))
            if manifest is not None:
                from requant.execute.manifest import check_manifest

                found.problems.extend(check_manifest(checkpoint, manifest, workers, progress))
        except CheckpointError as error:
            return Verification(state, list(error.problems), [])
    return found


def _check_whole(source: Checkpoint) -> None:
    """Raise CheckpointError if the weights of what is compared with are not whole themselves."""
    problems = take_inventory(source, parse_config(source.config, source.config_file)).problems
    if problems:
        raise CheckpointError(problems)


def _verify(checkpoint: Checkpoint, state: State, level: Level, workers: int, progress: Progress) -> Verification:
    source = parse_config(checkpoint.config, checkpoint.config_file)
    inventory = take_inventory(checkpoint, source)
    problems = list(inventory.problems)
    notes = [*checkpoint.notes, *disagreements(source, inventory.weights)]
    unknown = [weight.module for weight in inventory.weights if not weight.format]
    if unknown:
        notes.append(f"{len(unknown)} weights are of a format unknown here (the first: {unknown[0]}): not checked")
    if level != "headers":
        problems += _find_nan(checkpoint, inventory, level, workers, progress)
    return Verification(state, problems, notes)


def _find_nan(
    checkpoint: Checkpoint, inventory: Inventory, level: Level, workers: int, progress: Progress
) -> list[Problem]:
    from requant.kernels import compare

    wanted: list[tuple[TensorRef, str]] = []
    for weight in inventory.weights:
        if weight.bank is not None and weight.bank.stride:
            # Its payload begins in the middle of a stored tensor and does not lie in one piece: the tensor is read.
            refs = [(ref, ref.dtype) for ref in weight.bank.tensors]
        elif weight.format and len(weight.shape) == 2:
            parts = format_named(weight.format).parts((weight.shape[0], weight.shape[1]), weight.dtype)
            refs = [(ref, part.spelled(ref.dtype)) for ref, part in zip(weight.parts, parts, strict=True)]
            refs += [(ref, ref.dtype) for ref in weight.inputs]
        else:
            refs = [(ref, ref.dtype) for ref in weight.parts]
        wanted += refs if level == "data" else refs[1:]
    if level == "data":
        wanted += [(ref, ref.dtype) for ref in inventory.others]
    wanted = list(dict.fromkeys(wanted))  # of a bank that lies transposed, all weights name the same tensors
    found: list[Problem] = []
    lock = threading.Lock()

    def look_at(item: tuple[TensorRef, str], scratch: Scratch) -> None:
        ref, dtype = item
        if dtype not in (*FLOAT_DTYPES, "F8_E4M3", "F8_E8M0"):
            advance(ref.nbytes)
            return
        width = NUMPY_BITS[dtype].itemsize
        for start in range(0, ref.nbytes, _PIECE):
            nbytes = min(_PIECE, ref.nbytes - start)
            tile = scratch.tile("piece", dtype, 1, nbytes // width)
            checkpoint.store.read_into(ref.shard, ref.offset + start, tile.bits)
            bad = compare.first_nonfinite(tile.bits, dtype)
            what = "NaN or Inf"
            if bad < 0 and dtype == "F32" and ref.name.endswith(_DIVISORS):
                bad, what = _first_useless(tile.bits.view(np.float32)), "a divisor that is not positive, or too small"
            advance(nbytes)
            if bad >= 0:
                index = start // width + bad
                message = f"{what} at element {index} of {list(ref.shape)} {ref.dtype} in {ref.shard}"
                with lock:
                    found.append(Problem("nan-or-inf", message, ref.name, "restore the tensor from its source"))
                return

    with progress("verifying", sum(ref.nbytes for ref, _ in wanted)) as advance:
        run_parallel(wanted, look_at, workers)
    return sorted(found, key=lambda problem: problem.module)


def _first_useless(divisors: NDArray[np.float32]) -> int:
    """Return the flat index of the first divisor that is not positive or whose reciprocal overflows; -1: none."""
    with np.errstate(divide="ignore", over="ignore"):
        bad = np.flatnonzero(~((divisors > 0) & np.isfinite(1 / divisors)))
    return int(bad[0]) if bad.size else -1
