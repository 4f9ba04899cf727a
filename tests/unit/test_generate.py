# SPDX-License-Identifier: Apache-2.0
"""Generation on a model small enough to run by hand; tests/parity has the real ones."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chat_tokenizers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chain_model import FED, TRACED, VOCAB, Chain, by_hand, random_prompts, state_after
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lora_tune
from lora_tune.errors import InputError
from lora_tune.generation import engine
from lora_tune.generation.generate import Settings, answers
from lora_tune.generation.prompts import stop_ids_of
from lora_tune.generation.sampling import Sampling, make_sampling
from lora_tune.generation.text import TextStream, decode
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


# --- generate: prompts and answers in every form


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizers.qwen(chat_tokenizers.CHATML_TEMPLATE)


HELLO = [{"role": "user", "content": "Hello there"}]


def ids_of(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_every_form_of_prompt(model: Any, table: np.ndarray, tokenizer: Any) -> None:
    plain = tokenizer("What is it?")["input_ids"]
    stops = (tokenizer.eos_token_id,)
    texts = [
        decode(tokenizer, by_hand(ids, table, new=12, stops=stops))
        for ids in (plain, ids_of(tokenizer, HELLO))
    ]
    ids = by_hand(plain, table, new=12, stops=stops)

    def ask(prompts: Any) -> Any:
        return lora_tune.generate(model, tokenizer, prompts, max_new_tokens=12)

    assert ask("What is it?") == texts[0]
    assert ask(HELLO) == texts[1]
    assert ask({"messages": HELLO}) == texts[1]
    assert ask(plain) == ask(np.array(plain)) == ids
    assert ask(["What is it?", HELLO, plain]) == [*texts, ids]
    assert ask([plain]) == [ids]
    assert ask(tuple(plain)) == ask(jnp.array(plain)) == ask([np.int64(i) for i in plain]) == ids
    assert ask([jnp.int32(i) for i in plain]) == ids
    assert ask(np.array([plain, plain])) == ask([np.array(plain), tuple(plain)]) == [ids, ids]
    assert lora_tune.generate(model, None, plain, max_new_tokens=12, stop_ids=stops) == ids


def test_a_text_gets_the_special_tokens_of_the_tokenizer(model: Any, table: np.ndarray) -> None:
    llama = chat_tokenizers.llama()
    ids = [llama.bos_token_id, *llama("blue", add_special_tokens=False)["input_ids"]]
    wanted = by_hand(ids, table, new=8, stops=(llama.eos_token_id,))
    assert lora_tune.generate(model, llama, "blue", max_new_tokens=8) == decode(llama, wanted)


def test_tools_are_shown_to_the_template(model: Any, table: np.ndarray) -> None:
    qwen = chat_tokenizers.qwen()
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    text = qwen.apply_chat_template(HELLO, tools=tools, tokenize=False, add_generation_prompt=True)
    assert "look_up" in text
    wanted = by_hand(qwen(text)["input_ids"], table, new=8, stops=(qwen.eos_token_id,))
    found = lora_tune.generate(model, qwen, {"messages": HELLO, "tools": tools}, max_new_tokens=8)
    assert found == decode(qwen, wanted)


def test_stop_ids_in_every_form(model: Any, table: np.ndarray) -> None:
    [prompt] = random_prompts(4)
    stop = by_hand(prompt, table, new=6)[3]
    wanted = by_hand(prompt, table, new=6, stops=(stop,))
    arrays = np.int64(stop), jnp.int32(stop), np.array([stop])
    for stop_ids in (stop, [stop], (stop, 399), range(stop, stop + 1), *arrays):
        options: dict[str, Any] = {"max_new_tokens": np.int64(6), "stop_ids": stop_ids}
        assert lora_tune.generate(model, None, prompt, **options) == wanted
    assert Settings(stop_ids=0).stops() == [0]
    assert Settings(stop_ids=np.array([], int)).stops() == []  # pyright: ignore[reportArgumentType]
    assert Settings().stops() is None


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


def test_batches_do_not_change_answers(model: Any, tokenizer: Any) -> None:
    prompts = random_prompts(*range(1, 8))
    options = {"max_new_tokens": 6, "temperature": 1.0, "stop_ids": []}
    whole = lora_tune.generate(model, None, prompts, **options, batch_size=7)
    assert lora_tune.generate(model, None, prompts, **options, batch_size=3) == whole


def test_answers_come_batch_by_batch() -> None:
    model: Any = Chain(log=True)
    FED.clear()
    found = answers(model, None, random_prompts(1, 2, 3), Settings(4, batch_size=2, stop_ids=[]))
    next(found)
    jax.effects_barrier()
    calls = len(FED)
    next(found)
    jax.effects_barrier()
    assert len(FED) == calls, "the second answer is of the same batch"
    next(found)
    jax.effects_barrier()
    assert len(FED) > calls


def test_stream_gives_the_answers_in_pieces(model: Any, tokenizer: Any) -> None:
    pieces: list[tuple[int, Any]] = []
    prompts = ["What is it?", HELLO, [5, 6, 7]]
    found = lora_tune.generate(
        model,
        tokenizer,
        prompts,
        max_new_tokens=40,
        stream=lambda i, piece: pieces.append((i, piece)),
    )
    for i in range(2):
        assert "".join(piece for at, piece in pieces if at == i) == found[i]
    assert [piece for at, piece in pieces if at == 2] == found[2]
    assert len(pieces) > 40
    assert "" not in [piece for _, piece in pieces]


# --- text as it comes


def test_a_piece_never_holds_a_part_of_a_character() -> None:
    text = "naïve 日本語 🙂🏽 e\u0301 mañana"
    tokenizer = chat_tokenizers.qwen()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > len(text), "characters are spread over tokens"
    stream = TextStream(tokenizer)
    pieces = [stream.add(i) for i in ids]
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert stream.finish() == ""


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 336), max_size=30))
def test_pieces_join_to_the_text_of_any_tokens(ids: list[int]) -> None:
    """Broken characters and special tokens included."""
    tokenizer = chat_tokenizers.qwen()
    stream = TextStream(tokenizer)
    pieces = [*(stream.add(i) for i in ids), stream.finish()]
    assert "".join(pieces) == decode(tokenizer, ids)


# --- what ends an answer


def test_stop_ids_of_a_model_folder(tmp_path: Path, tokenizer: Any) -> None:
    assert stop_ids_of(None, None, chat=False) == []
    eos = tokenizer.eos_token_id
    assert stop_ids_of(tmp_path, tokenizer, chat=False) == [eos]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert stop_ids_of(tmp_path, tokenizer, chat=False) == [7]
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7}))
    assert stop_ids_of(tmp_path, tokenizer, chat=False) == [7]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 8]}))
    assert stop_ids_of(tmp_path, tokenizer, chat=False) == [8, 9]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(InputError, match="eos_token_id is '</s>', expected an id or a list of ids"):
        stop_ids_of(tmp_path, tokenizer, chat=False)


def test_a_conversation_also_stops_where_training_ends_a_turn(tmp_path: Path) -> None:
    """A base model whose folder names another token than its chat template writes."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    base = chat_tokenizers.qwen(eos_token="<|endoftext|>")
    end = base.convert_tokens_to_ids("<|im_end|>")
    assert stop_ids_of(tmp_path, base, chat=True) == [3, end]
    assert stop_ids_of(tmp_path, base, chat=False) == [3]
    assert stop_ids_of(tmp_path, chat_tokenizers.qwen(None), chat=True) == [3]
    no_end = chat_tokenizers.qwen(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    assert stop_ids_of(tmp_path, no_end, chat=True) == [3]


def test_generate_reads_them_from_the_folder(
    table: np.ndarray, tokenizer: Any, tmp_path: Path
) -> None:
    [prompt] = random_prompts(4)
    whole = by_hand(prompt, table, new=9)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 20}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": whole[5]}))
    model = Chain()
    model.origin = Folder(tmp_path)
    first = whole.index(whole[5])
    assert lora_tune.generate(model, tokenizer, prompt, max_new_tokens=9) == whole[:first]
    given = lora_tune.generate(model, tokenizer, prompt, max_new_tokens=9, stop_ids=[])
    assert given == whole
    with pytest.raises(InputError, match="more than the max_position_embeddings of the model, 20"):
        lora_tune.generate(model, tokenizer, prompt, max_new_tokens=17)


