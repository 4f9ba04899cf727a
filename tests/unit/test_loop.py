# SPDX-License-Identifier: Apache-2.0
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_problem
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from toy_problem import ToyData, make_state, make_step, optimizer, train

from lora_tune.checkpoint.folder import Checkpoints
from lora_tune.errors import InputError
from lora_tune.training.loop import run
from lora_tune.training.metrics import CLOCK, MetricsLog, read_rows
from lora_tune.training.tripwires import TripwireError


def rows_of(run_dir):
    """The rows without what depends on the clock."""
    rows = read_rows(Path(run_dir) / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in rows]


def plain_loop(total_steps):
    """The same training, written as plainly as can be."""
    opt, schedule = optimizer(total_steps)
    (trainable, opt_state, frozen), step_fn = make_state(opt), make_step(opt)
    data, rows = ToyData(), []
    for step in range(1, total_steps + 1):
        key = jax.random.fold_in(jax.random.key(7), step)
        batch = data.batch(step)
        trainable, opt_state, out = step_fn(trainable, opt_state, frozen, batch, key)
        rows.append(
            {"loss": float(out["loss"]), "lr": float(schedule(step - 1)), "batch": batch["weights"]}
        )
    return trainable, rows


def parts(*, total_steps=6, run_dir, step_fn=None, **changes):
    """Arguments of `run` for one new run."""
    opt, schedule = optimizer(total_steps)
    arguments = {
        "state": make_state(opt),
        "step_fn": step_fn or make_step(opt),
        "data": ToyData(),
        "place": jax.device_put,
        "checkpoints": Checkpoints(Path(run_dir) / "checkpoints", keep=2, every=2),
        "metrics": MetricsLog(run_dir, resume_step=None),
        "schedule": schedule,
        "total_steps": total_steps,
        "log_every": 1,
        "seed": 7,
    }
    return arguments | changes


def run_parts(**changes):
    arguments = parts(**changes)
    with arguments["metrics"]:
        return run(**arguments)


def poisoned(**values):
    """A step whose third call reports other numbers than it should."""
    opt, _ = optimizer(6)
    inner = make_step(opt)

    def step(trainable, opt_state, frozen, batch, key):
        # Adam's count is 2 before the third step.
        bad = next(leaf for leaf in jax.tree.leaves(opt_state) if leaf.ndim == 0) == 2
        trainable, opt_state, out = inner(trainable, opt_state, frozen, batch, key)
        changed = {
            name: jnp.where(bad, jnp.asarray(value, out[name].dtype), out[name])
            for name, value in values.items()
        }
        return trainable, opt_state, out | changed

    return jax.jit(step)


def test_it_does_what_a_plain_loop_does(tmp_path):
    outcome = train(tmp_path, total_steps=12)
    trainable, want = plain_loop(12)
    rows = [row for row in rows_of(tmp_path) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["loss"] for row in rows] == [row["loss"] for row in want]
    np.testing.assert_allclose(
        [row["learning_rate"] for row in rows], [row["lr"] for row in want], rtol=1e-5
    )
    for got, wanted in zip(
        jax.tree.leaves(outcome.state[0]), jax.tree.leaves(trainable), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
    tokens = [row["batch"].sum() for row in want]
    assert [row["trained_tokens"] for row in rows] == tokens
    assert rows[-1]["total_trained_tokens"] == sum(tokens)
    assert rows[-1]["total_tokens"] == 12 * toy_problem.ROWS == outcome.counts["total_tokens"]
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert (outcome.step, outcome.interrupted) == (12, None)
    assert outcome.checkpoint == tmp_path / "checkpoints" / "12"


def test_what_is_logged_evaluated_and_saved_when(tmp_path):
    train(tmp_path, total_steps=11, log_every=4, eval_every=6, save_every=5, keep=9)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows if "loss" in row] == [1, 4, 8, 11]
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 6, 11]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["10", "11", "5"]
    # A row of a step stands before the evaluation after it.
    assert ["eval_loss" in row for row in rows] == [True, False, False, True, False, False, True]


