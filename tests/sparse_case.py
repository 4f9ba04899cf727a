# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of any size that take no disk: real headers, and holes for the tensors."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

Shapes = Mapping[str, tuple[int, ...]]


def write_sparse(folder: Path, shapes: Shapes, *, shards: int) -> None:
    """bfloat16 tensors, all zero, spread over shards in their order, with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    held: list[dict[str, tuple[int, ...]]] = [{} for _ in range(shards)]
    seen = 0
    for name, shape in shapes.items():
        held[min(shards - 1, seen * shards // total)][name] = shape
        seen += 2 * math.prod(shape)
    weights = {}
    for k, part in enumerate(held):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name, shape in part.items():
            size = 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at, weights[name] = at + size, file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + at)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def qwen3_next_80b() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the published Qwen3-Next-80B-A3B, written out by hand."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (151936, 2048)}
    for i in range(48):
        layer = f"model.layers.{i}."
        shapes |= {layer + name: shape for name, shape in _layer(full=i % 4 == 3).items()}
    shapes |= {"model.norm.weight": (2048,), "lm_head.weight": (151936, 2048)}
    shapes |= {f"mtp.layers.0.{name}": shape for name, shape in _layer(full=True).items()}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return shapes | {f"mtp.{n}.weight": (2048,) for n in norms} | {"mtp.fc.weight": (2048, 4096)}


def _layer(*, full: bool) -> dict[str, tuple[int, ...]]:
    mixer: dict[str, tuple[int, ...]] = {
        "linear_attn.in_proj_qkvz.weight": (12288, 2048),
        "linear_attn.in_proj_ba.weight": (64, 2048),
        "linear_attn.conv1d.weight": (8192, 1, 4),
        "linear_attn.A_log": (32,),
        "linear_attn.dt_bias": (32,),
        "linear_attn.norm.weight": (128,),
        "linear_attn.out_proj.weight": (2048, 4096),
    }
    if full:
        mixer = {
            "self_attn.q_proj.weight": (8192, 2048),
            "self_attn.k_proj.weight": (512, 2048),
            "self_attn.v_proj.weight": (512, 2048),
            "self_attn.o_proj.weight": (2048, 4096),
            "self_attn.q_norm.weight": (256,),
            "self_attn.k_norm.weight": (256,),
        }
    experts = {
        f"mlp.experts.{e}.{name}.weight": (2048, 512) if name == "down_proj" else (512, 2048)
        for e in range(512)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    return {
        "input_layernorm.weight": (2048,),
        "post_attention_layernorm.weight": (2048,),
        **mixer,
        "mlp.gate.weight": (512, 2048),
        **experts,
        "mlp.shared_expert.gate_proj.weight": (512, 2048),
        "mlp.shared_expert.up_proj.weight": (512, 2048),
        "mlp.shared_expert.down_proj.weight": (2048, 512),
        "mlp.shared_expert_gate.weight": (1, 2048),
    }
