# SPDX-License-Identifier: Apache-2.0
"""What loading and merging a sharded checkpoint take of the host's memory, and their speed.

A Qwen3-MoE of random bfloat16 weights, 4 GB in 8 shards, is loaded and merged with an adapter on
every projection but those of experts, and once on experts too, each in a process of its own.
Memory is the highest mark over that of the process just before, without the device arrays (which
are host memory on a CPU): of all resident pages (`VmHWM`), mapped files among them, and of those
that are no file's (`RssAnon`, looked at every 5 ms). Beside each there is a plain copy of the same
files, taken right after: load against copying, merge against copying with every file synced, as
the merge does. `--cold` drops the files from the page cache before each. A virtual machine may be
slow to give memory that it has not given before, or has taken back: the first line says how slow.
Load, merge and copy alike begin right after as much of it was touched and let go.

    python benchmarks/load_merge.py
    python benchmarks/load_merge.py --gigabytes 1 --shards 4 --repeats 1
"""

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_tune import build
from lora_tune.hf.adapters import SCALE, A, B, factor_shapes
from lora_tune.hf.save import save_merged
from lora_tune.hf.table import bind
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.inject import adapted_stacks
from lora_tune.models.decoder import Decoder, DecoderOptions

BFLOAT16 = DecoderOptions(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
LIMIT = 1.5
EXPERT = 3 * 1024 * 512 * 2
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts_per_tok": 8,
}


def abstract(folder: Path) -> Decoder:
    return build.abstract_model(build.find_source(str(folder), weights=False), BFLOAT16)


def make(folder: Path, *, gigabytes: float, shards: int) -> None:
    """Random weights below 1: bits of any sign and fraction, and exponents below that of 1."""
    folder.mkdir()
    experts = max(8, round(gigabytes * 1e9 / EXPERT / CONFIG["num_hidden_layers"]))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_experts": experts}))
    model, rng = abstract(folder), np.random.default_rng(0)
    shapes = {n: leaf.hf_shape for leaf in bind(model.family, model) for n in leaf.names.ravel()}
    names = sorted(shapes)  # layer by layer, as published files are
    weights, total = {}, 0
    for k in range(shards):
        part = names[k * len(names) // shards : (k + 1) * len(names) // shards]
        file, header, at = f"model-{k + 1:05d}-of-{shards:05d}.safetensors", {}, 0
        for name in part:
            size = 2 * int(np.prod(shapes[name]))
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + size]}
            at, weights[name] = at + size, file
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for name in part:
                count = int(np.prod(shapes[name]))
                bits = np.frombuffer(rng.bytes(2 * count), np.uint16)
                out.write(((bits & 0x81FF) | 0x3C00).tobytes())
        total += at
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class Memory:
    """The highest marks of this process while the body runs, in GB over what it had before."""

    def __enter__(self) -> "Memory":
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        self._before = _status()
        self._anonymous, self._done = 0, threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.005):
            self._anonymous = max(self._anonymous, _status()["RssAnon"])

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()
        self.resident = (_status()["VmHWM"] - self._before["VmRSS"]) / 1e6
        self.anonymous = (self._anonymous - self._before["RssAnon"]) / 1e6


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        name: int(value.split()[0])
        for name, value in (line.split(":", 1) for line in lines)
        if name in ("VmHWM", "VmRSS", "RssAnon")
    }


def load(folder: Path, out: Path) -> dict[str, float]:
    jax.devices()
    touch_pages(size_of(folder))
    with Memory() as memory:
        started = time.perf_counter()
        model = build.load_weights(abstract(folder), mesh=None)
        arrays = jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        seconds = time.perf_counter() - started
    held = sum(array.nbytes for array in arrays) / 1e9
    return {
        "seconds": seconds,
        "resident": memory.resident - held,
        "anonymous": memory.anonymous - held,
    }