def test_samples_stand_in_the_log_before_their_step_is_saved(tmp_path):
    seen = []

    class Saving(Checkpoints):
        def save(self, step, state, **rest):
            seen.append((step, [row["step"] for row in rows_of(tmp_path) if "samples" in row]))
            return super().save(step, state, **rest)

    def answer(trainable, frozen):
        total = float(abs(trainable["q_proj"]["kernel_lora_b"]).sum())
        return [{"prompt": "B?", "answer": f"{total:.6f}"}]

    outcome = run_parts(
        run_dir=tmp_path,
        checkpoints=Saving(tmp_path / "checkpoints", keep=9, every=3),
        total_steps=7,
        sample_fn=answer,
        sample_every=3,
    )
    assert seen == [(3, [0, 3]), (6, [0, 3, 6]), (7, [0, 3, 6, 7])]
    samples = [row["samples"] for row in rows_of(tmp_path) if "samples" in row]
    assert samples[0] == [{"prompt": "B?", "answer": "0.000000"}], "B starts at zero"
    assert samples[-1] == answer(outcome.state[0], None)
    assert len({str(sample) for sample in samples}) == 4


def test_speed_counts_the_tokens_between_rows_and_leaves_out_compilation(tmp_path):
    class SlowToCompile:
        def __init__(self, step_fn):
            self.step_fn = step_fn

        def lower(self, *args):
            time.sleep(1.0)
            return self.step_fn.lower(*args)

        def __call__(self, *args):
            return self.step_fn(*args)

    opt, _ = optimizer(9)
    wait = 0.05
    run_parts(
        run_dir=tmp_path,
        total_steps=9,
        step_fn=SlowToCompile(make_step(opt)),
        data=ToyData(wait=wait),
        log_every=4,
        eval_fn=lambda *_: time.sleep(0.5) or {"eval_loss": 1.0},
        eval_every=2,
    )
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 4, 8, 9]
    assert rows[0]["compile_seconds"] > 1.0
    assert [row["step"] for row in rows if "compile_seconds" in row] == [1]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(
            toy_problem.ROWS / row["seconds_per_step"]
        ), "every step has the same number of tokens"
    for row in rows[1:3]:
        # Neither the 1 s of compilation nor the 0.5 s of each evaluation is in it.
        assert 0.8 * wait < row["seconds_per_step"] < wait + 0.15


def test_waiting_for_a_batch_counts_while_the_devices_have_nothing_to_do(tmp_path):
    busy = False

    class Working:
        """A number of a step that the devices are not done with while `busy`."""

        def __init__(self, array):
            self.array = array

        def is_ready(self):
            return not busy

        def __array__(self):
            return np.asarray(self.array)

    step_fn = make_step(optimizer(8)[0])

    class Wrapped:
        def lower(self, *args):
            return self

        def compile(self):
            return self

        def __call__(self, *args):
            *state, out = step_fn(*args)
            return *state, jax.tree.map(Working, out)

    def shares(name):
        run_parts(
            run_dir=tmp_path / name,
            checkpoints=Checkpoints(tmp_path / name / "checkpoints", keep=1, every=0),
            data=ToyData(wait=0.2),
            total_steps=8,
            log_every=6,
            step_fn=Wrapped(),
        )
        rows = read_rows(tmp_path / name / "metrics.jsonl")
        return [row["input_bound_fraction"] for row in rows]

    first, second, _ = shares("idle")
    assert first == 0, "the first batch is waited for while the step is compiled"
    assert 0.7 < second <= 1
    busy = True
    assert shares("busy")[1] < 0.3, "only the batch after row 1, when nothing was at work"


