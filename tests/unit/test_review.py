# SPDX-License-Identifier: Apache-2.0
"""`lora-tune data`: what it shows is what training sees, and what is wrong is not overlooked."""

import json
import os
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import browse, in_browser

from lora_tune import cli
from lora_tune.data import batch
from lora_tune.data.messages import Encoder, Example
from lora_tune.review import page, report
from lora_tune.review.report import Bar, Piece, bars, printable


def chat(question, answer):
    turns = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def data(tmp_path, capsys):
    """Runs the command on the shipped model's tokenizer; returns status, output and errors."""

    def run(rows, *arguments, held_out=None, **files):
        words = [f"data.path={write(tmp_path / 'train.jsonl', rows)}", *arguments]
        path = "null" if held_out is None else write(tmp_path / "eval.jsonl", held_out)
        words.append(f"data.eval_path={path}")
        if held_out is None:
            words.append("eval.num_samples=0")
        status = cli.main(["data", "recipe=quickstart.yaml", *words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def line(output, name):
    (found,) = [text for text in output.splitlines() if text[8:].startswith(f"{name} ")]
    return found


ROWS = [chat("the dog", "ya doku"), chat("the house", "ya neru"), chat("the dog", "ya doku")]


def test_it_shows_sequences_and_counts(data):
    status, output, errors = data(ROWS, "data.shuffle=false", "rows=9")
    assert (status, errors) == (0, "")
    for text in ("the dog", "the house"):
        assert f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n«ya " in output
    assert output.count("«ya doku<|im_end|>»") == 2
    assert "train.jsonl, row 2 ──" in output
    assert "tokens of padding]" in output
    assert "1 of 3 examples equal an earlier one" in line(output, "duplicates")
    assert line(output, "duplicates").startswith("warning")
    assert line(output, "conservation").startswith("ok")
    assert "none: set data.eval_path" in line(output, "held-out rows")


def test_held_out_rows_that_are_trained_on_are_an_error(data):
    held_out = [chat("the dog", "ya doku"), chat("the house", "other"), chat("the sky", "x")]
    status, output, errors = data(ROWS, held_out=held_out)
    assert status == 1
    assert "overlap: 1 of 3 held-out examples are training examples too, more than 1%" in errors
    assert "2 held-out prompts are training prompts too" in line(output, "prompts")
    _, output, _ = data(ROWS, "max_overlap=1", held_out=[*held_out[:1], *held_out])
    assert "2 of 4 held-out examples" in line(output, "overlap"), "the same one counts twice"
    status, output, errors = data(ROWS, "max_overlap=0.5", held_out=held_out)
    assert (status, errors) == (0, "")
    assert line(output, "overlap").startswith("warning")


def test_what_is_lost_is_counted(data):
    rows = [*ROWS, chat("the dog " * 40, "ya"), chat("the dog", "ya doku " * 40), {"messages": 3}]
    status, output, _ = data(rows, "data.on_bad_row=drop", "data.max_length=48")
    assert status == 0
    dropped = line(output, "dropped")
    assert "1 no trained token left after truncation, 1 malformed row" in dropped
    assert "train.jsonl:6: expected a non-empty list of messages" in line(output, "malformed")
    assert line(output, "truncated").startswith("warning truncated      2 examples")


def test_a_sequence_names_the_row_that_it_comes_from(data):
    rows = [{"messages": None}, {"messages": 3}, *ROWS]
    _, output, _ = data(rows, "data.on_bad_row=drop", "data.shuffle=false", "rows=9")
    assert [f"train.jsonl, row {n} ──" in output for n in range(1, 6)] == [False] * 2 + [True] * 3


def test_tokens_that_encoding_loses_are_an_error(data, monkeypatch):
    fit = Encoder._fit

    def lossy(self, whole):
        for piece in fit(self, whole):
            mask = piece.mask.copy()
            mask[np.flatnonzero(mask)[-1]] = False
            yield Example(piece.tokens, mask)

    monkeypatch.setattr(Encoder, "_fit", lossy)
    for strategy in ("right", "left", "split"):
        status, output, _ = data(ROWS, f"data.truncation_strategy={strategy}")
        assert status == 1
        assert line(output, "conservation").startswith("error")


@pytest.mark.parametrize("strategy", ["right", "left", "split", "delete"])
def test_what_truncation_takes_is_no_error(data, strategy):
    rows = [*ROWS, chat("the dog", "ya doku " * 40)]
    status, output, _ = data(
        rows, f"data.truncation_strategy={strategy}", "data.max_length=24", "data.shuffle=false"
    )
    assert status == 0
    assert line(output, "conservation").startswith("ok")
    assert (" 0 lost" in line(output, "conservation")) == (strategy == "split")


@pytest.mark.parametrize("name", ["x[/b]y.jsonl", "part-[ab]*.jsonl", "z*.jsonl"])
def test_names_of_files_are_no_markup_and_steer_nothing(tmp_path, capsys, name):
    file = tmp_path / name.replace("[ab]*", "a").replace("*", "\x1b[31m\udc80")
    file.parent.mkdir(exist_ok=True)
    write(file, [*ROWS, {"messages": 3}])
    recipe, html = tmp_path / "r[b].yaml", tmp_path / "a.html"
    recipe.write_text(
        "model: {path: 'lora_tune:tiny-qwen3-next'}\noutput_dir: x\neval: {num_samples: 0}\n"
    )
    words = [f"recipe={recipe}", f"data.path={tmp_path / name}", "data.on_bad_row=drop", "rows=1"]
    words += ["train.max_steps=1", f"html={html}"]
    assert cli.main(["data", *words]) == 0, capsys.readouterr().err
    for text in (capsys.readouterr().out, unescape(html.read_text())):
        assert f"Data of {recipe}" in text.replace("\n", "")
        assert text.replace("\n", "").count(str(tmp_path / name)) >= 2  # in table and sequence
        assert printable(f"{file}:4: ") in text
        assert "\x1b" not in text


def test_tokens_that_packing_loses_are_an_error(data, monkeypatch):
    build = batch.build

    def lossy(rows, **options):
        arrays = build(rows, **options)
        arrays["weights"][0, np.flatnonzero(arrays["weights"][0])[0]] = 0
        return arrays

    monkeypatch.setattr(batch, "build", lossy)
    status, output, errors = data(ROWS)
    assert status == 1
    assert "conservation: " in errors
    assert line(output, "conservation").startswith("error")


def test_nothing_trained_is_bad_input(data):
    status, _, errors = data([chat("the dog", "")])
    assert status == 2
    assert "leaves no example of its 1 rows: 1 x empty answer" in errors


def test_an_answer_without_an_end_is_a_warning(data):
    _, output, _ = data(ROWS, "data.train_on_eos=none")
    assert "does not learn to stop" in line(output, "ends")


def test_sources_are_counted_on_their_own(data, tmp_path):
    other = write(tmp_path / "other.jsonl", [{"text": "a b c"}])
    sources = f"data.sources=[{{path: {tmp_path}/train.jsonl, name: chats, weight: 1}}, "
    sources += f"{{path: {other}, name: texts, weight: 1}}]"
    status, output, errors = data(ROWS, sources, "data.path=[]")
    assert (status, errors) == (0, "")
    table = [text.split() for text in output.splitlines()]
    assert next(words for words in table if words[:1] == ["chats"])[1:4] == ["3", "3", "2"]
    assert next(words for words in table if words[:1] == ["texts"])[1:4] == ["1", "1", "2"]
    assert next(words for words in table if words[:1] == ["all"])[1:4] == ["4", "4", "4"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["row=3"], "unknown key 'row': did you mean 'rows'?"),
        (["rows=x"], "rows must be an integer, got 'x'"),
        (["rows=-1"], "rows must be at least 0, got -1"),
        (["max_overlap=2"], "max_overlap must be a share from 0 to 1, got 2"),
        (["html=/none/such/a.html"], "must name a file in a folder that exists"),
        (["data.max_lenght=4"], "did you mean 'data.max_length'?"),
    ],
)
def test_bad_words(data, arguments, said):
    status, _, errors = data(ROWS, *arguments)
    assert status == 2
    assert said in errors


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.marked, self.text = [], [], [], ""
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] == "mark":
            self.marked.append(data)
        if "pre" in self._open:
            self.text += data


