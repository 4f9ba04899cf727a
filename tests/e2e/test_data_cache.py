# SPDX-License-Identifier: Apache-2.0
"""`data.cache` and `data.num_proc` through the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_tune import assets


def rows(path: Path, count: int) -> Path:
    text = "Say how the old stone sleeps near the river, and why. " * 8
    with path.open("w") as file:
        for i in range(count):
            turns = [{"role": "user", "content": f"{i} {text}"}]
            turns.append({"role": "assistant", "content": f"{text} {i}"})
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def command(tmp_path: Path, data: Path, *overrides: str) -> list[str]:
    recipe = tmp_path / "recipe.yaml"
    model = assets.resolve("lora_tune:tiny-qwen3-next")
    recipe.write_text(
        f"output_dir: {tmp_path}/run\nmodel: {{path: '{model}'}}\n"
        f"data: {{path: '{data}', max_length: 512}}\ntrain: {{max_steps: 1}}\n"
    )
    return [sys.executable, "-m", "lora_tune.cli", "data", f"recipe={recipe}", *overrides]


def run(*args, **environment: str) -> subprocess.CompletedProcess:
    env = os.environ | environment
    return subprocess.run(*args, capture_output=True, text=True, env=env, timeout=300)


@pytest.mark.slow
def test_a_second_command_reads_what_the_first_has_kept(tmp_path):
    data, home = rows(tmp_path / "a.jsonl", 1500), tmp_path / "home"
    assert data.stat().st_size > 1 << 20
    said = []
    for overrides in (["data.num_proc=2"], [], ["data.cache=false"], [f"data.cache={home}/mine"]):
        done = run(command(tmp_path, data, *overrides), XDG_CACHE_HOME=str(home))
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
        assert len(list((home / "lora_tune" / "data").iterdir())) == 1
    assert len(set(said)) == 1
    assert len(list((home / "mine").iterdir())) == 1
    [kept] = (home / "lora_tune" / "data").iterdir()
    (kept / "tokens.bin").write_bytes(b"")
    done = run(command(tmp_path, data), XDG_CACHE_HOME=str(home))
    assert done.stdout == said[0]
    [note] = [line for line in done.stderr.splitlines() if "note:" in line]
    assert "are damaged" in note


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_while_rows_are_tokenised_ends_all_processes(tmp_path, number):
    data = rows(tmp_path / "a.jsonl", 30_000)
    process = subprocess.Popen(
        command(tmp_path, data, "data.num_proc=2", "data.cache=false"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until, workers = time.monotonic() + 120, []
    while len(workers) < 2 and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
        workers = children(process.pid)
    assert len(workers) == 2
    process.send_signal(number)
    begun = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    expected = 128 + number if number == signal.SIGINT else -number  # the system's own
    assert process.returncode == expected
    if number == signal.SIGINT:
        assert errors.splitlines()[-1] == "lora-tune: interrupted"
    while any(map(alive, workers)) and time.monotonic() < begun + 60:
        time.sleep(0.05)
    assert not any(map(alive, workers))


def children(pid: int) -> list[int]:
    """The processes that tokenise for a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            program = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == pid and b"lora_tune.data.worker" in program:
            found.append(int(folder.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
