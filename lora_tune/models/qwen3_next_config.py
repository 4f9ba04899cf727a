# SPDX-License-Identifier: Apache-2.0
"""The configuration of Qwen3-Next and Qwen3.5: `config.json` read, checked, made fit for others."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_tune.errors import InputError
from lora_tune.models.fields import (
    has_type_of,
    list_problems,
    sparse_layers,
    text_fields,
    unknown_fields,
    unsupported,
    value_problems,
)
from lora_tune.models.rope import (
    Rope,
    RopeFields,
    completed,
    make_rope,
    no_objects,
    rope_fields,
    rope_problems,
)

LINEAR, FULL = "linear_attention", "full_attention"
Kind = tuple[str, bool]
"""(mixer, whether the feed-forward is a mixture of experts)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Dialect:
    """One family: its fields of `config.json`, and its layers where they are not Qwen3-Next's.

    Attributes:
      model_type: of the configuration.
      defaults: what transformers assumes for a size that `config.json` leaves out.
      fixed: sizes that have no field.
      others: fields that are read one by one, and those that change nothing.
      separate: linear attention has a projection for queries, keys and values, one for the gate,
        and one for each rate, instead of two that are packed by key head.
      multimodal: the fields may be those of `text_config`.
    """

    model_type: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    others: Sequence[str]
    separate: bool = False
    multimodal: bool = False


@dataclasses.dataclass(frozen=True)
class Qwen3NextConfig:
    """The fields of `config.json` that shape the text model, under their own names."""

    dialect: Dialect
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: Rope
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


_COMMON: Mapping[str, Any] = {
    "hidden_size": 2048,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERTS: Mapping[str, Any] = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
}
_NO_EXPERTS: Mapping[str, Any] = {**dict.fromkeys(_EXPERTS, 0), "norm_topk_prob": True}
_SHAPE = ("layer_types", "full_attention_interval")
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_ROUTING = ("output_router_logits", "router_aux_loss_coef")

NEXT = Dialect(
    model_type="qwen3_next",
    defaults={
        **_COMMON,
        **_EXPERTS,
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    fixed={},
    others=(*_SHAPE, *_ROPE, *_ROUTING, "full_attention_layer_offset", "mlp_only_layers"),
)
QWEN3_5 = Dialect(
    model_type="qwen3_5",
    defaults={
        **_COMMON,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    fixed={**_NO_EXPERTS, "decoder_sparse_step": 1},
    others=(*_SHAPE, *_ROPE, "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    separate=True,
    multimodal=True,
)

QWEN3_5_MOE = Dialect(
    model_type="qwen3_5_moe",
    defaults={
        **_COMMON,
        **_EXPERTS,
        "vocab_size": 248320,
        "num_hidden_layers": 40,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    fixed={"intermediate_size": 0, "decoder_sparse_step": 1, "norm_topk_prob": True},
    others=(*QWEN3_5.others, *_ROUTING, "intermediate_size"),
    separate=True,
    multimodal=True,
)

_ONLY: Mapping[str, Sequence[Any]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "quantization_config": (None,),
}
"""Fields that may ask for something these layers do not do, and the values that do not."""

_ONLY_SEPARATE: Mapping[str, Sequence[Any]] = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32", None),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
    "norm_topk_prob": (True, None),
}
"""The same of Qwen3.5."""

_SECTIONS = ("mrope_section", "mrope_interleaved")
"""How positions in pictures are spread over a head; those of text are the same in every section."""


def read_config(dialect: Dialect, hf: Mapping[str, Any]) -> Qwen3NextConfig:
    """Reads a Hugging Face `config.json`.

    Raises:
      InputError: naming every field that is unknown, of the wrong type, contradictory, or asks for
        a feature that the layers lack.
    """
    hf, problems = text_fields(hf) if dialect.multimodal else (hf, [])
    values = {name: hf.get(name, default) for name, default in dialect.defaults.items()}
    only = {**_ONLY, **(_ONLY_SEPARATE if dialect.separate else {})}
    problems += [
        *value_problems(values, dialect.defaults),
        *_shape_problems(dialect, hf),
        *unsupported(hf, only),
        *unknown_fields(hf, {*dialect.defaults, *only, *dialect.others}),
    ]
    if problems:
        raise InputError(f"config.json ({dialect.model_type}): " + "; ".join(problems))
    values |= dialect.fixed
    sizes = {field.name for field in dataclasses.fields(Qwen3NextConfig)} & values.keys()
    config = Qwen3NextConfig(
        dialect=dialect,
        **{name: values[name] for name in sizes},
        rope=make_rope(_rope(dialect, hf), values["head_dim"], values["max_position_embeddings"]),
        sparse_layers=sparse_layers(values, hf.get("mlp_only_layers")),
        layer_types=_layer_types(dialect, hf, values["num_hidden_layers"]),
    )
    _check_sizes(config)
    return config


def _shape_problems(dialect: Dialect, hf: Mapping[str, Any]) -> Iterator[str]:
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
    wrong = list(no_objects(rope_fields(hf)))
    yield from wrong
    if not wrong:
        ignored = _SECTIONS if dialect.separate else ()
        yield from rope_problems(_rope(dialect, hf), partial=True, ignored=ignored)


def _rope(dialect: Dialect, hf: Mapping[str, Any]) -> RopeFields:
    """The rope fields; transformers 5 moved them from the top into `rope_parameters`."""
    return completed(
        rope_fields(hf),
        hf,
        rope_theta=hf.get("rope_theta", 10000.0),
        partial_rotary_factor=hf.get("partial_rotary_factor", 0.25),
        max_position_embeddings=dialect.defaults["max_position_embeddings"],
    )


def _layer_types(dialect: Dialect, hf: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    interval, offset = _cycle(hf)
    place = offset % interval
    by_cycle = tuple(FULL if i % interval == place else LINEAR for i in range(num_layers))
    if hf.get("layer_types") is None:
        return by_cycle
    listed = tuple(hf["layer_types"])
    if "full_attention_layer_offset" in hf and listed != by_cycle:
        raise InputError(
            f"config.json ({dialect.model_type}): full_attention_layer_offset is {offset}, but "
            "layer_types puts full attention elsewhere; leave out one of them"
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
    return {**rest, "layer_types": list(read_config(NEXT, hf).layer_types)}


def _check_sizes(c: Qwen3NextConfig) -> None:
    rotary_dim = c.rope.rotary_dim
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
            f"head_dim ({c.head_dim}) times partial_rotary_factor is {rotary_dim}, expected an "
            "even number above 0",
        ),
        (
            c.rope.rope_type != "dynamic" or rotary_dim != 2,
            f"head_dim ({c.head_dim}) times partial_rotary_factor is 2, expected at least 4 "
            "(rope_type is 'dynamic')",
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
        raise InputError(f"config.json ({c.dialect.model_type}): " + "; ".join(problems))
