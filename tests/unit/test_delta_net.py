# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule against transformers, a float64 loop, and each document run alone."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_tune.layers.delta_chunks import unit_lower_inverse
from lora_tune.layers.delta_net import gated_delta_rule, recurrent_gated_delta_rule

NAMES = ("q", "k", "v", "g", "beta")
DECAY = {"slow": 1e-5, "medium": 0.2, "fast": 8.0}
# One row of each kind: boundaries inside chunks, several in one chunk, padding everywhere.
ROWS = {
    "boundaries": [1] * 17 + [2] * 3 + [3] * 1 + [4] * 50 + [5] * 59,
    "left": [0] * 21 + [1] * 109,
    "right": [1] * 64 + [2] * 36 + [0] * 30,
    "middle": [0] * 2 + [1] * 9 + [0] * 5 + [1] * 20 + [0] * 40 + [2] * 44 + [0] * 4 + [2] * 6,
    "empty": [0] * 130,
    "single tokens": [*range(1, 70), *([0] * 3), *range(70, 128)],
    "id comes back": [1] * 40 + [2] * 50 + [0] * 5 + [1] * 35,
}


def make(rng, *, batch=2, time=65, key_heads=2, groups=2, dim=8, value_dim=6, decay="medium"):
    heads = key_heads * groups
    shapes = {
        "q": (batch, time, key_heads, dim),
        "k": (batch, time, key_heads, dim),
        "v": (batch, time, heads, value_dim),
    }
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    arrays["g"] = -DECAY[decay] * rng.uniform(size=(batch, time, heads))
    arrays["beta"] = rng.uniform(size=(batch, time, heads))
    return tuple(jnp.asarray(arrays[name], jnp.float32) for name in NAMES)


def cotangents(rng, rule, inputs, **kwargs):
    shapes = jax.eval_shape(partial(rule, **kwargs), *inputs)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)


# These tests spend their time in the compiler, not in the maths.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@cache
def compiled(rule, chunk_size):
    """One jitted function a rule, so that cases of equal shapes compile once."""
    if chunk_size is not None:
        rule = partial(rule, chunk_size=chunk_size)

    def loss(arrays, weights, kwargs):
        results = rule(*arrays, **kwargs)
        terms = jax.tree.map(lambda x, w: jnp.sum(x.astype(jnp.float32) * w), results, weights)
        return sum(jax.tree.leaves(terms)), results

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)


def with_gradients(rule, inputs, weights, *, chunk_size=None, **kwargs):
    """Outputs, state, and the gradient of a random projection of both to every input."""
    (_, results), grads = compiled(rule, chunk_size)(inputs, weights, kwargs)
    return *results, *grads


