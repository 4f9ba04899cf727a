# SPDX-License-Identifier: Apache-2.0
"""What layers keep for the backward pass: every policy trains alike, each recomputes the rest."""

import functools

import engine_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_tune import build, scan
from lora_tune.errors import InputError
from lora_tune.models.decoder import DecoderOptions
from lora_tune.training.state import split_model
from lora_tune.training.step import token_sums

LAYERS = {
    "layer_types": [cases.LINEAR, cases.FULL] * 2,
    "mlp_only_layers": [1, 3],
    "num_hidden_layers": 4,
}
BATCH = cases.stack_rows([cases.row(cases.documents([7, 5]), 12)], 1)


def traced(remat, *, scanned=True):
    """The trace of loss and gradients of the adapters, and the adapters."""
    model = cases.make(DecoderOptions(remat=remat, scan_layers=scanned), **LAYERS)
    split = split_model(model)
    batch = {name: jnp.asarray(array) for name, array in BATCH.items()}

    def loss(trainable):
        return token_sums(split.merge(trainable), batch)[0]

    f = cases.quick_jit(jax.value_and_grad(loss))
    return f.trace(split.trainable), split.trainable


@functools.cache
def outcome(remat):
    trace, adapters = traced(remat)
    return trace.lower().compile()(adapters)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [name for name in scan.REMAT if name != "none"])
def test_loss_and_gradients_do_not_depend_on_what_is_kept(remat):
    loss, gradients = outcome(remat)
    expected_loss, expected = outcome("none")
    assert expected_loss > 0
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert any(np.abs(array).max() > 0 for array in expected.values())
    cases.assert_close(gradients, expected, 1e-5)


@functools.cache
def work(remat, scanned):
    """How often the program runs, in all its layers: routing, plain and batched products."""
    jaxpr = traced(remat, scanned=scanned)[0].jaxpr
    count = {"routing": 0, "plain": 0, "batched": 0}
    for eqn, trips in cases.equations(jaxpr.jaxpr):
        if eqn.primitive.name == "top_k":
            count["routing"] += trips
        if eqn.primitive.name == "dot_general":
            batched = any(eqn.params["dimension_numbers"][1])
            count["batched" if batched else "plain"] += trips
    return count


@pytest.mark.parametrize("scanned", [True, False])
def test_each_policy_recomputes_what_it_does_not_keep(scanned):
    full, dots, save_attention, none, offload = (
        work(name, scanned) for name in ("full", "dots", "save_attention", "none", "offload")
    )
    sparse = 2
    # Where tokens go is decided once: rounded another way, it might be decided otherwise.
    assert all(w["routing"] == sparse for w in (full, dots, save_attention, none, offload))
    assert offload == full
    # Of an adapter, `x @ A` alone runs again: what it puts out is as thin as it is cheap. Two
    # layers of linear attention have 3 projections and a shared expert of 4, two others 4 and 3.
    assert dots["plain"] == none["plain"] + 2 * 7 + 2 * 7 < full["plain"]
    # Of batched products those of the experts alone: 3 projections with W, A and B, in two layers.
    # The delta rule's states are kept, so its chunks do not run once more.
    assert dots["batched"] == none["batched"] + 2 * 3 * 3 < full["batched"]
    # The two products of the two attention layers do not run again; those of linear attention
    # come with the states, which do.
    assert full["batched"] - save_attention["batched"] >= 4
    assert save_attention["plain"] == full["plain"]


def test_a_name_that_is_none_of_them():
    with pytest.raises(InputError, match="'half', expected one of full, dots, save_attention"):
        DecoderOptions(remat="half")


def test_offload_is_refused_where_the_host_is_the_device():
    model = cases.abstract(DecoderOptions(remat="offload"), **LAYERS)
    with pytest.raises(InputError, match=r"model\.remat=offload .* is a cpu"):
        build.load_weights(model, mesh=None, random_seed=0)
