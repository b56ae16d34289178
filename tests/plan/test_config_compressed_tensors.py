"""The synthesized quantization_config gives every module its scheme, and no other, under all of its names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.dialects.compressed_tensors import ConfigGroup
from requant.engines.names import name_variants
from requant.engines.resolver import Resolver
from requant.errors import CheckpointError
from requant.plan.config_compressed_tensors import synthesize
from requant.schemes import SCHEMES

BLOCK, CHANNEL, MXFP4 = (SCHEMES[name].config_group for name in ("FP8_BLOCK", "FP8_DYNAMIC", "MXFP4A16"))
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
ROOTS = ("", "model.", "language_model.model.", "model.language_model.")


def answers(config: dict[str, Any], modules: dict[str, ConfigGroup | None]) -> dict[str, Any]:
    """What an engine makes of each module: the group's weight arguments and activations, or None."""
    resolver = Resolver(config)
    groups = config["config_groups"]
    return {module: groups.get(resolver(module)) for module in modules}


def assert_says(config: dict[str, Any], modules: dict[str, ConfigGroup | None]) -> None:
    for module, group in answers(config, modules).items():
        scheme = modules[module]
        if scheme is None:
            assert group is None, module
        else:
            assert group["weights"] == scheme.weights, module
            assert group["input_activations"] == scheme.input_activations, module


def a_model(root: str = "model.", layers: int = 4, experts: int = 3) -> Iterator[str]:
    """The modules of a small mixture of experts with a vision tower."""
    yield f"{root}embed_tokens"
    yield f"{root.removesuffix('model.')}lm_head"
    for layer in range(layers):
        block = f"{root}layers.{layer}."
        yield from (f"{block}self_attn.{name}" for name in ("q_proj", "b_proj", "kv_b_proj", "o_proj"))
        yield f"{block}block_sparse_moe.gate"
        yield from (f"{block}block_sparse_moe.shared_experts.{name}" for name in ("gate_proj", "down_proj"))
        for expert, name in itertools.product(range(experts), ("w1", "w2", "w3")):
            yield f"{block}block_sparse_moe.experts.{expert}.{name}"
    for layer in range(2):
        yield from (f"vision_tower.encoder.layers.{layer}.self_attn.{x}" for x in ("q_proj", "out_proj"))
    yield from ("mm_projector.proj.0", "mm_projector.proj.2")


def scheme_of(module: str, rules: dict[str, ConfigGroup]) -> ConfigGroup | None:
    return next((scheme for pattern, scheme in rules.items() if re.fullmatch(pattern, module)), None)


def test_one_scheme() -> None:
    attention = r"model\.layers\.\d+\.self_attn\.(q|o)_proj"
    modules = {module: scheme_of(module, {attention: CHANNEL}) for module in a_model(experts=1)}
    config = synthesize(modules)
    assert config == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "channel",
                    "dynamic": False,
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
                "output_activations": None,
            }
        },
        "ignore": [
            r"re:(?:.*\.)?(?:embed_tokens|lm_head)$",
            r"re:(?:.*\.)?layers\.\d+\.(?:block_sparse_moe|mlp)\.experts\.\d+\."
            r"(?:down_proj|gate_proj|up_proj|w1|w2|w3)$",
            r"re:(?:.*\.)?layers\.\d+\.(?:block_sparse_moe|mlp)\.gate$",
            r"re:(?:.*\.)?layers\.\d+\.(?:block_sparse_moe|mlp)\.shared_experts\.(?:down_proj|gate_proj)$",
            r"re:(?:.*\.)?layers\.\d+\.self_attn\.(?:b_proj|kv_b_proj)$",
            r"re:(?:.*\.)?mm_projector\.proj\.\d+$",
            r"re:(?:.*\.)?vision_tower\.encoder\.layers\.\d+\.self_attn\.(?:out_proj|q_proj)$",
        ],
        "kv_cache_scheme": None,
    }
    assert_says(config, modules)


