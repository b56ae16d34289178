"""Measure whole conversions against ``cp -r`` and LLM Compressor, and write the result down.

Every figure is the wall time of a process from its start to its end. What is compared is run in turn, round by round,
on the same two CPUs, with the source in the page cache and nothing waiting to be written.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

# The peak memory of a child process starts with its parent's: nothing large is imported here, and the checkpoints
# are written by a process of their own.

WORKERS = 2
K3_IGNORE = ("--ignore", "re:.*self_attn.*")
REFERENCE = r"""
import sys
from llmcompressor import model_free_ptq
source, target, scheme = sys.argv[1:]
ignore = ["lm_head", "re:.*embed_tokens", r"re:.*mlp\.gate$"]  # what requant keeps unasked
model_free_ptq(source, target, scheme=scheme, ignore=ignore, device="cpu")
"""


class Step(NamedTuple):
    """One thing to time: ``command`` reads the folder ``reads`` and makes the folder ``writes``."""

    name: str
    command: Sequence[str | Path]
    reads: Path
    writes: Path


class Ratio(NamedTuple):
    """Two steps to compare by their time, and what we want the ratio to be."""

    over: str
    under: str
    target: str = ""


class Run(NamedTuple):
    """What one run took and made."""

    seconds: float
    peak_rss: int
    bytes_in: int
    bytes_out: int


Measured = Mapping[str, Sequence[Run]]


def measure(steps: Sequence[Step], rounds: int) -> Measured:
    """Run the steps in turn, ``rounds`` times; every folder that they write is removed again."""
    runs: dict[str, list[Run]] = {step.name: [] for step in steps}
    for number in range(rounds):
        for place, step in enumerate(steps):
            run = _run(step)
            runs[step.name].append(run)
            print(f"round {number + 1}: {step.name}: {run.seconds:.2f} s", file=sys.stderr, flush=True)
            still_read = {later.reads for later in steps[place + 1 :]}
            for folder in {other.writes for other in steps} - still_read:
                shutil.rmtree(folder, ignore_errors=True)
    return runs


def _run(step: Step) -> Run:
    shutil.rmtree(step.writes, ignore_errors=True)
    os.sync()
    bytes_in = _read(step.reads)
    # An installed package has its modules compiled.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen(list(map(str, step.command)), stdout=log, stderr=log, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            sys.exit(f"{step.name} failed\n{log.read().decode(errors='replace')}")
    return Run(seconds, usage.ru_maxrss * 1024, bytes_in, _size(step.writes))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _read(folder: Path) -> int:
    """Read every file, so that the page cache has it; return the bytes."""
    total = 0
    buffer = bytearray(16 << 20)
    for path in _files(folder):
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def copy(name: str, source: Path, target: Path) -> list[Step]:
    """Copy as people do, and again until the copy is on the disk, as requant's output is."""
    synced = 'cp -r "$0" "$1" && sync -f "$1"'
    return [
        Step(f"`cp -r` of the {name}", ["cp", "-r", source, target], source, target),
        Step(f"`cp -r` of the {name}, synced", ["sh", "-c", synced, source, target], source, target),
    ]


def requant(name: str, source: Path, target: Path, scheme: str, *options: str) -> Step:
    command: list[str | Path] = [sys.executable, "-m", "requant", "convert", source, target, "--scheme", scheme]
    return Step(name, [*command, "--workers", str(WORKERS), *options], source, target)


def reference(name: str, source: Path, target: Path, scheme: str) -> Step:
    return Step(name, [sys.executable, "-c", REFERENCE, source, target, scheme], source, target)


def bf16(source: Path, folder: Path) -> tuple[list[Step], list[Ratio]]:
    """Compare conversions of a BF16 checkpoint with copies of the source and of the output."""
    output, spare = folder / "output", folder / "copy"
    steps = [
        *copy("source", source, spare),
        requant("requant, FP8_DYNAMIC", source, output, "FP8_DYNAMIC"),
        requant("requant, FP8_BLOCK", source, output, "FP8_BLOCK"),
        *copy("output", output, spare),
    ]
    ratios = [
        Ratio(f"requant, {scheme}", under, "≤ 1.3" if under == "`cp -r` of the source" else "")
        for scheme in ("FP8_DYNAMIC", "FP8_BLOCK")
        for under in (step.name for step in steps if step.command[0] in ("cp", "sh"))
    ]
    return steps, ratios


