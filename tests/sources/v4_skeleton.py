"""DeepSeek-V4-Pro at its full size: real headers over sparse files, from the geometry of its config.

Names and shapes: vLLM's models/deepseek_v4 (attention, compressor, hyper-connections) and transformers'
configuration_deepseek_v4; sizes of the Pro model.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYERS, MTP, EXPERTS, HASHED = 61, 1, 384, 3
HIDDEN, INNER, VOCABULARY = 7168, 3072, 129280
HEADS, HEAD, Q_RANK, O_GROUPS, O_RANK = 128, 512, 1536, 16, 1024
INDEX_HEADS, INDEX_HEAD = 64, 128
STREAMS = 4
BYTES = {"BF16": 2, "F32": 4, "I64": 8, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return BYTES[self.dtype] * math.prod(self.shape)


def fp4(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", "I8", (rows, columns // 2))
    yield Tensor(f"{name}.scale", "F8_E8M0", (rows, columns // 32))


def fp8(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", "F8_E4M3", (rows, columns))
    yield Tensor(f"{name}.scale", "F8_E8M0", (-(-rows // 128), -(-columns // 128)))


def compressor(name: str, ratio: int, head: int) -> Iterator[Tensor]:
    overlap = 2 if ratio == 4 else 1
    yield Tensor(f"{name}.ape", "F32", (ratio, overlap * head))
    yield Tensor(f"{name}.norm.weight", "BF16", (head,))
    yield Tensor(f"{name}.wkv.weight", "BF16", (overlap * head, HIDDEN))
    yield Tensor(f"{name}.wgate.weight", "BF16", (overlap * head, HIDDEN))


def layer(name: str, number: int | None) -> Iterator[Tensor]:
    """A decoder layer; ``number`` None: the MTP layer."""
    for norm, size in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn.q_norm", Q_RANK), ("attn.kv_norm", HEAD)):
        yield Tensor(f"{name}.{norm}.weight", "BF16", (size,))
    yield Tensor(f"{name}.attn.attn_sink", "F32", (HEADS,))
    yield from fp8(f"{name}.attn.wq_a", Q_RANK, HIDDEN)
    yield from fp8(f"{name}.attn.wkv", HEAD, HIDDEN)
    yield from fp8(f"{name}.attn.wq_b", HEADS * HEAD, Q_RANK)
    yield from fp8(f"{name}.attn.wo_a", O_GROUPS * O_RANK, HEADS * HEAD // O_GROUPS)
    yield from fp8(f"{name}.attn.wo_b", HIDDEN, O_GROUPS * O_RANK)
    if number is not None:
        sparse = number >= 2 and number % 2 == 0
        yield from compressor(f"{name}.attn.compressor", 4 if sparse else 128, HEAD)
        if sparse:
            yield from fp8(f"{name}.attn.indexer.wq_b", INDEX_HEADS * INDEX_HEAD, Q_RANK)
            yield Tensor(f"{name}.attn.indexer.weights_proj.weight", "BF16", (INDEX_HEADS, HIDDEN))
            yield from compressor(f"{name}.attn.indexer.compressor", 4, INDEX_HEAD)
    mixes = (2 + STREAMS) * STREAMS
    for block in ("attn", "ffn"):
        yield Tensor(f"{name}.hc_{block}_base", "F32", (mixes,))
        yield Tensor(f"{name}.hc_{block}_fn", "F32", (mixes, STREAMS * HIDDEN))
        yield Tensor(f"{name}.hc_{block}_scale", "F32", (3,))
    yield Tensor(f"{name}.ffn.gate.weight", "BF16", (EXPERTS, HIDDEN))
    if number is not None and number < HASHED:
        yield Tensor(f"{name}.ffn.gate.tid2eid", "I64", (VOCABULARY, 6))
    else:
        yield Tensor(f"{name}.ffn.gate.bias", "F32", (EXPERTS,))
    for leaf, rows, columns in (("w1", INNER, HIDDEN), ("w2", HIDDEN, INNER), ("w3", INNER, HIDDEN)):
        yield from fp8(f"{name}.ffn.shared_experts.{leaf}", rows, columns)
        for expert in range(EXPERTS):
            yield from fp4(f"{name}.ffn.experts.{expert}.{leaf}", rows, columns)
    if number is None:
        yield from fp8(f"{name}.e_proj", HIDDEN, HIDDEN)
        yield from fp8(f"{name}.h_proj", HIDDEN, HIDDEN)
        for norm in ("enorm", "hnorm", "norm"):
            yield Tensor(f"{name}.{norm}.weight", "BF16", (HIDDEN,))


def shards() -> Iterator[list[Tensor]]:
    yield [Tensor("embed.weight", "BF16", (VOCABULARY, HIDDEN))]
    for number in range(LAYERS):
        yield list(layer(f"layers.{number}", number))
    for number in range(MTP):
        yield list(layer(f"mtp.{number}", None))
    yield [
        Tensor("head.weight", "BF16", (VOCABULARY, HIDDEN)),
        Tensor("norm.weight", "BF16", (HIDDEN,)),
        Tensor("hc_head_base", "F32", (STREAMS,)),
        Tensor("hc_head_fn", "F32", (STREAMS, STREAMS * HIDDEN)),
        Tensor("hc_head_scale", "F32", (1,)),
    ]


def write(folder: Path) -> list[Tensor]:
    """Write the skeleton; return every tensor of it."""
    folder.mkdir(parents=True)
    every = list(shards())
    weight_map = {}
    for number, tensors in enumerate(every, start=1):
        file = f"model-{number:05}-of-{len(every):05}.safetensors"
        header, end = {}, 0
        for tensor in tensors:
            weight_map[tensor.name] = file
            start, end = end, end + tensor.nbytes
            header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            os.ftruncate(out.fileno(), 8 + len(text) + end)
    flat = [tensor for tensors in every for tensor in tensors]
    total = sum(tensor.nbytes for tensor in flat)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "deepseek_v4",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "n_routed_experts": EXPERTS,
        "num_hidden_layers": LAYERS,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return flat
