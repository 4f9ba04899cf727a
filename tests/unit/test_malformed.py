# SPDX-License-Identifier: Apache-2.0
"""Whatever a file holds: rows, or one sentence that names the place. Never a traceback."""

import gzip
import json
import tempfile
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from chat_tokenizers import CHATML_TEMPLATE, llama3, qwen
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutated, share

from lora_tune.data import sources
from lora_tune.data.encode import encode_rows
from lora_tune.data.formats import COLUMNS, FORMATS
from lora_tune.data.messages import Encoder, encode
from lora_tune.errors import InputError, short

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
CALL = '{"name": "f", "arguments": {"x": [1, 2.5, null]}}'
LINES = [
    json.dumps(GOOD),
    json.dumps({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
    json.dumps({"prompt": "a", "completion": "b"}),
    json.dumps({"instruction": "a", "input": "", "output": "b"}),
    json.dumps({"text": "é\x00🙂"}),
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": ['
    + CALL
    + ']}], "tools": []}',
]
TEXTS = st.text(max_size=8) | st.sampled_from(
    ["", " ", "\x00", "<think>", "</think>", "<|im_end|>"]
)
ROLES = st.sampled_from(["user", "assistant", "tool", "system", "human", "gpt", "function_call"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | ROLES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.fixed_dictionaries(
    {}, optional={"name": TEXTS | JSON, "arguments": TEXTS | JSON | st.just(CALL), "function": JSON}
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": ROLES | JSON,
        "from": ROLES | JSON,
        "content": TEXTS | JSON | st.lists(st.fixed_dictionaries({"text": TEXTS})),
        "value": TEXTS | JSON,
        "reasoning_content": TEXTS | JSON,
        "tool_calls": st.lists(CALLS, max_size=2) | JSON,
        "function_call": CALLS | JSON,
        "weight": st.sampled_from([0, 1, 0.5, "1", None]),
        "name": TEXTS | JSON,
    },
)
CONVERSATIONS = st.lists(MESSAGES, max_size=4) | JSON | st.just(json.dumps(GOOD["messages"]))
ROW = st.fixed_dictionaries(
    {},
    optional={
        column: CONVERSATIONS
        if column in ("messages", "conversations", "prompt", "completion")
        else TEXTS | JSON
        for column in COLUMNS
    },
)
# Mostly well-formed conversations, so that what lies deeper is reached as well.
NEARLY = st.builds(
    lambda question, answer, extra: {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer} | extra,
        ]
    },
    TEXTS,
    TEXTS,
    MESSAGES.map(lambda m: {k: v for k, v in m.items() if k not in ("role", "from", "value")}),
)
QWEN, PLAIN, LLAMA = qwen(), qwen(CHATML_TEMPLATE), llama3()


def said_or_done(work):
    """What the work returns, or the sentence that says why there is nothing."""
    try:
        return work()
    except InputError as error:
        return str(error)


def survives(path, *, drop):
    """Reads and encodes a file; returns its examples, or the sentence that says why not."""

    def work():
        rows = sources.read(str(path), drop_bad_rows=drop)
        options = {"max_length": 64, "reasoning": "keep", "truncation_strategy": "split"}
        encoder = Encoder(QWEN, format=rows.format, **options)
        return encode_rows(rows, encoder, drop_bad_rows=drop)

    examples = said_or_done(work)
    if isinstance(examples, str):
        assert str(path) in examples
        examples.encode()  # can be printed
        return examples
    report = examples.report
    assert report.all_trained_tokens == report.trained_tokens + report.lost_trained_tokens
    assert int(examples.parts[0].tokens.min()) >= 0
    return examples


def in_file(name, content):
    """Calls `survives` on a file of these bytes, with rows dropped and not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        return [survives(path, drop=drop) for drop in (False, True)]


@st.composite
def broken_lines(draw):
    lines = draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=4))
    broken = [mutated(draw, line) if draw(st.booleans()) else line for line in lines]
    text = draw(st.sampled_from(["\n", "\r\n", "\n\n"])).join(broken)
    return text.encode("utf-8", "surrogatepass")


@settings(max_examples=share(1.5), deadline=None)
@given(broken_lines(), st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv"]))
def test_broken_files(content, name):
    in_file(name, content)


@settings(max_examples=share(0.4), deadline=None)
@given(
    st.binary(max_size=60), st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.parquet", "a.csv.gz"])
)
def test_bytes_of_any_kind(content, name):
    in_file(name, content)


@settings(max_examples=share(0.4), deadline=None)
@given(broken_lines(), st.integers(0, 80))
def test_packed_files_that_are_cut(content, cut):
    packed = gzip.compress(content, mtime=0)
    in_file("a.jsonl.gz", packed[: max(0, len(packed) - cut)])


@settings(max_examples=share(2), deadline=None)
@given(ROW | NEARLY, st.sampled_from([*FORMATS]), st.sampled_from(["keep", "drop", "last", None]))
def test_rows_of_any_values(row, format, reasoning):
    for tok in (QWEN, PLAIN, LLAMA):
        options = {"format": format, "max_length": 32, "reasoning": reasoning}
        found = said_or_done(partial(encode, row, tok, where="f.jsonl:7", **options))
        assert not isinstance(found, str) or found.startswith("f.jsonl:7")


@settings(max_examples=share(0.25), deadline=None)
@given(st.lists(ROW | NEARLY, min_size=1, max_size=3))
def test_parquet_of_any_values(rows):
    try:
        table = pyarrow.Table.from_pylist(rows)
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):
        return  # no table has such columns
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.parquet"
        try:
            pyarrow.parquet.write_table(table, path)
        except pyarrow.ArrowException:
            return  # nor such a file
        for drop in (False, True):
            survives(path, drop=drop)


DEEP = 800  # below what the JSON parser refuses


@pytest.mark.parametrize(
    "row",
    [
        '{"messages": ' + "[" * DEEP + "]" * DEEP + "}",
        '{"messages": [{"role": "user", "content": ' + "[" * DEEP + "]" * DEEP + "}]}",
        '{"text": ' + '{"a":' * DEEP + "1" + "}" * DEEP + "}",
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": '
        '[{"name": "f", "arguments": {"x": ' + "[" * DEEP + "]" * DEEP + "}}]}]}",
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": '
        '[{"name": "f", "arguments": "{\\"x\\": \\"\\\\ud800\\"}"}]}]}',
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], '
        '"tools": "[{\\"name\\": \\"\\\\ud800\\"}]"}',
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], '
        '"tools": [{"x": ' + "[" * DEEP + "]" * DEEP + "}]}",
    ],
)
def test_bombs_and_halves_that_hide_deeper(tmp_path, row):
    path = tmp_path / "a.jsonl"
    path.write_text(row + "\n")
    said = survives(path, drop=False)
    if isinstance(said, str):
        assert said.startswith(f"{path}:1")


def test_values_too_large_to_show_are_named():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert short(deep) == "a list too large to show"
    assert short(10**5000) == "a int too large to show"


@pytest.mark.parametrize("text", ["\r\n".join(LINES[:1] * 3) + "\r\n\r\n", "\ufeff" + LINES[0]])
def test_windows_files_are_read_as_they_are(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.encode())
    assert len(survives(path, drop=False)) == text.count("messages")
