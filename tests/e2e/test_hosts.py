# SPDX-License-Identifier: Apache-2.0
"""Two processes with four devices each, on loopback, are one run of eight devices."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_run import leftovers, losses_of, rows_of, write_chats, write_model, write_recipe

ROOT = Path(__file__).parents[2]
STEPS = 6
MORE = 12
SECTIONS: Mapping[str, Any] = {
    "mesh": {"fsdp": 4, "expert": 2},
    "train": {
        "max_steps": STEPS,
        "batch_size": 16,
        "gradient_accumulation_steps": 2,
        "load_best_model_at_end": True,
    },
    "save": {"every": 2, "keep": 2},  # so that old ones are looked at and removed
    "eval": {"every": 3, "num_samples": 1, "max_new_tokens": 4},
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    model, chats = write_model(folder / "model"), write_chats(folder / "chats.jsonl", 60)
    held_out = [
        str(write_chats(folder / f"held_out_{first}.jsonl", 5, first=first)) for first in (100, 200)
    ]
    sections = {**SECTIONS, "data": {"eval_path": held_out}}
    return write_recipe(folder / "recipe.yaml", model=model, chats=chats, **sections)


class Processes:
    """The same command in some processes, with eight devices together."""

    def __init__(
        self,
        recipe: Path,
        folder: Path,
        *overrides: str,
        count: int,
        devices: int = 8,
        last: Sequence[str] = (),
    ):
        """`last` is what the last process is told besides."""
        self.folder = folder
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        flag = f"--xla_force_host_platform_device_count={devices // count}"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": flag,
            # Of interest is what the processes say to each other, not how fast they compute.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        }
        command = [sys.executable, "-m", "lora_tune.cli", f"recipe={recipe}", *overrides]
        joined = [
            f"distributed.coordinator_address={address}",
            f"distributed.num_processes={count}",
        ]
        self.all = [
            subprocess.Popen(
                [*command, f"output_dir={folder}", *(last if number == count - 1 else ())]
                + ([*joined, f"distributed.process_id={number}"] if count > 1 else []),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number in range(count)
        ]

    def wait(self, timeout: float = 900) -> list[tuple[int, str]]:
        """(exit status, output) of each."""
        try:
            found = [(process, process.communicate(timeout=timeout)[0]) for process in self.all]
        finally:
            for process in self.all:
                process.kill()
        return [(process.returncode, output) for process, output in found]

    def finish(self) -> list[str]:
        found = self.wait()
        assert [status for status, _ in found] == [0] * len(found), found
        return [output for _, output in found]

    def logged(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for(self, seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 900
        while not seen():
            assert all(process.poll() is None for process in self.all), self.wait()
            assert time.monotonic() < deadline, "it never came to that moment"
            time.sleep(0.01)


@pytest.fixture(scope="module")
def one(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process with all eight devices."""
    processes = Processes(recipe, tmp_path_factory.mktemp("one") / "run", count=1)
    processes.finish()
    return processes.folder


def assert_same(folder: Path, other: Path) -> None:
    """The same examples in the same order, and numbers but for the order of sums."""
    rows, wanted = rows_of(folder), rows_of(other)
    assert [set(row) for row in rows] == [set(row) for row in wanted]
    for row, want in zip(rows, wanted, strict=True):
        for name, value in want.items():
            if isinstance(value, float):
                np.testing.assert_allclose(row[name], value, rtol=1e-4, err_msg=name)
            else:
                assert row[name] == value, name
    adapter, wanted_adapter = (
        load_file(run / "adapter" / "adapter_model.safetensors") for run in (folder, other)
    )
    assert adapter.keys() == wanted_adapter.keys()
    for name, want in wanted_adapter.items():
        np.testing.assert_allclose(adapter[name], want, atol=1e-3, err_msg=name)
    assert sorted(os.listdir(folder)) == sorted(os.listdir(other))
    assert leftovers(folder) == []


def test_two_processes_are_one(recipe: Path, one: Path, tmp_path: Path) -> None:
    processes = Processes(recipe, tmp_path / "run", count=2)
    first, second = processes.finish()
    assert_same(processes.folder, one)
    assert "step 6/6" in first
    assert "step" not in second.replace("steps", ""), "only one process tells"


