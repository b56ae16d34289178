"""The command line: parse, call the api, render."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from requant.errors import CallError, Problem, RequantError

_UsageError: Any = typer.BadParameter.__base__
"""The parser's error; typer brings its own copy of click, under a private name."""

app = typer.Typer(
    name="requant",
    help="Rewrite quantized checkpoints straight on the safetensors bytes.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

family_app = typer.Typer(help="Facts on model families: what engines fuse into one layer.", no_args_is_help=True)
app.add_typer(family_app, name="family")
recipes_app = typer.Typer(help="The recipes that come with requant.")
app.add_typer(recipes_app, name="recipes")

Src = Annotated[Path, typer.Argument(metavar="SRC", help="Folder of the checkpoint.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Exact = Annotated[
    Literal["auto", "off", "required"],
    typer.Option(help="Exact routes: where they exist, never, or no rounding of an MXFP4, MXFP8 or NVFP4 source."),
]
OverSpan = Annotated[Literal["round", "refuse"], typer.Option(help="Where an exact route cannot hold a region.")]
Arithmetic = Annotated[
    Literal["reference", "float32"], typer.Option(help="LLM Compressor's bytes, or closer to the weights.")
]
ScaleRule = Annotated[
    Literal["amax", "mse", "pow2"],
    typer.Option(
        help="Scales from the largest magnitude, by a search for the least squared error, or powers of two (FP8)."
    ),
]
InputScale = Annotated[
    str,
    typer.Option(
        metavar="constant:VALUE|bound|PATH",
        help="Activation scales that NVFP4 and FP8 store: VALUE, as compressed-tensors stores it, where a weight "
        "has none; what Kimi-K3's weights bound them by; or those of a checkpoint, or of a JSON of amax by module.",
    ),
]
Family = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="What engines fuse, if config.json's model_type does not say: generic, kimi_k3 …, or a YAML file.",
    ),
]
Manifest = Annotated[
    bool, typer.Option("--manifest", help="Write hashes of all tensors: the same source and recipe make the same.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Plan from the headers; write nothing.")]
Scan = Annotated[bool, typer.Option("--scan", help="Read the scales, too, and count over-span values.")]
Workers = Annotated[int | None, typer.Option(help="Threads; default: the CPUs in the affinity mask.", min=1)]


@app.command()
def inspect(src: Src, as_json: Json = False) -> None:
    """Show what a checkpoint holds: formats, roles, bytes."""
    with _reporting(as_json) as report:
        from requant import api, render

        report(api.inspect(src).to_json(), render.inspection)


@app.command()
def convert(
    src: Src,
    dst: Annotated[Path, typer.Argument(metavar="DST", help="New or empty folder for the output.")],
    scheme: Annotated[
        str | None, typer.Option(help="LLM Compressor's name: FP8_BLOCK, NVFP4, W4A16 …; BF16 dequantizes.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Rules in place of a scheme: see `requant recipes`, or a YAML file."),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="What to convert; default: Linear. Repeatable."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="What to leave as it is. Repeatable.")
    ] = None,
    exact: Exact = "auto",
    on_over_span: OverSpan = "round",
    arithmetic: Arithmetic = "reference",
    scale: ScaleRule = "amax",
    input_scale: InputScale = "constant:1.0",
    dialect: Annotated[
        Literal["compressed-tensors", "fp8", "modelopt"], typer.Option(help="Whose names and config the output has.")
    ] = "compressed-tensors",
    family: Family = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Split output shards larger than this: 50GB, 5GiB …")
    ] = None,
    workers: Workers = None,
    manifest: Manifest = False,
    dry_run: DryRun = False,
    scan: Scan = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the unfinished job in DST.")] = False,
    as_json: Json = False,
) -> None:
    """Rewrite a checkpoint under another scheme into a new folder."""
    with _reporting(as_json) as report:
        from requant import api, render
        from requant.execute.progress import progress

        if scan or not dry_run:
            _announce_compilation()
        result = api.convert(
            src,
            dst,
            scheme,
            recipe=recipe,
            target=target or (),
            ignore=ignore or (),
            exact=exact,
            on_over_span=on_over_span,
            arithmetic=arithmetic,
            scale=scale,
            input_scale=input_scale,
            dialect=dialect,
            family=family,
            max_shard_size=max_shard_size,
            workers=workers,
            manifest=manifest,
            dry_run=dry_run,
            scan=scan,
            restart=restart,
            progress=progress,
        )
        report(result.to_json(), render.conversion)


