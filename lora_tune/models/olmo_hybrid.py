# SPDX-License-Identifier: Apache-2.0
"""Olmo Hybrid: Gated DeltaNet layers, and full-attention layers whose norms stand behind.

Names follow `transformers.models.olmo_hybrid`, so that this file can be read beside it. Shapes:
B batch, T time, D embed, N heads, K key (or kv) heads, V value heads, H head dim.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lora_tune.cache import Entry, LayerCache
from lora_tune.errors import InputError
from lora_tune.hf.table import Row
from lora_tune.layers.linear import Linear
from lora_tune.layers.moe import MLP
from lora_tune.layers.norms import GatedRMSNorm, PlainRMSNorm
from lora_tune.layers.weights import ONES, Initialiser, weight
from lora_tune.models.attention import attend, make_attention_cache, remember
from lora_tune.models.family import Family
from lora_tune.models.fields import list_problems, unknown_fields, unsupported, value_problems
from lora_tune.models.gated_delta import Conv, DeltaSizes, delta_attention, log_decay
from lora_tune.models.inputs import LayerInputs
from lora_tune.models.rope import (
    Rope,
    RopeFields,
    completed,
    make_rope,
    no_objects,
    rope_fields,
    rope_problems,
)

Norm = functools.partial(PlainRMSNorm, exact=True)
"""The norm of all but the delta rule's outputs."""
LINEAR, FULL = "linear_attention", "full_attention"
_GATE_EPS = 1e-5
"""Of the norm behind the delta rule, which no field says."""


@dataclasses.dataclass(frozen=True)
class OlmoHybridConfig:
    """The fields of `config.json` that shape the model, under their own names.

    `rope` is None where the base is null: published models have no positions.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    linear_allow_neg_eigval: bool
    layer_types: tuple[str, ...]
    rope: Rope | None

    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer; equal kinds have equal parameter trees."""
        return self.layer_types

    def delta_sizes(self) -> DeltaSizes:
        """Sizes of linear attention."""
        return DeltaSizes(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            taps=self.linear_conv_kernel_dim,
            eps=_GATE_EPS,
        )


_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "max_position_embeddings": 65536,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
"""What transformers assumes for a field that `config.json` leaves out."""

_ONLY: Mapping[str, Sequence[Any]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0, None),
    "quantization_config": (None,),
}
"""Fields that may ask for something these layers do not do, and the values that do not."""

_OTHERS = (
    *("layer_types", "rope_parameters", "rope_scaling", "rope_theta"),
    *("linear_a_log_min", "linear_a_log_max"),
    *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
)
"""Fields that are read one by one, and those about fresh weights."""


def read_config(hf: Mapping[str, Any]) -> OlmoHybridConfig:
    """Reads a Hugging Face `config.json`.

    Raises:
      InputError: naming every field that is unknown, of the wrong type, contradictory, or asks for
        a feature that the layers lack.
    """
    values = {name: hf.get(name, default) for name, default in _DEFAULTS.items()}
    problems = [*value_problems(values, _DEFAULTS), *unsupported(hf, _ONLY)]
    problems += list_problems(hf, "layer_types", str)
    if not problems:
        follow = _following(hf, values)
        values |= {n: f if hf.get(n) is None else hf[n] for n, f in follow.items()}
        problems += value_problems(values, follow)
        problems += unknown_fields(hf, {*values, *_ONLY, *_OTHERS})
    problems = problems or [*_size_problems(hf, values), *_rope_problems(hf)]
    if problems:
        raise InputError("config.json (olmo_hybrid): " + "; ".join(problems))
    most, rope = values.pop("max_position_embeddings"), _rope(hf)
    return OlmoHybridConfig(
        **values,
        layer_types=_layer_types(hf, values["num_hidden_layers"]),
        rope=None
        if rope.values["rope_theta"] is None
        else make_rope(rope, values["head_dim"], most),
    )


