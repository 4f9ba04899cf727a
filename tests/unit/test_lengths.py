# SPDX-License-Identifier: Apache-2.0
"""Every kernel against its definition on the shortest row and on one longer than any block.

4097 tokens are one more than whole blocks and chunks of any size used here, and errors that add up
from chunk to chunk have 64 chunks to do it. Definitions are written for whole rows in float32; in
bfloat16 a kernel may lose its own roundings: eight bits, a few times over.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_tune.layers.attention import attention
from lora_tune.layers.conv import causal_conv, in_own_run
from lora_tune.layers.cross_entropy import cross_entropy
from lora_tune.layers.delta_kernel import kernel_backward, kernel_forward
from lora_tune.layers.delta_matrices import Form, Heads
from lora_tune.layers.delta_mixer import gated_delta_mixer
from lora_tune.layers.delta_net import (
    fill_up,
    gated_delta_rule,
    make_marks,
    recurrent_gated_delta_rule,
)
from lora_tune.layers.grouped import grouped_dot
from lora_tune.layers.linear import Linear
from lora_tune.layers.norms import gated_rms_normalise
from lora_tune.layers.splash import splash_attention

HEADS = Heads(key_heads=1, groups=2, key_dim=8, value_dim=6)
WIDE = Heads(key_heads=1, groups=1, key_dim=128, value_dim=128)
EPS, CHUNK = 1e-6, 64


def segments(time):
    """Documents of all kinds of lengths, with padding inside and at the end."""
    rng = np.random.default_rng(time)
    ids = np.repeat(np.arange(1, time + 1), rng.integers(1, 400, time))[:time]
    ids[time // 2 : time // 2 + time // 40] = 0
    ids[time - time // 50 :] = 0
    return jnp.asarray(ids[None])


def arrays(seed, **shapes):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


def compare(op, definition, given, dtype, *, ids=None):
    """Outputs and all gradients of `op` in dtype, and of its definition in float32."""

    def run(rule, given):
        def loss(given):
            out = rule(**given)
            # Padding may hold anything where a function does not say otherwise.
            out = out if ids is None else jnp.where((ids != 0)[..., None], out, 0)
            weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
            return jnp.sum(out.astype(jnp.float32) * weights), out

        (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
        return {"out": out, **grads}

    given = {name: x.astype(dtype) for name, x in given.items()}
    got = run(op, given)
    expected = run(definition, {name: x.astype(jnp.float32) for name, x in given.items()})
    for name, value in expected.items():
        scale = max(0.1, float(jnp.abs(value).max()))
        most = {"float32": 2e-5, "bfloat16": 2.0**-6 if name == "out" else 2.0**-4}[dtype]
        assert jnp.all(jnp.isfinite(got[name])), name
        assert jnp.abs(got[name].astype(jnp.float32) - value).max() <= most * scale, name


every = pytest.mark.parametrize(
    ("time", "dtype"), [(1, "float32"), (4097, "float32"), (4097, "bfloat16")]
)


def rule_inputs(time, heads):
    values = heads.key_heads * heads.groups
    return arrays(
        0,
        q=(1, time, heads.key_heads, heads.key_dim),
        k=(1, time, heads.key_heads, heads.key_dim),
        v=(1, time, values, heads.value_dim),
        g=(1, time, values),
        beta=(1, time, values),
    )


def decayed(rule, ids, *, q, k, v, g, beta):
    """The rule with a decay and a strength made of any numbers; slow, so that states last."""
    g, beta = -0.01 * jax.nn.softplus(g.astype(jnp.float32)), jax.nn.sigmoid(beta)
    out = rule(q, k, v, g, beta, segment_ids=ids)[0]
    return out.reshape(*out.shape[:2], -1)


@every
def test_delta_rule(time, dtype):
    ids, given = segments(time), rule_inputs(time, HEADS)
    by_token = partial(decayed, recurrent_gated_delta_rule, ids)
    compare(partial(decayed, gated_delta_rule, ids), by_token, given, dtype)


def mixer_inputs(time, heads):
    values = heads.key_heads * heads.groups
    return arrays(
        1,
        packed=(1, time, heads.key_heads * (heads.inner + heads.outer)),
        g=(1, time, values),
        beta=(1, time, values),
        kernel=(4, heads.key_heads * heads.inner),
        norm_weight=(heads.value_dim,),
    )


def mixed(heads, mix, ids, *, packed, g, beta, kernel, norm_weight):
    g, beta = -0.01 * jax.nn.softplus(g.astype(jnp.float32)), jax.nn.sigmoid(beta)
    return mix(heads, packed, g, beta, kernel, norm_weight, ids)


def in_parts(heads, packed, g, beta, kernel, norm_weight, ids):
    """Convolution, step loop, norm and gate over whole rows; one key head."""
    lead = packed.shape[:2]
    channels, z = jnp.split(packed, [heads.inner], axis=-1)
    x = jax.nn.silu(causal_conv(channels, kernel, segment_ids=ids)[0])
    q, k, v = jnp.split(x, [heads.key_dim, 2 * heads.key_dim], axis=-1)
    v = v.reshape(*lead, heads.groups, -1)
    out, _ = recurrent_gated_delta_rule(q[:, :, None], k[:, :, None], v, g, beta, segment_ids=ids)
    y = gated_rms_normalise(out, z.reshape(out.shape), norm_weight, eps=EPS)
    return y.reshape(*lead, -1)


def in_chunks(heads, packed, g, beta, kernel, norm_weight, ids):
    return gated_delta_mixer(
        packed,
        g,
        beta,
        kernel=kernel,
        norm_weight=norm_weight,
        heads=heads,
        eps=EPS,
        segment_ids=ids,
    )


@every
def test_mixer(time, dtype):
    ids, given = segments(time), mixer_inputs(time, HEADS)
    compare(
        partial(mixed, HEADS, in_chunks, ids), partial(mixed, HEADS, in_parts, ids), given, dtype
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def as_kernel(form, params, rows, marks):
    return kernel_forward(form, params, rows, marks, keep=False, interpret=True)[0]


def as_kernel_forward(form, params, rows, marks):
    y, states = kernel_forward(form, params, rows, marks, keep=True, interpret=True)
    return y, (params, rows, marks, states)


def as_kernel_backward(form, kept, d_y):
    d_params, d_rows = kernel_backward(form, *kept, d_y, interpret=True)
    d_params = tuple(d.astype(p.dtype) for d, p in zip(d_params, kept[0], strict=True))
    return d_params, d_rows, None


as_kernel.defvjp(as_kernel_forward, as_kernel_backward)


def in_kernels(heads, packed, g, beta, kernel, norm_weight, ids):
    time = packed.shape[1]
    form = Form(heads, CHUNK, EPS, jax.lax.Precision.HIGHEST, packed.dtype)
    marks = make_marks(ids, 1, time, CHUNK)
    rows = tuple(fill_up(x, CHUNK) for x in (packed, g, beta))
    params = (kernel[None], norm_weight)
    return as_kernel(form, params, rows, (marks, in_own_run(marks.run, 4)))[:, :time]


@pytest.mark.slow
@every
def test_mixer_as_tpu_kernels(time, dtype):
    ids, given = segments(time), mixer_inputs(time, WIDE)
    compare(
        partial(mixed, WIDE, in_kernels, ids), partial(mixed, WIDE, in_parts, ids), given, dtype
    )


def plain_attention(ids, window, *, q, k, v):
    """Softmax of the whole square of scores."""
    time, heads = q.shape[1:3]
    k, v = (jnp.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * 0.3
    i, j = np.arange(time)[:, None], np.arange(time)[None, :]
    seen = jnp.asarray((j <= i) & (i - j < (window or time)))[None]
    seen = seen & (ids[:, :, None] == ids[:, None, :])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest")
    return out.reshape(1, time, -1)


def blocked_attention(ids, window, *, q, k, v):
    out = attention(q, k, v, scale=0.3, segment_ids=ids, sliding_window=window)
    return out.reshape(*out.shape[:2], -1)


def attention_inputs(time, dim):
    return arrays(2, q=(1, time, 2, dim), k=(1, time, 1, dim), v=(1, time, 1, dim))


@pytest.mark.parametrize("window", [None, 100])
@every
def test_attention(time, dtype, window):
    ids, given = segments(time), attention_inputs(time, 8)
    got, expected = (partial(f, ids, window) for f in (blocked_attention, plain_attention))
    compare(got, expected, given, dtype, ids=ids)


def splash(ids, *, q, k, v):
    out = splash_attention(q, k, v, ids, scale=0.3, sliding_window=None, interpret=True)
    return out.reshape(*out.shape[:2], -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "time", [128, 4096]
)  # whole blocks: what else there is takes the other form
def test_attention_as_tpu_kernel(time):
    ids, given = segments(time), attention_inputs(time, 128)
    expected = partial(plain_attention, ids, None)
    compare(partial(splash, ids), expected, given, "bfloat16", ids=ids)


@every
def test_convolution(time, dtype):
    ids = segments(time)
    taps = 4
    # Tokens before, by document: what stands in between is of the same document or padding.
    index = np.arange(time)

    def definition(x, kernel):
        total = 0.0
        for back in range(taps):
            own = (index >= back) & (np.asarray(ids)[0] == np.roll(np.asarray(ids)[0], back))
            seen = jnp.where(
                jnp.asarray(own & (np.asarray(ids)[0] != 0))[None, :, None],
                jnp.roll(x, back, axis=1),
                0.0,
            )
            total = total + seen * kernel[taps - 1 - back][None, None]
        return total

    given = arrays(3, x=(1, time, 6), kernel=(taps, 6))
    compare(lambda x, kernel: causal_conv(x, kernel, segment_ids=ids)[0], definition, given, dtype)


@every
def test_cross_entropy(time, dtype):
    vocab = 37
    targets = jnp.asarray(np.random.default_rng(4).integers(0, vocab, time), jnp.int32)
    head = Linear(8, vocab, axes=("embed", "vocab"), dtype=jnp.float32)
    graphdef, state = nnx.split(head)

    def by_parts(h, w):
        head = nnx.merge(graphdef, jax.tree.map(lambda _: w, state))
        return cross_entropy(
            head, lambda head, h: head(h), h, targets, vocab_size=vocab, chunk_size=10
        )[0][:, None]

    def textbook(h, w):
        logits = jnp.matmul(h, w, precision="highest")
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)

    compare(by_parts, textbook, arrays(4, h=(time, 8), w=(8, vocab)), dtype)


@every
def test_grouped_product(time, dtype):
    rng = np.random.default_rng(5)
    group = np.sort(rng.choice([0, 1, 3, 6], size=time))  # others get nothing
    sizes = jnp.asarray(np.bincount(group, minlength=7), jnp.int32)

    def definition(x, w):
        return jnp.einsum("nk,nkm->nm", x, w[group], precision="highest")

    given = arrays(5, x=(time, 8), w=(7, 8, 6))
    compare(lambda x, w: grouped_dot(x, w, sizes), definition, given, dtype)
