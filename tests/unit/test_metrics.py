# SPDX-License-Identifier: Apache-2.0
import io
import json
import math
import subprocess
import sys

import pytest

from lora_tune.errors import InputError
from lora_tune.progress import clock
from lora_tune.training.metrics import MetricsLog, columns_of, read_rows
from lora_tune.training.report import Terminal, describe
from lora_tune.training.writers import TensorBoard, Wandb

TRAIN = {
    "step": 10,
    "loss": 1.25,
    "grad_norm": 0.5,
    "learning_rate": 1e-4,
    "tokens_per_second": 1234.5,
    "seconds_per_step": 2.0,
}


def write(run_dir, steps, *, resume_step=None):
    log = MetricsLog(run_dir, resume_step=resume_step)
    for step in steps:
        log.write({"step": step, "loss": step / 3})
    log.close()
    return log


def test_one_object_a_line_and_floats_survive_exactly(tmp_path):
    log = write(tmp_path, [1, 2])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 1 / 3},
        {"step": 2, "loss": 2 / 3},
    ]
    assert log.rows() == [json.loads(line) for line in lines]


def test_a_row_is_on_disk_before_write_returns(tmp_path):
    log = MetricsLog(tmp_path, resume_step=None)
    log.write({"step": 1, "loss": 1.0})
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    log.close()


def test_numbers_json_cannot_hold_become_null(tmp_path):
    log = MetricsLog(tmp_path, resume_step=None)
    log.write({"step": 1, "loss": math.nan, "grad_norm": -math.inf})
    log.close()

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "loss": None, "grad_norm": None}


def test_resuming_removes_later_rows_and_a_torn_last_line(tmp_path):
    write(tmp_path, [1, 2, 3, 4])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    log = write(tmp_path, [3], resume_step=2)
    assert [row["step"] for row in log.rows()] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_starts_a_new_file(tmp_path):
    write(tmp_path, [0, 1])
    assert [row["step"] for row in write(tmp_path, [0]).rows()] == [0]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"loss": 2}\n{"step": 3}\n')
    with pytest.raises(InputError, match=r"line 2 of .*metrics\.jsonl"):
        MetricsLog(tmp_path, resume_step=3)
    assert read_rows(tmp_path / "absent.jsonl") == []


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(InputError, match=r"metrics\.jsonl cannot be written.*output_dir"):
        MetricsLog(tmp_path / "run", resume_step=None)


