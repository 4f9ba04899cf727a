# SPDX-License-Identifier: Apache-2.0
"""The configuration of Qwen3-Next: `config.json` read, checked, and made fit for others."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_tune.errors import InputError
from lora_tune.models.fields import (
    has_type_of,
    list_problems,
    positive,
    sparse_layers,
    unknown_fields,
    unsupported,
    value_problems,
)

LINEAR, FULL = "linear_attention", "full_attention"
Kind = tuple[str, bool]
"""(mixer, whether the feed-forward is a mixture of experts)."""


@dataclasses.dataclass(frozen=True)
class Qwen3NextConfig:
    """The fields of `config.json` that shape the text model, under their own names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_theta: float
    partial_rotary_factor: float
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts_per_tok: int
    num_experts: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]
    layer_types: tuple[str, ...]

    def layer_kinds(self) -> tuple[Kind, ...]:
        """The kind of every layer; equal kinds have equal parameter trees."""
        return tuple(zip(self.layer_types, self.sparse_layers, strict=True))


_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}
"""What transformers assumes for a field that `config.json` leaves out."""

_ONLY: Mapping[str, Sequence[Any]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "quantization_config": (None,),
    "rope_scaling": (None,),
}
"""Fields that may ask for something these layers do not do, and the values that do not."""

_OTHERS = (
    *("layer_types", "full_attention_interval", "full_attention_layer_offset", "mlp_only_layers"),
    *("rope_parameters", "rope_theta", "partial_rotary_factor", "max_position_embeddings"),
    *("output_router_logits", "router_aux_loss_coef"),
)
"""Fields that are read one by one, and those about training alone."""


def read_config(hf: Mapping[str, Any]) -> Qwen3NextConfig:
    """Reads a Hugging Face `config.json`.

    Raises:
      InputError: naming every field that is of the wrong type, contradictory, or asks for a
        feature that the layers lack.
    """
    values = {name: hf.get(name, default) for name, default in _DEFAULTS.items()}
    problems = [
        *value_problems(values, _DEFAULTS),
        *_shape_problems(hf),
        *unsupported(hf, _ONLY),
        *unknown_fields(hf, {*_DEFAULTS, *_ONLY, *_OTHERS}),
    ]
    if problems:
        raise InputError("config.json (qwen3_next): " + "; ".join(problems))
    rope = _rope(hf)
    config = Qwen3NextConfig(
        **{name: value for name, value in values.items() if name != "decoder_sparse_step"},
        rope_theta=float(rope["rope_theta"]),
        partial_rotary_factor=float(rope["partial_rotary_factor"]),
        sparse_layers=sparse_layers(values, hf.get("mlp_only_layers")),
        layer_types=_layer_types(hf, values["num_hidden_layers"]),
    )
    _check_sizes(config)
    return config


def _shape_problems(hf: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the fields that say which layer is what, and with rope."""
    interval, offset = _cycle(hf)
    if not has_type_of(interval, 1) or interval < 1:
        yield f"full_attention_interval is {interval!r}, expected a number of layers"
    elif not has_type_of(offset, 1) or not -interval <= offset < interval:
        yield (
            f"full_attention_layer_offset is {offset!r}, expected a place in a cycle of {interval} "
            f"layers, {-interval} to {interval - 1}"
        )
    yield from list_problems(hf, "layer_types", str)
    yield from list_problems(hf, "mlp_only_layers", int)
    if not isinstance(hf.get("rope_parameters") or {}, Mapping):
        yield f"rope_parameters is {hf['rope_parameters']!r}, expected an object"
        return
    rope = _rope(hf)
    if rope.get("rope_type", "default") != "default":
        yield f"rope_parameters.rope_type={rope['rope_type']!r} is not supported"
    yield from positive(rope, ("rope_theta", "partial_rotary_factor"))


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The rope fields; transformers 5 moved them from the top into `rope_parameters`."""
    top = {
        "rope_theta": hf.get("rope_theta", 10000.0),
        "partial_rotary_factor": hf.get("partial_rotary_factor", 0.25),
    }
    return top | dict(hf.get("rope_parameters") or {})


def _layer_types(hf: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    interval, offset = _cycle(hf)
    place = offset % interval
    by_cycle = tuple(FULL if i % interval == place else LINEAR for i in range(num_layers))
    if hf.get("layer_types") is None:
        return by_cycle
    listed = tuple(hf["layer_types"])
    if "full_attention_layer_offset" in hf and listed != by_cycle:
        raise InputError(
            f"config.json (qwen3_next): full_attention_layer_offset is {offset}, but layer_types "
            "puts full attention elsewhere; leave out one of them"
        )
    return listed


def _cycle(hf: Mapping[str, Any]) -> tuple[Any, Any]:
    """Layers in a cycle, and which of them has full attention (our own field; default the last)."""
    return hf.get("full_attention_interval", 4), hf.get("full_attention_layer_offset", -1)


def portable_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` as others must read it: transformers knows layer types, but no offset."""
    if "full_attention_layer_offset" not in hf:
        return dict(hf)
    rest = {name: value for name, value in hf.items() if name != "full_attention_layer_offset"}
    return {**rest, "layer_types": list(read_config(hf).layer_types)}


def _check_sizes(c: Qwen3NextConfig) -> None:
    rotary_dim = int(c.head_dim * c.partial_rotary_factor)
    rules = [
        (
            len(c.layer_types) == c.num_hidden_layers,
            f"layer_types lists {len(c.layer_types)} layers, num_hidden_layers is "
            f"{c.num_hidden_layers}",
        ),
        (
            set(c.layer_types) <= {LINEAR, FULL},
            f"layer_types may hold {LINEAR!r} and {FULL!r}, got {sorted(set(c.layer_types))}",
        ),
        (
            c.num_attention_heads % c.num_key_value_heads == 0,
            "num_attention_heads must be a multiple of num_key_value_heads",
        ),
        (
            rotary_dim > 0 and rotary_dim % 2 == 0,
            f"head_dim ({c.head_dim}) times partial_rotary_factor ({c.partial_rotary_factor}) is "
            f"{rotary_dim}, expected an even number above 0",
        ),
        (
            c.linear_num_value_heads % c.linear_num_key_heads == 0,
            "linear_num_value_heads must be a multiple of linear_num_key_heads",
        ),
        (
            c.num_experts == 0 or 0 < c.num_experts_per_tok <= c.num_experts,
            "num_experts_per_tok must be between 1 and num_experts",
        ),
    ]
    problems = [text for holds, text in rules if not holds]
    if problems:
        raise InputError("config.json (qwen3_next): " + "; ".join(problems))
