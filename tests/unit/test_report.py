# SPDX-License-Identifier: Apache-2.0
"""The report of a run folder: what it says, and what a real browser makes of it."""

import html
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import browse, in_browser

from lora_tune import cli
from lora_tune.hf.card import serve_command
from lora_tune.report.curves import curve, number, thinned, ticks
from lora_tune.report.ending import reported
from lora_tune.report.folder import write_report
from lora_tune.training.metrics import MetricsLog
from lora_tune.training.tripwires import TripwireError

HOSTILE = (
    "</pre><script>console.error('ran')</script><img src=http://example.com/x.png onerror=a()>"
)
TOKEN = "hf_" + "Ab1" * 9
ROWS = [
    {"step": 0, "eval_loss": 4.0, "eval_accuracy": 0.0},
    {"step": 0, "samples": [{"prompt": HOSTILE, "answer": "no \x07\ud800", "expected": "yes"}]},
    *(
        {
            "step": step,
            "loss": 4.0 / step,
            "grad_norm": 1.0,
            "learning_rate": 1e-4,
            "tokens_per_second": 100.0 * step,
            "total_tokens": 10 * step,
        }
        for step in range(1, 31)
    ),
    {"step": 30, "eval_loss": 0.5, "eval_accuracy": 0.75},
    {"step": 30, "samples": [{"prompt": HOSTILE, "answer": TOKEN, "expected": "yes"}]},
]
SUMMARY = {
    "total_steps": 40,
    "parameters": {"trained": 1234, "frozen": 5},
    "data": {"rows": 7, "examples": 6, "drops": {"empty": 1}, "packing_efficiency": 0.5},
    "environment": {"devices": "8 x TPU v5", "mesh": "fsdp 8"},
    "ended": {"how": "tripwire", "step": 30, "said": f"the loss is nan {HOSTILE}"},
}


def write_run(folder: Path, *, summary=SUMMARY) -> Path:
    (folder / "adapter").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"model: {{path: me/base}}\n# {HOSTILE} {TOKEN}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "adapters.tsv").write_text("module\tlora_A\nmodel.layers.0.q_proj\t4x16\n")
    config = {"base_model_name_or_path": "me/base", "r": 24, "rank_pattern": {}}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
        lock = {"packages": {"jax": "9.8.7"}, "model": {"base": "me/base"}}
        (folder / "lock.json").write_text(json.dumps(lock))
    return folder


class Text(HTMLParser):
    """What a page shows, and the elements it has."""

    def __init__(self, page: str):
        super().__init__()
        self.shown, self.tags = "", set[str]()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.shown += data


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("runs") / "my run"))