@app.command()
def upgrade(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the checkpoint.", show_default=False)],
    recipe: Annotated[str, typer.Option(metavar="NAME|FILE", help="See `requant recipes`, or a YAML file.")],
    exact: Exact = "auto",
    on_over_span: OverSpan = "round",
    arithmetic: Arithmetic = "reference",
    scale: ScaleRule = "amax",
    input_scale: InputScale = "constant:1.0",
    family: Family = None,
    workers: Workers = None,
    manifest: Manifest = False,
    dry_run: DryRun = False,
    scan: Scan = False,
    as_json: Json = False,
) -> None:
    """Convert part of a checkpoint in place; interrupted, the same command finishes it."""
    with _reporting(as_json) as report:
        from requant import api, render
        from requant.execute.progress import progress

        if scan or not dry_run:
            _announce_compilation()
        result = api.upgrade(
            directory,
            recipe=recipe,
            exact=exact,
            on_over_span=on_over_span,
            arithmetic=arithmetic,
            scale=scale,
            input_scale=input_scale,
            family=family,
            workers=workers,
            manifest=manifest,
            dry_run=dry_run,
            scan=scan,
            progress=progress,
        )
        report(result.to_json(), render.conversion)


@app.command()
def config(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the checkpoint.", show_default=False)],
    write: Annotated[bool, typer.Option("--write", help="Put it in place; the old file stays beside it.")] = False,
    as_json: Json = False,
) -> None:
    """Show the quantization_config that the tensors on disk call for."""
    with _reporting(as_json) as report:
        from requant import api, render

        report(api.config(directory, write=write).to_json() | {"written": write}, render.config)


