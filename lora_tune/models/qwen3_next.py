# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: three Gated DeltaNet layers, then one gated full-attention layer; sparse experts.

Names follow `transformers.models.qwen3_next`, so that this file can be read beside it. Shapes:
B batch, T time, D embed, N heads, K key (or kv) heads, V value heads, H head dim.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from lora_tune.cache import (
    AttentionCache,
    Entry,
    LayerCache,
    RecurrentCache,
    slots_first,
    slots_last,
)
from lora_tune.errors import InputError
from lora_tune.hf.table import Row
from lora_tune.layers.attention import attention
from lora_tune.layers.conv import causal_conv
from lora_tune.layers.delta_net import gated_delta_rule, recurrent_gated_delta_rule
from lora_tune.layers.linear import Linear
from lora_tune.layers.moe import MLP, SparseMoe
from lora_tune.layers.norms import GatedRMSNorm, RMSNorm
from lora_tune.layers.rope import apply_rope, rope_frequencies
from lora_tune.layers.weights import ONES, Initialiser, uniform, weight
from lora_tune.models.decoder import Family, LayerInputs
from lora_tune.scan import MIXED

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
    decoder_sparse_step: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts_per_tok: int
    num_experts: int
    norm_topk_prob: bool
    mlp_only_layers: tuple[int, ...]
    layer_types: tuple[str, ...]

    def layer_kinds(self) -> tuple[Kind, ...]:
        """The kind of every layer; equal kinds have equal parameter trees."""
        return tuple((mixer, self._is_sparse(i)) for i, mixer in enumerate(self.layer_types))

    def _is_sparse(self, i: int) -> bool:
        on_step = self.num_experts > 0 and (i + 1) % self.decoder_sparse_step == 0
        return on_step and i not in self.mlp_only_layers


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

_MOST: Mapping[str, int] = {"num_hidden_layers": 500, "num_experts": 4096}
"""Far above any model there is; planning for what a slip of the pen asks for would take hours."""

_ONLY: Mapping[str, Sequence[Any]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "quantization_config": (None,),
    "rope_scaling": (None,),
}
"""Fields that may ask for something these layers do not do, and the values that do not."""


def read_config(hf: Mapping[str, Any]) -> Qwen3NextConfig:
    """Reads a Hugging Face `config.json`.

    Raises:
      InputError: naming every field that is of the wrong type, contradictory, or asks for a
        feature that the layers lack.
    """
    values = {name: hf.get(name, default) for name, default in _DEFAULTS.items()}
    problems = [*_value_problems(values), *_shape_problems(hf)]
    problems += [
        f"{name}={hf[name]!r} is not supported (only {' or '.join(map(repr, allowed))})"
        for name, allowed in _ONLY.items()
        if name in hf and hf[name] not in allowed
    ]
    if problems:
        raise InputError("config.json (qwen3_next): " + "; ".join(problems))
    rope = _rope(hf)
    config = Qwen3NextConfig(
        **values,
        rope_theta=float(rope["rope_theta"]),
        partial_rotary_factor=float(rope["partial_rotary_factor"]),
        mlp_only_layers=tuple(hf.get("mlp_only_layers") or ()),
        layer_types=_layer_types(hf, values["num_hidden_layers"]),
    )
    _check_sizes(config)
    return config


