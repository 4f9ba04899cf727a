# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: three Gated DeltaNet layers, then one gated full-attention layer; sparse experts.

Qwen3.5 is the same with other projections into linear attention. Names follow
`transformers.models.qwen3_next` and `qwen3_5`, so that this file can be read beside them. Shapes:
B batch, T time, D embed, N heads, K key (or kv) heads, V value heads, H head dim.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lora_tune.cache import Entry, LayerCache
from lora_tune.hf.table import Row
from lora_tune.layers.linear import Linear
from lora_tune.layers.moe import MLP, SparseMoe
from lora_tune.layers.norms import GatedRMSNorm, RMSNorm
from lora_tune.layers.weights import ONES, Initialiser, weight
from lora_tune.models.attention import attend, make_attention_cache, remember
from lora_tune.models.family import Family
from lora_tune.models.gated_delta import Conv, DeltaSizes, delta_attention, log_decay
from lora_tune.models.inputs import LayerInputs
from lora_tune.models.qwen3_next_config import (
    FULL,
    LINEAR,
    NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    Kind,
    Qwen3NextConfig,
    portable_config,
    read_config,
)


class GatedDeltaNet(nnx.Module):
    """Linear attention by the gated delta rule, with a short causal convolution before it."""

    def __init__(self, c: Qwen3NextConfig, *, dtype: DTypeLike):
        sizes, d = _delta_sizes(c), c.hidden_size
        keys, values, heads = sizes.keys, sizes.values, sizes.value_heads
        into, out_of = ("embed", "heads"), ("heads", "embed")
        rate = functools.partial(Linear, d, axes=("embed", "per_head"), dtype=dtype)
        if c.dialect.separate:
            self.in_proj_qkv = Linear(d, 2 * keys + values, axes=into, dtype=dtype)
            self.in_proj_z = Linear(d, values, axes=into, dtype=dtype)
            self.in_proj_b, self.in_proj_a = rate(heads), rate(heads)
        else:
            self.in_proj_qkvz = Linear(d, 2 * keys + 2 * values, axes=into, dtype=dtype)
            self.in_proj_ba = rate(2 * heads)
        self.conv1d = Conv(sizes.taps, 2 * keys + values, dtype)
        rates = Initialiser("log_uniform", 16.0)
        self.A_log = weight((heads,), dtype, axes=(None,), init=rates)
        self.dt_bias = weight((heads,), dtype, axes=(None,), init=ONES)
        self.norm = GatedRMSNorm(c.linear_value_head_dim, eps=c.rms_norm_eps, dtype=dtype)
        self.out_proj = Linear(values, d, axes=out_of, dtype=dtype)
        self.config = c

    def __call__(
        self, x: jax.Array, inputs: LayerInputs, entry: Entry | None
    ) -> tuple[jax.Array, Entry | None]:
        """Mixes `[B, T, D]` over time."""
        packed, b, a = self._project(x)
        y, entry = delta_attention(
            packed,
            log_decay(a, self.A_log[...], self.dt_bias[...]),
            jax.nn.sigmoid(b),
            kernel=self.conv1d.kernel[...],
            norm_weight=self.norm.weight[...],
            sizes=_delta_sizes(self.config),
            inputs=inputs,
            entry=entry,
        )
        return self.out_proj(y), entry

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Packed `[q, k, values, gates]` by key head, and both rates `[B, T, V]`."""
        sizes = _delta_sizes(self.config)
        if not self.config.dialect.separate:
            return self.in_proj_qkvz(x), *self._split_ba(self.in_proj_ba(x))
        qkv = jnp.split(self.in_proj_qkv(x), [sizes.keys, 2 * sizes.keys], axis=-1)
        packed = sizes.pack([*qkv, self.in_proj_z(x)])
        return packed, self.in_proj_b(x), self.in_proj_a(x)

    def _split_ba(self, packed: jax.Array) -> tuple[jax.Array, jax.Array]:  # each [B, T, V]
        lead = packed.shape[:2]
        grouped = packed.reshape(*lead, self.config.linear_num_key_heads, -1)
        b, a = jnp.split(grouped, 2, axis=-1)
        return b.reshape(*lead, -1), a.reshape(*lead, -1)


def _delta_sizes(c: Qwen3NextConfig) -> DeltaSizes:
    return DeltaSizes(
        key_heads=c.linear_num_key_heads,
        value_heads=c.linear_num_value_heads,
        key_dim=c.linear_key_head_dim,
        value_dim=c.linear_value_head_dim,
        taps=c.linear_conv_kernel_dim,
        eps=c.rms_norm_eps,
    )


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
        q, k = c.rope.turn(inputs, self.q_norm(q), self.k_norm(k))
        k, v, entry = remember(k, v, inputs, entry)
        y = attend(q, k, v, inputs)
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
        return make_attention_cache(
            c.num_key_value_heads, c.head_dim, batch=batch, size=size, dtype=dtype
        )
    return _delta_sizes(c).make_cache(batch=batch, dtype=dtype)


def _projection(name: str) -> Row:
    return Row(f"{name}.kernel", f"{name}.weight", "transpose")


def _expert(name: str) -> Row:
    return Row(f"mlp.experts.{name}.kernel", f"mlp.experts.{{e}}.{name}.weight", "transpose")


def _plain(name: str) -> Row:
    return Row(name, name)


_MLP = ("gate_proj", "up_proj", "down_proj")

_IN = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

FAMILY = Family(
    read_config=functools.partial(read_config, NEXT),
    make_layer=Layer,
    make_cache=make_cache,
    layer_rows=(
        _plain("input_layernorm.weight"),
        _plain("post_attention_layernorm.weight"),
        *(_projection(f"linear_attn.{n}") for n in (*_IN, "out_proj")),
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
QWEN3_5_FAMILY = dataclasses.replace(
    FAMILY,
    read_config=functools.partial(read_config, QWEN3_5),
    ignored=(
        *FAMILY.ignored,
        (r"model\.visual\..*", "the vision tower, which text does not pass through"),
    ),
    renamed=((r"^model\.language_model\.", "model."),),
    portable_config=dict,
)
QWEN3_5_MOE_FAMILY = dataclasses.replace(
    QWEN3_5_FAMILY,
    read_config=functools.partial(read_config, QWEN3_5_MOE),
    fused=(("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))),
)