def test_compiles_the_step_once(tmp_path):
    compiled = []

    def listen(event, _, fun_name="", **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    run_parts(run_dir=tmp_path)
    assert compiled.count("jit(step)") == 1


@pytest.mark.parametrize("cut", [4, 7, 9])
def test_a_cut_run_goes_on_bit_for_bit(tmp_path, cut):
    whole = train(tmp_path / "whole", total_steps=12, save_every=3)
    with pytest.raises(InputError, match=f"data ended after step {cut} of 12"):
        train(tmp_path / "cut", total_steps=12, save_every=3, stop_after=cut)
    data = ToyData()
    again = train(tmp_path / "cut", total_steps=12, save_every=3, data=data)
    # Exactly the examples after the checkpoint, none twice and none left out.
    assert data.served == list(range(cut // 3 * 3 + 1, 13))
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    for got, want in zip(
        jax.tree.leaves(again.state[:2]), jax.tree.leaves(whole.state[:2]), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_a_finished_run_does_nothing_more(tmp_path):
    train(tmp_path, total_steps=4)
    before = (tmp_path / "metrics.jsonl").read_text()
    outcome = train(tmp_path, total_steps=4)
    assert (outcome.step, outcome.interrupted, outcome.checkpoint) == (4, None, None)
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": np.nan}, "loss of step 3 is nan"),
        ({"grad_norm": 0.0}, "gradient norm of step 3 is exactly 0"),
        ({"trained_tokens": 0}, "step 3 has no trained token"),
    ],
)
def test_a_tripwire_stops_before_the_step_is_logged_or_saved(tmp_path, values, words):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, every=3)
    with pytest.raises(TripwireError, match=words):
        run_parts(run_dir=tmp_path, step_fn=poisoned(**values), checkpoints=checkpoints)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]
    assert checkpoints.steps() == []


@pytest.mark.parametrize("name", ["tokens", "trained_tokens"])
def test_tokens_that_are_not_those_of_the_data_stop_the_run(tmp_path, name):
    class Other(ToyData):
        def planned(self, step):
            found = super().planned(step)
            return {**found, name: found[name] + (step == 3)}

    words = f"step 3 counted .* {name.replace('_', ' ')}, the data has"
    with pytest.raises(TripwireError, match=words):
        run_parts(run_dir=tmp_path, data=Other())


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: {name: value[:, :-1] for name, value in batch.items()},
        lambda batch: {**batch, "x": batch["x"].astype(np.float16)},
        lambda batch: {**batch, "more": np.zeros(3, np.float32)},
    ],
)
def test_a_batch_that_the_step_was_not_compiled_for_stops_the_run(tmp_path, change):
    class Other(ToyData):
        def batch(self, step):
            found = super().batch(step)
            return change(found) if step == 4 else found

    with pytest.raises(TripwireError, match="step 4 has arrays of other shapes"):
        run_parts(run_dir=tmp_path, data=Other())


def test_adapters_that_do_not_move_stop_the_run_at_step_2(tmp_path):
    with pytest.raises(TripwireError, match="after 2 steps the B of stuck"):
        run_parts(run_dir=tmp_path, adapter_norms=lambda _: {"stuck": 0.0})


def test_nothing_trainable_stops_before_the_first_step(tmp_path):
    _, opt_state, frozen = make_state(optimizer(6)[0])
    with pytest.raises(TripwireError, match="nothing is trainable"):
        run_parts(run_dir=tmp_path, state=({}, opt_state, frozen))


def test_an_evaluation_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(TripwireError, match="evaluation loss after step 0 is nan"):
        run_parts(run_dir=tmp_path, eval_fn=lambda *_: {"eval_loss": float("nan")})


def test_an_implicit_transfer_in_the_step_is_an_error(tmp_path):
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
        run_parts(run_dir=tmp_path, place=lambda batch: batch)