def k3(source: Path, folder: Path) -> tuple[list[Step], list[Ratio]]:
    """Compare the exact route and the rounding one with copies of the source and of the output."""
    output, spare = folder / "output", folder / "copy"
    steps = [
        *copy("source", source, spare),
        requant("requant, FP8_BLOCK, rounded", source, output, "FP8_BLOCK", *K3_IGNORE, "--exact", "off"),
        requant("requant, FP8_BLOCK, exact", source, output, "FP8_BLOCK", *K3_IGNORE),
        *copy("output", output, spare),
    ]
    ratios = [
        Ratio(step.name, under)
        for step in steps
        if step.name.startswith("requant")
        for under in ("`cp -r` of the output", "`cp -r` of the output, synced")
    ]
    return steps, ratios


def k3_nvfp4(source: Path, folder: Path) -> tuple[list[Step], list[Ratio]]:
    """Compare the exact route to NVFP4, which is little more than a copy, with one."""
    output = folder / "output"
    ours = requant("requant, NVFP4, exact", source, output, "NVFP4", "--target", "re:.*experts.*w[123]$")
    copies = copy("output", output, folder / "copy")
    return [ours, *copies], [Ratio(ours.name, copies[0].name, "≤ 1.3"), Ratio(ours.name, copies[1].name)]


def against_reference(source: Path, folder: Path) -> tuple[list[Step], list[Ratio]]:
    """Compare LLM Compressor's conversions with requant's."""
    steps, ratios = [], []
    wanted = {"FP8_DYNAMIC": "≥ 20", "FP8_BLOCK": "≥ 12", "NVFP4A16": "≥ 80", "MXFP4A16": "≥ 80"}
    for scheme, target in wanted.items():
        ours, theirs = f"requant, {scheme}", f"LLM Compressor, {scheme}"
        steps += [
            requant(ours, source, folder / "output", scheme),
            reference(theirs, source, folder / "output", scheme),
        ]
        ratios.append(Ratio(theirs, ours, target))
    return steps, ratios


class Part(NamedTuple):
    """A section of the report: a checkpoint of a kind and a size, and what is done with it."""

    title: str
    kind: str
    gigabytes: float
    plan: Callable[[Path, Path], tuple[list[Step], list[Ratio]]]


def run_part(part: Part, parent: Path, rounds: int) -> list[str]:
    """Write the checkpoint, measure, remove everything; return the section."""
    with tempfile.TemporaryDirectory(prefix="requant-bench-", dir=parent) as name:
        folder = Path(name)
        small, source = folder / "small", folder / "source"
        _write(part.kind, 0.0, small)
        warming, _ = part.plan(small, folder)
        measure([step for step in warming if step.name.startswith("requant")], 1)  # compiles the kernels
        _write(part.kind, part.gigabytes, source)
        steps, ratios = part.plan(source, folder)
        measured = measure(steps, rounds)
    return [f"### {part.title}", "", *table(measured), "", *ratio_table(measured, ratios), ""]


def _write(kind: str, gigabytes: float, folder: Path) -> None:
    writer = Path(__file__).with_name("checkpoints.py")
    subprocess.run([sys.executable, writer, kind, folder, str(int(gigabytes * 1e9))], check=True)


def table(measured: Measured) -> list[str]:
    rows = ["| | GB in | GB out | seconds | GB/s of input | peak memory |", "|---|--:|--:|--:|--:|--:|"]
    for name, runs in measured.items():
        seconds = [run.seconds for run in runs]
        median, (_, _, bytes_in, bytes_out) = statistics.median(seconds), runs[0]
        spread = f"{median:.2f} ({min(seconds):.2f}–{max(seconds):.2f})"
        # A process starts with its parent's peak, which is more than cp needs.
        peak = "" if name.startswith("`cp") else f"{max(run.peak_rss for run in runs) / 1e6:,.0f} MB"
        rows.append(
            f"| {name} | {bytes_in / 1e9:.2f} | {bytes_out / 1e9:.2f} | {spread} | {bytes_in / median / 1e9:.2f} "
            f"| {peak} |"
        )
    return rows


def ratio_table(measured: Measured, ratios: Sequence[Ratio]) -> list[str]:
    rows = ["| time of | over time of | ratio | target |", "|---|---|--:|--:|"]
    for over, under, target in ratios:
        quotients = [a.seconds / b.seconds for a, b in zip(measured[over], measured[under], strict=True)]
        digits = 1 if target.startswith("≥") else 2
        low, middle, high = (
            f"{value:.{digits}f}" for value in (min(quotients), statistics.median(quotients), max(quotients))
        )
        rows.append(f"| {over} | {under} | **{middle}** ({low}–{high}) | {target} |")
    return rows