def merge(folder: Path, out: Path, *, experts: bool) -> dict[str, float]:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    targets += ["gate_proj", "up_proj", "down_proj"] if experts else []
    model = abstract(folder)
    leaves = bind(model.family, model)
    by_path = {leaf.path: leaf for leaf in leaves}
    arrays: dict[Any, np.ndarray] = {}
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=targets)
    for path, stack in adapted_stacks(leaves, lora).items():
        a, b = (np.full(s, 0.01, np.float32) for s in factor_shapes(by_path[path], stack.r))
        arrays |= {(*path[:-1], A): a, (*path[:-1], B): b, (*path[:-1], SCALE): stack.scales}
    touch_pages(size_of(folder))
    with Memory() as memory:
        started = time.perf_counter()
        save_merged(arrays, leaves, model.family, folder, out)
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "resident": memory.resident, "anonymous": memory.anonymous}


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def touch_pages(size: int) -> None:
    np.empty(size, np.uint8)[::4096] = 1


def touch(folder: Path, out: Path) -> dict[str, float]:
    """Nothing but as much fresh memory as loading needs, which some machines are slow to give."""
    size = size_of(folder)
    with Memory() as memory:
        started = time.perf_counter()
        touch_pages(size)
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "resident": memory.resident, "anonymous": memory.anonymous}


WORK: dict[str, Callable[[Path, Path], dict[str, float]]] = {
    "fresh memory alone": touch,
    "load": load,
    "merge": lambda folder, out: merge(folder, out, experts=False),
    "merge, experts": lambda folder, out: merge(folder, out, experts=True),
}


def copy(folder: Path, out: Path, *, synced: bool) -> float:
    touch_pages(size_of(folder))
    started = time.perf_counter()
    out.mkdir()
    for file in sorted(folder.iterdir()):
        shutil.copyfile(file, out / file.name)
        if synced:
            with (out / file.name).open("rb") as written:
                os.fsync(written.fileno())
    return time.perf_counter() - started


def read_once(folder: Path, *, cold: bool) -> None:
    """Puts the files into the page cache, or out of it."""
    for file in folder.iterdir():
        with file.open("rb") as held:
            if cold:
                os.posix_fadvise(held.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while held.read(2**24):
                    pass


def clear(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    os.sync()  # what one has written is not the other's to wait for


def measure(name: str, folder: Path, scratch: Path, args: Any) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        clear(scratch / "out")
        read_once(folder, cold=args.cold)
        command = [sys.executable, __file__, "--work", name, str(folder), str(scratch / "out")]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = json.loads(said.splitlines()[-1])
        clear(scratch / "out")
        read_once(folder, cold=args.cold)
        row["copy"] = copy(folder, scratch / "out", synced=name.startswith("merge"))
        for key, value in row.items():
            found.setdefault(key, []).append(value)
    clear(scratch / "out")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="files are not in the page cache")
    parser.add_argument("--scratch", type=Path, help="where the files go, default: /tmp")
    parser.add_argument("--work", nargs=3, metavar=("NAME", "BASE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        name, folder, out = args.work
        print(json.dumps(WORK[name](Path(folder), Path(out))))
        return
    with tempfile.TemporaryDirectory(dir=args.scratch) as place:
        scratch = Path(place)
        make(scratch / "base", gigabytes=args.gigabytes, shards=args.shards)
        size = size_of(scratch / "base")
        largest = max(f.stat().st_size for f in (scratch / "base").glob("*.safetensors"))
        cache = "cold" if args.cold else "warm"
        print(f"{size / 1e9:.2f} GB, largest shard {largest / 1e9:.2f} GB, {cache} page cache\n")
        columns = ("", "seconds", "MB/s", "of copy", "VmHWM GB", "RssAnon GB", "below 1.5")
        print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        for name in WORK:
            found = measure(name, scratch / "base", scratch, args)
            seconds, plain = (statistics.median(found[key]) for key in ("seconds", "copy"))
            peaks = [max(found[key]) for key in ("resident", "anonymous")]
            cells = [f"{seconds:.1f}", f"{size / 1e6 / seconds:,.0f}", f"{plain / seconds:.0%}"]
            cells += [*(f"{peak:.2f}" for peak in peaks), str(max(peaks) < LIMIT)]
            print(f"| {' | '.join([name, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
