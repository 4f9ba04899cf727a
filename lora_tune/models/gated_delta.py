# SPDX-License-Identifier: Apache-2.0
"""Linear attention by the gated delta rule as families call it, in training and over a cache.

A family has the projections before and behind it. Shapes: B batch, T time, K key heads, V value
heads, of which each key head serves the same number in turn.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from lora_tune.cache import Entry, RecurrentCache
from lora_tune.layers import sequence
from lora_tune.layers.activations import silu
from lora_tune.layers.conv import causal_conv
from lora_tune.layers.delta_mixer import Heads, gated_delta_mixer
from lora_tune.layers.delta_net import gated_delta_rule, recurrent_gated_delta_rule
from lora_tune.layers.norms import gated_rms_normalise
from lora_tune.layers.weights import uniform, weight
from lora_tune.models.inputs import LayerInputs
from lora_tune.scan import MIXED


class Conv(nnx.Module):
    """The weight of a depthwise causal convolution, kernel `[W, C]`."""

    def __init__(self, width: int, channels: int, dtype: DTypeLike):
        init = uniform(width**-0.5)
        self.kernel = weight((width, channels), dtype, axes=(None, None), init=init)


@dataclasses.dataclass(frozen=True)
class DeltaSizes:
    """Numbers and widths of heads, width of the convolution, and the epsilon of the norm."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float

    @property
    def keys(self) -> int:
        """Channels of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values, and of all gates."""
        return self.value_heads * self.value_dim

    @property
    def chunk_size(self) -> int:
        """Of the delta rule: work inside a chunk grows with its length, work between chunks falls.

        64 for the published head size of 128; narrow heads want shorter chunks (3.5 times faster
        at 32 with chunks of 16 than of 64, on a CPU).
        """
        return max(16, min(64, self.key_dim // 2))

    def pack(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Queries, keys, values and gates `[B, T, …]` -> `[q, k, values, gates]` by key head."""
        lead = parts[0].shape[:2]
        by_head = [part.reshape(*lead, self.key_heads, -1) for part in parts]
        return jnp.concatenate(by_head, axis=-1).reshape(*lead, -1)

    def unpack(self, packed: jax.Array) -> tuple[jax.Array, ...]:
        """The inverse of `pack`; the gates come as `[B, T, V, H]`."""
        lead, ratio = packed.shape[:2], self.value_heads // self.key_heads
        ends = [self.key_dim, 2 * self.key_dim, 2 * self.key_dim + ratio * self.value_dim]
        grouped = packed.reshape(*lead, self.key_heads, -1)
        q, k, v, z = jnp.split(grouped, ends, axis=-1)
        flat = [part.reshape(*lead, -1) for part in (q, k, v)]
        return *flat, z.reshape(*lead, self.value_heads, self.value_dim)

    def make_cache(self, *, batch: int, dtype: DTypeLike) -> RecurrentCache:
        """What a layer remembers of `batch` rows before their first token."""
        return RecurrentCache(
            conv=jnp.zeros((batch, self.taps - 1, 2 * self.keys + self.values), dtype),
            state=jnp.zeros((batch, self.value_heads, self.key_dim, self.value_dim), jnp.float32),
        )


def log_decay(a: jax.Array, a_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """`-exp(a_log) * softplus(a + dt_bias)` in float32, from `[B, T, V]` and twice `[V]`."""
    rate = jnp.exp(a_log.astype(jnp.float32))[None, None, :]
    step = a.astype(jnp.float32) + dt_bias.astype(jnp.float32)[None, None, :]
    return -rate * jax.nn.softplus(step)


def delta_attention(
    packed: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    kernel: jax.Array,
    norm_weight: jax.Array,
    sizes: DeltaSizes,
    inputs: LayerInputs,
    entry: Entry | None,
) -> tuple[jax.Array, Entry | None]:
    """Convolution, delta rule, norm and gate, going on from the cache where there is one.

    Args:
      packed: as from `DeltaSizes.pack`, `[B, T, P]`.
      g: logarithms of the decay, float32 `[B, T, V]`.
      beta: rates of writing `[B, T, V]`.
      kernel: of the convolution, `[W, C]`: channels of all q, all k, all values.
      norm_weight: `[H]`.
      sizes: of all these.
      inputs: segments, and the slots of the cache.
      entry: the layer's place in the cache; None in training.

    Returns:
      `[B, T, V H]`, named `MIXED` for remat, and the entry after the call.
    """
    run = functools.partial(
        _whole if entry is None else functools.partial(_onwards, entry=entry),
        kernel=kernel.astype(packed.dtype),
        norm_weight=norm_weight,
        sizes=sizes,
        inputs=inputs,
    )
    y, entry = run(packed, g, beta)
    return checkpoint_name(y, MIXED), entry


def _whole(
    packed: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    kernel: jax.Array,
    norm_weight: jax.Array,
    sizes: DeltaSizes,
    inputs: LayerInputs,
) -> tuple[jax.Array, None]:
    def deal(x: jax.Array) -> jax.Array:  # heads are dealt out by key head
        dealt = sequence.deal_heads(x.reshape(*x.shape[:2], sizes.key_heads, -1))
        return dealt.reshape(*dealt.shape[:2], -1)

    split = jnp.split(kernel, [sizes.keys, 2 * sizes.keys], axis=1)
    kernels = [sequence.own_heads(part, 1) for part in split]
    y = gated_delta_mixer(
        *(deal(x) for x in (packed, g, beta)),
        kernel=jnp.concatenate(kernels, axis=1),
        norm_weight=norm_weight,
        heads=Heads(
            key_heads=sizes.key_heads // sequence.parts(),
            groups=sizes.value_heads // sizes.key_heads,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
        ),
        eps=sizes.eps,
        segment_ids=sequence.whole_rows(inputs.segment_ids),
        chunk_size=sizes.chunk_size,
    )
    return sequence.collect_heads(y), None


def _onwards(
    packed: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    kernel: jax.Array,
    norm_weight: jax.Array,
    sizes: DeltaSizes,
    inputs: LayerInputs,
    entry: Entry,
) -> tuple[jax.Array, Entry]:
    """The same, going on from what the cache holds of each row, and leaving it there."""
    q, k, v, z = sizes.unpack(packed)
    window, state = _remembered(entry, inputs)
    mixed, window = causal_conv(
        jnp.concatenate([q, k, v], axis=-1), kernel, segment_ids=inputs.segment_ids, state=window
    )
    q, k, v = jnp.split(silu(mixed), [sizes.keys, 2 * sizes.keys], axis=-1)
    lead = packed.shape[:2]
    chunked = functools.partial(gated_delta_rule, chunk_size=sizes.chunk_size)
    y, state = (recurrent_gated_delta_rule if lead[1] == 1 else chunked)(
        q.reshape(*lead, sizes.key_heads, sizes.key_dim),
        k.reshape(*lead, sizes.key_heads, sizes.key_dim),
        v.reshape(*lead, sizes.value_heads, sizes.value_dim),
        g,
        beta,
        segment_ids=inputs.segment_ids,
        initial_state=state,
    )
    y = gated_rms_normalise(y, z, norm_weight, eps=sizes.eps)
    return y.reshape(*lead, -1), entry.write(conv=window, state=state)


def _remembered(entry: Entry, inputs: LayerInputs) -> tuple[jax.Array | None, jax.Array | None]:
    """What a cache holds of the document that each row goes on with: convolution window, state."""
    if inputs.slots is None:
        return None, None
    continues = inputs.slots.continues
    window, state = entry.read("conv"), entry.read("state")
    return (
        jnp.where(continues[:, None, None], window, 0),
        jnp.where(continues[:, None, None, None], state, 0),
    )
