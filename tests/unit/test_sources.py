# SPDX-License-Identifier: Apache-2.0
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from chat_tokenizers import qwen

from lora_tune.data import sources
from lora_tune.data.messages import encode
from lora_tune.errors import InputError

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
TEXT = {"text": "é"}


def write(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return str(path)


def test_json_lines_give_rows_with_file_and_line(tmp_path):
    path = write(tmp_path / "a.jsonl", "\ufeff" + json.dumps(CHAT), "", CHAT, "")
    rows = sources.read(path)
    assert (rows.format, len(rows)) == ("messages", 2)
    assert list(rows) == [(f"{path}:1", CHAT), (f"{path}:3", CHAT)]
    assert list(rows) == list(rows)


@pytest.mark.parametrize("text", [json.dumps([TEXT, TEXT]), json.dumps(TEXT) + "\n" * 2])
def test_json_is_an_array_or_lines(tmp_path, text):
    rows = sources.read(write(tmp_path / "a.json", text))
    assert [fields for _, fields in rows] == [TEXT] * len(rows)
    assert len(rows) == text.count("text")


def test_a_glob_reads_files_in_order(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", {"text": name})
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "c.jsonl", {"text": "c"})
    assert [f["text"] for _, f in sources.read(f"{tmp_path}/*.jsonl")] == ["a", "b"]
    assert len(sources.read(f"{tmp_path}/**/*.jsonl")) == 3
    with pytest.raises(InputError, match="no file matches"):
        sources.read(f"{tmp_path}/*.parquet")


@pytest.mark.parametrize(
    ("fields", "format"),
    [
        (CHAT | {"prompt": "x", "completion": "y"}, "messages"),
        ({"prompt": "x", "completion": "y", "text": "z"}, "prompt_completion"),
        ({"instruction": "x", "output": "y", "input": "z"}, "alpaca"),
        (TEXT, "text"),
    ],
)
def test_the_format_follows_from_the_columns(tmp_path, fields, format):
    path = write(tmp_path / "a.jsonl", fields)
    assert sources.read(path).format == format
    assert sources.read(write(tmp_path / "b.jsonl", fields | TEXT), format="text").format == "text"


def test_conversations_of_sharegpt_are_known(tmp_path):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = sources.read(write(tmp_path / "a.jsonl", {"conversations": turns, "id": 1}))
    assert rows.format == "sharegpt"
    assert [fields for _, fields in rows] == [{"conversations": turns, "id": 1}]
    rows = sources.read(write(tmp_path / "b.jsonl", {"conversations": "talk", "text": "x"}))
    assert rows.format == "text"


@pytest.mark.parametrize("name", ["chats[1].jsonl", "what?.jsonl", "#a.jsonl"])
def test_a_file_is_itself_before_it_is_a_pattern(tmp_path, name):
    assert len(sources.read(write(tmp_path / name, TEXT))) == 1


def test_max_samples_reads_only_the_first_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", TEXT, {"text": "b"}, "{")
    rows = sources.read(path, max_samples=2)
    assert [fields["text"] for _, fields in rows] == ["é", "b"]
    assert len(rows) == 2
    with pytest.raises(InputError, match="max_samples must be at least 1"):
        sources.read(path, max_samples=0)


def test_columns_can_be_renamed(tmp_path):
    path = write(tmp_path / "a.jsonl", {"body": "x", "id": 1})
    rows = sources.read(path, columns={"text": "body"})
    assert [f for _, f in rows] == [{"text": "x", "id": 1}]


def test_parquet_round_trip_loses_no_tool_call_and_adds_no_argument(tmp_path):
    def row(name, arguments):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        tools = [{"type": "function", "function": {"name": name, "parameters": {name: {}}}}]
        return {"messages": [{"role": "user", "content": "q"}, turn], "tools": json.dumps(tools)}

    wanted = [row("weather", {"city": "Ulm"}), row("time", {"zone": "CET"})]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(wanted), path)
    filled = pyarrow.parquet.read_table(path).to_pylist()[0]["messages"][1]
    assert filled["tool_calls"][0]["function"]["arguments"] == {"city": "Ulm", "zone": None}

    rows = sources.read(str(path))
    assert [where for where, _ in rows] == [f"{path} row 0", f"{path} row 1"]
    tok = qwen()
    for (_, got), expected in zip(rows, wanted, strict=True):
        ours, theirs = (
            encode(r, tok, format=rows.format, max_length=999).examples[0] for r in (got, expected)
        )
        assert tok.decode(ours.tokens) == tok.decode(theirs.tokens)
        arguments = expected["messages"][1]["tool_calls"][0]["function"]["arguments"]
        assert f'"arguments": {json.dumps(arguments)}}}' in tok.decode(ours.tokens)


def test_hub_ids_go_through_datasets(monkeypatch):
    import datasets

    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_list([TEXT | {"x": 1}, TEXT | {"x": None}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = sources.read("owner/name", split="test", subset="en")
    assert calls == [(("owner/name", "en"), {"split": "test", "streaming": False})]
    assert list(rows)[1] == ("owner/name[test] row 1", TEXT)
    assert len(sources.read("owner/name", max_samples=1)) == 1
    assert calls[-1][1]["streaming"]  # no more is fetched than is used


def test_a_hub_id_that_is_not_found_is_an_error(monkeypatch):
    import datasets

    def load_dataset(*args, **kwargs):
        raise FileNotFoundError("Dataset 'owner/name'\n doesn't exist")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match=r"'owner/name' is neither.* doesn't exist$"):
        sources.read("owner/name")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl.gz", '{"text": "é"}\n{"text": "b\\n, \\"c\\""}\n'),
        ("a.json.gz", '[{"text": "é"}, {"text": "b\\n, \\"c\\""}]'),
        ("a.json", '{"version": 2, "data": [{"text": "é"}, {"text": "b\\n, \\"c\\""}]}'),
        ("a.json", '{\n "rows": [\n{"text": "é"}, {"text": "b\\n, \\"c\\""}]}'),
        ("a.csv", '\ufefftext\r\né\r\n\r\n"b\n, ""c"""\r\n'),
        ("a.csv.gz", 'text\né\n"b\n, ""c"""'),
        ("a.tsv", 'text\né\n"b\n, ""c"""'),
    ],
)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name, text):
    data = text.encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert [fields for _, fields in sources.read(str(path))] == [TEXT, {"text": 'b\n, "c"'}]


