# SPDX-License-Identifier: Apache-2.0
"""The causal convolution against a plain loop, torch, and its own continuation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_tune.layers.conv import causal_conv as causal_conv_eager
from lora_tune.layers.segments import mask_padding, running_segments

causal_conv = jax.jit(causal_conv_eager)

IDS = np.array(
    [
        [1, 1, 1, 1, 2, 3, 3, 0, 0, 4, 4, 4],
        [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0] * 12,
        [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7],
    ]
)


def loop(x, kernel, ids):
    """One row; an input counts when every token between it and the output is of its document."""
    y = np.zeros_like(x)
    for t in range(len(ids)):
        for back in range(len(kernel)):
            s = t - back
            if s >= 0 and ids[t] != 0 and np.all(ids[s : t + 1] == ids[t]):
                y[t] += kernel[len(kernel) - 1 - back] * x[s]
    return y


def last_inputs(x, ids, count):
    """The last inputs of the document that runs at the end, zeros in front."""
    real = [t for t in range(len(ids)) if ids[t] != 0]
    own = [x[t] for t in real if ids[t] == ids[real[-1]]][-count:] if count else []
    return np.concatenate(
        [np.zeros((count - len(own), x.shape[1])), np.reshape(own, (-1, x.shape[1]))]
    )


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
def test_segments_equal_a_plain_loop(taps):
    rng = np.random.default_rng(taps)
    x, kernel = rng.normal(size=(5, 12, 3)), rng.normal(size=(taps, 3))
    y, state = causal_conv(
        jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32), segment_ids=jnp.asarray(IDS)
    )
    for row in range(5):
        np.testing.assert_allclose(y[row], loop(x[row], kernel, IDS[row]), atol=1e-5)
        expected = last_inputs(x[row], IDS[row], taps - 1)
        np.testing.assert_allclose(state[row], expected, atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("taps", [1, 4])
def test_equals_torch(taps):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 9, 5)).astype(np.float32)
    kernel = rng.normal(size=(taps, 5)).astype(np.float32)
    y, state = causal_conv(jnp.asarray(x), jnp.asarray(kernel))
    weight = torch.tensor(kernel.T[:, None].copy())
    theirs = torch.nn.functional.conv1d(torch.tensor(x).mT, weight, padding=taps - 1, groups=5)[
        ..., :9
    ].mT
    np.testing.assert_allclose(y, theirs, atol=1e-5)
    np.testing.assert_array_equal(state, x[:, 9 - (taps - 1) :])


@pytest.mark.parametrize("cut", [1, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_two_calls_equal_one(cut, masked):
    """The cut falls inside documents, before and after padding."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, 12, 3)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    ids = jnp.asarray([[1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3], [0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 0, 0]])
    parts = (ids[:, :cut], ids[:, cut:]) if masked else (None, None)
    expected = causal_conv(x, kernel, segment_ids=ids if masked else None)
    first, state = causal_conv(x[:, :cut], kernel, segment_ids=parts[0])
    second, state = causal_conv(x[:, cut:], kernel, segment_ids=parts[1], state=state)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), expected[0], atol=1e-6)
    np.testing.assert_array_equal(state, expected[1])


@pytest.mark.parametrize(("left", "right"), [(0, 0), (3, 2)])
def test_decoding_after_a_padded_prompt(left, right):
    """Padding on either side of either call pushes no input out of the window."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(1, 11, 3)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    expected, _ = causal_conv(x, kernel)

    def padded(part):
        wide = jnp.pad(part, ((0, 0), (left, right), (0, 0)), constant_values=9.0)
        real = jnp.ones((1, part.shape[1]), jnp.int32)
        return wide, jnp.pad(real, ((0, 0), (left, right)))

    state, got = None, []
    for start, stop in ((0, 6), (6, 7), (7, 9), (9, 11)):
        wide, ids = padded(x[:, start:stop])
        y, state = causal_conv(wide, kernel, segment_ids=ids, state=state)
        got.append(y[:, left : left + stop - start])
    np.testing.assert_allclose(jnp.concatenate(got, 1), expected, atol=1e-6)


def test_idle_row_keeps_its_state():
    state = jnp.arange(6.0).reshape(1, 3, 2)
    ids = jnp.zeros((1, 2), jnp.int32)
    _, after = causal_conv(jnp.ones((1, 2, 2)), jnp.ones((4, 2)), segment_ids=ids, state=state)
    np.testing.assert_array_equal(after, state)


def test_gradient_stays_in_the_document():
    x = jnp.ones((1, 12, 1)).at[0, 7].set(jnp.nan)
    ids = jnp.asarray(IDS[:1])

    def loss(x):
        y, _ = causal_conv(x, jnp.ones((4, 1)), segment_ids=ids)
        return jnp.sum(y[0, 9:])

    np.testing.assert_array_equal(jax.grad(loss)(x)[0, :, 0], [0] * 9 + [3, 2, 1])


def test_bfloat16_sums_in_float32():
    x = jnp.full((1, 4, 1), 256.0, jnp.bfloat16).at[0, 3].set(1.0)
    y, state = causal_conv(x, jnp.asarray([[0.0], [-1.0], [1.0], [1.0]], jnp.bfloat16))
    assert y.dtype == state.dtype == jnp.bfloat16
    assert float(y[0, 3, 0]) == 1.0


def test_runs_go_on_through_padding():
    real, run = running_segments(jnp.asarray([[0, 5, 0, 5, 2, 0, 5, 5, 0], [0] * 9]))
    assert real.tolist()[0] == [False, True, False, True, True, False, True, True, False]
    assert run.tolist() == [[0, 0, 0, 0, 1, 1, 2, 2, 2], [0] * 9]


def test_mask_padding_removes_what_stood_there():
    x = jnp.full((1, 2, 3, 4), jnp.nan).at[0, 1].set(2.0)
    masked = mask_padding(x, jnp.asarray([[0, 1]]))
    np.testing.assert_array_equal(masked[0, :, 0, 0], [0.0, 2.0])
    assert mask_padding(x, None) is x
