# SPDX-License-Identifier: Apache-2.0
"""Mixers over rows that are cut along time, against the same mixers over whole rows."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from lora_tune import sharding
from lora_tune.errors import InputError
from lora_tune.layers import sequence
from lora_tune.models.attention import attend
from lora_tune.models.inputs import LayerInputs

TIME, WIDTH = 16, 4


def arrays(heads, keys):
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, TIME, n, WIDTH)), jnp.float32) for n in (heads, keys, keys)
    )
    segments = jnp.asarray([[1] * 5 + [2] * 9 + [0] * 2, [3] * 16], jnp.int32)
    return q, k, v, segments


def run(q, k, v, segments):
    y = attend(q, k, v, LayerInputs(segments, segments))
    return jnp.sum(jnp.sin(y)), y


def cut(count):
    """`run` with the rows over `count` devices."""
    mesh = sharding.make_mesh(sequence=count)

    def local(*parts):
        with sharding.manual(mesh):
            return run(*parts)[1]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=P(None, "sequence"),
        out_specs=P(None, "sequence"),
        axis_names=set(sharding.MANUAL_AXES),
        check_vma=False,
    )

    def whole(*arguments):
        y = mapped(*arguments)
        return jnp.sum(jnp.sin(y)), y

    return whole


@pytest.mark.parametrize(("heads", "keys", "count"), [(4, 2, 2), (8, 2, 4), (4, 1, 4), (4, 4, 4)])
def test_attention_over_cut_rows(heads, keys, count):
    """Fewer key/value heads than devices too: each query still reads its own."""
    arguments = arrays(heads, keys)
    grad = [jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True)) for f in (run, cut(count))]
    expected, actual = (jax.tree.leaves(f(*arguments)) for f in grad)
    for got, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=2e-6)


def test_heads_that_cannot_be_dealt_out_are_named():
    with pytest.raises(InputError, match=r"mesh\.sequence=4 does not divide the 6 heads"):
        jax.eval_shape(cut(4), *arrays(6, 2))


def test_whole_rows_are_left_alone():
    q, *_ = arrays(4, 2)
    assert sequence.deal_heads(q) is q
    assert sequence.collect_heads(q) is q
    assert sequence.whole_rows(q) is q
    assert sequence.own_heads(q, 2) is q


@pytest.mark.parametrize(
    ("heads", "said"),
    [({"num_attention_heads": 6}, "6 heads"), ({"linear_num_key_heads": 2}, "2 heads")],
)
def test_heads_are_checked_before_weights_are_loaded(heads, said):
    fits = {"num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 4}
    sequence.check_heads(4, SimpleNamespace(**fits))
    with pytest.raises(InputError, match=rf"mesh\.sequence=4 does not divide the {said}"):
        sequence.check_heads(4, SimpleNamespace(**{**fits, **heads}))