def test_csv_rows_are_named_by_the_line_they_begin_at(tmp_path):
    path = write(tmp_path / "a.csv", "text,id", '"a\nb",1', "c,2")
    assert [where for where, _ in sources.read(path)] == [f"{path}:2", f"{path}:4"]


def test_a_list_of_files_is_read_in_order(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", {"text": name}) for name in "ba"]
    rows = sources.read([paths[0], f"{tmp_path}/a*.jsonl"])
    assert [fields["text"] for _, fields in rows] == ["b", "a"]
    with pytest.raises(InputError, match=r"'owner/name' is no file.*data\.sources"):
        sources.read([paths[0], "owner/name"])


def test_bad_rows_are_dropped_and_listed_if_that_is_asked_for(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"a', {"id": 1}, TEXT, {"text": None}, TEXT)
    rows = sources.read(path, drop_bad_rows=True)
    assert (rows.format, rows.count) == ("text", 5)
    assert [where for where, _ in rows] == [f"{path}:3", f"{path}:5"]
    assert [number for number, _ in rows.numbered()] == [2, 4]
    assert rows.bad == {0, 1, 3}
    assert [said.split(": ")[0] for said in rows.problems] == [f"{path}:{n}" for n in (1, 2, 4)]
    with pytest.raises(InputError, match=r"2 rows of .* cannot be read"):
        sources.read(write(tmp_path / "b.jsonl", '{"a', "["), drop_bad_rows=True)


# Bad input.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("text,text\na,b", "a.csv:1: the first line must name every column once"),
        ("text,\na,b", "a.csv:1: the first line must name every column once"),
        ("text,id\na", "a.csv:2: 1 fields, expected 2 as the first line has"),
        ('text\na\n"b', "a.csv:3: broken CSV (unexpected end of data)"),
        ("text\n", "a.csv' is empty"),
        ("", "a.csv' is empty"),
        ("text\na\x00", "UTF-16 or no text at all"),
    ],
)
def test_bad_csv_names_the_line(tmp_path, text, says):
    with pytest.raises(InputError) as error:
        sources.read(write(tmp_path / "a.csv", text))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([TEXT, '{"text": '], "a.jsonl:2: broken JSON at column"),
        ([TEXT, "[1]"], "a.jsonl:2: expected a JSON object"),
        ([TEXT, '{"text": NaN}'], "a.jsonl:2: NaN is no JSON number"),
        ([TEXT, '{"text": ' + "1" * 5000 + "}"], "a.jsonl:2: a JSON number has too many digits"),
        ([TEXT, "[" * 100_000], "a.jsonl:2: JSON nested too deeply"),
        ([TEXT, '{"text": "\\ud800"}'], "a.jsonl:2: a \\u escape is half of a surrogate pair"),
        ([TEXT, CHAT], "a.jsonl:2: column `text` is missing or null, found `messages`"),
        ([{"text": None}], "a.jsonl:1: unknown columns, found `text`"),
        (
            [{"question": 1, "answer": 2}],
            "a.jsonl:1: unknown columns, found `answer`, `question`, expected `messages`",
        ),
        (
            [{"query": "a", "response": "b"}],
            "set data.columns={prompt: query, completion: response} to read them so",
        ),
        (["[", json.dumps(TEXT), "]"], "a.jsonl:1: a JSON array, expected one object per line"),
        ([json.dumps(CHAT, indent=1)], "a.jsonl:1: a JSON object over several lines"),
        (['{"text":', '"a"}'], "`jq -c . a.jsonl` writes it so"),
        ([], "is empty"),
        (["", " "], "is empty"),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path, lines, says):
    path = write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(InputError) as error:
        sources.read(path)
    assert says in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_all_bad_lines_are_reported_at_once(tmp_path):
    path = write(tmp_path / "a.jsonl", TEXT, *["{"] * 7)
    with pytest.raises(InputError) as error:
        sources.read(path)
    message = str(error.value)
    assert message.startswith("7 rows of")
    assert [f"{path}:{n}:" in message for n in (2, 6, 7)] == [True, True, False]
    assert message.endswith("and 2 more")


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32-le"])
def test_other_encodings_are_named(tmp_path, suffix, encoding):
    path = tmp_path / f"a{suffix}"
    path.write_text(json.dumps(TEXT), encoding=encoding)
    with pytest.raises(InputError, match=r"a\.json.*UTF-16 or no text.*save the file as UTF-8"):
        sources.read(str(path))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"messages": "talk"}, r"names `talk`, which is not there, found `messages`"),
        ({"tools": "functions"}, r"`functions`, which no row of .* has, found `messages`"),
        ({"massages": "messages"}, r"has the key `massages`, expected our names `messages`"),
    ],
)
def test_columns_that_are_not_there_name_those_that_are(tmp_path, columns, said):
    with pytest.raises(InputError, match=said):
        sources.read(write(tmp_path / "a.jsonl", CHAT), columns=columns)


