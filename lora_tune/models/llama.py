# SPDX-License-Identifier: Apache-2.0
"""Llama: grouped-query attention with rope and a gated MLP; also SmolLM2 and others of this type.

Names follow `transformers.models.llama`, so that this file can be read beside it. Shapes: B batch,
T time, D embed, N heads, K key/value heads, H head dim.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lora_tune.cache import AttentionCache, Entry
from lora_tune.errors import InputError
from lora_tune.hf.table import Row
from lora_tune.layers.linear import Linear
from lora_tune.layers.moe import MLP
from lora_tune.layers.norms import PlainRMSNorm
from lora_tune.layers.rope import apply_rope, rope_frequencies, scale_llama3
from lora_tune.models.attention import attend, make_attention_cache
from lora_tune.models.decoder import Family, LayerInputs
from lora_tune.models.fields import positive, unsupported, value_problems

KIND = "attention"
"""The one kind of layer."""


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The fields of `config.json` that shape the model, under their own names.

    `rope_scaling` holds the numbers of rope type `llama3` by name, and nothing for `default`.
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
    rope_theta: float
    rope_scaling: tuple[tuple[str, float], ...]

    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer: all are equal."""
        return (KIND,) * self.num_hidden_layers

    def frequencies(self) -> np.ndarray:
        """Radians per position of each pair of head dimensions, `[H / 2]`."""
        plain = rope_frequencies(self.head_dim, self.rope_theta)
        return scale_llama3(plain, **dict(self.rope_scaling)) if self.rope_scaling else plain


_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
"""What transformers assumes for a field that `config.json` leaves out."""

_ONLY: Mapping[str, Sequence[Any]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
}
"""Fields that may ask for something these layers do not do, and the values that do not."""

