# SPDX-License-Identifier: Apache-2.0
"""The LoRA training step on this CPU against PEFT on torch, in one process, step by step in turn.

Both sides start from the same checkpoint and the same adapter, see the same batch, and take the
same AdamW steps in float32; the benchmark stops if their losses differ. Ours is the step that a
recipe compiles. PEFT runs without gradient checkpointing; ours keeps what `--remat` says, by
default the policy that is fastest on a CPU. The ratio is that of seconds, and beside it that of the
CPU time that the process used.

A busy machine makes either ratio worthless with several threads: torch's threads wait for each
other at every operation and count as busy meanwhile, so PEFT alone slows down. There, give both
sides one core; the load that the table begins with should be near 0 otherwise.

    pip install '.[parity]'
    python benchmarks/cpu_step.py                          # both models, random weights
    python benchmarks/cpu_step.py --model ~/SmolLM2-135M   # a Llama checkpoint on disk
    taskset -c 0 python benchmarks/cpu_step.py --threads 1 # on a busy machine
"""

import argparse
import functools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import peft
import torch
import transformers
from flax import nnx

from lora_tune import build
from lora_tune.api import save_adapter
from lora_tune.hf.hub import find_model
from lora_tune.lora.inject import LORA_B
from lora_tune.models.decoder import Decoder
from lora_tune.recipe import schema
from lora_tune.training.state import split_model
from lora_tune.training.step import make_step

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}
"""The shapes of SmolLM2-135M."""
TINY_QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
OPTIM = {"learning_rate": 1e-4, "lr_scheduler_type": "constant", "weight_decay": 0.01}
# Losses of one step: both sides sum the same float32 terms in another order.
TOLERANCE = 1e-4

Step = Callable[[], float]
"""Takes one optimizer step on the batch and returns the loss before it."""


def random_checkpoint(config: dict[str, Any], folder: Path) -> Path:
    """Writes a checkpoint of random weights as transformers has them."""
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(**config)
    transformers.AutoModelForCausalLM.from_config(made).float().save_pretrained(folder)
    return folder


def our_model(folder: Path, args: argparse.Namespace) -> tuple[schema.Recipe, Decoder]:
    """The model of a recipe, with adapters on every projection."""
    recipe = schema.Recipe(
        model=schema.Model(path=str(folder), dtype="float32", remat=args.remat),
        lora=schema.Lora(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"),
        train=schema.Train(max_steps=1000, batch_size=args.rows),
        optim=schema.Optim(**OPTIM),
    )
    model = build.make_model(recipe, find_model(str(folder)), None)
    rng = np.random.default_rng(1)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == LORA_B:  # zeros would leave the gradients of A out of the comparison
            variable.set_value(jnp.asarray(rng.normal(0, 0.01, variable.shape), jnp.float32))
    return recipe, model


def our_step(recipe: schema.Recipe, model: Decoder, tokens: np.ndarray) -> Step:
    optimizer, _ = build.optimizer_of(recipe, 1000)
    split = split_model(model)
    opt_state, _ = build.init_optimizer(optimizer, split, None)
    step = jax.jit(make_step(split, optimizer), donate_argnums=(0, 1))
    batch = build.make_place(None, 1)(
        {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": np.ones(tokens[:, 1:].shape, np.float32),
            "segment_ids": np.ones(tokens[:, 1:].shape, np.int32),
            "positions": np.broadcast_to(
                np.arange(tokens.shape[1] - 1, dtype=np.int32), tokens[:, 1:].shape
            ),
        }
    )
    state = [split.trainable, opt_state]

    def run() -> float:
        state[0], state[1], metrics = step(*state, split.frozen, batch, jax.random.key(0))
        return float(jax.block_until_ready(metrics)["loss"])

    return run


def their_step(folder: Path, adapter: Path, tokens: np.ndarray) -> Step:
    """PEFT on the same checkpoint with the same adapter; attention in torch's own fused form."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        # PEFT fuses gate and up of the experts. The blocks of B between the two, zero in what we
        # save, would be trained as well: another model than ours, whose losses part from it.
        parameter.register_hook(functools.partial(torch.mul, (parameter != 0).float()))
    optimizer = torch.optim.AdamW(
        trained, lr=OPTIM["learning_rate"], weight_decay=OPTIM["weight_decay"], eps=1e-8
    )
    inputs, targets = (torch.tensor(part).long() for part in (tokens[:, :-1], tokens[:, 1:]))

    def run() -> float:
        logits = model(inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss.item()

    return run


def timed(step: Step) -> tuple[float, float, float]:
    """The loss of a step, its seconds, and its seconds of CPU time over all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    return loss, time.perf_counter() - wall, time.process_time() - cpu


def compare(name: str, folder: Path, args: argparse.Namespace) -> None:
    """Prints one line: tokens per second of both sides and their ratio."""
    recipe, model = our_model(folder, args)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocab_size, (args.rows, args.length + 1), np.int32)
    ours = our_step(recipe, model, tokens)
    with tempfile.TemporaryDirectory() as scratch:
        save_adapter(model, Path(scratch) / "adapter")
        theirs = their_step(folder, Path(scratch) / "adapter", tokens)
    started = time.perf_counter()
    losses: list[tuple[float, float]] = [(ours(), theirs())]
    first = time.perf_counter() - started
    walls: list[tuple[float, float]] = []
    cpus: list[tuple[float, float]] = []
    for _ in range(args.steps):
        mine, other = timed(ours), timed(theirs)
        for found, times in zip((losses, walls, cpus), zip(mine, other, strict=True), strict=True):
            found.append(times)
    for a, b in losses:
        if not abs(a - b) <= TOLERANCE * abs(b):
            raise SystemExit(f"{name}: the losses differ: ours and PEFT's are {losses}")
    mine, other = (statistics.median(column) for column in zip(*walls, strict=True))
    cpu_ratio = statistics.median(theirs / ours for ours, theirs in cpus)
    count = args.rows * args.length
    print(
        f"{name:<18} {count / mine:>8.0f} {count / other:>8.0f} {other / mine:>7.2f} "
        f"{cpu_ratio:>8.2f} {losses[0][0]:>8.4f} {losses[-1][0]:>8.4f} {losses[-1][1]:>8.4f} "
        f"{first:>8.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Llama folder in place of random weights")
    parser.add_argument("--only", choices=("llama", "qwen3_next"))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5, help="timed, after one that compiles")
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)
    print(f"{args.rows} x {args.length} tokens, r={args.rank} on every projection, float32")
    print(f"remat {args.remat}, {args.threads} threads, median of {args.steps} steps")
    print(f"{os.getloadavg()[0]:.1f} processes were running in the last minute")
    print(
        f"{'model':<18} {'ours':>8} {'PEFT':>8} {'ratio':>7} "
        f"{'cpu':>8} {'loss':>8} {'last':>8} {'PEFT':>8} {'first s':>8}   (tokens a second)"
    )
    with tempfile.TemporaryDirectory() as scratch:
        if args.only != "qwen3_next":
            folder = args.model or random_checkpoint(SMOLLM2, Path(scratch) / "llama")
            compare("SmolLM2-135M" if args.model is None else args.model.name, folder, args)
        if args.only != "llama":
            folder = random_checkpoint(TINY_QWEN3_NEXT, Path(scratch) / "qwen3_next")
            compare("tiny Qwen3-Next", folder, args)


if __name__ == "__main__":
    main()