def test_columns_that_are_null_are_said_to_be(tmp_path):
    row = json.dumps({"question": "why", "reply": None})
    with pytest.raises(InputError, match=r"found `question`, `reply` \(`reply`: null\), expected"):
        sources.read(write(tmp_path / "a.jsonl", row))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("https://example.org/a.jsonl", "an address on the net: download it"),
        ("https:/example.org/a.jsonl", "an address on the net: download it"),
        ("https://huggingface.co/datasets/owner/name/tree/main", "give the hub id owner/name"),
        ("s3://bucket/a.jsonl", "an address on the net"),
    ],
)
def test_an_address_is_no_path(path, said):
    with pytest.raises(InputError, match=said):
        sources.read(path)


def test_bytes_that_are_not_utf8_name_the_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:2: not UTF-8"):
        sources.read(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet", "../a/b/c/absent"])
def test_a_missing_file_is_an_error(tmp_path, name):
    with pytest.raises(InputError, match=r"absent.* does not exist"):
        sources.read(str(tmp_path / name))


def test_other_files_are_errors(tmp_path):
    with pytest.raises(InputError, match=r"ends in '\.xml': expected one of \.jsonl"):
        sources.read(write(tmp_path / "a.xml", "text"))
    for name in ("a.jsonl.zst", "a.parquet.gz", "a.gz"):
        with pytest.raises(InputError, match="unpack it first"):
            sources.read(write(tmp_path / name, "text"))
    with pytest.raises(InputError, match=r"a\.jsonl\.gz' cannot be read: Not a gzipped file"):
        sources.read(write(tmp_path / "a.jsonl.gz", "text"))
    with pytest.raises(InputError, match="is a folder"):
        sources.read(str(tmp_path))
    with pytest.raises(InputError, match="not readable Parquet"):
        sources.read(write(tmp_path / "a.parquet", "text"))
    with pytest.raises(InputError, match=r"a\.json' is broken JSON"):
        sources.read(write(tmp_path / "a.json", "[{"))
    with pytest.raises(InputError, match="format 'chat' is unknown"):
        sources.read("a.jsonl", format="chat")
