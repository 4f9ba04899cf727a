# SPDX-License-Identifier: Apache-2.0
"""The commands `generate` and `chat`, on a model that can be run by hand."""

import contextlib
import dataclasses
import datetime
import decimal
import io
import json
import signal
import threading
from pathlib import Path
from typing import Any

import chat_tokenizers
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from chain_model import Chain, by_hand

from lora_tune import cli, commands, recipe
from lora_tune.errors import InputError
from lora_tune.generation.text import decode

TOKENIZER = chat_tokenizers.qwen(chat_tokenizers.CHATML_TEMPLATE)
LOADED: list[Any] = []


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Chain:
    """The model that every command loads; how it was asked for is in LOADED."""
    model = Chain()
    LOADED.clear()

    def load_run(folder: str, overrides: list[str]) -> Any:
        LOADED.append((folder, overrides))
        return model, TOKENIZER

    def load_model(**options: Any) -> Any:
        LOADED.append(options)
        return model, TOKENIZER

    monkeypatch.setattr(commands.api, "load_run", load_run)
    monkeypatch.setattr(commands.api, "load_model", load_model)
    return model


def answer(model: Chain, prompt: Any, *, new: int, stops: tuple[int, ...] | None = None) -> str:
    """What the model says to a text or to messages."""
    if isinstance(prompt, list):
        prompt = TOKENIZER.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids = TOKENIZER(prompt)["input_ids"]
    stops = (TOKENIZER.eos_token_id,) if stops is None else stops
    return decode(TOKENIZER, by_hand(ids, np.asarray(model.table[...]), new=new, stops=stops))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert cli.main(list(arguments)) == status
    out, err = capsys.readouterr()
    if status:
        assert out == ""
        assert err.startswith("lora-tune: error: ")
        assert err.count("\n") == 1
        return err
    return out


def test_a_prompt_is_a_message_unless_raw(
    capsys: pytest.CaptureFixture[str], loaded: Chain
) -> None:
    asked = ["generate", "run=runs/a", "max_new_tokens=9", "prompt=What = it?"]
    assert run(capsys, *asked) == answer(loaded, [user("What = it?")], new=9) + "\n"
    assert run(capsys, *asked, "raw=true") == answer(loaded, "What = it?", new=9) + "\n"
    assert LOADED == [("runs/a", [])] * 2


def test_settings_reach_the_model(capsys: pytest.CaptureFixture[str], loaded: Chain) -> None:
    greedy = by_hand(TOKENIZER("a")["input_ids"], np.asarray(loaded.table[...]), new=5)
    asked = ["generate", "run=a", "prompt=a", "raw=true", "max_new_tokens=5"]
    stopped = run(capsys, *asked, f"stop_ids=[399, {greedy[2]}]")
    assert stopped == answer(loaded, "a", new=5, stops=(greedy[2],)) + "\n"
    sampled = [*asked, "temperature=3", "top_k=50", "top_p=0.9", "min_p=0.01"]
    first = run(capsys, *sampled, "seed=1", "repetition_penalty=1.1", "cache_size=null")
    assert first == run(capsys, *sampled, "seed=1", "repetition_penalty=1.1")
    assert first != run(capsys, *sampled, "seed=2", "repetition_penalty=1.1")


def test_an_answer_that_was_cut_off_says_so(
    capsys: pytest.CaptureFixture[str], loaded: Chain
) -> None:
    greedy = by_hand(TOKENIZER("a")["input_ids"], np.asarray(loaded.table[...]), new=5)
    first = greedy.index(greedy[4])  # the number of tokens before the one that ends the answer
    asked = ["generate", "run=a", "prompt=a", "raw=true", f"stop_ids={greedy[4]}"]
    for new in (first, first + 1):
        assert cli.main([*asked, f"max_new_tokens={new}"]) == 0
        out, err = capsys.readouterr()
        assert out == decode(TOKENIZER, greedy[:first]) + "\n"
        note = f"lora-tune: the answer was cut off at max_new_tokens={new}\n"
        assert err == (note if new == first else "")


