# SPDX-License-Identifier: Apache-2.0
"""Inputs of single layers: what every layer of Gemma 4 sees of the tokens beside the hidden states.

Names follow `transformers.models.gemma4`. Shapes: B batch, T time, D embed, L layers, P width of a
layer's own input.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lora_tune import scan
from lora_tune.layers.activations import ACTIVATIONS
from lora_tune.layers.linear import Embed, Linear
from lora_tune.models.transformer_config import TransformerConfig


class Context(nnx.Module):
    """The part that follows from the embedded tokens: a projection for all layers, normalised."""

    def __init__(self, c: TransformerConfig, norm: Callable[..., nnx.Module], *, dtype: DTypeLike):
        width = c.hidden_size_per_layer_input
        self.per_layer_model_projection = Linear(
            c.hidden_size, c.num_hidden_layers * width, axes=("embed", "mlp"), dtype=dtype
        )
        self.per_layer_projection_norm = norm(width, eps=c.rms_norm_eps, dtype=dtype)
        self.width = width

    def __call__(self, h: jax.Array) -> jax.Array:
        """`[B, T, D]` -> `[B, T, L, P]`."""
        y = _times(self.per_layer_model_projection(h), h.shape[-1] ** -0.5)
        return self.per_layer_projection_norm(y.reshape(*h.shape[:2], -1, self.width))


class PerLayerInputs(nnx.Module):
    """A second embedding of the tokens, with a part for each layer, and their context."""

    def __init__(self, c: TransformerConfig, norm: Callable[..., nnx.Module], *, dtype: DTypeLike):
        width = c.hidden_size_per_layer_input
        self.embed_tokens_per_layer = Embed(
            c.vocab_size_per_layer_input, c.num_hidden_layers * width, dtype=dtype
        )
        self.context = Context(c, norm, dtype=dtype)
        self.width = width

    def __call__(self, tokens: jax.Array, h: jax.Array) -> jax.Array:
        """Token ids `[B, T]` and their scaled embeddings `[B, T, D]` -> `[L, B, T, P]`."""

        def project(context: Context, _: None, h: jax.Array) -> tuple[None, jax.Array]:
            return None, context(h)

        _, y = scan.apply_stack(self.context, None, project, axis=None, xs=h, unshard=True)
        rows = self.embed_tokens_per_layer(tokens, h.dtype) * jnp.asarray(self.width**0.5, h.dtype)
        return jnp.moveaxis(_times(y + rows.reshape(y.shape), 0.5**0.5), 2, 0)


class PerLayerInput(nnx.Module):
    """What one layer adds to its residual from its own input."""

    def __init__(self, c: TransformerConfig, norm: Callable[..., nnx.Module], *, dtype: DTypeLike):
        d, p = c.hidden_size, c.hidden_size_per_layer_input
        self.gate = Linear(d, p, axes=("embed", "mlp"), dtype=dtype)
        self.projection = Linear(p, d, axes=("mlp", "embed"), dtype=dtype)
        self.norm = norm(d, eps=c.rms_norm_eps, dtype=dtype)
        self.activation = c.dialect.activation

    def __call__(self, h: jax.Array, own: jax.Array) -> jax.Array:
        """`[B, T, D]` and the layer's `[B, T, P]` -> `[B, T, D]`."""
        activate = ACTIVATIONS[self.activation]
        return self.norm(self.projection(activate(self.gate(h)) * own))


def _times(x: jax.Array, factor: float) -> jax.Array:
    """`x * factor`, where the factor is not rounded to the dtype of x first."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
