# SPDX-License-Identifier: Apache-2.0
"""Decoders of attention and MLP layers: Llama and the families that differ from it in details.

Names follow `transformers.models.llama`, so that this file can be read beside it; how a family
differs is said by its `Dialect`. Shapes: B batch, T time, D embed, N heads, K key/value heads,
H head dim.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from lora_tune.cache import AttentionCache, Entry, NoCache
from lora_tune.hf.table import Row
from lora_tune.layers.linear import Linear
from lora_tune.layers.moe import MLP, SparseMoe
from lora_tune.layers.norms import PlainRMSNorm, RMSNorm, rms_normalise
from lora_tune.layers.weights import ONES, weight
from lora_tune.models.attention import attend, make_attention_cache, remember
from lora_tune.models.family import Family
from lora_tune.models.inputs import LayerInputs
from lora_tune.models.kinds import KEPT, SHARED, SLIDING, Kind
from lora_tune.models.per_layer import PerLayerInput, PerLayerInputs
from lora_tune.models.transformer_config import (
    Dialect,
    TransformerConfig,
    read_config,
)


def norm_of(dialect: Dialect) -> Callable[..., nnx.Module]:
    """The norm of a family's layers: `(features, eps=, dtype=) -> norm`."""
    if dialect.zero_centred:
        return RMSNorm
    return functools.partial(PlainRMSNorm, exact=True) if dialect.exact_norms else PlainRMSNorm


class Attention(nnx.Module):
    """Grouped-query attention with rope, over all earlier tokens or a window of them."""

    def __init__(self, c: TransformerConfig, kind: Kind, *, dtype: DTypeLike):
        layer_type, keys = kind.layer_type, kind.keys
        n, d = c.num_attention_heads, c.hidden_size
        k, h = c.heads(layer_type)
        linear = functools.partial(Linear, dtype=dtype)
        into = functools.partial(linear, axes=("embed", "heads"), bias=c.qkv_bias)
        self.q_proj = into(d, n * h)
        if keys != SHARED:
            self.k_proj = into(d, k * h)
            if not c.values_are_keys(layer_type):
                self.v_proj = into(d, k * h)
        self.o_proj = linear(n * h, d, axes=("heads", "embed"), bias=c.attention_bias)
        if c.dialect.qk_norm:
            norm = norm_of(c.dialect)
            self.q_norm = norm(h, eps=c.rms_norm_eps, dtype=dtype)
            if keys != SHARED:
                self.k_norm = norm(h, eps=c.rms_norm_eps, dtype=dtype)
        self.config = c
        self.kind = kind

    def __call__(
        self, x: jax.Array, inputs: LayerInputs, entry: Entry | None
    ) -> tuple[jax.Array, Entry | None, tuple[jax.Array, jax.Array]]:
        """Mixes `[B, T, D]` over time; returns the keys and values as well."""
        c, layer_type = self.config, self.kind.layer_type
        shape = (*x.shape[:2], -1, c.heads(layer_type)[1])
        q = self.q_proj(x).reshape(shape)
        q = self.q_norm(q) if c.dialect.qk_norm else q
        if self.kind.keys == SHARED:
            (q,), (k, v) = c.rope(layer_type).turn(inputs, q), inputs.kept[layer_type]
        else:
            k = self.k_proj(x).reshape(shape)
            v = k if c.values_are_keys(layer_type) else self.v_proj(x).reshape(shape)
            if c.dialect.value_norm:
                v = rms_normalise(v, c.rms_norm_eps).astype(v.dtype)
            k = self.k_norm(k) if c.dialect.qk_norm else k
            q, k = c.rope(layer_type).turn(inputs, q, k)
            k, v, entry = remember(k, v, inputs, entry)
        window = c.sliding_window if layer_type == SLIDING else None
        y = attend(q, k, v, inputs, scale=c.attention_scale, sliding_window=window)
        return self.o_proj(y.reshape(*x.shape[:2], -1)), entry, (k, v)


