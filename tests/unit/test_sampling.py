# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_tune.errors import InputError
from lora_tune.generation.sampling import (
    Sampling,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    make_sampling,
    next_tokens,
    penalise_repetition,
)


def logits_of(*probabilities: float) -> jax.Array:
    return jnp.log(jnp.array([probabilities], jnp.float32))


def kept(logits: jax.Array) -> list[int]:
    return np.flatnonzero(np.isfinite(np.asarray(logits)[0])).tolist()


@pytest.mark.parametrize(("k", "left"), [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (9, [0, 1, 2, 3])])
def test_top_k(k: int, left: list[int]) -> None:
    assert kept(keep_top_k(logits_of(0.2, 0.4, 0.1, 0.3), k)) == left


def test_top_k_keeps_what_is_as_likely_as_the_last() -> None:
    assert kept(keep_top_k(logits_of(0.1, 0.25, 0.4, 0.25), 2)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("p", "left"),
    [(0.05, [1]), (0.39, [1]), (0.41, [1, 3]), (0.71, [0, 1, 3]), (0.95, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_fewest_that_reach_p(p: float, left: list[int]) -> None:
    assert kept(keep_top_p(logits_of(0.2, 0.4, 0.1, 0.3), p)) == left


@pytest.mark.parametrize(("p", "left"), [(0.2, [0, 1, 2, 3]), (0.3, [0, 1, 3]), (1.0, [1])])
def test_min_p_is_relative_to_the_most_likely(p: float, left: list[int]) -> None:
    assert kept(keep_min_p(logits_of(0.2, 0.4, 0.1, 0.3), p)) == left


def test_repetition_penalty_lowers_what_was_seen_whatever_its_sign() -> None:
    logits = jnp.array([[2.0, -2.0, 2.0, -2.0]])
    seen = jnp.array([[True, True, False, False]])
    np.testing.assert_array_equal(penalise_repetition(logits, seen, 4.0), [[0.5, -8.0, 2.0, -2.0]])


def keys(count: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def test_greedy_takes_the_most_likely_after_the_penalty() -> None:
    logits = jnp.array([[1.0, 3.0, 2.0]] * 2, jnp.bfloat16)
    seen = jnp.array([[False, True, False], [False, False, False]])
    sampling = make_sampling(repetition_penalty=2.0)
    np.testing.assert_array_equal(next_tokens(logits, sampling, keys(2), seen)[0], [2, 1])


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20000 draws, at temperature 2, of the three tokens that top_k leaves."""
    count = 20_000
    logits = jnp.broadcast_to(jnp.array([1.0, 0.0, 2.0, -3.0]), (count, 4))
    sampling = make_sampling(temperature=2.0, top_k=3)
    drawn = np.bincount(next_tokens(logits, sampling, keys(count))[0], minlength=4)
    weights = np.exp(np.array([1.0, 0.0, 2.0]) / 2)
    expected = count * weights / weights.sum()
    assert drawn[3] == 0
    # 13.8 is exceeded by chance once in a thousand seeds (2 degrees of freedom).
    assert ((drawn[:3] - expected) ** 2 / expected).sum() < 13.8


def test_a_row_depends_on_its_own_key_and_logits_only() -> None:
    logits = jax.random.normal(jax.random.key(9), (6, 50))
    sampling = make_sampling(temperature=1.5, top_p=0.9, min_p=0.01)
    together, _ = next_tokens(logits, sampling, keys(6))
    for i in range(6):
        alone, _ = next_tokens(logits[i : i + 1], sampling, keys(6)[i : i + 1])
        assert alone[0] == together[i]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_k": 2, "top_p": 0.5}])
def test_no_token_is_chosen_where_logits_are_not_finite(settings: dict[str, float]) -> None:
    nan, inf = np.nan, np.inf
    rows = [[1, nan, 0], [1, inf, 0], [-inf, -inf, -inf], [nan, nan, nan], [1, -inf, 0], [1, 2, 3]]
    _, sound = next_tokens(jnp.array(rows), make_sampling(**settings), keys(6))
    assert sound.tolist() == [False, False, False, False, True, True]


def test_what_is_off_is_none() -> None:
    assert make_sampling() == Sampling()
    assert jax.tree.leaves(make_sampling()) == []
    on = make_sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    of_numpy = make_sampling(temperature=np.float32(0.5), top_k=np.int64(5), top_p=1)  # pyright: ignore
    assert of_numpy == Sampling(temperature=0.5, top_k=5)
    assert {type(value) for value in jax.tree.leaves(of_numpy)} == {float, int}
    assert sorted(jax.tree.leaves(on)) == [0.1, 0.7, 0.9, 1.1, 5]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": -0.1}, "temperature must be a number at least 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be a number at least 0, got nan"),
        ({"temperature": "hot"}, "temperature must be a number at least 0, got 'hot'"),
        ({"top_p": 0.0}, "top_p must be a number above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be a number above 0 and at most 1, got 1.1"),
        ({"top_k": -1}, "top_k must be an integer of at least 0 and below 2**31, got -1"),
        ({"top_k": 2.0}, "top_k must be an integer of at least 0 and below 2**31, got 2.0"),
        ({"min_p": -0.1}, "min_p must be a number from 0 to 1, got -0.1"),
        ({"min_p": 1.5}, "min_p must be a number from 0 to 1, got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0, got 0"),
        ({"temperature": 1e-46}, "temperature must be a number at least 0 that float32 can hold"),
        ({"temperature": 1e-40}, "from 1.2e-38 to 3.4e+38 if not 0, got 1e-40"),
        ({"temperature": 1e39}, "from 1.2e-38 to 3.4e+38 if not 0, got 1e+39"),
        ({"temperature": 10**400}, "float32 can hold, from 1.2e-38 to 3.4e+38 if not 0, got 1000"),
        ({"temperature": float("inf")}, "if not 0, got inf"),
        ({"top_p": 1e-46}, "top_p must be a number above 0 and at most 1 that float32 can hold"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty must be a number above 0 that float32"),
        ({"min_p": 1e-46}, "min_p must be a number from 0 to 1 that float32 can hold"),
        ({"top_k": 5}, "top_k=5 has no effect with temperature=0"),
        ({"top_p": 0.5, "min_p": 0.1}, "top_p=0.5, min_p=0.1 has no effect with temperature=0"),
    ],
)
def test_bad_settings_are_one_sentence(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        make_sampling(**settings)
    assert sentence in str(error.value)