def test_a_signal_to_one_stops_both_and_both_go_on_in_one(
    recipe: Path, one: Path, tmp_path: Path
) -> None:
    processes = Processes(recipe, tmp_path / "run", count=2)
    processes.wait_for(lambda: processes.logged() > 2)
    processes.all[1].send_signal(signal.SIGTERM)
    found = processes.wait()
    assert [status for status, _ in found] == [143, 143], found
    step = max(int(name) for name in os.listdir(processes.folder / "checkpoints"))
    assert f"SIGTERM: stopped after step {step}, saved in" in found[0][1]
    assert step < STEPS
    again = Processes(recipe, processes.folder, count=1)
    assert f"going on after step {step}" in again.finish()[0]
    assert_same(processes.folder, one)


def test_a_host_that_dies_ends_the_job_and_the_rerun_goes_on(
    recipe: Path, one: Path, tmp_path: Path
) -> None:
    processes = Processes(recipe, tmp_path / "run", count=2)
    processes.wait_for(lambda: processes.logged() > 3)
    processes.all[1].kill()
    died = time.monotonic()
    status, output = processes.wait(timeout=300)[0]
    assert time.monotonic() - died < 60
    assert status not in (0, -signal.SIGKILL)
    # Our sentence where the devices notice first, that of jax where its heartbeat does.
    assert "another process of this run" in output or "another task died" in output
    again = Processes(recipe, processes.folder, count=2)
    again.finish()
    assert_same(processes.folder, one)


def test_what_one_process_cannot_do_stops_both_with_its_reason(
    recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    processes = Processes(recipe, folder, count=2, last=["data.path=nowhere.jsonl"])
    (status, output), (its_status, its_output) = processes.wait()
    assert (status, its_status) == (2, 2)
    assert "process 1 could not prepare the run, so no process goes on" in output
    assert "nowhere.jsonl" in its_output
    assert not folder.exists()


def test_what_processes_must_share_is_compared(recipe: Path, tmp_path: Path) -> None:
    other = write_chats(tmp_path / "other.jsonl", 4)
    last = [f"data.eval_path={other}"]
    for status, output in Processes(recipe, tmp_path / "run", count=2, last=last).wait():
        assert status == 2
        assert "the recipe of process 1 is not that of process 0" in output


def test_a_mesh_that_leaves_devices_out_is_refused(recipe: Path, tmp_path: Path) -> None:
    processes = Processes(recipe, tmp_path / "run", "mesh.expert=1", count=2)
    for status, output in processes.wait():
        assert status == 2
        assert "2 processes have 8 devices together, the mesh uses 4" in output


def test_a_process_that_cannot_write_ends_the_others(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    processes = Processes(recipe, folder, "train.max_steps=500", count=2)
    processes.wait_for(lambda: processes.logged() > 1)
    begun = time.monotonic()
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "checkpoints").write_text("in the way")
    for status, output in processes.wait(timeout=300):
        assert status != 0, output
    # 34 s where nothing else runs; the others' tests have the same cores.
    assert time.monotonic() - begun < 180


def test_all_or_nothing_is_said_of_how_to_join(recipe: Path, tmp_path: Path) -> None:
    one = Processes(recipe, tmp_path / "run", "distributed.num_processes=2", count=1)
    [(status, output)] = one.wait()
    assert status == 2
    assert "distributed.coordinator_address and distributed.process_id must be set too" in output
    assert not (tmp_path / "run").exists()


def test_eight_devices_then_four_then_eight(recipe: Path, tmp_path: Path) -> None:
    def part(name: str, devices: int) -> Processes:
        words = (f"mesh.fsdp={devices // 2}", f"train.max_steps={MORE}")
        return Processes(recipe, tmp_path / name, *words, count=1, devices=devices)

    def step(run: Processes) -> int:
        """The last that is logged; rows of evaluations come before the first."""
        path = run.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last may be torn
        return max(losses_of([json.loads(line) for line in lines]), default=0)

    whole = part("whole", 8)
    whole.finish()
    stopped = [0]
    for devices in (8, 4):
        one = part("run", devices)
        one.wait_for(lambda one=one: step(one) > stopped[-1])
        one.all[0].send_signal(signal.SIGTERM)
        [(status, output)] = one.wait()
        assert status == 143, output
        stopped.append(step(one))
        assert f"SIGTERM: stopped after step {stopped[-1]}, saved in" in output
    assert 0 < stopped[1] < stopped[2] < MORE
    part("run", 8).finish()
    assert_same(tmp_path / "run", whole.folder)
    assert list(losses_of(rows_of(tmp_path / "run"))) == list(range(1, MORE + 1))
