# SPDX-License-Identifier: Apache-2.0
"""The Qwix provider that gives projections their adapters, routed experts included.

Qwix runs the model once with two functions intercepted: `jax.lax.dot_general`, and the grouped
product of the experts, which the stock provider does not know. When the call comes from a
projection that a rule names, the provider creates A and B on that module, and from then on adds
`x @ A @ B * scale` to the product. Because the call happens while a scan body is traced, the new
parameters belong to one layer; the scan engine stacks them.

Differences from the stock provider, each for a reason:

* Only projection modules are intercepted, and only on their own kernel: no guessing by shape.
* Adapters are float32 whatever the base, and A starts as U(-1/sqrt(in), 1/sqrt(in)), as in PEFT;
  the trace only declares it, `inject` draws it per Hugging Face module.
* Experts get an A and a B each.
* The scale is a variable with one value per layer, so that `alpha_pattern`, `rank_pattern` and
  `layers_to_transform` may differ between layers that share a stack.
* Dropout acts only while the module carries a `dropout` random stream: training sets one,
  evaluation does not.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from jax.experimental import xla_metadata
from qwix._src.utils import flax_util

from lora_tune.layers import grouped
from lora_tune.layers.linear import ExpertLinear, Linear
from lora_tune.layers.weights import ONES, ZEROS, uniform


class LoRAScale(nnx.Variable):
    """`alpha / r` (or `alpha / sqrt(r)`) of one adapter, a float32 scalar; never trained."""


class AdapterProvider(qwix.LoraProvider):
    """Adds adapters to the kernels of `Linear` and `ExpertLinear` modules that a rule matches."""

    def get_intercept_map(self) -> Mapping[str, Callable]:
        """The two operations that projections are made of."""
        return {
            "jax.lax.dot_general": self.dot_general,
            "lora_tune.layers.grouped.grouped_dot": self.grouped_dot,
        }

    def dot_general(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """`lhs @ rhs`, plus the adapter's share where `rhs` is an adapted kernel `[in, out]`."""
        y = jax.lax.dot_general(lhs, rhs, *args, **kwargs)
        module = self._adapted_module("dot_general", rhs)
        if module is None:
            return y
        a, b, scale = _factors(module)
        return _plus(y, low_rank(_dropout(module, lhs), a, b, scale))

    def grouped_dot(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Grouped product, plus each expert's own adapter on its rows."""
        y = grouped.grouped_dot(lhs, rhs, group_sizes)
        module = self._adapted_module("grouped_dot", rhs)
        if module is None:
            return y
        a, b, scale = _factors(module)
        low = grouped.grouped_dot(_dropout(module, lhs), a.astype(lhs.dtype), group_sizes)
        low = (low * scale).astype(lhs.dtype)
        return _plus(y, grouped.grouped_dot(low, b.astype(lhs.dtype), group_sizes))

    def _adapted_module(self, op: str, rhs: jax.Array) -> Any:
        """The projection whose kernel `rhs` is, with its adapter, if a rule names it."""
        module = flax_util.get_current_module()
        if not isinstance(module, Linear | ExpertLinear) or rhs.shape != module.kernel.shape:
            return None
        rule, _ = self._get_current_rule_and_op_id(op, only_rule=True)
        if rule is None:
            return None
        module.lora_dropout = rule.dropout
        if not hasattr(module, "kernel_lora_a"):
            _create_adapter(module, rule.rank)
        return module


def _create_adapter(module: Any, rank: int) -> None:
    """Puts A, B and their scale beside the kernel; `lora_tune.lora.inject` fills A."""
    *experts, inner, outer = module.kernel.shape
    *lead, in_axis, out_axis = module.kernel.get_metadata()["axes"]
    a = jnp.zeros((*experts, inner, rank), jnp.float32)
    b = jnp.zeros((*experts, rank, outer), jnp.float32)
    module.kernel_lora_a = nnx.LoRAParam(a, axes=(*lead, in_axis, None), init=uniform(inner**-0.5))
    module.kernel_lora_b = nnx.LoRAParam(b, axes=(*lead, None, out_axis), init=ZEROS)
    module.kernel_lora_scale = LoRAScale(jnp.ones((), jnp.float32), axes=(), init=ONES)


def _plus(y: jax.Array, delta: jax.Array) -> jax.Array:
    """`y + delta` in the dtype of `y`."""
    # XLA's CPU code for a sum fused with, say, a norm behind it may round differently from the norm
    # alone. As a computation of its own, a delta of zero leaves everything behind it bit for bit
    # as in the base. Elsewhere the fusion is worth more.
    return jax.lax.platform_dependent(y, delta.astype(y.dtype), cpu=_apart, default=jnp.add)


def _apart(y: jax.Array, delta: jax.Array) -> jax.Array:
    with xla_metadata.set_xla_metadata(inlineable="false"):
        return jax.jit(jnp.add)(y, delta)


def _factors(module: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A, B and their scale, each as it is stored."""
    return module.kernel_lora_a[...], module.kernel_lora_b[...], module.kernel_lora_scale[...]


@jax.custom_vjp
def low_rank(x: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
    """`x @ A * scale @ B` in the dtype of `x`, for `[n, in]`, `[in, r]`, `[r, out]` and a scalar.

    The gradient of A is computed as `[r, in]`, a product whose rows are long; the one that autodiff
    writes takes four times as long on a CPU. Gradients are summed in float32.
    """
    return _low_rank_forward(x, a, b, scale)[0]


def _low_rank_forward(x: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array) -> tuple:
    low = jnp.dot(x, a.astype(x.dtype))
    # The scale is not rounded to the activations' dtype: the saved adapter has it exact.
    low = (low * scale).astype(x.dtype)
    return jnp.dot(low, b.astype(x.dtype)), (x, a, b, scale, low)


def _low_rank_backward(kept: tuple, g: jax.Array) -> tuple:
    x, a, b, scale, low = kept
    rows, columns = (((0,), (0,)), ((), ())), (((1,), (1,)), ((), ()))
    g_low = jax.lax.dot_general(g, b.astype(g.dtype), columns)
    g_low = (g_low * scale).astype(g.dtype)
    exact = {"preferred_element_type": jnp.float32}
    # XLA would turn the product itself back, rather than what comes out of it.
    da = jax.lax.optimization_barrier(jax.lax.dot_general(g_low, x, rows, **exact)).T
    db = jax.lax.dot_general(low, g, rows, **exact)
    return jax.lax.dot_general(g_low, a.astype(g.dtype), columns), da, db, jnp.zeros_like(scale)


low_rank.defvjp(_low_rank_forward, _low_rank_backward)


def _dropout(module: Any, x: jax.Array) -> jax.Array:
    rngs, rate = module.qwix_rngs, module.lora_dropout
    if not rate or rngs is None or "dropout" not in rngs:
        return x
    kept = jax.random.bernoulli(rngs.dropout(), 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0).astype(x.dtype)
