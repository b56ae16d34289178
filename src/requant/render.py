"""Results for people: compact tables on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the caller: the job is done, whoever reads of it or not."""
        raise BrokenPipeError


def _console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    return _Console(stderr=stderr, highlight=False, emoji=False, soft_wrap=soft_wrap)


def _plain(text: str) -> str:
    """Return text out of a checkpoint as it may be printed: no markup, no control characters."""
    return escape("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))


MOST_PROBLEMS = 50
"""How many problems are printed in full."""


def conversion(document: Mapping[str, Any]) -> None:
    """Print a plan, or a plan and what came of it."""
    out = _console()
    converted = ", ".join(f"{count:,} weights → {name}" for name, count in document["converted"].items())
    routes = ", ".join(f"{count:,} {name}" for name, count in document["routes"].items())
    out.print(f"[bold]{converted or 'nothing to convert'}[/bold]" + (f"  (routes: {routes})" if routes else ""))
    if document["dry_run"]:
        out.print("a plan: nothing has been written")
    reasons = ", ".join(f"{count:,} {name}" for name, count in sorted(document["kept_reasons"].items()))
    out.print(f"{document['kept']:,} weights kept" + (f"  ({reasons})" if reasons else ""))
    table = Table("", "tensors", "bytes", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    table.add_row("in", f"{document['tensors_in']:,}", f"{document['bytes_in']:,}")
    table.add_row("out", f"{document['tensors_out']:,}", f"{document['bytes_out']:,}")
    table.add_row("  read and converted", "", f"{document['bytes_read']:,}")
    table.add_row("  written", "", f"{document['bytes_written']:,}")
    table.add_row("  copied in whole pages (shared where files can be)", "", f"{document['bytes_shared']:,}")
    out.print(table)
    values = document.get("values")
    if values is not None:
        out.print(
            f"values: {values['exact']:,} exact, {values['rounded']:,} rounded, {values['over_span']:,} over-span"
            + (f"; the search gained {values['gain_db']:.2f} dB over amax scales" if "gain_db" in values else "")
        )
    out.print(f"{document['seconds']:.1f} s, peak {document['peak_rss'] / 1e6:,.0f} MB")
    _notes(document["notes"])


def inspection(document: Mapping[str, Any]) -> None:
    """Print what a checkpoint holds."""
    out = _console()
    family = document["family"] or "unknown family"
    out.print(f"[bold]{_plain(family)}[/bold]: {document['tensors']:,} tensors, {document['bytes']:,} bytes")
    table = Table("role", "weights", "bytes", "formats", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    for role, share in sorted(document["classes"].items(), key=lambda item: -item[1]["bytes"]):
        formats = ", ".join(f"{count:,} {name}" for name, count in sorted(share["formats"].items()))
        table.add_row(role, f"{share['weights']:,}", f"{share['bytes']:,}", formats)
    out.print(table)
    _notes(document["notes"])


def verification(document: Mapping[str, Any]) -> None:
    """Print a verdict and everything behind it."""
    out = _console()
    verdict = "[green]whole[/green]" if document["ok"] else "[red]not whole[/red]"
    out.print(f"{verdict} (state: {document['state']})")
    _notes(document["notes"])
    problems(document["problems"])


def comparison(document: Mapping[str, Any]) -> None:
    """Print how far two checkpoints are apart, in all and by role."""
    out = _console()
    table = Table("role", "weights", "values", "differing", "SQNR dB", "max rel. error", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for role, part in (*document["classes"].items(), ("all", document)):
        exact = part["differing"] == 0
        sqnr = "exact" if exact else "-" if part["sqnr_db"] is None else f"{part['sqnr_db']:.2f}"
        worst = "∞" if part["max_rel_error"] is None else f"{part['max_rel_error']:.3g}"
        table.add_row(role, f"{part['weights']:,}", f"{part['values']:,}", f"{part['differing']:,}", sqnr, worst)
    out.print(table)
    _notes(document["notes"])


def problems(found: Sequence[Mapping[str, str]]) -> None:
    """Print problems on stderr, each with its remedy."""
    err = _console(stderr=True, soft_wrap=True)
    for problem in found[:MOST_PROBLEMS]:
        place = f"{problem['module']}: " if problem["module"] else ""
        err.print(f"[red]{problem['code']}[/red] {_plain(place + problem['message'])}")
        if problem["remedy"]:
            err.print(f"    {_plain(problem['remedy'])}")
    if len(found) > MOST_PROBLEMS:
        err.print(f"… and {len(found) - MOST_PROBLEMS:,} more; see --json")


def _notes(notes: Iterable[str]) -> None:
    err = _console(stderr=True, soft_wrap=True)
    for note in notes:
        err.print(f"[yellow]note[/yellow] {_plain(note)}")


def yaml_text(document: Mapping[str, Any]) -> None:
    """Print YAML as it is."""
    print(document["yaml"], end="")


def config(document: Mapping[str, Any]) -> None:
    """Print a quantization_config as it is, and on stderr what it differs from."""
    print(json.dumps(document["quantization_config"], indent=2))
    for name in document["differs"]:
        _console(stderr=True).print(f"{_plain(name)} {'said' if document['written'] else 'says'} something else")
    _notes(document["notes"])


def recipes(document: Mapping[str, Any]) -> None:
    """Print the names of recipes, and what each is for."""
    out = _console()
    for name, description in document["recipes"].items():
        out.print(f"[bold]{_plain(name)}[/bold]\n  {_plain(description)}")


def skeleton(document: Mapping[str, Any]) -> None:
    """Print what a checkpoint that has been made consists of."""
    made = f"{document['tensors']:,} tensors, {document['bytes']:,} bytes in {document['shards']} shards"
    _console(soft_wrap=True).print(f"{made} → {_plain(document['folder'])}")


def demonstration(document: Mapping[str, Any]) -> None:
    """Print the demo: what was made, and both conversions of it."""
    out = _console()
    source = document["source"]
    out.print(f"A small Kimi-K3, routed experts in MXFP4: {source['tensors']:,} tensors, {source['bytes']:,} bytes\n")
    for label, title in (
        ("exact", "requant convert … --scheme FP8_BLOCK"),
        ("rounded", "requant convert … --scheme FP8_BLOCK --exact off   (LLM Compressor's bytes)"),
    ):
        out.rule(f"[bold]{_plain(title)}", align="left")
        conversion(document[label]["converted"])
        out.print()
        verification(document[label]["verified"])
        comparison(document[label]["compared"])
        out.print()
