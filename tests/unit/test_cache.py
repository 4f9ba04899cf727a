# SPDX-License-Identifier: Apache-2.0
"""Caches: every layer meets its own, rows continue, and a compiled decode step copies nothing."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import engine_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_tune.cache import Cache, Entry, RecurrentCache, group_caches, ungroup_caches
from lora_tune.generation import engine
from lora_tune.generation.sampling import Sampling
from lora_tune.layers.weights import NORMAL, weight
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.models.inputs import LayerInputs
from lora_tune.scan import plan_layers
from lora_tune.training.state import split_model

PATTERNS = [
    "LLLF" * 3,
    "FLLL" * 2,
    "LFLL" * 2,
    "LLFLLF",
    "LLLLF" * 2,
    "LFFLFF",
    "FFF",
    "LLL",
    "LLLFLL",
    "LLLFLLL",
    "FLLLFLL",
    "DLLFLLF",
    "LFD",
]


class NumberedLayer(nnx.Module):
    """A layer whose weight is its own number: it checks what its cache holds and adds 100."""

    def __init__(self, config: Any, kind: str, *, dtype: Any):
        self.number = weight((1,), dtype, axes=(None,), init=NORMAL)

    def __call__(self, h: jax.Array, inputs: Any, entry: Entry) -> tuple[jax.Array, Entry]:
        held = entry.read("state")
        return h + jnp.abs(held[0] - self.number[0]), entry.write(state=held + 100)


@dataclasses.dataclass(frozen=True)
class NumberedConfig:
    kinds: str
    vocab_size: int = 4
    hidden_size: int = 4
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True

    def layer_kinds(self) -> tuple[str, ...]:
        return tuple(self.kinds)


NUMBERED: Any = dataclasses.replace(
    cases.FAMILY,
    make_layer=NumberedLayer,
    make_cache=lambda config, kind, *, batch, size, dtype: sentinel(0),
)


def sentinel(value: float) -> RecurrentCache:
    return RecurrentCache(conv=jnp.zeros((1,)), state=jnp.full((1,), float(value)))


def states(caches: Any) -> list[float]:
    return [float(cache.state[0]) for cache in caches]


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("kinds", PATTERNS)
def test_every_layer_meets_its_own_cache_and_writes_to_it(kinds, scan):
    config: Any = NumberedConfig(kinds)
    model: Any = Decoder(NUMBERED, config, DecoderOptions(scan_layers=scan, remat="none"))
    numbers = model.plan.stacks()
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        value = jnp.zeros(variable.shape)
        if path[-1] == "number":
            value = jnp.asarray(numbers[path[:-1]], jnp.float32).reshape(variable.shape)
        variable.set_value(value)
    nnx.update(model, state)
    flat = [sentinel(i) for i in range(len(kinds))]
    grouped = group_caches(model.plan, flat)
    like = model.create_cache(1, 2)
    assert jax.tree.map(jnp.shape, grouped) == jax.tree.map(jnp.shape, like.layers)
    inputs = LayerInputs(jnp.ones((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    h, after = model._run_layers(jnp.zeros((1, 1, 4)), inputs, None, grouped)
    assert np.all(np.asarray(h) == 0), "a layer read the cache of another"
    assert states(ungroup_caches(model.plan, after)) == [100 + i for i in range(len(kinds))]


@pytest.mark.parametrize("kinds", PATTERNS)
def test_a_flat_list_comes_back_in_order(kinds):
    plan = plan_layers(kinds)
    back = ungroup_caches(plan, group_caches(plan, [sentinel(i) for i in range(len(kinds))]))
    assert states(back) == list(range(len(kinds)))
    with pytest.raises(ValueError, match=f"{len(kinds) + 1} caches for {len(kinds)} decoder"):
        group_caches(plan, [sentinel(0)] * (len(kinds) + 1))


class Player:
    """A small hybrid with caches, whose calls are compiled once per number of tokens."""

    def __init__(self, **options: Any):
        self.model: Any = cases.make(
            DecoderOptions(**options), num_experts=0, layer_types=None, num_hidden_layers=4
        )
        self.full = cases.quick_jit(lambda tokens, ids: self.model(tokens, ids))
        self.step = cases.quick_jit(lambda tokens, ids, c: self.model(tokens, ids, cache=c))

    def play(self, tokens: Any, ids: Any, cuts: list[int], size: int = 16) -> tuple[Any, Cache]:
        """Logits of the row played in pieces that end at `cuts`."""
        cache, out = self.model.create_cache(tokens.shape[0], size), []
        for start, stop in zip([0, *cuts], [*cuts, tokens.shape[1]], strict=True):
            logits, cache = self.step(tokens[:, start:stop], ids[:, start:stop], cache)
            out.append(logits)
        return np.concatenate(out, axis=1), cache


@pytest.fixture(scope="module")
def player() -> Player:
    return Player()


def tokens_like(ids: Any) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 46, np.shape(ids)), jnp.int32)


IDS = {
    "one document": [1] * 10,
    "padding on the left": [0, 0, 0] + [1] * 7,
    "a document ends inside a call": [1, 1, 1, 1, 2, 2, 2, 2, 2, 2],
    "a document ends between calls": [1, 1, 1, 1, 1, 1, 2, 2, 2, 2],
    "a call of padding alone": [0, 0, 0, 0, 0, 0, 1, 1, 1, 1],
}


@pytest.mark.parametrize("name", IDS)
def test_pieces_equal_the_whole(player, name):
    ids = jnp.asarray([IDS[name], IDS["one document"]], jnp.int32)
    tokens = tokens_like(ids)
    played, cache = player.play(tokens, ids, [6, 8, 9])
    real = np.asarray(ids) != 0
    np.testing.assert_allclose(
        played[real], np.asarray(player.full(tokens, ids))[real], rtol=1e-4, atol=1e-4
    )
    assert int(cache.index) == 10
    np.testing.assert_array_equal(cache.segment_ids[:, :10], ids)
    assert not np.any(cache.segment_ids[:, 10:])


def test_a_finished_row_stands_still(player):
    ids = jnp.asarray([[1] * 6 + [0, 0], [1] * 8], jnp.int32)
    tokens = tokens_like(ids)
    _, before = player.play(tokens[:, :6], ids[:, :6], [])
    _, after = player.play(tokens, ids, [6, 7])
    _, other = player.play(tokens.at[0, 6:].set(3), ids, [6, 7])
    for mine, held, changed in zip(
        *(ungroup_caches(player.model.plan, cache.layers) for cache in (before, after, other)),
        strict=True,
    ):
        if isinstance(mine, RecurrentCache):
            for name in ("conv", "state"):
                row = [getattr(cache, name)[0] for cache in (mine, held, changed)]
                np.testing.assert_array_equal(row[0], row[1])
                np.testing.assert_array_equal(row[1], row[2])


def test_bfloat16_decoding_stays_near_the_whole():
    """Within 0.03 of the largest logit: about four units in the last place of bfloat16."""
    player = Player(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    ids = jnp.asarray([IDS["padding on the left"], IDS["one document"]], jnp.int32)
    tokens = tokens_like(ids)
    played, cache = player.play(tokens, ids, [6, 8, 9])
    full = np.asarray(player.full(tokens, ids), np.float32)
    real = np.asarray(ids) != 0
    error = np.abs(np.asarray(played, np.float32) - full)[real].max()
    assert error < 0.03 * np.abs(full[real]).max()
    states = [entry for entry in cache.layers if isinstance(entry, RecurrentCache)]
    assert all(entry.state.dtype == jnp.float32 for entry in states)


COPY = re.compile(r"= \(?(\w+\[[\d,]*\])\{[^ ]* (?:.* )?copy(?:-start)?\(")


def whole_arrays(model: Any, cache: Cache) -> Mapping[str, str]:
    """HLO type -> name, of all stacked weights and of all caches."""
    named = {"/".join(map(str, p)): v.get_value() for p, v in nnx.to_flat_state(nnx.state(model))}
    named |= {f"cache {i}": leaf for i, leaf in enumerate(jax.tree.leaves(cache.layers))}
    short = {"float32": "f32", "bfloat16": "bf16"}
    return {
        f"{short[str(array.dtype)]}[{','.join(map(str, array.shape))}]": name
        for name, array in named.items()
        if array.size > 64
    }


def test_a_decode_step_copies_no_weight_and_no_cache():
    """The engine's own step: weights are inputs, the state is donated."""
    split = split_model(cases.make())
    weights = {**split.frozen, **split.trainable}
    program = engine.program_of(split.graphdef, engine.place_of(weights))
    state = program.create(weights, 2, 24, True)
    ones = jnp.ones((2, 1), jnp.int32)
    draw = (Sampling(temperature=1.0, repetition_penalty=1.1), jax.random.key(0))
    lowered = program.advance.lower(
        weights, state, ones, ones, 1, *draw, jnp.arange(2), jnp.full(8, -1)
    )
    compiled = lowered.compile()
    whole = whole_arrays(split.merge(), state.cache)
    copies = {whole[kind] for kind in COPY.findall(compiled.as_text()) if kind in whole}
    # XLA:CPU copies the convolution windows (a shift within one buffer), 1/100 of a state's size;
    # finding them shows that copies are found.
    assert copies == {"cache 0"}
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= donated
