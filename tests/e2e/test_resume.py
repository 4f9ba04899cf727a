# SPDX-License-Identifier: Apache-2.0
"""A run that is killed, or asked to stop, at any moment, and the same command again."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import browse, in_browser
from small_run import leftovers, losses_of, rows_of, tree_of, write_chats, write_model, write_recipe

from lora_tune import cli, verify
from lora_tune.training import loop

ROOT = Path(__file__).parents[2]
STEPS = 12
# Dropout makes every step depend on its random key, packing and two parts a step on data order.
SECTIONS: dict[str, Any] = {
    "lora": {"lora_dropout": 0.1},
    "train": {"max_steps": STEPS, "gradient_accumulation_steps": 2},
    "save": {"every": 2, "merged": True},
    "eval": {"every": 5},
}


class Run:
    """The command of one run folder, in processes of its own on one device."""

    def __init__(self, recipe: Path, output_dir: Path):
        self.folder = output_dir
        self.recipe = recipe

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lora_tune.cli", f"recipe={self.recipe}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
        return subprocess.Popen(
            [*command, f"output_dir={self.folder}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> str:
        process = self.start()
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return out

    def kill_when(self, seen: Callable[[], bool], *, delay: float = 0.0) -> bool:
        """Starts it and kills it as soon as `seen`; False if it was too late for that."""
        process = self.start()
        wait_for(process, seen)
        time.sleep(delay)
        process.kill()
        _, err = process.communicate(timeout=300)
        assert process.returncode in (0, -signal.SIGKILL), err
        return process.returncode == -signal.SIGKILL

    def stop_when(self, seen: Callable[[], bool], number: signal.Signals) -> tuple[int, str]:
        """Starts it and sends a signal when `seen`; returns exit status and standard output."""
        process = self.start()
        wait_for(process, seen)
        process.send_signal(number)
        out, _ = process.communicate(timeout=300)
        return process.returncode, out

    def logged(self) -> int:
        """Complete lines in the log."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def saved(self) -> list[int]:
        """Steps of the checkpoints."""
        return sorted(int(name) for name in self._checkpoints() if name.isdecimal())

    def saving(self) -> bool:
        return any("tmp" in name for name in self._checkpoints())

    def exporting(self) -> bool:
        return any((self.folder / f".{name}.partial").exists() for name in ("adapter", "merged"))

    def _checkpoints(self) -> list[str]:
        folder = self.folder / "checkpoints"
        return os.listdir(folder) if folder.exists() else []


def wait_for(process: subprocess.Popen[str], seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while process.poll() is None and not seen():
        assert time.monotonic() < deadline, "it never came to that moment"
        # The moments of interest last a few milliseconds.
        time.sleep(0.0005)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    model, chats = write_model(folder / "model"), write_chats(folder / "chats.jsonl", 60)
    held_out = write_chats(folder / "held_out.jsonl", 5, first=100, ask="count up to")
    sections = {**SECTIONS, "data": {"eval_path": str(held_out)}}
    return write_recipe(folder / "recipe.yaml", model=model, chats=chats, **sections)


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    run = Run(recipe, tmp_path_factory.mktemp("whole") / "run")
    run.finish()
    rows = rows_of(run.folder)
    assert list(losses_of(rows)) == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 5, 10, STEPS]
    # Otherwise a wrong order of examples could not be told from the right one.
    assert len({row["trained_tokens"] for row in rows if "loss" in row}) > STEPS // 2
    return run.folder


