# SPDX-License-Identifier: Apache-2.0
"""Kills a small run at random moments, over and over, and compares what it leaves.

    python benchmarks/kill_resume.py --runs 200

Each run trains a model of a few kilobytes (dropout, packing, two parts a step, evaluations, a
checkpoint every second step, adapter and merged export), is killed with SIGKILL at a moment drawn
from its whole duration, start and export included, and is given the same command again until it
ends. Log, checkpoints, order of examples, adapter and merged model must be those of a run that
nothing disturbed, bit for bit, and an export must be whole at every moment.

Processes are forked from one that has imported everything, which spares seconds each.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]

import datasets  # noqa: E402, F401  what a run imports late
import jax  # noqa: E402
import orbax.checkpoint  # noqa: E402, F401
from small_run import (  # noqa: E402
    leftovers,
    rows_of,
    tree_of,
    write_chats,
    write_model,
    write_recipe,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402, F401  a run imports them late

from lora_tune import api, cli, compiled  # noqa: E402, F401

STEPS = 12
SECTIONS: dict[str, Any] = {
    "lora": {"lora_dropout": 0.1},
    "train": {"max_steps": STEPS, "gradient_accumulation_steps": 2},
    "save": {"every": 2, "merged": True},
    "eval": {"every": 5},
}


def fork(recipe: Path, folder: Path, *settings: str) -> int:
    """Starts the command of a run folder and returns its process."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    with open(folder.with_suffix(".log"), "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os._exit(cli.main([f"recipe={recipe}", f"output_dir={folder}", *settings]))


def state_of(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves, but for what the clock and the folder's name decide."""
    meta = folder / "checkpoints" / str(STEPS) / "meta" / "metadata"
    return {
        "rows": rows_of(folder),
        "meta": json.loads(meta.read_text()),
        "exports": [tree_of(folder / name) for name in ("adapter", "merged")],
        "checkpoints": sorted(os.listdir(folder / "checkpoints")),
        "files": sorted(os.listdir(folder)),
        "leftovers": leftovers(folder),
    }


def half_exports(folder: Path, whole: dict[str, Any]) -> list[str]:
    """Exports that are there and are not the whole ones."""
    names = zip(("adapter", "merged"), whole["exports"], strict=True)
    return [n for n, tree in names if (folder / n).exists() and tree_of(folder / n) != tree]


def killed_run(recipe: Path, folder: Path, seconds: float, whole: dict[str, Any]) -> int:
    """One run, killed until a kill comes too late; returns the number of kills.

    Raises:
      SystemExit: something is not as in the undisturbed run.
    """
    kills = 0
    while True:
        child = fork(recipe, folder)
        # Half of the runs are killed twice at least.
        if kills == 0 or random.random() < 0.5:
            time.sleep(random.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if folder.exists() and (half := half_exports(folder, whole)):
            raise SystemExit(f"{folder}: {half} are half written after {kills} kills")
        if os.WIFSIGNALED(status):
            kills += 1
            continue
        if os.waitstatus_to_exitcode(status):
            raise SystemExit(folder.with_suffix(".log").read_text()[-3000:])
        found = state_of(folder)
        if found != whole:
            other = [key for key in whole if found[key] != whole[key]]
            raise SystemExit(f"{folder}: {other} differ after {kills} kills")
        return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    with tempfile.TemporaryDirectory() as place:
        jax.config.update("jax_compilation_cache_dir", f"{place}/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        folder = Path(place)
        model, chats = write_model(folder / "model"), write_chats(folder / "chats.jsonl", 60)
        held_out = write_chats(folder / "held_out.jsonl", 5, first=100)
        sections = {**SECTIONS, "data": {"eval_path": str(held_out)}}
        recipe = write_recipe(folder / "recipe.yaml", model=model, chats=chats, **sections)
        for name in ("cold", "whole"):  # the second finds its programs compiled
            begin = time.monotonic()
            status = os.waitpid(fork(recipe, folder / name), 0)[1]
            assert status == 0, (folder / f"{name}.log").read_text()[-3000:]
            seconds = time.monotonic() - begin
        whole = state_of(folder / "whole")
        print(f"an undisturbed run takes {seconds:.1f} s", flush=True)
        kills = 0
        for number in range(1, arguments.runs + 1):
            kills += killed_run(recipe, folder / f"run{number}", seconds, whole)
            print(f"{number} runs, {kills} kills: all as undisturbed", flush=True)


if __name__ == "__main__":
    main()