def test_two_formats() -> None:
    rules = {r".*\.experts\.\d+\.w[123]": MXFP4, r"model\.layers\.\d+\.self_attn\.q_proj": CHANNEL}
    modules = {module: scheme_of(module, rules) for module in a_model()}
    config = synthesize(modules)
    assert config["format"] == "mixed-precision"
    group_0, group_1 = config["config_groups"].values()
    assert group_0["format"] == "mxfp4-pack-quantized"
    assert group_0["targets"] == [
        r"re:(?:.*\.)?layers\.\d+\.(?:block_sparse_moe|mlp)\.experts\.\d+\."
        r"(?:down_proj|gate_proj|up_proj|w1|w2|w3)$"
    ]
    assert group_0["input_activations"] is None
    assert group_1["format"] == "float-quantized"
    # The vision tower, which is kept, has a layers.N.self_attn.q_proj of its own.
    assert group_1["targets"] == [
        r"re:(?:model\.|language_model\.|language_model\.model\.|model\.language_model\.)?"
        r"layers\.\d+\.self_attn\.q_proj$"
    ]
    assert_says(config, modules)


def test_two_schemes_in_one_format() -> None:
    config = synthesize({"a.x": CHANNEL, "a.y": BLOCK, "a.z": BLOCK})
    assert config["format"] == "float-quantized"
    assert {name: group["targets"] for name, group in config["config_groups"].items()} == {
        "group_0": [r"re:(?:.*\.)?a\.(?:y|z)$"],
        "group_1": [r"re:(?:.*\.)?a\.x$"],
    }
    assert all("format" not in group for group in config["config_groups"].values())


@pytest.mark.parametrize("root", ROOTS)
def test_every_root_and_both_namings_of_experts(root: str) -> None:
    """Configured from one spelling on disk, the answer is the same for those of every engine."""
    rules = {r".*\.experts\.\d+\.w[123]": MXFP4, r".*layers\.\d+\.self_attn\.(q|o)_proj": BLOCK}
    modules = {module: scheme_of(module, rules) for module in a_model(root)}
    config = synthesize(modules)
    for asked in ROOTS:
        spelled = {
            re.sub(f"^{re.escape(root)}layers", f"{asked}layers", module): scheme for module, scheme in modules.items()
        }
        assert_says(config, spelled)
        vllm = {
            re.sub(r"(?<=\.)w[123]$", lambda leaf: PROJECTIONS[leaf[0]], module): scheme
            for module, scheme in spelled.items()
        }
        assert_says(config, vllm)
        sglang = {module.replace("block_sparse_moe", "mlp"): scheme for module, scheme in vllm.items()}
        assert_says(config, sglang)


def test_some_layers_only() -> None:
    modules = {f"model.layers.{n}.mlp.up_proj": CHANNEL if n in (2, 10) else None for n in range(12)}
    config = synthesize(modules)
    assert config["ignore"] == [r"re:(?:.*\.)?layers\.(?:0|1|3|4|5|6|7|8|9|11)\.mlp\.up_proj$"]
    modules["lm_head"] = BLOCK
    config = synthesize(modules)
    assert config["config_groups"]["group_0"]["targets"] == [r"re:(?:.*\.)?layers\.(?:2|10)\.mlp\.up_proj$"]
    assert_says(config, modules)


def test_some_experts_of_some_layers_only() -> None:
    modules: dict[str, ConfigGroup | None] = {
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj": (
            MXFP4 if layer in (1, 3) and expert != 2 else CHANNEL if layer == 2 else None
        )
        for layer, expert in itertools.product(range(5), range(4))
    }
    config = synthesize(modules)
    mxfp4, channel = (group["targets"] for group in config["config_groups"].values())
    assert mxfp4 == [r"re:(?:.*\.)?layers\.(?:1|3)\.mlp\.experts\.(?:0|1|3)\.up_proj$"]
    assert channel == [r"re:(?:.*\.)?layers\.2\.mlp\.experts\.\d+\.up_proj$"]
    assert_says(config, modules)


def test_a_part_of_a_name_is_another_name() -> None:
    modules = {"layers.0.a.b_proj": None, "layers.0.a.kv_b_proj": CHANNEL, "layers.0.a.b_proj.x": BLOCK}
    assert_says(synthesize(modules), modules)