def verified(folder: Path, last: int) -> tuple[int, str, str]:
    """Status and output of a verification on one device, as the runs had it: roundings differ."""
    done = subprocess.run(
        [sys.executable, "-m", "lora_tune.cli", "verify-resume", f"run={folder}", f"last={last}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def final_meta(run_dir: Path) -> Any:
    return json.loads((run_dir / "checkpoints" / str(STEPS) / "meta" / "metadata").read_text())


def assert_same_run(folder: Path, whole: Path) -> None:
    """Everything that a run leaves, but for what the clock and the folder's name decide."""
    assert rows_of(folder) == rows_of(whole)
    assert final_meta(folder) == final_meta(whole)
    for name in ("adapter", "merged"):
        assert tree_of(folder / name) == tree_of(whole / name)
    assert (folder / "adapters.tsv").read_bytes() == (whole / "adapters.tsv").read_bytes()
    recipe = (folder / "recipe.yaml").read_text()
    assert recipe.replace(str(folder), str(whole)) == (whole / "recipe.yaml").read_text()
    assert sorted(os.listdir(folder)) == sorted(os.listdir(whole))
    names = [sorted(os.listdir(run / "checkpoints")) for run in (folder, whole)]
    assert names[0] == names[1]
    assert leftovers(folder) == []


@pytest.mark.slow
def test_kill_9_at_any_moment_and_the_same_command_again(
    recipe: Path, whole: Path, tmp_path: Path
) -> None:
    run = Run(recipe, tmp_path / "run")
    assert run.kill_when(lambda: True, delay=random.uniform(0.2, 4.0)), "killed while starting"
    assert run.saved() == []

    target = random.randint(3, 5)
    assert run.kill_when(lambda: run.logged() > target, delay=random.uniform(0.0, 0.05))
    assert max(run.saved(), default=0) < STEPS

    before = max(run.saved(), default=0)
    assert run.kill_when(lambda: max(run.saved(), default=0) > before and run.saving())

    # A finished run exports again, so that one missed moment is followed by the next.
    assert any(run.kill_when(run.exporting) for _ in range(5)), "never killed in the export"
    assert run.saved()[-1] == STEPS

    run.finish()
    assert_same_run(run.folder, whole)


@pytest.mark.slow
def test_signals_save_say_where_and_do_not_look_like_success(
    recipe: Path, whole: Path, tmp_path: Path
) -> None:
    run, step = Run(recipe, tmp_path / "run"), 0
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        logged, begun = run.logged(), step
        code, out = run.stop_when(lambda logged=logged: run.logged() > max(logged, 2), number)
        assert code == status, out
        step = run.saved()[-1]
        assert begun < step < STEPS
        assert f"{number.name}: stopped after step {step}, saved in {run.folder}" in out
        assert (f"going on after step {begun}" in out) == (begun > 0)
        rows = rows_of(run.folder)
        assert rows == rows_of(whole)[: len(rows)]
        assert list(losses_of(rows)) == list(range(1, step + 1))
        assert not (run.folder / "adapter").exists()
        report = (run.folder / "report.html").read_text(encoding="utf-8")
        assert f"Interrupted after step {step} of {STEPS}: {number.name}" in report
        assert leftovers(run.folder) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.resume=never", "train.resume=never, but"),
        ("optim.learning_rate=0.5", "in which optim.learning_rate was 0.01, is 0.5"),
        ("lora.r=2", "in which lora.r was 4, is 2"),
        ("data.path={other}", "the training data is not what the checkpoint"),
        ("train.max_steps=8", "holds a checkpoint of step 12, but the recipe asks for 8 steps"),
    ],
)
def test_another_run_does_not_go_on_from_these_checkpoints(
    recipe: Path,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    override: str,
    said: str,
) -> None:
    other = write_chats(tmp_path / "other.jsonl", 61)
    before = tree_of(whole)

    status = cli.main([f"recipe={recipe}", f"output_dir={whole}", override.format(other=other)])

    err = capsys.readouterr().err
    assert status == 2
    assert err.startswith("lora-tune: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert "output_dir" in err, "it says what to do"
    assert tree_of(whole) == before


def test_the_end_of_a_run_is_verified_and_the_run_is_left_alone(
    whole: Path,
) -> None:
    before = tree_of(whole)
    status, out, err = verified(whole, 2)
    assert status == 0, err
    start = int(out.partition("from step ")[2].split()[0]) - 1
    assert start in Run(whole, whole).saved()
    assert f"{STEPS - start} of {STEPS - start} logged steps are the same, bit for bit" in out
    assert "fewer" not in out
    # More than the checkpoints go back: from the very beginning.
    status, out, err = verified(whole, STEPS + 1)
    assert status == 0, err
    assert f"fewer steps than last={STEPS + 1} can be compared: {STEPS}" in out
    assert f"{STEPS} of {STEPS} logged steps are the same" in out
    assert tree_of(whole) == before


def test_a_run_that_was_made_longer_is_verified_from_there_on(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With more steps in all, the first ones would have other learning rates now."""
    command = [f"recipe={recipe}", f"output_dir={tmp_path}", "save.merged=false", "save.keep=4"]
    (tmp_path / "certificate.json").write_text('{"step": 4}')
    assert cli.main([*command, "train.max_steps=4"]) == 0
    assert (tmp_path / "certificate.json").exists()
    capsys.readouterr()
    assert cli.main([*command, "train.max_steps=7"]) == 0
    assert "removed the certificate" in capsys.readouterr().out
    assert not (tmp_path / "certificate.json").exists()
    status, out, err = verified(tmp_path, 9)
    assert status == 0, err
    assert "steps up to 4 were trained when the run was to have another number of steps" in out
    assert "3 of 3 logged steps are the same, bit for bit" in out
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    status, _, err = verified(tmp_path, 9)
    assert status == 2
    assert "has no checkpoint from step 4 on with a logged step after it" in err
    (tmp_path / "metrics.jsonl").unlink()
    status, _, err = verified(tmp_path, 9)
    assert status == 2
    assert "metrics.jsonl has no step that was trained" in err
    assert cli.main([*command, "train.max_steps=7"]) == 0
    assert "metrics.jsonl has lost its rows up to step 7" in capsys.readouterr().out
    assert cli.main(["report", f"run={tmp_path}"]) == 0
    assert "so the report has no curves" in capsys.readouterr().err
    (tmp_path / "adapter" / "mine.txt").write_text("kept")
    assert cli.main([*command, "train.max_steps=8"]) == 2
    assert "holds mine.txt, which lora-tune did not write" in capsys.readouterr().err


def test_a_run_without_its_checkpoints_is_not_replaced_unsaid(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints")
    before = tree_of(folder)
    command = [f"recipe={recipe}", f"output_dir={folder}"]
    assert cli.main(command) == 2
    err = capsys.readouterr().err
    both = f"{folder / 'adapter'} and {folder / 'merged'}"
    assert f"{both}: left by a run of which no checkpoint is here" in err
    assert tree_of(folder) == before
    for name in ("adapter", "merged"):
        shutil.rmtree(folder / name)
        (folder / name).mkdir()  # nothing in it is nothing to lose
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert f"metrics.jsonl went up to step {STEPS}, and there is no checkpoint" in out
    assert "training examples too" not in out


def test_a_log_that_cannot_be_read_is_not_replaced_unsaid(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("what is this\n")
    assert cli.main([f"recipe={recipe}", f"output_dir={tmp_path}", "train.max_steps=1"]) == 0
    assert "metrics.jsonl cannot be read, and there is no checkpoint" in capsys.readouterr().out


@in_browser
def test_the_report_of_a_run_opens_in_a_browser(whole: Path, tmp_path: Path) -> None:
    document, said, asked = browse(whole / "report.html", tmp_path)
    assert document.count("<svg") == document.count("</svg>") > 1
    assert "linear_attn.in_proj_qkvz" in document, "the table of adapted modules"
    assert (said, asked) == ([], set())


@pytest.mark.parametrize("key", ["loss", "grad_norm", "total_trained_tokens"])
def test_a_log_that_does_not_come_back_is_told(whole: Path, tmp_path: Path, key: str) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    [row] = [row for row in rows if row["step"] == STEPS - 1 and "loss" in row]
    row[key] = math.nextafter(row[key], 9e9) if isinstance(row[key], float) else row[key] + 1
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, _, err = verified(folder, 2)
    assert status == 1
    assert f"step {STEPS - 1} is not what was logged: {key} {row[key]!r} is" in err


def test_a_run_goes_on_from_the_checkpoint_of_another(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, *_ = Run(recipe, whole).saved()
    arguments = [f"recipe={recipe}", f"output_dir={tmp_path / 'run'}"]
    path = whole / "checkpoints" / str(start)
    assert cli.main([*arguments, f"train.resume={path}"]) == 0
    rows = rows_of(tmp_path / "run")
    assert rows == [row for row in rows_of(whole) if row["step"] > start]
    assert tree_of(tmp_path / "run" / "adapter") == tree_of(whole / "adapter")
    # There is a checkpoint of its own now, and a run folder stands for its newest.
    assert cli.main([*arguments, f"train.resume={whole}"]) == 0
    said = capsys.readouterr().out
    assert f"going on after step {STEPS}, the last: nothing is left to train" in said

    # What it names may be gone then.
    assert cli.main([*arguments, f"train.resume={tmp_path / 'gone'}"]) == 0

    for wrong in ("awto", str(tmp_path), str(whole / "adapter")):
        place = f"output_dir={tmp_path / 'new'}"
        assert cli.main([f"recipe={recipe}", place, f"train.resume={wrong}"]) == 2
        err = capsys.readouterr().err
        assert "train.resume: expected auto, never, a run folder with checkpoints" in err
        assert repr(wrong) in err
        assert not (tmp_path / "new").exists()
    words = [f"recipe={recipe}", place, f"train.resume={path}", f"train.max_steps={start - 1}"]
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert f"train.resume={path} holds a checkpoint of step {start}" in err
    assert "name an earlier one" in err
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "checkpoints").symlink_to(tmp_path / "nowhere")
    assert cli.main(words[:2]) == 2
    assert "checkpoints is no folder; move it away" in capsys.readouterr().err
    (tmp_path / "new" / "checkpoints").unlink()
    wrong = whole / "checkpoints" / "99"
    assert cli.main([*arguments[:1], place, f"train.resume={wrong}"]) == 2
    steps = ", ".join(map(str, Run(recipe, whole).saved()))
    assert f"has no checkpoint 99; it has those of steps {steps}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_is_used_by_one_run_at_a_time(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(recipe, tmp_path / "run")
    process = run.start()
    try:
        wait_for(process, lambda: run.logged() > 0)
        assert cli.main([f"recipe={recipe}", f"output_dir={run.folder}"]) == 2
    finally:
        process.kill()
        process.communicate(timeout=60)
    err = capsys.readouterr().err
    assert f"output_dir {run.folder} is in use by process {process.pid} on " in err
    assert err.count("\n") == 1
    # The process is gone, so is its hold on the folder.
    assert cli.main([f"recipe={recipe}", f"output_dir={run.folder}"]) == 0
    assert ".in_use" not in os.listdir(run.folder)


def test_an_interrupt_of_a_verification_is_no_difference(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = loop._numbered

    def interrupted(*args: Any) -> Any:
        for step, batch in real(*args):
            if step == STEPS:
                os.kill(os.getpid(), signal.SIGTERM)
            yield step, batch

    monkeypatch.setattr(loop, "_numbered", interrupted)
    # One step more, so that the signal does not come in the last.
    monkeypatch.setattr(verify, "_start", lambda *_: 0)
    real_replay = verify._replay
    monkeypatch.setattr(verify, "_replay", lambda *a: real_replay(*a[:3], STEPS + 1))
    assert cli.main(["verify-resume", f"run={whole}"]) == 143
    err = capfd.readouterr().err
    assert "not what was logged" not in err
    assert "SIGTERM: finishing this step\n" in err
