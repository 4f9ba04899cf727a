# SPDX-License-Identifier: Apache-2.0
"""Attention against torch, a float64 softmax, and each document run alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_tune.layers import block_attention
from lora_tune.layers.attention import attention

IDS = np.array(
    [
        [1] * 7 + [2] * 1 + [3] * 12 + [0] * 3 + [4] * 10 + [0] * 4,
        [0] * 5 + [1] * 30 + [0] * 2,
    ]
)


def make(rng, *, batch=2, time=37, length=None, heads=4, kv_heads=2, dim=8):
    length = time if length is None else length
    shapes = [(batch, time, heads, dim), (batch, length, kv_heads, dim)]
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in (*shapes, shapes[1]))


def reference(q, k, v, seen, scale):
    """Plain softmax over the seen keys, float64; zeros where none is seen."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, t, n in np.ndindex(*q.shape[:3]):
        keys = np.flatnonzero(seen[b, t])
        if len(keys):
            head = n // (q.shape[2] // k.shape[2])
            logits = k[b, keys, head] @ q[b, t, n] * scale
            weights = np.exp(logits - logits.max())
            out[b, t, n] = weights @ v[b, keys, head] / weights.sum()
    return out


def gradients(fn, arrays, weights):
    return jax.jit(jax.grad(lambda *x: jnp.sum(fn(*x) * weights), (0, 1, 2)))(*arrays)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("block_size", "window"), [(37, None), (5, None), (512, 4), (16, 4)])
def test_equals_plain_softmax(block_size, window, kv_heads):
    arrays = make(np.random.default_rng(0), kv_heads=kv_heads)
    fn = partial(attention, scale=0.3, block_size=block_size, sliding_window=window)
    got = jax.jit(fn)(*arrays, segment_ids=jnp.asarray(IDS))
    ago = np.arange(37)[:, None] - np.arange(37)[None, :]
    seen = (ago >= 0) & (ago < (window or 37)) & (IDS[:, :, None] == IDS[:, None, :])
    seen &= IDS[:, :, None] != 0
    np.testing.assert_allclose(got, reference(*arrays, seen, 0.3), atol=1e-5)


@pytest.mark.parametrize("window", [None, 4, 15])
def test_spans_leave_out_keys_that_no_query_sees(window, monkeypatch):
    monkeypatch.setattr(block_attention, "_SPAN", 8)
    rng = np.random.default_rng(1)
    arrays, weights = make(rng), jnp.asarray(rng.normal(size=(2, 37, 4, 8)), jnp.float32)
    spans = partial(attention, scale=0.3, sliding_window=window, segment_ids=jnp.asarray(IDS))
    whole = partial(spans, query_offset=0)  # the same queries, not known to be the keys' tokens
    shapes = [str(jax.make_jaxpr(lambda *x, f=f: f(*x))(*arrays)) for f in (spans, whole)]
    assert ["f32[2,2,20,10]" in shape for shape in shapes] == [True, False]  # 10 queries, 10 keys
    np.testing.assert_allclose(jax.jit(spans)(*arrays), jax.jit(whole)(*arrays), atol=1e-6)
    for got, want in zip(*(gradients(f, arrays, weights) for f in (spans, whole)), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parity
@pytest.mark.parametrize("block_size", [512, 8])
def test_equals_torch_with_gradients(block_size):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    arrays = make(rng)
    weights = rng.normal(size=arrays[0].shape).astype(np.float32)
    theirs = [torch.tensor(np.asarray(x), requires_grad=True) for x in arrays]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in theirs), is_causal=True, scale=0.4, enable_gqa=True
    ).transpose(1, 2)
    (out * torch.tensor(weights)).sum().backward()
    fn = partial(attention, scale=0.4, block_size=block_size)
    np.testing.assert_allclose(fn(*arrays), out.detach(), atol=1e-5)
    for got, x in zip(gradients(fn, arrays, weights), theirs, strict=True):
        np.testing.assert_allclose(got, x.grad, atol=1e-5)