def test_mtp_layers_are_told_from_layers() -> None:
    modules = {"model.layers.0.mlp.up_proj": CHANNEL, "mtp.layers.0.mlp.up_proj": None, "mtp.fc": None}
    config = synthesize(modules)
    assert config["ignore"] == [r"re:(?:.*\.)?mtp\.fc$", r"re:mtp\.layers\.\d+\.mlp\.up_proj$"]
    assert_says(config, modules)


def test_an_unknown_root_is_open() -> None:
    """vLLM calls backbone.layers.N model.layers.N."""
    config = synthesize({"backbone.layers.0.mixer.in_proj": CHANNEL, "backbone.layers.1.mixer.x": MXFP4})
    assert Resolver(config)("model.layers.0.mixer.in_proj") is not None


def test_the_order_of_modules_makes_no_difference() -> None:
    rules = {r".*\.experts\.[01]\.w[123]": MXFP4, r".*self_attn\.q_proj": CHANNEL, r".*o_proj": BLOCK}
    modules = {module: scheme_of(module, rules) for module in a_model()}
    assert synthesize(modules) == synthesize(dict(reversed(modules.items())))


def test_equal_schemes_are_one() -> None:
    twin = ConfigGroup(CHANNEL.format, CHANNEL.weights, CHANNEL.input_activations)
    assert list(synthesize({"a": CHANNEL, "b": twin})["config_groups"]) == ["group_0"]


@pytest.mark.parametrize("name", ["a+", "(a", "[a]", "a|b", "a\\d", "^a$", "a b", "é.²", "re:a", "*", "a..b"])
def test_hostile_names_are_taken_literally(name: str) -> None:
    modules = {name: CHANNEL, "a": MXFP4, "a.b": None, "aa": None, "b": None}
    assert_says(synthesize(modules), modules)


def test_one_name_for_two_modules_is_refused() -> None:
    modules = {"layers.0.x": CHANNEL, "model.layers.0.x": None}
    with pytest.raises(CheckpointError) as caught:
        synthesize(modules)
    problem = caught.value.problems[0]
    assert problem.code == "engine-refuses"
    assert problem.module in modules
    assert "group_0" in problem.message


def test_no_scheme() -> None:
    with pytest.raises(ValueError, match="scheme"):
        synthesize({"a": None})


components = st.sampled_from(["x", "b_proj", "kv_b_proj", "0", "1", "10", "layers", "experts", "mlp", "w1"])
names = st.lists(components, min_size=1, max_size=5).map(".".join)


@given(st.dictionaries(names, st.sampled_from([None, CHANNEL, BLOCK, MXFP4]), min_size=1))
def test_any_names(modules: dict[str, ConfigGroup | None]) -> None:
    """Whatever the names: the configuration says what was asked for, unless modules share names."""
    if not any(modules.values()):
        return
    try:
        assert_says(synthesize(modules), modules)
    except CheckpointError:
        sharing: dict[str, set[str | None]] = {}
        for module, scheme in modules.items():
            for name in name_variants(module):
                sharing.setdefault(re.sub(r"\b\d+\b", "0", name), set()).add(scheme and str(scheme.weights))
        assert any(len(schemes) > 1 for schemes in sharing.values())


layer = st.integers(0, 3)
modules_by_number = st.dictionaries(
    st.tuples(layer, layer, st.sampled_from(["w1", "w2"])),
    st.sampled_from([None, CHANNEL, MXFP4]),
    min_size=1,
)


@given(modules_by_number)
def test_any_division_of_layers_and_experts(choice: dict[tuple[int, int, str], ConfigGroup | None]) -> None:
    if not any(choice.values()):
        return
    modules = {f"model.layers.{n}.mlp.experts.{e}.{leaf}": scheme for (n, e, leaf), scheme in choice.items()}
    config = synthesize(modules)
    assert_says(config, modules)
    asked = {name.replace("w1", "gate_proj").replace("w2", "down_proj"): modules[name] for name in modules}
    assert_says(config, asked)
