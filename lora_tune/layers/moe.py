# SPDX-License-Identifier: Apache-2.0
"""Feed-forward layers: the gated MLP and the sparse mixture of experts.

Routed experts run as grouped matmuls over rows sorted by expert (`layers.grouped`); no token is
ever dropped. Inside a manual region with an expert axis, each device holds some experts and rows
travel to them (`layers.exchange`); the experts themselves never move.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from lora_tune import scan, sharding
from lora_tune.layers.activations import ACTIVATIONS, silu
from lora_tune.layers.exchange import Exchange, capacity, run_experts
from lora_tune.layers.grouped import permute, sort_by, spread
from lora_tune.layers.linear import ExpertLinear, Linear


class MLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(
        self,
        embed: int,
        hidden: int,
        *,
        dtype: DTypeLike,
        bias: bool = False,
        activation: str = "silu",
    ):
        linear = functools.partial(Linear, dtype=dtype, bias=bias)
        self.gate_proj = linear(embed, hidden, axes=("embed", "mlp"))
        self.up_proj = linear(embed, hidden, axes=("embed", "mlp"))
        self.down_proj = linear(hidden, embed, axes=("mlp", "embed"))
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., D]` to `[..., D]`."""
        activate = ACTIVATIONS[self.activation]
        return self.down_proj(activate(self.gate_proj(x)) * self.up_proj(x))


class Experts(nnx.Module):
    """The routed experts: a gated MLP for each, on rows grouped by expert."""

    def __init__(self, num_experts: int, embed: int, hidden: int, *, dtype: DTypeLike):
        def linear(inner: int, outer: int, axes: tuple[str, str]) -> ExpertLinear:
            return ExpertLinear(num_experts, inner, outer, axes=axes, dtype=dtype)

        self.gate_proj = linear(embed, hidden, ("embed", "mlp"))
        self.up_proj = linear(embed, hidden, ("embed", "mlp"))
        self.down_proj = linear(hidden, embed, ("mlp", "embed"))

    @property
    def local_experts(self) -> int:
        """Number of experts held here: all of them, or one device's share in a manual region."""
        return self.gate_proj.kernel.shape[0]

    def __call__(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Rows `[n, D]` sorted by expert, `group_sizes [E]` -> `[n, D]`."""
        hidden = silu(self.gate_proj(x, group_sizes)) * self.up_proj(x, group_sizes)
        return self.down_proj(hidden, group_sizes)


def route(logits: jax.Array, top_k: int, *, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """Chooses experts: softmax over all in float32, the `top_k` largest, optionally renormalised.

    Args:
      logits: `[n, E]` router scores.
      top_k: experts per token.
      normalise: divide the chosen probabilities by their sum (`norm_topk_prob`).

    Returns:
      Weights `[n, top_k]` in the dtype of `logits`, and expert indices `[n, top_k]`.
    """
    shares = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jax.lax.top_k(jax.lax.stop_gradient(shares), top_k)[1]
    # What is computed again may be rounded another way: a token keeps its experts.
    chosen = checkpoint_name(chosen.reshape(-1), scan.ROUTED).reshape(chosen.shape)
    weights = _pick(shares, chosen)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights.astype(logits.dtype), chosen


@jax.custom_vjp
def _pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """Of each row of x `[n, E]` the entries at its index `[n, k]`, all different.

    Its transpose compares, where that of plain indexing is a scatter, which a TPU sorts first.
    """
    return jnp.take_along_axis(x, index, axis=-1, mode="promise_in_bounds")


def _pick_forward(x: jax.Array, index: jax.Array) -> tuple:
    return _pick(x, index), (index, jnp.arange(x.shape[-1], dtype=index.dtype))


def _pick_backward(kept: tuple, g: jax.Array) -> tuple:
    index, entries = kept
    mine = index[:, :, None] == entries[None, None, :]
    return jnp.sum(jnp.where(mine, g[:, :, None], 0), axis=1), None


_pick.defvjp(_pick_forward, _pick_backward)


def dispatch(x: jax.Array, weights: jax.Array, chosen: jax.Array, experts: Experts) -> jax.Array:
    """Runs every token through its chosen experts and sums the results by weight.

    Args:
      x: tokens `[n, D]`.
      weights: `[n, k]`.
      chosen: global expert indices `[n, k]`.
      experts: the experts; in a manual region, this device's share of them.

    Returns:
      `[n, D]`.
    """
    axis = sharding.manual_axis("expert")
    return (_here if axis is None else _exchanged)(x, weights, chosen, experts)


def _here(x: jax.Array, weights: jax.Array, chosen: jax.Array, experts: Experts) -> jax.Array:
    n, top_k = chosen.shape
    order, place = sort_by(chosen.reshape(-1), experts.local_experts)
    order, place = (checkpoint_name(part, scan.ROUTED) for part in (order, place))
    group_sizes = jnp.bincount(chosen.reshape(-1), length=experts.local_experts)
    y = experts(spread(x, order, place, top_k), group_sizes.astype(jnp.int32))
    return jnp.einsum("nkd,nk->nd", permute(y, place, order).reshape(n, top_k, -1), weights)


def _exchanged(x: jax.Array, weights: jax.Array, chosen: jax.Array, experts: Experts) -> jax.Array:
    devices = sharding.manual_size("expert")
    exchange = Exchange(
        axis="expert",
        agree=tuple(filter(sharding.manual_axis, sharding.MANUAL_AXES)),
        devices=devices,
        local=experts.local_experts,
        capacity=capacity(chosen.size, devices),
    )
    rngs, keys = scan.take_keys(experts)
    graphdef, parameters, rest = nnx.split(experts, nnx.Param, ...)

    def call(parameters: Any, constants: Any, rows: Any, sizes: Any, turn: Any) -> jax.Array:
        rest, keys = constants
        module = nnx.merge(graphdef, parameters, rest, copy=True)
        if keys is not None:
            keys = {name: jax.random.fold_in(key, turn) for name, key in keys.items()}
            module.set_attributes(qwix_rngs=nnx.Rngs(**keys))
        return module(rows, sizes)

    y = run_experts(call, exchange, parameters, (rest, keys), x, weights, chosen)
    if rngs is not None:
        experts.set_attributes(qwix_rngs=rngs)
    return y


class SparseMoe(nnx.Module):
    """Routed experts, plus a shared expert behind a sigmoid gate where there is one."""

    def __init__(
        self,
        embed: int,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        shared_hidden: int | None,
        normalise: bool,
        dtype: DTypeLike,
    ):
        self.gate = Linear(embed, num_experts, axes=("embed", None), dtype=dtype)
        self.experts = Experts(num_experts, embed, hidden, dtype=dtype)
        self.shares = shared_hidden is not None
        if shared_hidden is not None:
            self.shared_expert = MLP(embed, shared_hidden, dtype=dtype)
            self.shared_expert_gate = Linear(embed, 1, axes=("embed", None), dtype=dtype)
        self.top_k = top_k
        self.normalise = normalise

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[B, T, D]` to `[B, T, D]`."""
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = route(self.gate(flat), self.top_k, normalise=self.normalise)
        y = dispatch(flat, weights, chosen, self.experts)
        if self.shares:
            y = y + jax.nn.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        return y.reshape(x.shape)