_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(hf: Mapping[str, Any]) -> LlamaConfig:
    """Reads a Hugging Face `config.json`.

    Raises:
      InputError: naming every field that is of the wrong type, contradictory, or asks for a
        feature that the layers lack.
    """
    values = {name: hf.get(name, default) for name, default in _DEFAULTS.items()}
    problems = [*value_problems(values, _DEFAULTS), *unsupported(hf, _ONLY)]
    if not problems:
        # Both follow from the number of heads, also where the file says null.
        heads = values["num_attention_heads"]
        follow = {"num_key_value_heads": heads, "head_dim": values["hidden_size"] // heads}
        given = {name: hf.get(name) for name in follow}
        values |= {name: follow[name] if n is None else n for name, n in given.items()}
        problems = [*value_problems(values, follow), *_rope_problems(hf, values)]
    problems = problems or list(_size_problems(values))
    if problems:
        raise InputError("config.json (llama): " + "; ".join(problems))
    rope = _rope(hf, values.pop("max_position_embeddings"))
    scaled = rope["rope_type"] == "llama3"
    return LlamaConfig(
        **values,
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=tuple((name, rope[name]) for name in _SCALING) if scaled else (),
    )


def _rope_fields(hf: Mapping[str, Any]) -> Any:
    """transformers 5 calls `rope_parameters` what was `rope_scaling`, and reads both."""
    return hf.get("rope_scaling") or hf.get("rope_parameters") or {}


def _rope(hf: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    """All rope fields; `rope_theta` used to stand at the top, `rope_type` to be called `type`."""
    fields = _rope_fields(hf)
    defaults = {
        "rope_theta": hf.get("rope_theta", 10000.0),
        "rope_type": fields.get("type", "default"),
        "original_max_position_embeddings": hf.get(
            "original_max_position_embeddings", max_positions
        ),
    }
    return defaults | dict(fields)


def _rope_problems(hf: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(_rope_fields(hf), Mapping):
        yield f"rope_parameters is {_rope_fields(hf)!r}, expected an object"
        return
    rope = _rope(hf, values["max_position_embeddings"])
    yield from positive(rope, ("rope_theta",))
    yield from unsupported(rope, {"partial_rotary_factor": _ONLY["partial_rotary_factor"]})
    if rope["rope_type"] not in ("default", "llama3"):
        yield f"rope_type={rope['rope_type']!r} is not supported (only 'default' or 'llama3')"
    if rope["rope_type"] != "llama3":
        return
    missing = [name for name in _SCALING if name not in rope]
    wrong = [f"{name} is missing (rope_type is 'llama3')" for name in missing]
    wrong += positive(rope, [name for name in _SCALING if name in rope])
    if not wrong and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        wrong = ["high_freq_factor must be above low_freq_factor"]
    yield from wrong


def _size_problems(values: Mapping[str, Any]) -> Iterator[str]:
    if values["num_attention_heads"] % values["num_key_value_heads"]:
        yield "num_attention_heads must be a multiple of num_key_value_heads"
    if values["head_dim"] % 2:
        yield f"head_dim is {values['head_dim']}, expected an even number"


class Attention(nnx.Module):
    """Grouped-query attention with rope on whole heads."""

    def __init__(self, c: LlamaConfig, *, dtype: DTypeLike):
        n, k, h, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size
        into, out_of = ("embed", "heads"), ("heads", "embed")
        self.q_proj = Linear(d, n * h, axes=into, dtype=dtype)
        self.k_proj = Linear(d, k * h, axes=into, dtype=dtype)
        self.v_proj = Linear(d, k * h, axes=into, dtype=dtype)
        self.o_proj = Linear(n * h, d, axes=out_of, dtype=dtype)
        self.config = c

    def __call__(
        self, x: jax.Array, inputs: LayerInputs, entry: Entry | None
    ) -> tuple[jax.Array, Entry | None]:
        """Mixes `[B, T, D]` over time."""
        shape = (*x.shape[:2], -1, self.config.head_dim)
        frequencies = self.config.frequencies()
        q = apply_rope(self.q_proj(x).reshape(shape), inputs.positions, frequencies)
        k = apply_rope(self.k_proj(x).reshape(shape), inputs.positions, frequencies)
        y, entry = attend(q, k, self.v_proj(x).reshape(shape), inputs, entry)
        return self.o_proj(y.reshape(*x.shape[:2], -1)), entry


class Layer(nnx.Module):
    """Pre-norm residual layer: attention, then the gated MLP."""

    def __init__(self, c: LlamaConfig, kind: str, *, dtype: DTypeLike):
        self.input_layernorm = PlainRMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(c, dtype=dtype)
        self.post_attention_layernorm = PlainRMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, dtype=dtype)

    def __call__(
        self, h: jax.Array, inputs: LayerInputs, entry: Entry | None = None
    ) -> tuple[jax.Array, Entry | None]:
        """Runs the layer on `[B, T, D]`."""
        mixed, entry = self.self_attn(self.input_layernorm(h), inputs, entry)
        h = h + mixed
        return h + self.mlp(self.post_attention_layernorm(h)), entry


def make_cache(
    c: LlamaConfig, kind: str, *, batch: int, size: int, dtype: DTypeLike
) -> AttentionCache:
    """An empty cache of a layer for `batch` rows of `size` slots."""
    return make_attention_cache(
        c.num_key_value_heads, c.head_dim, batch=batch, size=size, dtype=dtype
    )


FAMILY = Family(
    read_config=read_config,
    make_layer=Layer,
    make_cache=make_cache,
    make_norm=PlainRMSNorm,
    layer_rows=(
        *(
            Row(f"{name}.weight", f"{name}.weight")
            for name in ("input_layernorm", "post_attention_layernorm")
        ),
        *(
            Row(f"{name}.kernel", f"{name}.weight", "transpose")
            for name in (
                *(f"self_attn.{side}_proj" for side in ("q", "k", "v", "o")),
                *(f"mlp.{side}_proj" for side in ("gate", "up", "down")),
            )
        ),
    ),
    top_rows=(
        Row("embed_tokens.embedding", "model.embed_tokens.weight"),
        Row("norm.weight", "model.norm.weight"),
        Row("lm_head.kernel", "lm_head.weight", "transpose"),
    ),
    ignored=(
        (
            r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
            "rope frequencies, which follow from the configuration",
        ),
    ),
)
