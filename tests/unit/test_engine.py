# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on a model small enough to run by hand; tests/parity has the real ones."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chain_model import FED, TRACED, VOCAB, Chain, by_hand, random_prompts, state_after
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lora_tune.errors import InputError
from lora_tune.generation import engine
from lora_tune.generation.sampling import Sampling, make_sampling
from lora_tune.sharding import make_mesh
from lora_tune.training.state import split_model


@pytest.fixture(scope="module")
def model() -> Any:
    return Chain()


@pytest.fixture(scope="module")
def table(model: Any) -> np.ndarray:
    return np.asarray(model.table[...])


def complete(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    split = split_model(model)
    defaults = {"max_new_tokens": 10, "stop_ids": (), "sampling": Sampling()}
    weights = {**split.frozen, **split.trainable}
    return engine.complete(split.graphdef, weights, prompts, **(defaults | options))


@pytest.mark.parametrize("lengths", [(1,), (32, 5), (33, 1, 128), (129, 512, 7), (513, 1, 1030)])
def test_prompts_of_any_length_are_gone_on_from_as_by_hand(
    model: Any, table: np.ndarray, lengths: tuple[int, ...]
) -> None:
    prompts = random_prompts(*lengths)
    assert complete(model, prompts) == [by_hand(p, table, new=10) for p in prompts]
    read_once = complete(model, prompts[-1:], once=True)
    assert read_once == [by_hand(prompts[-1], table, new=10)]


def test_the_cache_may_be_just_large_enough(model: Any, table: np.ndarray) -> None:
    prompts = random_prompts(40, 3)
    found = complete(model, prompts, cache_size=50)
    assert found == [by_hand(p, table, new=10) for p in prompts]


def test_rows_end_before_a_stop_id_and_then_are_padding(table: np.ndarray) -> None:
    model = Chain(log=True)
    prompts = random_prompts(4, 9, 6)
    whole = [by_hand(p, table, new=10) for p in prompts]
    stops = (whole[0][0], whole[1][3], 399)
    wanted = [by_hand(p, table, new=10, stops=stops) for p in prompts]
    ends = [len(answer) for answer in wanted]
    assert ends[0] == 0
    assert ends[1] == 3
    FED.clear()
    assert complete(model, prompts, stop_ids=stops) == wanted
    jax.effects_barrier()
    fed = np.concatenate([ids for ids in FED if ids.shape[1] == 1], axis=1)
    for row, end in zip(fed, ends, strict=True):
        # The last token of an answer cut by its length is never read.
        np.testing.assert_array_equal(row, np.arange(len(row)) < end)


def test_it_ends_when_every_row_has(model: Any, table: np.ndarray) -> None:
    prompts = random_prompts(4, 9)
    stops = tuple(by_hand(p, table, new=3)[-1] for p in prompts)
    split = split_model(model)
    yielded = list(
        engine.steps(
            split.graphdef,
            split.trainable,
            prompts,
            max_new_tokens=1000,
            stop_ids=stops,
            sampling=Sampling(),
        )
    )
    assert len(yielded) <= 3
    assert (yielded[-1] == -1).all()


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the functions that XLA compiles."""
    names: list[str] = []

    def listen(event: str, _: float, fun_name: str = "", **__: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("mesh", [False, True])
def test_decode_is_compiled_once_for_all_prompts(
    table: np.ndarray, compiled: list[str], mesh: bool
) -> None:
    model = Chain()
    place = jax.devices()[2] if not mesh else NamedSharding(make_mesh(fsdp=2), P(None, "fsdp"))
    model.table.set_value(jax.device_put(model.table.get_value(), place))
    TRACED.clear()
    for n in (1, 2, 31, 33, 100, 129, 400, 513, 1500):
        pair = random_prompts(n, 1, seed=n)
        assert complete(model, pair, cache_size=2051) == [by_hand(p, table, new=10) for p in pair]
    assert TRACED == {1: 1, 32: 1, 128: 1, 512: 1}
    assert compiled.count("jit(advance)") == 4
    complete(model, pair, cache_size=2051, once=True)
    complete(model, random_prompts(60, 3), cache_size=2051, once=True)
    assert compiled.count("jit(advance)") == 4


def test_a_cache_without_room_for_padding_takes_one_program_more() -> None:
    model = Chain(seed=2)
    table = np.asarray(model.table[...])
    TRACED.clear()
    for n in (20, 100, 400, 520, 560, 590):
        [prompt] = random_prompts(n)
        assert complete(model, [prompt], cache_size=600) == [by_hand(prompt, table, new=10)]
    assert TRACED == {1: 1, 32: 1, 128: 1, 512: 1, 600 - 10 - 512: 1}


def test_values_of_settings_are_not_compiled(model: Any, compiled: list[str]) -> None:
    for warm in (0.5, 0.9):
        sampling = make_sampling(temperature=warm, top_k=int(10 * warm), top_p=warm)
        seed, stops = int(100 * warm), range(int(5 * warm))
        complete(model, random_prompts(4), sampling=sampling, seed=seed, stop_ids=stops)
    assert compiled.count("jit(advance)") == 2


def test_weights_are_arguments(model: Any, table: np.ndarray) -> None:
    prompts = random_prompts(5)
    complete(model, prompts)
    TRACED.clear()
    other = Chain(seed=1)
    assert complete(other, prompts) == [by_hand(prompts[0], np.asarray(other.table[...]), new=10)]
    assert TRACED == {}
    assert complete(other, prompts) != complete(model, prompts)


def test_the_cache_is_updated_in_place(model: Any) -> None:
    split = split_model(model)
    program = engine.program_of(split.graphdef, engine.place_of(split.trainable))
    state = program.create(split.trainable, 2, 64, True)
    draw = Sampling(), jax.random.key(0), np.arange(2), np.array([1], np.int32)
    ones = np.ones((2, 1), np.int32)
    after, *_ = program.advance(split.trainable, state, ones, ones, 0, *draw)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((after, split.trainable)))


WARM = make_sampling(temperature=1.0)


def test_a_row_draws_the_same_alone_and_among_others(model: Any) -> None:
    prompts = random_prompts(6, 31, 3)
    prompts.append(prompts[0])
    options = {"sampling": WARM, "cache_size": 64}
    together = complete(model, prompts, seed=3, batch=6, **options)
    for i, prompt in enumerate(prompts):
        assert complete(model, [prompt], seed=3, rows=[i], **options) == [together[i]]
    assert together[0] != together[3], "equal prompts draw different answers"
    assert complete(model, prompts, seed=4, batch=6, **options) != together


def test_draws_follow_the_model(model: Any, table: np.ndarray) -> None:
    """First tokens of 2000 rows, against the probabilities in the table."""
    [prompt] = random_prompts(3)
    drawn = complete(model, [prompt] * 2000, sampling=WARM, max_new_tokens=1)
    counts = np.bincount([answer[0] for answer in drawn], minlength=VOCAB)
    expected = np.exp(table[state_after(prompt)])
    expected *= 2000 / expected.sum()
    # Tokens too rare to count alone are counted together.
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    degrees = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


def test_repetition_penalty_sees_prompt_and_answer_but_no_padding(
    model: Any, table: np.ndarray
) -> None:
    """With an enormous penalty no token comes twice, nor one of the prompt."""
    prompts = random_prompts(1, 35)
    sampling = make_sampling(repetition_penalty=1e6)
    found = complete(model, prompts, sampling=sampling, max_new_tokens=60)
    for prompt, answer in zip(prompts, found, strict=True):
        seen = list(prompt)
        for token in answer:
            scores = table[state_after(seen)].copy()
            scores[seen] = np.where(scores[seen] < 0, scores[seen] * 1e6, scores[seen] / 1e6)
            assert token == scores.argmax()
            seen.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(temperature: float) -> None:
    model: Any = Chain()
    [prompt] = random_prompts(4)
    broken = state_after([*prompt, *by_hand(prompt, np.asarray(model.table[...]), new=2)])
    model.table[...] = model.table[...].at[broken, 7].set(jnp.nan)
    assert len(complete(model, [prompt], max_new_tokens=2)[0]) == 2
    with pytest.raises(InputError, match="logits for token 3 of an answer are not finite"):
        complete(model, [prompt], max_new_tokens=4)


def test_logits_of_padding_may_be_anything(model: Any) -> None:
    """A row of padding stays at state 0; the other row goes to a later one."""
    split = split_model(model)
    weights = {path: table.at[0].set(jnp.nan) for path, table in split.trainable.items()}
    program = engine.program_of(split.graphdef, engine.place_of(weights))
    draw = Sampling(), jax.random.key(0), np.arange(2), np.array([1], np.int32)
    for real, wanted in (([0, 1], True), ([1, 1], False)):
        state = program.create(weights, 2, 64, False)
        tokens, ids = np.array([[96], [5]], np.int32), np.array(real, np.int32)[:, None]
        *_, sound = program.advance(weights, state, tokens, ids, 0, *draw)
        assert sound == wanted