def _value_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the fields that are one number or one truth value."""
    for name, default in _DEFAULTS.items():
        value, least = values[name], 0 if name.startswith("num_experts") else 1
        if not _has_type_of(value, default):
            yield f"{name} is {value!r}, expected {type(default).__name__}"
        elif type(default) is int and value < least:
            yield f"{name} is {value}, expected at least {least}"
        elif value > _MOST.get(name, value):
            yield f"{name} is {value}, expected at most {_MOST[name]}"


def _shape_problems(hf: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the fields that say which layer is what, and with rope."""
    interval, offset = _cycle(hf)
    if not _has_type_of(interval, 1) or interval < 1:
        yield f"full_attention_interval is {interval!r}, expected a number of layers"
    elif not _has_type_of(offset, 1) or not -interval <= offset < interval:
        yield (
            f"full_attention_layer_offset is {offset!r}, expected a place in a cycle of {interval} "
            f"layers, {-interval} to {interval - 1}"
        )
    for name, kind in (("layer_types", str), ("mlp_only_layers", int)):
        value = hf.get(name)
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if value is not None and not (is_list and all(type(item) is kind for item in value)):
            yield f"{name} is {value!r}, expected a list of {kind.__name__}"
    if not isinstance(hf.get("rope_parameters") or {}, Mapping):
        yield f"rope_parameters is {hf['rope_parameters']!r}, expected an object"
        return
    rope = _rope(hf)
    if rope.get("rope_type", "default") != "default":
        yield f"rope_parameters.rope_type={rope['rope_type']!r} is not supported"
    for name in ("rope_theta", "partial_rotary_factor"):
        if not _has_type_of(rope[name], 1.0) or rope[name] <= 0:
            yield f"{name} is {rope[name]!r}, expected a number above 0"


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The rope fields; transformers 5 moved them from the top into `rope_parameters`."""
    top = {
        "rope_theta": hf.get("rope_theta", 10000.0),
        "partial_rotary_factor": hf.get("partial_rotary_factor", 0.25),
    }
    return top | dict(hf.get("rope_parameters") or {})


def _has_type_of(value: Any, example: Any) -> bool:
    if isinstance(example, bool) or isinstance(value, bool):
        return type(value) is type(example)
    return isinstance(value, (int, float) if isinstance(example, float) else int)


def _layer_types(hf: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    if hf.get("layer_types") is not None:
        return tuple(hf["layer_types"])
    interval, offset = _cycle(hf)
    full = offset % interval
    return tuple(FULL if i % interval == full else LINEAR for i in range(num_layers))


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


class GatedDeltaNet(nnx.Module):
    """Linear attention by the gated delta rule, with a short causal convolution before it."""

    def __init__(self, c: Qwen3NextConfig, *, dtype: DTypeLike):
        key_dim = c.linear_num_key_heads * c.linear_key_head_dim
        value_dim = c.linear_num_value_heads * c.linear_value_head_dim
        d, heads = c.hidden_size, c.linear_num_value_heads
        into, out_of = ("embed", "heads"), ("heads", "embed")
        self.in_proj_qkvz = Linear(d, 2 * key_dim + 2 * value_dim, axes=into, dtype=dtype)
        self.in_proj_ba = Linear(d, 2 * heads, axes=into, dtype=dtype)
        self.conv1d = Conv(c.linear_conv_kernel_dim, 2 * key_dim + value_dim, dtype)
        rates = Initialiser("log_uniform", 16.0)
        self.A_log = weight((heads,), dtype, axes=(None,), init=rates)
        self.dt_bias = weight((heads,), dtype, axes=(None,), init=ONES)
        self.norm = GatedRMSNorm(c.linear_value_head_dim, eps=c.rms_norm_eps, dtype=dtype)
        self.out_proj = Linear(value_dim, d, axes=out_of, dtype=dtype)
        self.config = c

    def __call__(
        self, x: jax.Array, inputs: LayerInputs, entry: Entry | None
    ) -> tuple[jax.Array, Entry | None]:
        """Mixes `[B, T, D]` over time."""
        c = self.config
        q, k, v, z = self._split_qkvz(self.in_proj_qkvz(x))
        b, a = self._split_ba(self.in_proj_ba(x))
        key_dim = q.shape[-1]
        window, state = _remembered(entry, inputs)
        mixed, window = causal_conv(
            jnp.concatenate([q, k, v], axis=-1),
            self.conv1d.kernel[...].astype(x.dtype),
            segment_ids=inputs.segment_ids,
            state=window,
        )
        q, k, v = jnp.split(jax.nn.silu(mixed), [key_dim, 2 * key_dim], axis=-1)
        heads = x.shape[:2]
        rate = jnp.exp(self.A_log[...].astype(jnp.float32))[None, None, :]
        step = jax.nn.softplus(
            a.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)[None, None, :]
        )
        one_token = entry is not None and x.shape[1] == 1
        y, state = (recurrent_gated_delta_rule if one_token else _chunked(c))(
            q.reshape(*heads, c.linear_num_key_heads, c.linear_key_head_dim),
            k.reshape(*heads, c.linear_num_key_heads, c.linear_key_head_dim),
            v.reshape(*heads, c.linear_num_value_heads, c.linear_value_head_dim),
            -rate * step,
            jax.nn.sigmoid(b),
            segment_ids=inputs.segment_ids,
            initial_state=state,
        )
        if entry is not None:
            entry = entry.write(conv=window, state=state)
        y = checkpoint_name(y, MIXED)
        return self.out_proj(self.norm(y, z).reshape(*heads, -1)), entry

    def _split_qkvz(self, packed: jax.Array) -> tuple[jax.Array, ...]:
        """Unpacks, per key head, `[q, k, values, gates]`; z comes as `[B, T, V, H]`."""
        c = self.config
        ratio = c.linear_num_value_heads // c.linear_num_key_heads
        dk, dv = c.linear_key_head_dim, ratio * c.linear_value_head_dim
        lead = packed.shape[:2]
        grouped = packed.reshape(*lead, c.linear_num_key_heads, -1)
        q, k, v, z = jnp.split(grouped, [dk, 2 * dk, 2 * dk + dv], axis=-1)
        flat = [part.reshape(*lead, -1) for part in (q, k, v)]
        return *flat, z.reshape(*lead, c.linear_num_value_heads, c.linear_value_head_dim)

    def _split_ba(self, packed: jax.Array) -> tuple[jax.Array, jax.Array]:  # each [B, T, V]
        lead = packed.shape[:2]
        grouped = packed.reshape(*lead, self.config.linear_num_key_heads, -1)
        b, a = jnp.split(grouped, 2, axis=-1)
        return b.reshape(*lead, -1), a.reshape(*lead, -1)


def _remembered(
    entry: Entry | None, inputs: LayerInputs
) -> tuple[jax.Array | None, jax.Array | None]:
    """What a cache holds of the document that each row goes on with: convolution window, state."""
    if entry is None or inputs.slots is None:
        return None, None
    continues = inputs.slots.continues
    window, state = entry.read("conv"), entry.read("state")
    return (
        jnp.where(continues[:, None, None], window, 0),
        jnp.where(continues[:, None, None, None], state, 0),
    )


def _chunked(c: Qwen3NextConfig) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The chunked delta rule: work inside a chunk grows with its length, work between falls.

    64 for the published head size of 128; narrow heads want shorter chunks (3.5 times faster at 32
    with chunks of 16 than of 64, on a CPU).
    """
    chunk_size = max(16, min(64, c.linear_key_head_dim // 2))
    return functools.partial(gated_delta_rule, chunk_size=chunk_size)


class Conv(nnx.Module):
    """The weight of a depthwise causal convolution, kernel `[K, C]`."""

    def __init__(self, width: int, channels: int, dtype: DTypeLike):
        init = uniform(width**-0.5)
        self.kernel = weight((width, channels), dtype, axes=(None, None), init=init)


class Attention(nnx.Module):
    """Grouped-query attention with q/k norm, partial RoPE and a sigmoid gate on the output."""

    def __init__(self, c: Qwen3NextConfig, *, dtype: DTypeLike):
        n, k, h, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size
        into, out_of = ("embed", "heads"), ("heads", "embed")
        self.q_proj = Linear(d, 2 * n * h, axes=into, dtype=dtype)
        self.k_proj = Linear(d, k * h, axes=into, dtype=dtype)
        self.v_proj = Linear(d, k * h, axes=into, dtype=dtype)
        self.o_proj = Linear(n * h, d, axes=out_of, dtype=dtype)
        self.q_norm = RMSNorm(h, eps=c.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(h, eps=c.rms_norm_eps, dtype=dtype)
        self.config = c

    def __call__(
        self, x: jax.Array, inputs: LayerInputs, entry: Entry | None
    ) -> tuple[jax.Array, Entry | None]:
        """Mixes `[B, T, D]` over time."""
        c = self.config
        lead = x.shape[:2]
        query_gate = self.q_proj(x).reshape(*lead, c.num_attention_heads, 2 * c.head_dim)
        q, gate = jnp.split(query_gate, 2, axis=-1)
        k = self.k_proj(x).reshape(*lead, c.num_key_value_heads, c.head_dim)
        v = self.v_proj(x).reshape(*lead, c.num_key_value_heads, c.head_dim)
        frequencies = rope_frequencies(int(c.head_dim * c.partial_rotary_factor), c.rope_theta)
        q = apply_rope(self.q_norm(q), inputs.positions, frequencies)
        k = apply_rope(self.k_norm(k), inputs.positions, frequencies)
        attend = functools.partial(
            attention, segment_ids=inputs.segment_ids, scale=c.head_dim**-0.5
        )
        slots = inputs.slots
        if entry is None or slots is None:
            y = attend(q, k, v)
        else:
            entry = entry.write(slot=slots.index, k=slots_first(k), v=slots_first(v))
            y = attend(
                q,
                slots_last(entry.read("k")),
                slots_last(entry.read("v")),
                key_segment_ids=slots.segment_ids,
                query_offset=slots.index,
            )
        y = checkpoint_name(y, MIXED)
        return self.o_proj((y * jax.nn.sigmoid(gate)).reshape(*lead, -1)), entry


class Layer(nnx.Module):
    """Pre-norm residual layer: a mixer, then a feed-forward."""

    def __init__(self, c: Qwen3NextConfig, kind: Kind, *, dtype: DTypeLike):
        mixer, sparse = kind
        d = c.hidden_size
        self.input_layernorm = RMSNorm(d, eps=c.rms_norm_eps, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(d, eps=c.rms_norm_eps, dtype=dtype)
        self.mixer = mixer
        if mixer == LINEAR:
            self.linear_attn = GatedDeltaNet(c, dtype=dtype)
        else:
            self.self_attn = Attention(c, dtype=dtype)
        if sparse:
            self.mlp = SparseMoe(
                d,
                num_experts=c.num_experts,
                top_k=c.num_experts_per_tok,
                hidden=c.moe_intermediate_size,
                shared_hidden=c.shared_expert_intermediate_size,
                normalise=c.norm_topk_prob,
                dtype=dtype,
            )
        else:
            self.mlp = MLP(d, c.intermediate_size, dtype=dtype)

    def __call__(
        self, h: jax.Array, inputs: LayerInputs, entry: Entry | None = None
    ) -> tuple[jax.Array, Entry | None]:
        """Runs the layer on `[B, T, D]`."""
        mix = self.linear_attn if self.mixer == LINEAR else self.self_attn
        mixed, entry = mix(self.input_layernorm(h), inputs, entry)
        h = h + mixed
        return h + self.mlp(self.post_attention_layernorm(h)), entry


def make_cache(
    c: Qwen3NextConfig, kind: Kind, *, batch: int, size: int, dtype: DTypeLike
) -> LayerCache:
    """An empty cache of a layer for `batch` rows of `size` slots."""
    mixer, _ = kind
    if mixer == FULL:
        shape = (size, c.num_key_value_heads, batch, c.head_dim)
        return AttentionCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))
    values, key_dim = c.linear_num_value_heads, c.linear_key_head_dim
    channels = 2 * c.linear_num_key_heads * key_dim + values * c.linear_value_head_dim
    return RecurrentCache(
        conv=jnp.zeros((batch, c.linear_conv_kernel_dim - 1, channels), dtype),
        state=jnp.zeros((batch, values, key_dim, c.linear_value_head_dim), jnp.float32),
    )


def _projection(name: str) -> Row:
    return Row(f"{name}.kernel", f"{name}.weight", "transpose")


def _expert(name: str) -> Row:
    return Row(f"mlp.experts.{name}.kernel", f"mlp.experts.{{e}}.{name}.weight", "transpose")


def _plain(name: str) -> Row:
    return Row(name, name)


_MLP = ("gate_proj", "up_proj", "down_proj")

FAMILY = Family(
    read_config=read_config,
    make_layer=Layer,
    make_cache=make_cache,
    layer_rows=(
        _plain("input_layernorm.weight"),
        _plain("post_attention_layernorm.weight"),
        *(_projection(f"linear_attn.{n}") for n in ("in_proj_qkvz", "in_proj_ba", "out_proj")),
        Row("linear_attn.conv1d.kernel", "linear_attn.conv1d.weight", "conv"),
        *(_plain(f"linear_attn.{name}") for name in ("A_log", "dt_bias", "norm.weight")),
        *(_projection(f"self_attn.{n}") for n in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(_plain(f"self_attn.{name}") for name in ("q_norm.weight", "k_norm.weight")),
        _projection("mlp.gate"),
        *(_expert(name) for name in _MLP),
        *(_projection(f"mlp.shared_expert.{name}") for name in _MLP),
        _projection("mlp.shared_expert_gate"),
        *(_projection(f"mlp.{name}") for name in _MLP),
    ),
    top_rows=(
        Row("embed_tokens.embedding", "model.embed_tokens.weight"),
        Row("norm.weight", "model.norm.weight"),
        Row("lm_head.kernel", "lm_head.weight", "transpose"),
    ),
    ignored=((r"mtp\..*", "multi-token prediction heads, which fine-tuning does not use"),),
    not_adaptable=("mlp.gate",),
    portable_config=portable_config,
)