def report(sections: Sequence[str], rounds: int, has_reference: bool) -> str:
    packages = ["requant", "numpy", "numba"]
    if has_reference:
        packages += ["llmcompressor", "compressed-tensors", "torch", "safetensors"]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    missing = "" if has_reference else "\nLLM Compressor was not installed, so there is no comparison with it.\n"
    body = "\n".join(sections)
    return f"""\
# Performance

Written by `benchmarks/convert.py` on {datetime.now(UTC):%Y-%m-%d}. Medians of {rounds} rounds, with the smallest
and the largest value; ratios are formed within a round. GB are 10^9 bytes.
{missing}
| | |
|---|---|
| CPU | {_cpu()}; {WORKERS} of {os.cpu_count()} logical CPUs used |
| memory | {os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30:.0f} GiB |
| kernel | {platform.system()} {platform.release()} |
| versions | Python {platform.python_version()}, {versions} |

{body}
## How it is measured

- A time is the wall time of a whole process: interpreter, imports, loading of compiled kernels, conversion, `fsync`,
  exit. Only the compilation of the kernels, a few seconds once per installation, has been done before. What does not
  depend on the size takes requant a bit over a second and LLM Compressor several, and weighs less the larger the
  checkpoint is.
- Whatever is compared runs in turn within each round, restricted to the same {WORKERS} CPUs. Before each run the last
  output is removed, `sync` has everything else written, and the source is read once, so that it is in the page cache
  for both sides.
- requant returns when its output is on the disk. `cp` returns when it is in memory, and the system writes it later;
  "synced" is `cp -r` followed by `sync` of the file system. `cp -r` alone is what people compare with, the synced copy
  is like for like.
- On tmpfs the disk has no part. But where the hypervisor of a virtual machine takes back freed memory, a page is slow
  at its first use after that, for whichever process comes first: copies on tmpfs are to be read with care there.
- Peak memory is the largest resident set of the process. The page cache is not in it.
- The BF16 checkpoints have the shapes and names of Qwen3-30B-A3B with fewer layers. In the Kimi-K3 checkpoint the
  experts (MXFP4) have their real shapes. The weights are normally distributed.
- LLM Compressor is `model_free_ptq(…, device="cpu")` with its defaults, on the same files, told to ignore what requant
  keeps by default.

## Measure again

```bash
pip install -e '.[parity]'
python benchmarks/convert.py --folder /tmp/bench --folder /dev/shm/bench --output docs/performance.md
```

takes about an hour and, in each folder, `2.5 × --size-gb` of space. Without `[parity]` the comparison with
LLM Compressor is left out.
"""


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    vectors = "AVX-512" if "avx512f" in facts.get("flags", "") else "AVX2" if "avx2" in facts.get("flags", "") else ""
    return " ".join([facts.get("model name", platform.machine()), vectors]).strip()


def _file_system(folder: Path) -> str:
    output = subprocess.check_output(["df", "--output=fstype", str(folder)], text=True)
    return output.split()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, action="append", help="where to measure; repeatable (default: temp dir)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size-gb", type=float, default=5.0, help="the BF16 source, and about the Kimi-K3 output")
    parser.add_argument("--reference-gb", type=float, default=1.4, help="the source for LLM Compressor")
    parser.add_argument("--output", type=Path, help="Markdown file to write (default: print)")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:WORKERS])
    has_reference = importlib.util.find_spec("llmcompressor") is not None
    parts = [
        Part("BF16 to FP8", "bf16", options.size_gb, bf16),
        Part("Kimi-K3's MXFP4 to FP8", "k3", options.size_gb / 1.9, k3),
        Part("Kimi-K3's MXFP4 to NVFP4", "k3", options.size_gb / 1.05, k3_nvfp4),
    ]
    if has_reference:
        parts.append(Part("Against LLM Compressor", "bf16", options.reference_gb, against_reference))
    sections = []
    for parent in options.folder or [Path(tempfile.gettempdir())]:
        parent.mkdir(parents=True, exist_ok=True)
        sections += [f"## On {_file_system(parent)}", ""]
        for part in parts:
            sections += run_part(part, parent, options.rounds)
    text = report(sections, options.rounds, has_reference)
    if options.output:
        options.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