def test_where_the_model_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", "prompt=a", "max_new_tokens=1", "model.dtype=float32"]
    run(capsys, *common, "run=a", "mesh.fsdp=2")
    run(capsys, *common, "model.path=b", "model.chat_template=c.jinja", "mesh.fsdp=2")
    [of_run, base] = LOADED
    assert of_run == ("a", ["model.dtype=float32", "mesh.fsdp=2"])
    assert base.pop("mesh").shape["fsdp"] == 2
    assert base == {"path": "b", "dtype": "float32", "chat_template": "c.jinja"}


def test_another_mesh_does_not_have_to_divide_the_batches_of_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "output_dir: a\nmodel: {path: a}\ndata: {path: a.jsonl, eval_path: b.jsonl}\n"
        "mesh: {data: 2}\neval: {batch_size: 8}\n"
        "train: {max_steps: 1, batch_size: 8, gradient_accumulation_steps: 4}\n"
    )
    with pytest.raises(InputError, match=r"train\.batch_size .*eval\.batch_size"):
        recipe.load(path, ["mesh.fsdp=3"])
    run(capsys, "generate", "prompt=a", "max_new_tokens=1", f"run={tmp_path}", "mesh.fsdp=3")
    [(_, overrides)] = LOADED
    assert recipe.load(path, overrides).mesh == recipe.Mesh(data=2, fsdp=3)
    for size in (0, -1):
        overrides = [f"mesh.fsdp={size}", *commands._fitting_batches(str(tmp_path), {"fsdp": size})]
        with pytest.raises(InputError, match=rf": mesh\.fsdp must be at least 1, got {size}$"):
            recipe.load(path, overrides)


def test_every_row_of_a_file(
    capsys: pytest.CaptureFixture[str], loaded: Chain, tmp_path: Path
) -> None:
    talk = [user("Hello"), {"role": "assistant", "content": "I am"}, user("What is it?")]
    rows = [
        {"messages": talk, "id": 7},
        {"messages": [*talk, {"role": "assistant", "content": "blue"}]},
        {"prompt": "What is 4?"},
        {"prompt": [user("there")]},
        {"text": "the answer is", "note": "ü"},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "x"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    asked: list[Any] = [talk, talk, [user("What is 4?")], [user("there")], "the answer is"]
    asked.append([user("Hello")])
    out = run(capsys, "generate", "run=a", f"prompts={path}", "max_new_tokens=6", "batch_size=4")
    wanted = [answer(loaded, prompt, new=6) for prompt in asked]
    printed = [json.loads(line) for line in out.splitlines()]
    assert printed == [{**row, "answer": a} for row, a in zip(rows, wanted, strict=True)]
    assert "ü" in out
    raw = run(capsys, "generate", "run=a", f"prompts={path}", "max_new_tokens=6", "raw=true")
    assert json.loads(raw.splitlines()[2])["answer"] == answer(loaded, "What is 4?", new=6)


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]