@pytest.mark.parametrize("block_size", [512, 8])
def test_packed_equals_each_document_alone(block_size):
    rng = np.random.default_rng(2)
    arrays = make(rng)
    weights = jnp.asarray(rng.normal(size=arrays[0].shape), jnp.float32)
    packed = partial(attention, scale=0.3, segment_ids=jnp.asarray(IDS), block_size=block_size)
    out, grads = packed(*arrays), gradients(packed, arrays, weights)
    for row, ids in enumerate(IDS):
        # Documents of 1, 10 and 30 tokens; the others have the same code path.
        for number in {2, 4} if row == 0 else {1}:
            at = np.flatnonzero(ids == number)
            alone = tuple(x[row : row + 1, at] for x in arrays)
            fn = partial(attention, scale=0.3)
            np.testing.assert_allclose(out[row, at], jax.jit(fn)(*alone)[0], atol=1e-5)
            expected = gradients(fn, alone, weights[row : row + 1, at])
            for got, one in zip(grads, expected, strict=True):
                np.testing.assert_allclose(got[row, at], one[0], atol=1e-5)
    for x in (out, *grads):
        assert np.all(np.isfinite(x))
        assert not np.any(np.asarray(x)[IDS == 0])


def test_decoding_with_a_cache_equals_the_whole_row():
    """Rows are at different lengths; unwritten cache slots have id 0 and hold rubbish."""
    q, k, v = make(np.random.default_rng(3), time=12)
    whole = attention(q, k, v, scale=0.3)
    offset = np.array([9, 4])
    step = jnp.stack([q[row, o : o + 3] for row, o in enumerate(offset)])
    written = jnp.asarray(np.arange(12)[None, :] < offset[:, None] + 3)
    got = attention(
        step,
        jnp.where(written[..., None, None], k, 50.0),
        jnp.where(written[..., None, None], v, 50.0),
        scale=0.3,
        segment_ids=jnp.ones((2, 3), jnp.int32),
        key_segment_ids=written.astype(jnp.int32),
        query_offset=jnp.asarray(offset),
    )
    for row, o in enumerate(offset):
        np.testing.assert_allclose(got[row], whole[row, o : o + 3], atol=1e-5)
    last = attention(q[:, 10:], k, v, scale=0.3)
    np.testing.assert_allclose(last, whole[:, 10:], atol=1e-5)


def test_softmax_is_float32_for_bfloat16():
    rng = np.random.default_rng(4)
    half = tuple(x.astype(jnp.bfloat16) for x in make(rng, dim=64))
    got = attention(*half, scale=1.0)
    exact = attention(*(x.astype(jnp.float32) for x in half), scale=1.0)
    assert got.dtype == jnp.bfloat16
    # One rounding of the probabilities and one of the result.
    bound = 2.0**-8 * 2 * np.abs(np.asarray(half[2], np.float32)).max()
    assert np.abs(np.asarray(got, np.float32) - exact).max() < bound


def test_blocks_keep_no_square_matrix():
    """Nothing saved for the backward pass has both a query and a key axis."""
    arrays = make(np.random.default_rng(5), batch=1, time=64)
    fn = partial(attention, scale=1.0, block_size=16)
    jaxpr = jax.make_jaxpr(lambda *x: jax.vjp(fn, *x)[1])(*arrays)
    residuals = [x.aval.shape for x in jaxpr.jaxpr.outvars]
    assert residuals
    assert max(int(np.prod(shape)) for shape in residuals) <= arrays[0].size


def test_wrong_arguments_are_refused():
    q, k, v = make(np.random.default_rng(6), time=4, length=6)
    ids = jnp.ones((2, 4), jnp.int32)
    with pytest.raises(ValueError, match="key_segment_ids"):
        attention(q, k, v, scale=1.0, segment_ids=ids)
    with pytest.raises(ValueError, match="without segment_ids"):
        attention(q, k, v, scale=1.0, key_segment_ids=jnp.ones((2, 6), jnp.int32))
    with pytest.raises(ValueError, match="3 query heads"):
        attention(q[:, :, :3], k, v, scale=1.0)