def assert_close(got, expected, tolerance=1e-5):
    for name, a, b in zip(("out", "state", *NAMES), got, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        bound = tolerance * max(1.0, np.abs(b).max(initial=0.0))
        assert np.abs(a - b).max(initial=0.0) <= bound, name


def loop(q, k, v, g, beta, ids):
    """The definition for one row, float64, one head at a time."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    time, heads, value_dim = v.shape
    groups = heads // q.shape[1]
    out, states = np.zeros_like(v), np.zeros((heads, q.shape[2], value_dim))
    for head in range(heads):
        state, previous = states[head], None
        for t in range(time):
            if ids[t] == 0:
                continue
            if ids[t] != previous:
                state[:] = 0
            previous = ids[t]
            query, key = q[t, head // groups], k[t, head // groups]
            query = query / np.sqrt(query @ query + 1e-6) / np.sqrt(len(query))
            key = key / np.sqrt(key @ key + 1e-6)
            state *= np.exp(g[t, head])
            state += np.outer(key, beta[t, head] * (v[t, head] - key @ state))
            out[t, head] = query @ state
    return out, states


@pytest.mark.parametrize("rule", [gated_delta_rule, recurrent_gated_delta_rule])
def test_definition_with_segments(rule):
    inputs = make(np.random.default_rng(0), batch=len(ROWS), time=130, decay="slow")
    out, state = jax.jit(rule)(*inputs, segment_ids=jnp.asarray(list(ROWS.values())))
    for row, ids in enumerate(ROWS.values()):
        expected = loop(*(x[row] for x in inputs), ids)
        assert np.abs(out[row] - expected[0]).max() < 1e-5
        assert np.abs(state[row] - expected[1]).max() < 1e-5


@pytest.mark.parametrize(
    ("time", "groups", "chunk_size", "decay"),
    [
        (1, 1, 64, "medium"),
        (2, 2, 64, "slow"),
        (63, 4, 64, "fast"),
        (64, 2, 64, "slow"),
        (65, 2, 1, "medium"),
        (65, 4, 7, "slow"),
        (130, 4, 64, "medium"),
        (200, 2, 128, "slow"),
    ],
)
def test_chunked_equals_recurrent(time, groups, chunk_size, decay):
    rng = np.random.default_rng(time + groups)
    inputs = make(rng, time=time, groups=groups, decay=decay)
    weights = cotangents(rng, recurrent_gated_delta_rule, inputs)
    expected = with_gradients(recurrent_gated_delta_rule, inputs, weights)
    got = with_gradients(gated_delta_rule, inputs, weights, chunk_size=chunk_size)
    assert_close(got, expected)


@pytest.mark.parametrize("decay", DECAY)
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_chunked_equals_recurrent_with_segments(chunk_size, decay):
    rng = np.random.default_rng(1)
    ids = jnp.asarray(list(ROWS.values()))
    inputs = make(rng, batch=len(ROWS), time=130, decay=decay)
    weights = cotangents(rng, recurrent_gated_delta_rule, inputs)
    expected = with_gradients(recurrent_gated_delta_rule, inputs, weights, segment_ids=ids)
    got = with_gradients(gated_delta_rule, inputs, weights, segment_ids=ids, chunk_size=chunk_size)
    assert_close(got, expected)


def test_random_segments():
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 30, size=(7, 40))
    rows = [np.repeat(np.arange(1, 41), row)[:130] for row in lengths]
    ids = np.stack(rows) * (rng.uniform(size=(7, 130)) > 0.2)
    inputs = make(rng, batch=7, time=130, decay="slow")
    weights = cotangents(rng, recurrent_gated_delta_rule, inputs)
    kwargs = {"segment_ids": jnp.asarray(ids, jnp.int32)}
    expected = with_gradients(recurrent_gated_delta_rule, inputs, weights, **kwargs)
    got = with_gradients(gated_delta_rule, inputs, weights, chunk_size=64, **kwargs)
    assert_close(got, expected)


def test_packed_equals_each_document_alone():
    """Slow decay: a state that leaks into the next document would not fade away.

    Each document alone is a row of its own, cut after it only by the causality of the rule.
    """
    rng = np.random.default_rng(3)
    lengths, pads = [37, 1, 2, 60, 30, 64], [3, 0, 5, 0, 1, 0]
    time, longest = sum(lengths) + sum(pads), max(lengths)
    inputs = make(rng, batch=1, time=time, decay="slow")
    ends = np.cumsum(np.add(lengths, pads))
    spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    ids = np.zeros((1, time), np.int32)
    for number, span in enumerate(spans, start=1):
        ids[0, span] = number

    def rows(x):
        parts = [x[0, span] for span in spans]
        ends = [[(0, longest - len(part))] + [(0, 0)] * (part.ndim - 1) for part in parts]
        return jnp.stack([jnp.pad(p, e) for p, e in zip(parts, ends, strict=True)])

    weights = cotangents(rng, gated_delta_rule, inputs)
    out, state, *grads = with_gradients(
        gated_delta_rule, inputs, weights, segment_ids=jnp.asarray(ids)
    )
    only_last = jnp.zeros((len(spans), *weights[1].shape[1:])).at[-1].set(weights[1][0])
    alone = with_gradients(
        recurrent_gated_delta_rule, tuple(map(rows, inputs)), (rows(weights[0]), only_last)
    )
    inside = np.arange(longest)[None, :] < np.array(lengths)[:, None]
    alone_out = jnp.where(inside[..., None, None], alone[0], 0.0)
    assert_close((rows(out), state, *map(rows, grads)), (alone_out, alone[1][-1:], *alone[2:]))
    for x in (out, *grads):
        assert not np.any(np.asarray(x)[ids == 0])


@pytest.mark.parametrize("rule", [gated_delta_rule, recurrent_gated_delta_rule])
@pytest.mark.parametrize("garbage", [0.0, 7.0, np.nan])
def test_padding_changes_nothing(rule, garbage):
    """Left, middle and right padding, whatever it holds, against the row without any."""
    rng = np.random.default_rng(4)
    inputs = make(rng, batch=1, time=70, decay="slow")
    weights = cotangents(rng, rule, inputs)
    expected = with_gradients(rule, inputs, weights)
    real = np.sort(5 + rng.permutation(125)[:70])

    def padded(x, fill):
        return jnp.full((1, 140, *x.shape[2:]), fill, x.dtype).at[:, real].set(x)

    ids = jnp.zeros((1, 140), jnp.int32).at[:, real].set(3)
    wide = tuple(padded(x, garbage) for x in inputs)
    out, state, *grads = with_gradients(
        rule, wide, (padded(weights[0], 1.0), weights[1]), segment_ids=ids
    )
    assert_close((out[:, real], state, *(x[:, real] for x in grads)), expected)
    pads = np.setdiff1d(np.arange(140), real)
    for x in (out, *grads):
        assert not np.any(np.asarray(x)[:, pads])


@pytest.mark.parametrize(
    ("rule", "cut"),
    [(gated_delta_rule, 1), (gated_delta_rule, 50), (recurrent_gated_delta_rule, 50)],
)
def test_two_calls_equal_one(rule, cut):
    """The state carries a row on, through the second part's left padding and into its segments."""
    rng = np.random.default_rng(5)
    row = jnp.asarray([[1] * 70 + [2] * 30, [0] * 10 + [1] * 60 + [0] * 30])
    inputs = make(rng, time=100, decay="slow")
    weights = cotangents(rng, rule, inputs)
    expected = with_gradients(recurrent_gated_delta_rule, inputs, weights, segment_ids=row)

    def in_two(*arrays):
        first, state = rule(*(x[:, :cut] for x in arrays), segment_ids=row[:, :cut])
        second, state = rule(
            *(x[:, cut:] for x in arrays), segment_ids=row[:, cut:], initial_state=state
        )
        return jnp.concatenate([first, second], axis=1), state

    assert_close(with_gradients(in_two, inputs, weights), expected)


def test_zero_rows_have_finite_gradients():
    inputs = tuple(jnp.zeros_like(x) for x in make(np.random.default_rng(6), time=70))
    weights = cotangents(np.random.default_rng(6), gated_delta_rule, inputs)
    for rule in (gated_delta_rule, recurrent_gated_delta_rule):
        for x in with_gradients(rule, inputs, weights):
            assert np.all(np.isfinite(x))


def test_hard_forgetting_stays_finite():
    """exp(c_i - c_j) above the diagonal would be exp(3200) here."""
    q, k, v, g, beta = make(np.random.default_rng(7), time=64)
    inputs = (q, k, v, jnp.full_like(g, -50.0), beta)
    weights = cotangents(np.random.default_rng(7), gated_delta_rule, inputs)
    expected = with_gradients(recurrent_gated_delta_rule, inputs, weights)
    assert_close(with_gradients(gated_delta_rule, inputs, weights), expected)


def test_bfloat16_inputs_lose_only_their_own_rounding():
    """All maths is float32: against float32 on the same rounded inputs, half an output ulp."""
    rng = np.random.default_rng(8)
    q, k, v, g, beta = make(rng, time=130)
    half = (*(x.astype(jnp.bfloat16) for x in (q, k, v)), g, beta)
    out, state = jax.jit(gated_delta_rule)(*half)
    expected = recurrent_gated_delta_rule(*(x.astype(jnp.float32) for x in half))
    assert out.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float32), expected[0], rtol=2.0**-8, atol=1e-5)
    np.testing.assert_allclose(state, expected[1], atol=1e-5)


