"""compressed-tensors itself reads the synthesized quantization_config, and finds the same modules by it."""

from __future__ import annotations

import pytest

from requant.plan.config_compressed_tensors import synthesize
from requant.schemes import SCHEMES

pytestmark = pytest.mark.parity

LEAVES = (
    "self_attn.q_proj",
    "self_attn.b_proj",
    "self_attn.kv_b_proj",
    "mlp.experts.0.w1",
    "mlp.experts.1.w1",
)


@pytest.mark.parametrize(
    "chosen",
    [
        *({"self_attn.q_proj": name} for name, scheme in SCHEMES.items() if scheme.config_group is not None),
        {"self_attn.q_proj": "FP8_DYNAMIC", "self_attn.b_proj": "FP8_BLOCK"},
        {"self_attn.q_proj": "FP8_DYNAMIC", "mlp.experts.0.w1": "MXFP4A16", "mlp.experts.1.w1": "MXFP4A16"},
        {"self_attn.b_proj": "FP8_BLOCK", "mlp.experts.1.w1": "MXFP4A16"},
    ],
)
def test_compressed_tensors_reads_it(chosen: dict[str, str]) -> None:
    import torch
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils import is_match

    modules = {
        f"model.layers.{layer}.{leaf}": SCHEMES[chosen[leaf]].config_group if leaf in chosen else None
        for layer in range(3)
        for leaf in LEAVES
    }
    config = QuantizationConfig.model_validate(synthesize(modules))
    linear = torch.nn.Linear(1, 1)
    for module, scheme in modules.items():
        found = [
            group for group in config.config_groups.values() if is_match(module, linear, group.targets, config.ignore)
        ]
        assert [group.weights.num_bits for group in found] == ([] if scheme is None else [scheme.weights["num_bits"]])
        if scheme is not None:
            weights = found[0].weights.model_dump(mode="json")
            assert {key: weights[key] for key in scheme.weights} == dict(scheme.weights)
            assert (found[0].input_activations is None) == (scheme.input_activations is None)
