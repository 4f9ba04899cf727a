# SPDX-License-Identifier: Apache-2.0
"""Every pattern of layers, scanned against unrolled: gradients, caches and decoding."""

import functools
from typing import Any

import engine_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_tune.cache import ungroup_caches
from lora_tune.errors import InputError
from lora_tune.models.decoder import DecoderOptions
from lora_tune.training.state import split_model, unflatten

LAYERS = {"L": cases.LINEAR, "F": cases.FULL}


def spelled(kinds: str, **changes: Any) -> dict[str, Any]:
    """A configuration by its letters, of dense layers unless `changes` say otherwise."""
    return {"layer_types": [LAYERS[k] for k in kinds], "num_experts": 0, **changes}


def cycle(interval: int, offset: int, layers: int) -> dict[str, Any]:
    """A configuration by the place of the full-attention layer in its cycle."""
    return {
        "layer_types": None,
        "full_attention_interval": interval,
        "full_attention_layer_offset": offset,
        "num_hidden_layers": layers,
        "num_experts": 0,
    }


# name -> (the layers as they must run, the configuration)
PATTERNS = {
    "LLLF": ("LLLF" * 2, cycle(4, -1, 8)),
    "FLLL": ("FLLL" * 2, cycle(4, 0, 8)),
    "LFLL": ("LFLL" * 2, cycle(4, -3, 8)),
    "LLFLLF": ("LLFLLF", cycle(3, -1, 6)),
    "two full layers a cycle": ("LFFLFF", spelled("LFFLFF")),
    "LLLLF": ("LLLLF", cycle(5, 4, 5)),
    "F only": ("FFF", spelled("FFF")),
    "L only": ("LLL", spelled("LLL")),
    "6 layers, cycle of 4": ("LLLFLL", cycle(4, 3, 6)),
    "7 layers, cycle of 4": ("FLLLFLL", cycle(4, 0, 7)),
    "dense first layer": (
        "LFLFL",
        spelled("LFLFL", num_experts=4, mlp_only_layers=[0]),
    ),
}
ROWS = [[9], [6], [4, 5]]  # documents of each row; only the last row holds two
LENGTH, PROMPT, SIZE = 9, 7, 12


def config_of(name: str) -> dict[str, Any]:
    letters, changes = PATTERNS[name]
    return {"mlp_only_layers": [], "num_hidden_layers": len(letters), **changes}


@functools.cache
def batch() -> dict[str, np.ndarray]:
    """Three rows of documents, shorter ones padded on the left."""
    rows = []
    for seed, lengths in enumerate(ROWS):
        docs = cases.documents(lengths, seed=seed)
        rows.append(cases.row(docs, LENGTH, before=LENGTH - sum(lengths)))
    return cases.stack_rows(rows, len(rows))


class Case:
    """A pattern in one layout: its model, and the functions that both layouts must agree on."""

    def __init__(self, name: str, *, scanned: bool):
        self.model = cases.make(
            DecoderOptions(scan_layers=scanned, loss_chunk=10), **config_of(name)
        )
        self.split = split_model(self.model)

    def merge(self, trainable: Any) -> Any:
        weights = unflatten({**trainable, **self.split.frozen})
        return nnx.merge(self.split.graphdef, weights, copy=True)

    def full(self, trainable: Any) -> jax.Array:
        """Logits of the rows at once."""
        return self.merge(trainable)(batch()["tokens"], batch()["segment_ids"])

    def cached(self, trainable: Any) -> tuple[jax.Array, Any]:
        """The same logits from a prompt and single tokens after it, and the caches at the end."""
        tokens, ids = batch()["tokens"], batch()["segment_ids"]

        def decode(cache: Any, token: Any) -> Any:
            tokens, ids = token
            logits, cache = self.merge(trainable)(tokens[:, None], ids[:, None], cache=cache)
            return cache, logits[:, 0]

        cache = self.model.create_cache(len(ROWS), SIZE)
        first, cache = self.merge(trainable)(tokens[:, :PROMPT], ids[:, :PROMPT], cache=cache)
        cache, rest = jax.lax.scan(decode, cache, (tokens[:, PROMPT:].T, ids[:, PROMPT:].T))
        logits = jnp.concatenate([first, jnp.moveaxis(rest, 0, 1)], axis=1)
        return logits, ungroup_caches(self.model.plan, cache.layers)

    def gradients(self, trainable: Any) -> Any:
        """Of the summed loss, by the adapters."""

        def loss(trainable: Any) -> jax.Array:
            rows = batch()
            nll, _ = self.merge(trainable)(
                rows["tokens"], rows["segment_ids"], rows["positions"], targets=rows["targets"]
            )
            return jnp.sum(nll * rows["weights"])

        return jax.grad(loss)(trainable)

    def run(self, function: Any) -> Any:
        return cases.quick_jit(function)(self.split.trainable)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_decoding_by_scan_by_loop_and_without_caches_is_the_same(name):
    scanned, unrolled = Case(name, scanned=True), Case(name, scanned=False)
    kinds = scanned.model.config.layer_types
    assert "".join("F" if kind == cases.FULL else "L" for kind in kinds) == PATTERNS[name][0]
    full, (logits, caches) = scanned.run(lambda w: (scanned.full(w), scanned.cached(w)))
    real = batch()["segment_ids"] != 0
    assert np.abs(full[real]).max() > 0.1
    np.testing.assert_allclose(logits[real], full[real], rtol=1e-4, atol=1e-4)
    expected, expected_caches = unrolled.run(unrolled.cached)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    for i, (mine, other) in enumerate(zip(caches, expected_caches, strict=True)):
        assert type(mine) is type(other), i
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=f"layer {i}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two full layers a cycle", "7 layers, cycle of 4"])
def test_gradients_by_scan_and_by_loop_are_the_same(name):
    actual, expected = (
        cases.by_name(case.model, case.run(case.gradients))
        for case in (Case(name, scanned=True), Case(name, scanned=False))
    )
    cases.assert_close(actual, expected, 1e-5)


def test_depth_does_not_make_the_program_longer():
    def lines(layers: int) -> int:
        model = cases.abstract(**cycle(4, -1, layers), mlp_only_layers=[])
        graphdef, state = nnx.split(model)

        def loss(state: Any, tokens: jax.Array) -> jax.Array:
            nll, _ = nnx.merge(graphdef, state)(tokens, targets=tokens)
            return jnp.sum(nll)

        tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        return len(jax.jit(jax.grad(loss)).lower(state, tokens).as_text().splitlines())

    assert lines(48) == lines(8)


@pytest.mark.parametrize("offset", [4, -5, "last", True])
def test_an_offset_outside_the_cycle_is_refused(offset):
    with pytest.raises(InputError, match=r"full_attention_layer_offset is .* -4 to 3"):
        cases.abstract(**cycle(4, offset, 8))


def test_an_offset_that_contradicts_the_list_is_refused():
    listed = {**cycle(4, 0, 8), **spelled("LLLF" * 2)}
    with pytest.raises(InputError, match="layer_types puts full attention elsewhere"):
        cases.abstract(**listed)
    cases.abstract(**listed | {"full_attention_layer_offset": -1})