def test_value_heads_must_divide():
    q, k, v, g, beta = make(np.random.default_rng(9), time=3)
    with pytest.raises(ValueError, match="3 value heads cannot be shared by 2 key heads"):
        gated_delta_rule(q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3])


@pytest.mark.parametrize("size", [1, 2, 3, 16, 37, 64])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_ladder_equals_numpy_inverse(size, spread):
    """Entries well above 1, where a product of powers of L would lose everything."""
    rng = np.random.default_rng(size)
    lower = np.tril(rng.uniform(-spread, spread, size=(2, 3, size, size)), -1)
    if spread > 1:
        lower *= rng.uniform(size=lower.shape) < 2 / size
    got = unit_lower_inverse(jnp.asarray(lower + np.triu(np.ones((size, size))), jnp.float32))
    expected = np.linalg.inv(np.eye(size) + lower)
    assert np.abs(got - expected).max() <= 2e-6 * np.abs(expected).max()


def test_gradient_saves_inputs_and_chunk_states():
    """Kept for the backward pass: the operands in their own dtype and one state a chunk."""
    inputs = make(np.random.default_rng(10), time=256, key_heads=1, groups=1, dim=16, value_dim=32)
    inputs = tuple(x.astype(jnp.bfloat16) for x in inputs)
    pull = jax.eval_shape(lambda *x: jax.vjp(gated_delta_rule, *x)[1], *inputs)
    kept = {(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(pull) if leaf.shape}
    tokens = {((2, 256, width), "bfloat16") for width in (16, 32, 1)}
    marks = {((2, 256), "bool"), ((2, 256), "int32")}
    assert kept == tokens | marks | {((4, 2, 1, 16, 1, 32), "float32")}


@pytest.mark.parity
@pytest.mark.parametrize(
    "name", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"]
)
@pytest.mark.parametrize("rule", [gated_delta_rule, recurrent_gated_delta_rule])
@pytest.mark.parametrize("groups", [1, 4])
def test_equals_transformers(name, rule, groups):
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    rng = np.random.default_rng(11)
    inputs = make(rng, time=130, groups=groups)
    state = rng.normal(size=(2, 2 * groups, 8, 6)).astype(np.float32)
    weights = cotangents(rng, rule, inputs)
    theirs = [torch.tensor(np.asarray(x), requires_grad=True) for x in inputs]
    out, last = getattr(modeling, name)(
        *theirs,
        initial_state=torch.tensor(state),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    loss = (out * torch.tensor(np.asarray(weights[0]))).sum()
    (loss + (last * torch.tensor(np.asarray(weights[1]))).sum()).backward()
    expected = (out.detach(), last.detach(), *(x.grad for x in theirs))
    assert_close(with_gradients(rule, inputs, weights, initial_state=jnp.asarray(state)), expected)
