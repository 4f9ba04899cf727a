# SPDX-License-Identifier: Apache-2.0
"""How fast files go in and out: weights, merged export, adapter; conversations, packing, batches.

Weights are a random Llama in bfloat16 with adapters on every projection. Beside each file there is
the time of a plain copy of as many bytes, taken in turn with it; beside tokenising, that of the
tokenizer alone on the same text. Files are in the page cache: this is about this package's work,
not about disks.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --width 1024 --layers 24 --repeats 5
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from lora_tune import assets, build
from lora_tune.api import save_adapter, save_merged
from lora_tune.data import sources
from lora_tune.data import tokenizer as tokenizers
from lora_tune.data.batch import build as build_batch
from lora_tune.data.encode import encode_rows
from lora_tune.data.messages import Encoder
from lora_tune.data.packing import pack
from lora_tune.hf.table import bind
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.inject import LORA_B, add_lora
from lora_tune.models.decoder import Decoder, DecoderOptions

BFLOAT16 = DecoderOptions(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)


def random_folder(folder: Path, *, width: int, layers: int) -> Path:
    """A Llama checkpoint in one file."""
    config = {
        "model_type": "llama",
        "vocab_size": 32 * width,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model, rng = abstract(folder), np.random.default_rng(0)
    tensors = {
        name: rng.normal(0, 0.02, leaf.hf_shape).astype(leaf.dtype)
        for leaf in bind(model.family, model)
        for name in leaf.names.ravel()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(Path(str(assets.resolve("lora_tune:tiny-qwen3-next"))) / "tokenizer.json", folder)
    return folder


def abstract(folder: Path) -> Decoder:
    return build.abstract_model(build.find_source(str(folder), weights=False), BFLOAT16)


def load(folder: Path) -> Decoder:
    model = build.load_weights(abstract(folder), mesh=None)
    jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    return model


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_turn(repeats: int, *works: Callable[[], Any]) -> list[float]:
    """The median time of each of several works, taken in turn."""
    times = [[seconds(work) for work in works] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def report(name: str, amount: float, unit: str, ours: float, plain: float, beside: str) -> None:
    rate = f"{amount / ours:,.0f} {unit}/s"
    print(f"{name:<18} {ours:>8.3f} {rate:>20} {ours / plain:>8.2f} x {beside}", flush=True)


def weights(scratch: Path, args: argparse.Namespace) -> None:
    base = random_folder(scratch / "base", width=args.width, layers=args.layers)
    model = add_lora(load(base), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == LORA_B:
            variable.set_value(jnp.full(variable.shape, 0.01, jnp.float32))
    save_adapter(model, scratch / "adapter")
    for name, out, work in (
        ("load", base, lambda: load(base)),
        ("merged export", base, lambda: save_merged(model, scratch / "merged")),
        ("adapter export", scratch / "adapter", lambda: save_adapter(model, scratch / "adapter")),
    ):
        file = next(out.glob("*.safetensors"))
        copy = partial(shutil.copyfile, file, scratch / "copy")
        size = file.stat().st_size / 1e6
        report(
            name, size, "MB", *in_turn(args.repeats, work, copy), beside=f"copy of {size:.0f} MB"
        )


def conversations(args: argparse.Namespace) -> None:
    tokenizer = tokenizers.load(str(assets.resolve("lora_tune:tiny-qwen3-next")))
    rows = sources.read(str(assets.resolve("lora_tune:quickstart/train.jsonl")))
    encoder = Encoder(tokenizer, format=rows.format, max_length=args.length)
    encode = partial(encode_rows, rows, encoder)
    examples = encode()
    texts = [tokenizer.decode(example.tokens) for example in examples]
    tokens = sum(map(len, (example.tokens for example in examples)))
    times = in_turn(args.repeats, encode, lambda: [tokenizer(text) for text in texts])
    report("rows to tokens", tokens, "tokens", *times, beside="tokenizer alone")
    lengths = np.tile(examples.lengths, 100)
    [packing] = in_turn(args.repeats, lambda: pack(lengths, args.length))
    print(f"{'pack':<18} {packing:>8.3f} {f'{len(lengths) / packing:,.0f} examples/s':>20}")
    plan = [[examples[i] for i in row] for row in pack(examples.lengths, args.length)]
    [laying] = in_turn(args.repeats, lambda: build_batch(plan, max_length=args.length))
    print(f"{'lay out batches':<18} {laying:>8.3f} {f'{tokens / laying:,.0f} tokens/s':>20}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens of a packed row")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(f"{'':<18} {'seconds':>8} {'':>20} {'':>8}   (median of {args.repeats})")
    with tempfile.TemporaryDirectory() as scratch:
        weights(Path(scratch), args)
    conversations(args)


if __name__ == "__main__":
    main()