def _following(hf: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, int]:
    """Sizes that follow from others where the file has none, or null."""

    def given(name: str, default: int) -> int:  # of another type: reported with the others
        value = hf.get(name)
        return value if isinstance(value, int) and value > 0 else default

    heads, width = values["num_attention_heads"], values["hidden_size"]
    keys = given("linear_num_key_heads", heads)
    key_dim = given("linear_key_head_dim", int(0.75 * width) // keys)
    return {
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
    }


def _layer_types(hf: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    if hf.get("layer_types") is not None:
        return tuple(hf["layer_types"])
    types = [FULL if i % 4 == 3 else LINEAR for i in range(layers)]
    return tuple(types if FULL in types else [*types[:-1], FULL])


def _rope(hf: Mapping[str, Any]) -> RopeFields:
    return completed(
        rope_fields(hf),
        hf,
        rope_theta=hf.get("rope_theta", 10000.0),
        max_position_embeddings=_DEFAULTS["max_position_embeddings"],
    )


def _rope_problems(hf: Mapping[str, Any]) -> Iterator[str]:
    wrong = list(no_objects(rope_fields(hf)))
    yield from wrong
    if not wrong and (rope := _rope(hf)).values["rope_theta"] is not None:
        yield from rope_problems(rope)


def _size_problems(hf: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    types, layers = _layer_types(hf, values["num_hidden_layers"]), values["num_hidden_layers"]
    if not set(types) <= {LINEAR, FULL}:
        yield f"layer_types may hold {LINEAR!r} and {FULL!r}, got {sorted(set(types))}"
    if len(types) != layers:
        yield f"layer_types lists {len(types)} layers, num_hidden_layers is {layers}"
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if values[many] % values[few]:
            yield f"{many} must be a multiple of {few}"
    if values["head_dim"] % 2 or values["head_dim"] < 4:
        yield f"head_dim is {values['head_dim']}, expected an even number of at least 4"


class GatedDeltaNet(nnx.Module):
    """Linear attention by the gated delta rule, each input with a projection of its own."""

    def __init__(self, c: OlmoHybridConfig, *, dtype: DTypeLike):
        sizes, d = c.delta_sizes(), c.hidden_size
        into = functools.partial(Linear, d, axes=("embed", "heads"), dtype=dtype)
        rate = functools.partial(Linear, d, axes=("embed", "per_head"), dtype=dtype)
        self.q_proj, self.k_proj = into(sizes.keys), into(sizes.keys)
        self.v_proj, self.g_proj = into(sizes.values), into(sizes.values)
        self.a_proj, self.b_proj = rate(sizes.value_heads), rate(sizes.value_heads)
        self.q_conv1d = Conv(sizes.taps, sizes.keys, dtype)
        self.k_conv1d = Conv(sizes.taps, sizes.keys, dtype)
        self.v_conv1d = Conv(sizes.taps, sizes.values, dtype)
        heads, rates = (sizes.value_heads,), Initialiser("log_uniform", 16.0)
        self.A_log = weight(heads, dtype, axes=(None,), init=rates)
        self.dt_bias = weight(heads, dtype, axes=(None,), init=ONES)
        self.o_norm = GatedRMSNorm(sizes.value_dim, eps=sizes.eps, dtype=dtype)
        self.o_proj = Linear(sizes.values, d, axes=("heads", "embed"), dtype=dtype)
        self.config = c

    def __call__(
        self, x: jax.Array, inputs: LayerInputs, entry: Entry | None
    ) -> tuple[jax.Array, Entry | None]:
        """Mixes `[B, T, D]` over time."""
        c = self.config
        sizes = c.delta_sizes()
        into = (self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        y, entry = delta_attention(
            sizes.pack([project(x) for project in into]),
            log_decay(self.a_proj(x), self.A_log[...], self.dt_bias[...]),
            jax.nn.sigmoid(self.b_proj(x)) * (2 if c.linear_allow_neg_eigval else 1),
            kernel=jnp.concatenate([conv.kernel[...] for conv in convs], axis=1),
            norm_weight=self.o_norm.weight[...],
            sizes=sizes,
            inputs=inputs,
            entry=entry,
        )
        return self.o_proj(y), entry


class Attention(nnx.Module):
    """Grouped-query attention; queries and keys are normalised over all heads together."""

    def __init__(self, c: OlmoHybridConfig, *, dtype: DTypeLike):
        n, k, d = c.num_attention_heads, c.num_key_value_heads, c.hidden_size
        linear = functools.partial(Linear, dtype=dtype, bias=c.attention_bias)
        norm = functools.partial(Norm, eps=c.rms_norm_eps, dtype=dtype)
        self.q_proj = linear(d, n * c.head_dim, axes=("embed", "heads"))
        self.k_proj = linear(d, k * c.head_dim, axes=("embed", "heads"))
        self.v_proj = linear(d, k * c.head_dim, axes=("embed", "heads"))
        self.o_proj = linear(n * c.head_dim, d, axes=("heads", "embed"))
        self.q_norm, self.k_norm = norm(n * c.head_dim), norm(k * c.head_dim)
        self.config = c

    def __call__(
        self, x: jax.Array, inputs: LayerInputs, entry: Entry | None
    ) -> tuple[jax.Array, Entry | None]:
        """Mixes `[B, T, D]` over time."""
        c = self.config
        shape = (*x.shape[:2], -1, c.head_dim)
        q = self.q_norm(self.q_proj(x)).reshape(shape)
        k = self.k_norm(self.k_proj(x)).reshape(shape)
        if c.rope is not None:
            q, k = c.rope.turn(inputs, q, k)
        k, v, entry = remember(k, self.v_proj(x).reshape(shape), inputs, entry)
        y = attend(q, k, v, inputs)
        return self.o_proj(y.reshape(*x.shape[:2], -1)), entry


class Layer(nnx.Module):
    """Residual layer: a mixer, then the gated MLP.

    Norms stand before both in layers of linear attention, behind both in the others.
    """

    def __init__(self, c: OlmoHybridConfig, kind: str, *, dtype: DTypeLike):
        norm = functools.partial(Norm, c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.kind = kind
        self.post_attention_layernorm = norm()
        if kind == LINEAR:
            self.input_layernorm = norm()
            self.linear_attn = GatedDeltaNet(c, dtype=dtype)
        else:
            self.post_feedforward_layernorm = norm()
            self.self_attn = Attention(c, dtype=dtype)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, dtype=dtype)

    def __call__(
        self, h: jax.Array, inputs: LayerInputs, entry: Entry | None = None
    ) -> tuple[jax.Array, Entry | None]:
        """Runs the layer on `[B, T, D]`."""
        if self.kind == LINEAR:
            mixed, entry = self.linear_attn(self.input_layernorm(h), inputs, entry)
            h = h + mixed
            return h + self.mlp(self.post_attention_layernorm(h)), entry
        mixed, entry = self.self_attn(h, inputs, entry)
        h = h + self.post_attention_layernorm(mixed)
        return h + self.post_feedforward_layernorm(self.mlp(h)), entry


def make_cache(
    c: OlmoHybridConfig, kind: str, *, batch: int, size: int, dtype: DTypeLike
) -> LayerCache:
    """An empty cache of a layer for `batch` rows of `size` slots."""
    if kind == LINEAR:
        return c.delta_sizes().make_cache(batch=batch, dtype=dtype)
    return make_attention_cache(
        c.num_key_value_heads, c.head_dim, batch=batch, size=size, dtype=dtype
    )


_ATTENTION = tuple(f"self_attn.{side}_proj" for side in "qkvo")
_PROJECTIONS = (
    *_ATTENTION,
    *(f"linear_attn.{side}_proj" for side in "qkvgabo"),
    *(f"mlp.{side}_proj" for side in ("gate", "up", "down")),
)
_NORMS = (
    *("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"),
    *("self_attn.q_norm", "self_attn.k_norm", "linear_attn.o_norm"),
)

FAMILY = Family(
    read_config=read_config,
    make_layer=Layer,
    make_cache=make_cache,
    make_norm=Norm,
    layer_rows=(
        *(Row(f"{name}.weight", f"{name}.weight") for name in _NORMS),
        *(Row(f"{name}.kernel", f"{name}.weight", "transpose") for name in _PROJECTIONS),
        *(Row(f"{name}.bias", f"{name}.bias") for name in _ATTENTION),
        *(
            Row(f"linear_attn.{side}_conv1d.kernel", f"linear_attn.{side}_conv1d.weight", "conv")
            for side in "qkv"
        ),
        *(Row(f"linear_attn.{name}", f"linear_attn.{name}") for name in ("A_log", "dt_bias")),
    ),
    top_rows=(
        Row("embed_tokens.embedding", "model.embed_tokens.weight"),
        Row("norm.weight", "model.norm.weight"),
        Row("lm_head.kernel", "lm_head.weight", "transpose"),
    ),
    ignored=(),
    renamed=(
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
)
