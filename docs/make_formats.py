"""Write formats.md, what requant can read and write, from its registries: ``python docs/make_formats.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from requant.dialects import DIALECTS, OUTPUT_DIALECTS, Dialect
from requant.formats import EXACT_ROUTES, FORMATS, TO_DENSE, Format, Part, format_named
from requant.formats.exact import lossless
from requant.plan.config_modelopt import modelopt_config
from requant.schemes import SCHEMES, Scheme, can_write

SHAPE = (256, 512)
GROUPED = ("int4-g128", "int4-g128-asym", "int8-g128", "int8-g32")
"""Of the integers in groups, of which there is one for any group: those of the presets, and MXFP4's exact target."""

NARROW = "the E8M0 exponents under one scale lie within 14 binades (each lower top code gains one)"
POWERS = "every scale is a power of two"
IN_RANGE = "no value lies outside BF16's range"
CONDITIONS = {
    ("mxfp4", "fp8-block"): NARROW,
    ("mxfp4", "fp8-channel"): NARROW,
    ("mxfp4", "fp8-tensor"): NARROW,
    ("mxfp4", "nvfp4"): "the E8M0 exponents of a fused group lie within 17 binades",
    ("mxfp4", "nvfp4-scale2"): "the E8M0 exponents of a fused group lie within 17 binades",
    ("mxfp4", "dense"): IN_RANGE,
    ("mxfp8", "dense"): IN_RANGE,
    ("mxfp8", "fp8-block"): "the E8M0 exponents within each block are equal",
    ("fp8-block", "mxfp8"): POWERS,
    ("fp8-channel", "mxfp8"): POWERS,
    ("fp8-block", "dense"): f"{POWERS}, and {IN_RANGE}",
    ("fp8-channel", "dense"): f"{POWERS}, and {IN_RANGE}",
    ("fp8-tensor", "dense"): f"{POWERS}, and {IN_RANGE}",
    ("nvfp4", "nvfp4-scale2"): "the global scale is a power of two (otherwise within 6e-8)",
    ("nvfp4-scale2", "nvfp4"): "the global scale is a power of two (otherwise within 6e-8)",
    ("nvfp4", "dense"): "the global scale is a power of two",
    ("nvfp4-scale2", "dense"): "the global scale is a power of two",
}
"""(source, target) → when the exact route between them changes no value; those that never do have no condition."""


def main() -> None:
    """Write the file beside this one."""
    Path(__file__).with_name("formats.md").write_text(document())


def document() -> str:
    """Return the text of formats.md."""
    return "\n".join(
        [
            "# Formats",
            "",
            "Written by `docs/make_formats.py` from the registries of the package.",
            "",
            "## Schemes",
            "",
            "LLM Compressor's names. W4A16, W4A16_ASYM and W8A16 take any group: `W4A16_G32`. In a cell: what the",
            "dialect's config calls it; in brackets what is stored beside each weight for its activations.",
            "",
            *table(
                ("scheme", "format", "weights", "activations", *OUTPUT_DIALECTS),
                (
                    (
                        f"`{scheme.name}`",
                        f"`{scheme.format}`",
                        arguments(scheme.weights),
                        arguments(scheme.input_activations),
                        *(config_words(scheme, dialect) for dialect in OUTPUT_DIALECTS.values()),
                    )
                    for scheme in SCHEMES.values()
                ),
            ),
            "",
            "## Parts",
            "",
            f"What is stored of a BF16 weight {list(SHAPE)}, and under which suffix. Dialects that are not named",
            "above are read and not written.",
            "",
            *table(
                ("format", "dialect", "parts"),
                (
                    (f"`{format_.name}`", dialect.name, parts(format_, dialect))
                    for format_ in formats()
                    for dialect in DIALECTS.values()
                    if dialect.spelling(format_.name)
                ),
            ),
            "",
            "## From one format to another",
            "",
            "Between any two, in any dialects that have them. **exact**: no value changes. A letter: no value changes",
            "where the condition holds; what it does not hold for is rounded, and counted. ·: decoded and rounded.",
            "=: only names and shapes change.",
            "",
            *matrix(),
            "",
        ]
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    names = list(head)
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def arguments(args: object) -> str:
    """Say in words what compressed-tensors arguments say."""
    if not isinstance(args, dict) and not hasattr(args, "get"):
        return "as they are"
    words = [f"{args['num_bits']}-bit {args['type']}", str(args["strategy"]).replace("_", " ")]
    if "group_size" in args:
        words.append(f"of {args['group_size']}")
    if "block_structure" in args:
        words.append("×".join(map(str, args["block_structure"])))
    if not args["symmetric"]:
        words.append("asymmetric")
    if args["dynamic"]:
        words.append("dynamic" if args["dynamic"] is True else f"dynamic ({args['dynamic']})")
    return " ".join(words)


def config_words(scheme: Scheme, dialect: Dialect) -> str:
    """Return what a dialect's config calls a scheme, and its activation scale; an em dash where it has none."""
    name = dialect.formats.get(scheme.format, scheme.format)
    if not can_write(dialect, scheme):
        return "—"
    if scheme.config_group is None:
        return "unquantized"
    match dialect.name:
        case "compressed-tensors":
            word = scheme.config_group.format
        case "modelopt":
            word = modelopt_config({"model.layers.0.mlp.up_proj": scheme.config_group})["quant_algo"]
        case _:
            word = dialect.name
    stored = f" (`{dialect.input_scales[name].suffix}`)" if scheme.stores_input_scale else ""
    return f"`{word}`{stored}"


def formats() -> list[Format]:
    """Return the formats that are spelled out."""
    return [*FORMATS.values(), *map(format_named, GROUPED)]


def parts(format_: Format, dialect: Dialect) -> str:
    """Return the suffix, dtype and shape of every part of a weight."""
    spelling = dialect.spelling(format_.name)
    assert spelling is not None
    stored = format_.parts(SHAPE, dialect.scale_dtype or "BF16" if format_.name != "dense" else "BF16")

    def one(part: Part, suffix: str, shape: tuple[int, ...], read: tuple[str, ...]) -> str:
        also = f" (read also: {', '.join(read)})" if read else ""
        return f"`{suffix}` {part.dtype} {list(shape)}{also}"

    return ", ".join(
        one(part, spelled.suffix, spelled.shape(part.shape), spelled.dtypes)
        for part, spelled in zip(stored, spelling, strict=True)
    )


def matrix() -> Iterator[str]:
    """Yield the lines of the table of sources and targets, and of the conditions in it."""
    names = [format_.name for format_ in formats()]
    letters: dict[str, str] = {}

    def cell(source: str, target: str) -> str:
        if source == target:
            return "="
        route = TO_DENSE.get((source, "BF16")) if target == "dense" else EXACT_ROUTES.get((source, target))
        if route is None:
            return "·"
        always = route.holds is None and route.suspects is lossless(route.transcode).suspects
        if always:
            assert (source, target) not in CONDITIONS
            return "**exact**"
        return letters.setdefault(CONDITIONS[source, target], chr(ord("a") + len(letters)))

    rows = [[f"`{source}`", *(cell(source, target) for target in names)] for source in names]
    yield from table(("from \\ to", *(f"`{name}`" for name in names)), rows)
    assert letters.keys() == set(CONDITIONS.values())
    yield ""
    for condition, letter in letters.items():
        yield f"- {letter}: exact if {condition}."


if __name__ == "__main__":
    main()