def test_tools_of_a_row_are_shown_whatever_form_its_prompt_has(
    capsys: pytest.CaptureFixture[str], loaded: Chain, tmp_path: Path, monkeypatch: Any
) -> None:
    qwen = chat_tokenizers.qwen()
    monkeypatch.setattr(commands.api, "load_run", lambda *_: (loaded, qwen))
    rows: list[dict[str, Any]] = [
        {"messages": [user("Hello")], "tools": TOOLS},
        {"prompt": [user("Hello")], "tools": json.dumps(TOOLS)},
        {"prompt": "Hello", "tools": TOOLS},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    shown = qwen.apply_chat_template(
        [user("Hello")], tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert "look_up" in shown
    table = np.asarray(loaded.table[...])
    ids = by_hand(qwen(shown)["input_ids"], table, new=6, stops=(qwen.eos_token_id,))
    out = run(capsys, "generate", "run=a", f"prompts={path}", "max_new_tokens=6")
    assert [json.loads(line)["answer"] for line in out.splitlines()] == [decode(qwen, ids)] * 3


def test_columns_of_parquet_are_written_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    when = datetime.datetime(2024, 2, 29, 1, 2, 3, 4)
    row = {
        "text": "Hello",
        "when": when,
        "day": when.date(),
        "price": decimal.Decimal("0.10"),
        "nested": {"times": [when]},
    }
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    out = json.loads(run(capsys, "generate", "run=a", f"prompts={path}", "max_new_tokens=1"))
    assert datetime.datetime.fromisoformat(out["when"]) == when
    assert datetime.date.fromisoformat(out["day"]) == when.date()
    assert str(decimal.Decimal(out["price"])) == "0.10"
    assert out["nested"] == {"times": [out["when"]]}


def test_what_json_cannot_hold_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    rows = [{"text": "Hello", "image": {"bytes": b"\xff"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    error = run(capsys, "generate", "run=a", f"prompts={path}", status=2)
    assert "row 0: the column `image` cannot be written as JSON (it holds bytes), got" in error
    assert LOADED == []


def test_all_bad_rows_are_named_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = ["{", '{"a": 1}', '{"messages": 1}', '{"text": "a", "answer": "b"}']
    bad.append('{"text": "a", "tools": [{}]}')
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(['{"text": "a"}', *bad, *bad[:2]]))
    error = run(capsys, "generate", "run=a", f"prompts={path}", status=2)
    assert f"7 rows of '{path}' cannot be answered: {path}:2: broken JSON" in error
    assert ":3: expected messages, prompt or text, found a" in error
    assert ":4: expected a non-empty list of messages, got 1" in error
    assert ":5: the row has a column `answer` already" in error
    assert ":6: `tools` are shown by the chat template, but the prompt is taken as it is" in error
    assert error.endswith("; and 2 more\n")
    assert LOADED == []
    path.write_text('{"prompt": "a"}\n{"prompt": []}\n{"text": ""}')
    error = run(capsys, "generate", "run=a", f"prompts={path}", status=2)
    assert f"2 prompts cannot be answered: {path}:2 is []" in error
    assert f"{path}:3 is empty" in error


class Terminal(io.TextIOWrapper):
    """An output that can hold less than Unicode."""

    def __init__(self, encoding: str):
        super().__init__(io.BytesIO(), encoding=encoding)

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # pyright: ignore


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_answers_on_a_terminal_without_their_characters(
    loaded: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    row = {"text": "a", "note": "ü 日本語"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    monkeypatch.setattr(commands, "answers", lambda *_, **__: iter(["ß 🙂"]))
    monkeypatch.setattr("sys.stdout", terminal := Terminal(encoding))
    assert cli.main(["generate", "run=a", f"prompts={tmp_path / 'rows.jsonl'}"]) == 0
    assert json.loads(terminal.text()) == {**row, "answer": "ß 🙂"}
    monkeypatch.setattr("sys.stdout", terminal := Terminal(encoding))
    monkeypatch.setattr(commands, "answers", lambda *_, stream, **__: [stream(0, "ß 🙂")])
    assert cli.main(["generate", "run=a", "prompt=b"]) == 0
    shown = {"ascii": r"\xdf \U0001f642", "latin-1": r"ß \U0001f642", "utf-8": "ß 🙂"}
    assert terminal.text() == shown[encoding] + "\n"


def test_chat_remembers_what_was_said(
    capsys: pytest.CaptureFixture[str], loaded: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\n  \nWhat is it?\n"))
    out = run(capsys, "chat", "run=a", "max_new_tokens=5", "system=there")
    talk = [{"role": "system", "content": "there"}, user("Hello")]
    first = answer(loaded, talk, new=5)
    talk += [{"role": "assistant", "content": first}, user("What is it?")]
    assert out == f"{first}\n{answer(loaded, talk, new=5)}\n"


def test_a_conversation_that_is_too_long_ends_with_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n" * 9))
    assert cli.main(["chat", "run=a", "max_new_tokens=5", "cache_size=40"]) == 2
    out, err = capsys.readouterr()
    assert 1 <= out.count("\n") < 9
    assert "the conversation has " in err
    assert (
        "more than the cache_size, 40; shorten the conversation or lower max_new_tokens, or" in err
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Folder:
    folder: Path


def test_a_chat_has_no_more_room_than_the_model_has_positions(
    capsys: pytest.CaptureFixture[str],
    loaded: Chain,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    loaded.origin = Folder(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    run(capsys, "chat", "run=a", "max_new_tokens=5")
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    error = run(capsys, "chat", "run=a", "max_new_tokens=5", "cache_size=65", status=2)
    assert "cache_size=65 is more than the max_position_embeddings of the model, 64" in error


@pytest.mark.parametrize("lost", [False, True])
def test_an_interrupt_ends_the_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Also one whose exception was raised where it is dropped, as in a callback of jax."""

    def interrupted(*_: Any, stream: Any, **__: Any) -> list[str]:
        stream(0, "half an")
        with contextlib.suppress(KeyboardInterrupt) if lost else contextlib.nullcontext():
            signal.raise_signal(signal.SIGINT)
        stream(0, " answer")
        return [""]

    monkeypatch.setattr(commands, "answers", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    # A shell that starts the tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for command in (["generate", "run=a", "prompt=a"], ["chat", "run=a"]):
            assert cli.main(command) == 130
            assert capsys.readouterr() == ("half an\n", "lora-tune: interrupted\n")
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


BROKEN = '{"prompt": "a"}\n{"prompt": '


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "run=a"], "expected one of prompt=TEXT and prompts=FILE.jsonl"),
        (["generate", "run=a", "prompt=b", "prompts=c"], "expected one of prompt=TEXT and"),
        (["generate", "prompt=b"], "expected run=DIR, the folder of a run, or model.path=PATH"),
        (["chat"], "expected run=DIR, the folder of a run, or model.path=PATH"),
        (["chat", "run=a", "temprature=1"], "'temprature': did you mean 'temperature'?"),
        (["chat", "run=a", "max_tokens=1"], "'max_tokens': did you mean 'max_new_tokens'?"),
        (["chat", "run=a", "batch_size=1"], "batch_size has no meaning in chat, only in generate"),
        (["generate", "run=a", "system=a"], "system has no meaning in generate, only in chat"),
        (["chat", "run=a", "model.dtpe=1"], "'model.dtpe': did you mean 'model.dtype'?"),
        (["chat", "run=a", "zzz=1"], "unknown key 'zzz': expected one of run, system, max_new"),
        (["chat", "run=a", "top_k=many"], "top_k must be an integer, got 'many'"),
        (["chat", "run=a", "top_p=half"], "top_p must be a number, got 'half'"),
        (["chat", "run=a", "stop_ids=[a]"], "stop_ids must be integers with commas between"),
        (["chat", "run=a", "temperature=-1"], "temperature must be a number at least 0, got -1.0"),
        (["generate", "run=a", "prompt=b", "raw=yes"], "raw must be true or false, got 'yes'"),
        (["generate", "run=a", "prompt="], "prompt is empty; give it a value or remove it"),
        (["chat", "run="], "run is empty"),
        (["chat", "model.path="], "model.path is empty"),
        (["generate", "run=a", "prompts={}"], ":1: expected messages, prompt or text, found an "),
        (["generate", "run=a", "prompts=/none.jsonl"], "'/none.jsonl' does not exist"),
        (["generate", "run=a", "prompts=none"], "prompts: there is no file 'none'"),
        (["generate", "run=a", f"prompts={BROKEN}"], ":2: broken JSON at column 12"),
        (
            ["generate", "run=a", 'prompts={"a": 1}'],
            ":1: expected messages, prompt or text, found a",
        ),
        (["generate", "run=a", 'prompts={"text": 1}'], ":1 is 1, expected a text, a list of"),
        (["generate", "run=a", 'prompts={"messages": 1}'], ":1: expected a non-empty list of"),
        (
            ["generate", "run=a", "raw=true", 'prompts={"prompt": "a", "tools": [{"a": 1}]}'],
            ":1: `tools` are shown by the chat template, but the prompt is taken as it is",
        ),
        (
            ["generate", "run=a", 'prompts={"prompt": "a", "answer": "b"}'],
            ":1: the row has a column `answer` already, which the model's answer is written to",
        ),
        (["generate", "run=a", "prompt"], "expected key=value, got 'prompt'"),
    ],
)
def test_bad_usage_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    key, _, content = arguments[-1].partition("=")
    if key == "prompts" and content.startswith("{"):
        (tmp_path / "rows.jsonl").write_text(content)
        arguments = [*arguments[:-1], f"prompts={tmp_path / 'rows.jsonl'}"]
    assert sentence in run(capsys, *arguments, status=2)


def test_answers_are_shown_in_any_thread(capsys: pytest.CaptureFixture[str]) -> None:
    def show() -> None:
        with commands._shown() as stream:
            stream(0, "answer")

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=show)
    thread.start()
    thread.join()
    assert capsys.readouterr().out == "answer"
    assert signal.getsignal(signal.SIGINT) == before
