# SPDX-License-Identifier: Apache-2.0
"""Rows to batches: tokenising with one process and with several, what is kept, batches from it.

Made-up conversations, written as JSON Lines, go the way of a run with packing. Each stage is a
process of its own, so that its peak of memory is its own; of the workers it is the largest. Memory
is given above that of the same imports with the tokenizer and no data; maps of files count in it,
and give way when memory is short. `--other` is the part of every row that stands in columns that
nobody learns from, as published data has them: it is read and parsed and not tokenised.

    python benchmarks/data.py --tokenizer FOLDER
    python benchmarks/data.py --tokenizer FOLDER --gigabytes 2 --other 0.9
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from lora_tune import assets
from lora_tune.data import tokenizer as tokenizers
from lora_tune.data.dataset import Dataset
from lora_tune.data.prefetch import ahead
from lora_tune.data.prepared import Means, Source, examples
from lora_tune.data.store import Store

_WORDS = 20_000
"""Different words of the made-up text."""


def write_rows(path: Path, size: float, other: float) -> None:
    """Conversations of two turns until the file has `size` bytes."""
    rng = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(_WORDS)]
    often = [1 / (rank + 2) for rank in range(_WORDS)]
    written = 0
    with path.open("w") as file:
        while written < size:
            turns = []
            for role in ("user", "assistant") * 2:
                text = " ".join(rng.choices(words, often, k=rng.randint(20, 200)))
                turns.append({"role": role, "content": text.capitalize() + "."})
            row: dict[str, object] = {"messages": turns}
            row["id"] = "x" * int(len(json.dumps(row)) * other / (1 - other))
            written += file.write(json.dumps(row) + "\n")


def peak(who: int) -> float:
    """Megabytes that this process, or the largest of those it has waited for, has ever held."""
    return resource.getrusage(who).ru_maxrss / 1024


def cpu() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def encode(args: argparse.Namespace) -> dict[str, float]:
    """One stage: rows to examples, made or read from what was kept, then batches."""
    tokenizer = tokenizers.load(args.tokenizer)
    bare = peak(resource.RUSAGE_SELF)
    source = Source(str(args.scratch / "rows.jsonl"))
    means = Means(args.num_proc, Store(args.scratch / f"kept-{args.num_proc}"), worth=0)
    begun, before = time.perf_counter(), cpu()
    found = examples(source, tokenizer, {"max_length": args.length}, means)
    result = {
        "tokens": found.report.tokens,
        "seconds": time.perf_counter() - begun,
        "cpu": cpu() - before,
        "fingerprint": found.fingerprint,
        "rss": peak(resource.RUSAGE_SELF) - bare,
        "workers": peak(resource.RUSAGE_CHILDREN) - bare if args.num_proc > 1 else 0,
    }
    if args.stage == "warm":
        dataset = Dataset(found, max_length=args.length, batch_size=16)
        steps = min(dataset.steps(1), args.steps)
        batches = islice(ahead(batch for _, batch in dataset.batches()), steps)
        result["packed"] = sum(int((batch["segment_ids"] > 0).sum()) for batch in batches)
        result["all"] = time.perf_counter() - begun
        result["efficiency"] = dataset.report.packing_efficiency
        result["rss"] = peak(resource.RUSAGE_SELF) - bare
    return result


def stage(args: argparse.Namespace, name: str, num_proc: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--stage", name, "--num-proc", str(num_proc)]
    command += ["--scratch", str(args.scratch), "--tokenizer", args.tokenizer]
    command += ["--length", str(args.length), "--steps", str(args.steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def report(args: argparse.Namespace) -> None:
    path = args.scratch / "rows.jsonl"
    write_rows(path, args.gigabytes * 1e9, args.other)
    print(f"{path.stat().st_size / 1e9:.2f} GB of rows, {args.other:.0%} in other columns")
    fingerprints = set()
    for num_proc in args.processes:
        got = stage(args, "cold", num_proc)
        fingerprints.add(got["fingerprint"])
        tokens = got["tokens"]
        print(
            f"tokenise, {num_proc} process{'es' if num_proc > 1 else ''}: {tokens:,} tokens in "
            f"{got['seconds']:.1f} s = {tokens / got['seconds']:,.0f} tokens/s; "
            f"{got['cpu']:.1f} s of CPU = {tokens / got['cpu']:,.0f} tokens/s of CPU; "
            f"memory +{got['rss']:.0f} MB, a worker +{got['workers']:.0f} MB",
            flush=True,
        )
    got = stage(args, "warm", args.processes[-1])
    assert fingerprints == {got["fingerprint"]}
    print(
        f"from what was kept: {got['tokens']:,} tokens found and checked in {got['seconds']:.2f} s"
        f"; with packing and batches {got['packed']:,} tokens in {got['all']:.2f} s = "
        f"{got['packed'] / got['all']:,.0f} tokens/s; rows {got['efficiency']:.1%} full; "
        f"memory +{got['rss']:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tiny = str(assets.resolve("lora_tune:tiny-qwen3-next"))
    parser.add_argument("--tokenizer", default=tiny, help="a model's folder; default: a tiny one")
    parser.add_argument("--gigabytes", type=float, default=0.01)
    parser.add_argument("--other", type=float, default=0.0)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=1_000_000, help="batches to make at most")
    parser.add_argument("--stage", choices=["cold", "warm"], help=argparse.SUPPRESS)
    parser.add_argument("--num-proc", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        print(json.dumps(encode(args)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        args.scratch = Path(scratch)
        report(args)


if __name__ == "__main__":
    main()