@app.command()
def verify(
    src: Src,
    headers: Annotated[bool, typer.Option("--headers", help="Headers, index and config only.")] = False,
    scales: Annotated[bool, typer.Option("--scales", help="And every scale (the default).")] = False,
    data: Annotated[bool, typer.Option("--data", help="And every value.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(metavar="SRC", help="And that it is what a conversion of SRC may have made: reads all of both."),
    ] = None,
    manifest: Annotated[
        Path | None, typer.Option(metavar="FILE", help="And every tensor against the hashes of a manifest.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Notes count as problems.")] = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Check that a checkpoint is whole."""
    with _reporting(as_json) as report:
        from requant import api, render
        from requant.execute.progress import progress

        if headers + scales + data > 1:
            raise CallError(Problem("bad-option", "--headers, --scales and --data exclude each other"))
        level: Literal["headers", "scales", "data"] = "headers" if headers else "data" if data else "scales"
        if level != "headers":
            _announce_compilation()
        found = api.verify(
            src, level, against=against, manifest=manifest, strict=strict, workers=workers, progress=progress
        )
        report(found.to_json(), render.verification, 0 if found.ok else 1)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of a checkpoint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of the other.")],
    expect: Annotated[
        Literal["exact"] | None, typer.Option(help="exact: exit with 1 unless every value is the same.")
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Measure how far two checkpoints are apart, in decoded values."""
    with _reporting(as_json) as report:
        from requant import api, render
        from requant.execute.progress import progress

        _announce_compilation()
        found = api.compare(a, b, workers=workers, progress=progress)
        report(found.to_json(), render.comparison, 1 if expect and not found.exact else 0)
        if expect and not found.exact:
            print(f"not exact: {found.total.differing:,} values differ, {found.unmatched} unmatched", file=sys.stderr)


@family_app.command("init")
def family_init(src: Src, as_json: Json = False) -> None:
    """Draft the YAML of a checkpoint's family, for --family, on stdout."""
    with _reporting(as_json) as report:
        from requant import api, render

        report(api.family_init(src).to_json(), render.yaml_text)


@recipes_app.callback(invoke_without_command=True)
def recipes(context: typer.Context, as_json: Json = False) -> None:
    """List the recipes that come with requant."""
    if context.invoked_subcommand is not None:
        return
    with _reporting(as_json) as report:
        from requant import api, render

        report({"ok": True, "recipes": api.recipes(), "problems": [], "notes": []}, render.recipes)


@recipes_app.command("show")
def recipes_show(
    name: Annotated[str, typer.Argument(help="Name of the recipe.", show_default=False)], as_json: Json = False
) -> None:
    """Print a recipe's YAML."""
    with _reporting(as_json) as report:
        from requant import api, render

        report({"ok": True, "yaml": api.recipe_text(name), "problems": [], "notes": []}, render.yaml_text)


@app.command()
def demo(
    full_size: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Only write a full-size Kimi-K3 of sparse files (1.56 TB apparent)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a small Kimi-K3-shaped MXFP4 checkpoint, convert it exactly and with rounding, and compare."""
    with _reporting(as_json) as report:
        from requant import demo as demonstration
        from requant import render

        if full_size is not None:
            report(demonstration.write_full_size(full_size), render.skeleton)
        else:
            _announce_compilation()
            report(demonstration.run(), render.demonstration)


_Render = Callable[[dict[str, Any]], None]


@contextlib.contextmanager
def _reporting(as_json: bool) -> Iterator[Callable[..., None]]:
    """Yield ``report(document, render, exit_code=0)``; whatever goes wrong is reported in the same form."""
    exit_code = 0
    as_json = as_json or _json_wanted()

    def report(document: dict[str, Any], render: _Render, code: int = 0) -> None:
        nonlocal exit_code
        exit_code = code
        if as_json:
            _print_json(document)
        else:
            render(document)

    try:
        yield report
    except RequantError as error:
        exit_code = error.exit_code
        problems = [problem.to_json() for problem in error.problems]
        if as_json:
            _print_json({"notes": [], **error.document, "ok": False, "problems": problems})
        else:
            from requant import render

            render.problems(problems)
    except KeyboardInterrupt:
        exit_code = 130
        if as_json:
            _print_json({"ok": False, "problems": [], "notes": ["interrupted"]})
        else:
            print("interrupted; a conversion continues with the same command", file=sys.stderr)
    except OSError as error:  # stdout's: the verbs have named every other
        exit_code = _stdout_failed(error) or exit_code
    except Exception as error:
        if as_json:
            problem = Problem("internal", f"{type(error).__name__}: {error}", remedy="please report this")
            _print_json({"ok": False, "problems": [problem.to_json()], "notes": []})
        raise
    if exit_code:
        raise typer.Exit(exit_code)


def _announce_compilation() -> None:
    """Say so where nothing has been compiled yet: the first use of every kernel then takes a second or two."""
    from requant.kernels.cache import kernels_cached

    if not kernels_cached():
        print("compiling kernels, once for this version …", file=sys.stderr)


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def _json_wanted() -> bool:
    """Tell whether the call asks for JSON, also where it could not be parsed, or took --json for a value."""
    return "--json" in sys.argv[1:]


def main() -> None:
    """Run the command line; a call that cannot be parsed is reported like any other failure."""
    _make_streams_safe()
    gc.set_threshold(200_000)  # plans are millions of objects without a cycle; the default would walk them for nothing
    code = 0
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
    except _UsageError as error:
        code = 2
        if _json_wanted():
            problem = Problem("bad-option", error.format_message(), remedy="see --help")
            _print_json({"ok": False, "problems": [problem.to_json()], "notes": []})
        else:
            error.show()
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        code = _stdout_failed(error) or code
    gc.freeze()  # the interpreter's last collections would cost a third of a second
    sys.exit(code)


def _make_streams_safe() -> None:
    """Let output go nowhere where a stream is closed, and what a stream cannot spell be escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _stdout_failed(error: OSError) -> int:
    """Return the exit code of a stdout that cannot be written: 0 where its reader has just seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter's last flush goes there
    if isinstance(error, BrokenPipeError):
        return 0
    print(f"stdout: {error.strerror}", file=sys.stderr)
    return 3