def test_the_page_marks_what_is_learned_and_takes_no_text_for_markup(data, tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=y>&lt;"
    rows = [chat(evil, "ya </mark></pre><script>"), chat("b\x1b[31m", "z\u202e")]
    html = tmp_path / "a.html"
    status, output, _ = data(rows, "data.shuffle=false", f"html={html}")
    assert status == 0
    assert "\x1b" not in output
    assert "␛[31m" in output
    found = Page(html.read_text())
    assert not {"script", "img", "link", "iframe"} & set(found.tags)
    assert not {"src", "href", "onerror"} & set(found.attributes)
    assert found.marked[0] == "Learned"
    assert sorted(found.marked[1:]) == [
        "ya </mark></pre><script><|im_end|>",
        "z<U+202E><|im_end|>",
    ]
    assert f"<|im_start|>user\n{evil}<|im_end|>\n<|im_start|>assistant\n" in found.text
    assert [path.name for path in tmp_path.glob("*html*")] == ["a.html"]


@in_browser
def test_a_browser_shows_the_page_without_an_error_or_a_request(data, tmp_path):
    evil = "<script>console.error(1)</script><img src=http://example.com/x.png>"
    page = tmp_path / "a.html"
    status, _, _ = data([chat(evil, "ya"), *ROWS], "data.shuffle=false", f"html={page}")
    assert status == 0
    document, said, asked = browse(page, tmp_path)
    assert "ya" in Page(document).marked[1]
    assert evil in Page(document).text
    assert (said, asked) == ([], set())


def test_a_page_of_pieces():
    pieces = (Piece("boundary", "d"), Piece("context", "<"), Piece("trained", "&"))
    text = "".join(map(page._piece, pieces))
    assert text == '<span class="boundary">d</span>&lt;<mark>&amp;</mark>'


def test_bars_by_hand():
    assert bars([3, 4, 5, 16, 17]) == [Bar(3, 4, 2), Bar(5, 8, 1), Bar(9, 16, 1), Bar(17, 32, 1)]
    assert bars([2]) == [Bar(2, 2, 1)]


def test_signs_stand_for_what_steers_a_terminal():
    assert printable("a\nb\tc\rd\x00e\x7f\u2066") == "a\nb\tc␍d␀e<U+007F><U+2066>"
    assert printable("👩\u200d🚀 é中") == "👩\u200d🚀 é中"


def test_it_needs_no_accelerator_and_no_weights(tmp_path):
    """With a platform that does not exist, starting jax would be an error."""
    folder = tmp_path / "model"
    folder.mkdir()
    shipped = Path(report.__file__).parents[1] / "assets" / "tiny-qwen3-next"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (shipped / name).is_file():
            (folder / name).write_bytes((shipped / name).read_bytes())
    words = ["data", "recipe=quickstart", f"model.path={folder}", "rows=1"]
    code = f"import sys; from lora_tune.cli import main; s = main({words}); assert s == 0\n"
    code += "assert 'jax' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "none_such"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