@dataclasses.dataclass(frozen=True, eq=False)
class Folder:
    folder: Path


# --- what cannot be


NO_TEMPLATE = chat_tokenizers.qwen(None)


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        ([], {}, "prompts is [], expected a text, a list of messages, a list of token ids, or"),
        (None, {}, "prompts is None, expected a text"),
        (7, {}, "prompts is 7, expected a text"),
        ({"a", "b"}, {}, "expected a text, a list of messages, a list of token ids, or a list"),
        (["", "a", ""], {}, "2 prompts cannot be answered: prompt 0 is empty; the model needs"),
        ("a", {"model": "x"}, "model is 'x', expected a model: load_model gives one"),
        ("a", {"tokenizer": "x"}, "tokenizer is 'x', expected a tokenizer, or None for prompts"),
        ("a", {"stream": "x"}, "stream is 'x', expected a function of a number and a piece"),
        ("a", {"stop_ids": 2.5}, "an id in stop_ids must be an integer of at least 0 and below"),
        ("a", {"stop_ids": "2"}, "an id in stop_ids must be an integer of at least 0 and below"),
        ("a", {"stop_ids": [[2]]}, "below 2**31, got [2]"),
        ("", {}, "the prompt is empty"),
        (["a", ""], {}, "prompt 1 is empty"),
        ([[]], {}, "the prompt is [], expected a text, a list of messages or a list of token ids"),
        ([1, VOCAB], {}, f"{VOCAB} is no token id of this model, expected integers from 0 to 399"),
        ([1, -1], {}, "-1 is no token id of this model"),
        ([1, 2.5], {}, "2.5 is no token id of this model"),
        ("\udc80", {}, "the prompt is not UTF-8 text (character 0)"),
        ([{"role": "boss", "content": "a"}], {}, "role 'boss' is unknown"),
        ({"messages": []}, {}, "expected a non-empty list of messages"),
        ({"message": HELLO}, {}, "expected the keys messages and tools"),
        (
            [*HELLO, {"role": "assistant", "content": "a"}],
            {},
            "the last message is the assistant's",
        ),
        (HELLO, {"tokenizer": NO_TEMPLATE}, "the tokenizer has no chat template, which messages"),
        ("a", {"tokenizer": None}, "the prompt is 'a', expected a list of token ids, because"),
        (
            "a",
            {"max_new_tokens": 0},
            "max_new_tokens must be an integer of at least 1 and below 2**31, got 0",
        ),
        ("a", {"seed": -1}, "seed must be an integer of at least 0 and below 2**31, got -1"),
        (
            "a",
            {"batch_size": 0},
            "batch_size must be an integer of at least 1 and below 2**31, got 0",
        ),
        (
            "a",
            {"stop_ids": ["b"]},
            "an id in stop_ids must be an integer of at least 0 and below 2**31, got 'b'",
        ),
        ("a", {"temperature": -1}, "temperature must be a number at least 0, got -1"),
        ("a", {"top_k": 3}, "top_k=3 has no effect with temperature=0"),
        (
            [1, 2, 3],
            {"cache_size": 10, "max_new_tokens": 8},
            "the prompt has 3 tokens, which with max_new_tokens=8 is more than the cache_size, 10; "
            "shorten the prompt or lower max_new_tokens, or raise it",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    model: Any, tokenizer: Any, prompts: Any, options: dict[str, Any], sentence: str
) -> None:
    options = dict(options)
    model = options.pop("model", model)
    with pytest.raises(InputError) as error:
        lora_tune.generate(model, options.pop("tokenizer", tokenizer), prompts, **options)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