def test_a_full_disk_is_one_sentence(tmp_path):
    code = (
        "import resource, sys\n"
        "from lora_tune.training.metrics import MetricsLog\n"
        "from lora_tune.errors import InputError\n"
        "log = MetricsLog(sys.argv[1], resume_step=None)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
        "try:\n"
        "    for step in range(100): log.write({'step': step, 'loss': 1.0})\n"
        "except InputError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "cannot be written: File too large; free space" in done.stdout
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert rows


SAMPLES = [
    {"prompt": "a\nquestion", "answer": "it\nis", "expected": "x"},
    {"prompt": "b", "answer": "", "expected": "y"},
]


def test_columns_of_sets_and_sources_are_told_apart():
    keys = (
        "loss",
        "loss/a/b",
        "eval_loss",
        "eval_x_loss",
        "eval_x_loss/a",
        "eval_loss/eval_y_loss",
    )
    assert columns_of("loss", keys) == {"loss/a/b": "a/b"}
    assert columns_of("eval_loss", keys) == {
        "eval_x_loss": "x",
        "eval_x_loss/a": "x/a",
        "eval_loss/eval_y_loss": "eval_y_loss",
    }
    keys = ("eval_accuracy", "eval_token_accuracy", "eval_x_token_accuracy", "eval_x_accuracy")
    assert columns_of("eval_accuracy", keys) == {"eval_x_accuracy": "x"}
    assert columns_of("eval_token_accuracy", keys) == {"eval_x_token_accuracy": "x"}
    row = {"step": 4, "eval_loss": 1.0, "eval_x_loss": 2.0, "eval_loss/s": 3.0}
    assert describe(row, total_steps=9) == "step 4/9  eval loss 1.0000 (x 2.0000, s 3.0000)"


def test_without_a_terminal_each_row_is_a_plain_line(tmp_path):
    stream = io.StringIO()
    terminal = Terminal(total_steps=40, stream=stream)
    log = MetricsLog(tmp_path, resume_step=None, writers=[terminal])
    log.write(TRAIN | {"compile_seconds": 3.25})
    log.write({"step": 10, "eval_loss": 0.75, "eval_accuracy": 0.5, "eval_exact_match": 0.25})
    for step in (0, 10, 40):
        log.write({"step": step, "samples": SAMPLES})
    log.note("saved [here]")
    log.close()
    train, evaluation, *samples, note = stream.getvalue().splitlines()
    assert train == (
        "step 10/40  loss 1.2500  grad norm 0.5  learning rate 0.0001  1,234 tokens/s  "
        "ETA 0:01:00  (compiled in 3.2 s)"
    )
    assert evaluation == "step 10/40  eval loss 0.7500  eval accuracy 50.00 %  exact match 25.00 %"
    said = [
        " | a question | answer: 'it\\nis' | expected: 'x'",
        " | b | answer: '' | expected: 'y'",
    ]
    when = ("before training", "after step 10", "after training")
    assert samples == [f"{start}{rest}" for start in when for rest in said]
    assert note == "saved [here]"


def test_in_a_terminal_there_is_a_live_line(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    terminal = Terminal(total_steps=40, start_step=5, stream=stream)
    terminal.write(TRAIN)
    terminal.write({"step": 10, "eval_loss": 0.75})
    terminal.close()
    shown = stream.getvalue()
    for words in ("10/40", "loss 1.2500", "1,234 tokens/s", "eval loss 0.7500", "ETA"):
        assert words in shown
    assert "\x1b[" in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (65, "0:01:05"), (36_061, "10:01:01")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_wandb_is_offline_and_keeps_its_id(tmp_path):
    ids = []
    for step in (1, 2):
        writer = Wandb(tmp_path, project="test", config={"lora": {"r": 4}})
        ids.append(writer._run.id)
        log = MetricsLog(tmp_path, resume_step=step, writers=[writer])
        log.write({"step": step, "loss": 1.0})
        log.write({"step": step, "samples": SAMPLES})
        log.close()
    assert ids[0] == ids[1]
    runs = [path for path in (tmp_path / "wandb").glob("offline-run-*") if path.is_dir()]
    assert runs
    [table, *_] = (tmp_path / "wandb").rglob("*.table.json")
    logged = json.loads(table.read_text())
    assert logged["columns"] == ["prompt", "answer", "expected"]
    assert logged["data"] == [list(sample.values()) for sample in SAMPLES]
    # Two starts within one second: the second folder ends in "<id>-1".
    assert all(f"-{ids[0]}" in path.name for path in runs)


def test_wandb_that_does_not_start_is_a_sentence(tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(InputError, match=r"wandb does not start \(No API key.*wandb_mode=offline"):
        Wandb(tmp_path, project="test", config={}, mode="online")


def events_of(folder):
    """(tag, step) -> value, as TensorBoard reads files: later ones take back steps of earlier."""
    from tensorboardX.proto import event_pb2

    found = {}
    for path in sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        content = path.read_bytes()
        while content:  # length, its checksum, the event, its checksum
            size = int.from_bytes(content[:8], "little")
            event = event_pb2.Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            if event.session_log.status == event_pb2.SessionLog.START:
                found = {key: value for key, value in found.items() if key[1] < event.step}
            for value in event.summary.value:
                text = value.tensor.string_val
                found[value.tag, event.step] = text[0].decode() if text else value.simple_value
    return found


def test_tensorboard_has_what_the_log_has_and_no_step_twice(tmp_path):
    for start, last in ((None, 3), (1, 2)):
        log = MetricsLog(
            tmp_path, resume_step=start, writers=[TensorBoard(tmp_path / "tb", resume_step=start)]
        )
        for step in range((start or 0) + 1, last + 1):
            log.write({"step": step, "loss": step + (start or 0) / 4, "mfu": None})
        log.write({"step": last, "eval_loss": 0.5, "eval_far_loss/a.jsonl": 0.25})
        log.write({"step": last, "samples": SAMPLES[1:]})
        log.close()
    found = events_of(tmp_path / "tb")
    assert {key: value for key, value in found.items() if key[0] == "train/loss"} == {
        ("train/loss", 1): 1.0,
        ("train/loss", 2): 2.25,
    }
    assert (found["eval/loss", 2], found["eval/far_loss/a.jsonl", 2]) == (0.5, 0.25)
    [text] = [value for (tag, _), value in found.items() if tag.startswith("samples/0")]
    assert text == "prompt: b\n\nanswer: \n\nexpected: y"


def test_tensorboard_without_its_package_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(InputError, match=r"pip install 'lora-tune\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_no_writer_sees_a_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    stream, token = io.StringIO(), "hf_" + "Ab1" * 9
    log = MetricsLog(tmp_path, resume_step=None, writers=[Terminal(total_steps=4, stream=stream)])
    answer = f"it is {token}, or correct-horse-battery"
    log.write({"step": 0, "samples": [{"prompt": "your token?", "answer": answer}]})
    log.note(f"sent with {token}")
    log.close()
    for text in (stream.getvalue(), (tmp_path / "metrics.jsonl").read_text()):
        assert "it is [secret], or [secret]" in text
        assert token not in text
    assert "sent with [secret]" in stream.getvalue()