class Layer(nnx.Module):
    """Residual layer: attention, then a feed-forward, with norms before and maybe behind them.

    As in transformers, `post_attention_layernorm` is before the feed-forward where there are two
    norms, and behind attention where there are four.
    """

    def __init__(self, c: TransformerConfig, kind: Kind, *, dtype: DTypeLike):
        norm_type = norm_of(c.dialect)
        norm = functools.partial(norm_type, c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.input_layernorm = norm()
        self.self_attn = Attention(c, kind, dtype=dtype)
        self.post_attention_layernorm = norm()
        self.sandwiched = c.dialect.sandwiched
        if self.sandwiched:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()
        self.scaled = c.dialect.scaled_layers
        if self.scaled:
            self.layer_scalar = weight((1,), dtype, axes=(None,), init=ONES)
        self.keeps = kind.keys == KEPT
        if c.hidden_size_per_layer_input:
            self.per_layer_input = PerLayerInput(c, norm_type, dtype=dtype)
        if kind.sparse:
            self.mlp = SparseMoe(
                c.hidden_size,
                num_experts=c.num_experts,
                top_k=c.num_experts_per_tok,
                hidden=c.moe_intermediate_size,
                shared_hidden=None,
                normalise=c.norm_topk_prob,
                dtype=dtype,
            )
        else:
            self.mlp = MLP(
                c.hidden_size,
                c.intermediate_size * (2 if c.use_double_wide_mlp and kind.keys == SHARED else 1),
                bias=c.mlp_bias,
                activation=c.dialect.activation,
                dtype=dtype,
            )

    def __call__(
        self, h: jax.Array, inputs: LayerInputs, entry: Entry | None = None
    ) -> tuple[Any, ...]:
        """Runs the layer on `[B, T, D]`."""
        mixed, entry, keys_and_values = self.self_attn(self.input_layernorm(h), inputs, entry)
        if not self.sandwiched:
            h = h + mixed
            return h + self.mlp(self.post_attention_layernorm(h)), entry
        h = h + self.post_attention_layernorm(mixed)
        fed = self.mlp(self.pre_feedforward_layernorm(h))
        h = h + self.post_feedforward_layernorm(fed)
        if inputs.own is not None:
            h = h + self.per_layer_input(h, inputs.own)
        if self.scaled:  # by a buffer, as transformers has it: training leaves it alone
            scalar = jax.lax.stop_gradient(self.layer_scalar[...])
            h = h * scalar.astype(h.dtype)[None, None, :]
        return (h, entry, keys_and_values) if self.keeps else (h, entry)


def make_cache(
    c: TransformerConfig, kind: Kind, *, batch: int, size: int, dtype: DTypeLike
) -> AttentionCache | NoCache:
    """An empty cache of a layer for `batch` rows of `size` slots."""
    if kind.keys == SHARED:
        return NoCache()
    heads, width = c.heads(kind.layer_type)
    return make_attention_cache(heads, width, batch=batch, size=size, dtype=dtype)


def _keeps(c: TransformerConfig, kind: Kind) -> str | None:
    return kind.layer_type if kind.keys == KEPT else None


def _layer_inputs(c: TransformerConfig, *, dtype: DTypeLike) -> PerLayerInputs | None:
    if not c.hidden_size_per_layer_input:
        return None
    return PerLayerInputs(c, norm_of(c.dialect), dtype=dtype)


def _unused(dialect: Dialect, c: TransformerConfig) -> tuple[tuple[str, str], ...]:
    """Projections to keys and values of layers that share those of others."""
    shared = [str(i) for i, kind in enumerate(c.layer_kinds()) if kind.keys == SHARED]
    if not shared:
        return ()
    names = rf"layers\.({'|'.join(shared)})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
    return ((re.escape(dialect.prefix) + names, "keys and values, which come from earlier layers"),)


def _embedding_scale(c: TransformerConfig) -> float:
    return c.hidden_size**0.5 if c.dialect.scaled_embeddings else 1.0


def _logit_cap(c: TransformerConfig) -> float | None:
    return c.final_logit_softcapping


_PROJECTIONS = (
    *(f"self_attn.{side}_proj" for side in ("q", "k", "v", "o")),
    *(f"mlp.{side}_proj" for side in ("gate", "up", "down")),
)
_EXPERTS = tuple(f"{side}_proj" for side in ("gate", "up", "down"))
_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *("self_attn.q_norm", "self_attn.k_norm"),
)
_OWN = "per_layer_input"
_ALL = "layer_inputs"


def make_family(dialect: Dialect) -> Family:
    """The family of a dialect; rows of parameters that it does not have are never met."""
    return Family(
        read_config=functools.partial(read_config, dialect),
        make_layer=Layer,
        make_cache=make_cache,
        keeps=_keeps,
        make_layer_inputs=_layer_inputs,
        unused=functools.partial(_unused, dialect),
        make_norm=norm_of(dialect),
        embedding_scale=_embedding_scale,
        logit_cap=_logit_cap,
        layer_rows=(
            *(Row(f"{name}.weight", f"{name}.weight") for name in _NORMS),
            *(Row(f"{name}.kernel", f"{name}.weight", "transpose") for name in _PROJECTIONS),
            *(Row(f"{name}.bias", f"{name}.bias") for name in _PROJECTIONS),
            Row("layer_scalar", "layer_scalar"),
            Row(f"{_OWN}.gate.kernel", "per_layer_input_gate.weight", "transpose"),
            Row(f"{_OWN}.projection.kernel", "per_layer_projection.weight", "transpose"),
            Row(f"{_OWN}.norm.weight", "post_per_layer_input_norm.weight"),
            Row("mlp.gate.kernel", "mlp.gate.weight", "transpose"),
            *(
                Row(f"mlp.experts.{name}.kernel", f"mlp.experts.{{e}}.{name}.weight", "transpose")
                for name in _EXPERTS
            ),
        ),
        top_rows=(
            Row("embed_tokens.embedding", f"{dialect.prefix}embed_tokens.weight"),
            Row(
                f"{_ALL}.embed_tokens_per_layer.embedding",
                f"{dialect.prefix}embed_tokens_per_layer.weight",
            ),
            Row(
                f"{_ALL}.context.per_layer_model_projection.kernel",
                f"{dialect.prefix}per_layer_model_projection.weight",
                "transpose",
            ),
            Row(
                f"{_ALL}.context.per_layer_projection_norm.weight",
                f"{dialect.prefix}per_layer_projection_norm.weight",
            ),
            Row("norm.weight", f"{dialect.prefix}norm.weight"),
            Row("lm_head.kernel", "lm_head.weight", "transpose"),
        ),
        ignored=(
            *dialect.passed_by,
            (
                r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
                "rope frequencies, which follow from the configuration",
            ),
        ),
        not_adaptable=("mlp.gate",),
        renamed=dialect.renamed,
        layer_prefix=f"{dialect.prefix}layers.{{i}}.",
    )