def test_runs_on_a_mesh(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "data"))
    run_parts(
        run_dir=tmp_path,
        state=jax.device_put(make_state(optimizer(6)[0]), everywhere),
        place=lambda batch: jax.device_put(batch, split),
    )
    got = [row["loss"] for row in rows_of(tmp_path)]
    np.testing.assert_allclose(got, [row["loss"] for row in plain_loop(6)[1]], rtol=1e-5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step_and_says_where(tmp_path, number):
    class Interrupting(ToyData):
        def batch(self, step):
            if step == 5:
                os.kill(os.getpid(), number)
            return super().batch(step)

    class Said:
        notes: tuple[str, ...] = ()

        def write(self, row):
            pass

        def note(self, sentence):
            self.notes += (sentence,)

        def close(self):
            pass

    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    said = Said()
    outcome = train(tmp_path / "cut", total_steps=12, data=Interrupting(), writers=[said])
    assert (outcome.step, outcome.interrupted) == (5, number.name)
    assert outcome.checkpoint == tmp_path / "cut" / "checkpoints" / "5"
    assert said.notes[0].startswith("compiling the training step")
    assert said.notes[1:] == (
        f"{number.name}: stopped after step 5, saved in {outcome.checkpoint}",
    )
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    train(tmp_path / "cut", total_steps=12)
    train(tmp_path / "whole", total_steps=12)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


ENDLESS = """
import os, signal, sys, threading, time
sys.path[:0] = [{tests!r}, {unit!r}]
from lora_tune import cli
import test_loop

class Endless:
    def lower(self, *args):
        return self

    def compile(self):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.Signals({number}))).start()
        time.sleep(600)

cli._VERBS["list"] = lambda _: test_loop.run_parts(run_dir={folder!r}, step_fn=Endless())
sys.exit(cli.main(["list"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_step_compiles_ends_the_command(tmp_path, number):
    """The compiler cannot be stopped; the command ends beside it."""
    unit = Path(__file__).parent
    names = {"tests": str(unit.parent), "unit": str(unit), "folder": str(tmp_path)}
    code = ENDLESS.format(number=int(number), **names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 128 + number, done.stderr
    said = [line for line in done.stderr.splitlines() if line]
    assert said == [
        f"{number.name}: stopped while compiling, nothing to save",
        "lora-tune: interrupted",
    ]


def test_a_step_that_does_not_compile_says_why(tmp_path):
    class Broken:
        def lower(self, *args):
            return self

        def compile(self):
            raise ValueError("no such instruction")

    with pytest.raises(ValueError, match="no such instruction"):
        run_parts(run_dir=tmp_path, step_fn=Broken())


IMPATIENT = """
import os, signal, sys
from toy_problem import ToyData, train

class Impatient(ToyData):
    def batch(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        return super().batch(step)

train(sys.argv[1], total_steps=6, data=Impatient())
"""


def test_a_second_signal_ends_at_once(tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", IMPATIENT, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "SIGTERM: finishing this step, then saving" in done.stderr


def test_runs_outside_the_main_thread(tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(train(tmp_path, total_steps=3)))
    thread.start()
    thread.join()
    assert done[0].step == 3


@pytest.mark.slow
def test_kill_9_at_any_moment_and_the_same_command_again(tmp_path):
    """Random kills during steps, log lines and checkpoints leave no trace in the result."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}

    def start(name, wait):
        command = [sys.executable, toy_problem.__file__, str(tmp_path / name), "40", "2", wait]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)

    def finish(process):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out

    def kill_in_the_middle():
        file = tmp_path / "killed" / "metrics.jsonl"
        before = len(read_rows(file))
        process, deadline = start("killed", "0.04"), time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if file.exists() and len(read_rows(file)) not in (0, before):
                break
            time.sleep(0.01)
        time.sleep(random.uniform(0.0, 0.6))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"

    reference = start("whole", "0")
    for _ in range(2):
        kill_in_the_middle()
    assert finish(start("killed", "0")).split() == ["40", "None"]
    finish(reference)
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")
    assert len(rows_of(tmp_path / "whole")) == 40 + 9
    assert sorted(p.name for p in (tmp_path / "killed" / "checkpoints").iterdir()) == sorted(
        p.name for p in (tmp_path / "whole" / "checkpoints").iterdir()
    )