def test_it_says_what_the_folder_holds_and_escapes_all_of_it(page):
    text = Text(page.read_text(encoding="utf-8"))
    for words in (
        "my run",
        "Stopped because training had gone wrong after step 30 of 40: the loss is nan </pre>",
        "4 → 0.5",
        "0.0\xa0% → 75.0\xa0%",
        "step 30: 0.133333",
        HOSTILE,
        "no ␇?",
        "50.0% of the positions hold a token",
        "1 empty",
        "model.layers.0.q_proj",
        "AutoModelForCausalLM.from_pretrained('me/base'",
        "vllm serve me/base --enable-lora --max-lora-rank 32 --lora-modules adapter='/",
        "my run/adapter'",
        "8 x TPU v5",
        "9.8.7",
        "model: {path: me/base}",
        "[secret]",
    ):
        assert words in text.shown, words
    assert TOKEN not in text.shown
    assert text.tags.isdisjoint({"script", "img", "link", "iframe", "object"})
    assert not re.search(r"(?:src|href)=[\"']?\w", re.sub(r"&lt;.*?&gt;", "", page.read_text()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ended": None}, "Not at its end: it still runs, or was killed; the last step in its log"),
        ({"ended": {"how": "finished", "step": 40, "said": ""}}, "Finished after step 40 of 40"),
        (
            {"ended": {"how": "interrupted", "step": 9, "said": "SIGTERM"}},
            "Interrupted after step 9 of 40: SIGTERM",
        ),
        (None, "Finished; the last step in its log is 30"),
    ],
)
def test_it_says_how_the_run_ended_also_of_old_folders(tmp_path, capsys, change, said):
    summary = None if change is None else {**SUMMARY, **change}
    folder = write_run(tmp_path / "run", summary=summary)
    assert cli.main(["report", f"run={folder}"]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.html'}\n"
    assert said in Text((folder / "report.html").read_text()).shown
    assert sorted(folder.glob(".*")) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run={here}"], "is no run folder: there is no recipe.yaml in it"),
        ([], "expected run=DIR"),
        (["output_dir=x"], "did you mean 'run'?"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, arguments, said):
    assert cli.main(["report", *(a.format(here=tmp_path) for a in arguments)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named_and_the_old_report_stays(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    before = write_report(folder).read_bytes()
    (folder / "summary.json").write_text('{"total')
    assert cli.main(["report", f"run={folder}"]) == 2
    assert f"{folder / 'summary.json'} is not JSON" in capsys.readouterr().err
    assert (folder / "report.html").read_bytes() == before


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("summary.json", '{"data": 3}', "summary.json: data: expected a mapping, got 3"),
        ("summary.json", '{"total_steps": "x"}', "total_steps: expected an integer, got 'x'"),
        ("summary.json", '{"ended": {"how": [], "step": 1}}', "ended: how: expected a text"),
        ("summary.json", '{"data": {"sources": [1, 2]}}', "data: sources: expected a mapping"),
        ("summary.json", '{"data": {"drops": {"a": "b"}}}', "drops: a: expected an integer"),
        ("lock.json", '{"model": []}', "lock.json: model: expected a mapping, got []"),
        ("recipe.yaml", "model: 7", "recipe.yaml: model: expected a mapping, got 7"),
        ("recipe.yaml", "a: 2000-99-99", "recipe.yaml is not YAML"),
        ("metrics.jsonl", '{"step": 3, "loss": "x"}\n', "metrics.jsonl, step 3: loss: expected a"),
        ("metrics.jsonl", '{"step": 1e999}\n', "line 1 of"),
        ("adapter/adapter_config.json", '{"r": "x"}', "r: expected an integer, got 'x'"),
    ],
)
def test_what_has_another_type_is_named(tmp_path, capsys, file, content, said):
    folder = write_run(tmp_path / "run")
    (folder / file).write_text(content)
    assert cli.main(["report", f"run={folder}"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ({**dict.fromkeys(SUMMARY), "total_steps": 40}, "Not at its end"),
        ({"parameters": {}, "ended": None}, "the last step in its log is 30"),
        ({"ended": {"how": "paused"}}, "a way that this version does not know ('paused') after"),
        ({"data": {"sources": [{"a": 1, "b": 2}, {"a": 1}]}}, "Not at its end"),
    ],
)
def test_what_is_null_or_not_known_is_left_out(tmp_path, capsys, summary, said):
    folder = write_run(tmp_path / "run", summary=summary)
    (folder / "lock.json").write_text('{"model": null, "packages": null}')
    (folder / "recipe.yaml").write_text("model: null\n")
    (folder / "adapter" / "adapter_config.json").write_text('{"rank_pattern": null}')
    (folder / "metrics.jsonl").write_text('{"step": 30, "samples": [{}, {}]}\n')
    assert cli.main(["report", f"run={folder}"]) == 0, capsys.readouterr().err
    page = (folder / "report.html").read_text()
    assert said in Text(page).shown
    assert 'class="ended unknown"' in page


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (None, "finished"),
        ("SIGINT", "interrupted"),
        (TripwireError(f"the loss is nan, {TOKEN}"), "tripwire"),
        (KeyboardInterrupt(), "interrupted"),
        (KeyboardInterrupt(15), "interrupted"),
        (OSError(28, "No space left"), "failed"),
    ],
)
def test_however_a_run_ends_it_leaves_a_report(tmp_path, error, how):
    folder = write_run(tmp_path / "run", summary=None)
    rest = {key: value for key, value in SUMMARY.items() if key != "ended"}

    def run():
        with (
            MetricsLog(folder, resume_step=30) as metrics,
            reported(folder, rest, metrics) as end,
        ):
            assert json.loads((folder / "summary.json").read_text())["ended"] is None
            if isinstance(error, BaseException):
                raise error
            end.step, end.interrupted = 31, error

    if isinstance(error, BaseException):
        with pytest.raises(type(error)):
            run()
    else:
        run()
    ended = json.loads((folder / "summary.json").read_text())["ended"]
    assert (ended["how"], ended["step"]) == (how, 30 if isinstance(error, BaseException) else 31)
    assert TOKEN not in (folder / "summary.json").read_text()
    assert f'class="ended {how}"' in (folder / "report.html").read_text()
    if isinstance(error, KeyboardInterrupt):
        assert ended["said"] == ("SIGTERM" if error.args else "SIGINT")


def test_the_served_command_is_words_of_a_shell():
    command = serve_command("./my base; rm", 8, "a b")
    words = shlex.split(command)
    assert words[:3] == ["vllm", "serve", "./my base; rm"]
    assert words[-1] == "adapter=a b"


def test_a_curve_keeps_every_peak_and_both_ends():
    points = [(step, 1.0) for step in range(10_000)]
    points[4321], points[5678] = (4321, 9.0), (5678, -9.0)
    kept = thinned(points)
    assert {(0, 1.0), (4321, 9.0), (5678, -9.0), (9999, 1.0)} <= set(kept)
    assert len(kept) <= 310
    drawn = curve([{"step": s, "loss": v} for s, v in points], "loss", title="Loss")
    assert f"{len(kept)} of 10000 points" in drawn
    assert "<title>step 4,321: 9</title>" in drawn
    assert curve([{"step": 1, "loss": None}, {"step": 2}], "loss", title="Loss") == ""


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 10, [0, 5, 10]),
        (0.13, 0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3, 4, [-4, -2, 0, 2, 4]),
        (0, 0, [0, 0.5, 1.0]),
    ],
)
def test_axes_have_round_numbers(low, high, wanted):
    assert ticks(low, high) == pytest.approx(wanted)
    assert [number(v) for v in (0, 1234567.0, 0.00012, 12345.0, 1.5)] == [
        "0",
        "1.23e6",
        "0.00012",
        "12,345",
        "1.5",
    ]


@in_browser
def test_a_browser_shows_it_without_an_error_or_a_request(page, tmp_path):
    document, said, asked = browse(page, tmp_path)
    assert document.count("<svg") == document.count("</svg>") == 6
    assert document.count("<circle") == 4 * 30 + 2 * 2
    assert html.escape(HOSTILE, quote=False) in document
    assert said == []
    assert asked == set()

    # What is told above would be seen: the same page with what must not be there.
    faulty = tmp_path / "faulty.html"
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())
    faulty.write_text(text.replace("<main>", f"<main>{HOSTILE}"))
    _, said, asked = browse(faulty, tmp_path)
    assert any("ran" in line for line in said)
    assert "http://example.com/x.png" in asked
