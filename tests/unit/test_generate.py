# SPDX-License-Identifier: Apache-2.0
"""`generate` on a model small enough to run by hand: prompts in every form, streams, stops."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import chat_tokenizers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chain_model import FED, VOCAB, Chain, by_hand, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

import lora_tune
from lora_tune.errors import InputError
from lora_tune.generation.generate import Settings, answers
from lora_tune.generation.prompts import stop_ids_of
from lora_tune.generation.text import TextStream, decode


@pytest.fixture(scope="module")
def model() -> Any:
    return Chain()


@pytest.fixture(scope="module")
def table(model: Any) -> np.ndarray:
    return np.asarray(model.table[...])


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
    model: Any = Chain()
    model.origin = Folder(tmp_path)
    first = whole.index(whole[5])
    assert lora_tune.generate(model, tokenizer, prompt, max_new_tokens=9) == whole[:first]
    given = lora_tune.generate(model, tokenizer, prompt, max_new_tokens=9, stop_ids=[])
    assert given == whole
    with pytest.raises(InputError, match="more than the max_position_embeddings of the model, 20"):
        lora_tune.generate(model, tokenizer, prompt, max_new_tokens=17)
    with pytest.raises(InputError, match="cache_size=21 is more than the max_position_embeddings"):
        lora_tune.generate(model, tokenizer, prompt, max_new_tokens=9, cache_size=21)


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
        ("a", {"stop_ids": [2, VOCAB]}, f"stop_ids: {VOCAB} is no token id of this model"),
        (b"hello", {}, "prompts is b'hello', expected a text"),
        (bytearray(b"a"), {}, "prompts is bytearray(b'a'), expected a text"),
        ([b"hello"], {}, "the prompt is b'hello', expected a text"),
        ("", {}, "the prompt is empty"),
        (["a", ""], {}, "prompt 1 is empty"),
        ([[]], {}, "the prompt is [], expected a text, a list of messages or a list of token ids"),
        ([1, VOCAB], {}, f"{VOCAB} is no token id of this model, expected integers from 0 to 399"),
        ([1, -1], {}, "-1 is no token id of this model"),
        ([1, 2.5], {}, "2.5 is no token id of this model"),
        ("\udc80", {}, "the prompt is not UTF-8 text (character 0)"),
        (
            [*HELLO, {"role": "user", "content": "ab\udc80"}],
            {},
            "the prompt, message 1, is not UTF-8 text (character 2)",
        ),
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
            "shorten the prompt or lower max_new_tokens, or raise cache_size",
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
