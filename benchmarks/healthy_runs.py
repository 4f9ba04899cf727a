# SPDX-License-Identifier: Apache-2.0
"""Trains small models in many ways that are all healthy, and looks that nothing stops them.

    python benchmarks/healthy_runs.py --runs 20

Families take turns; each run draws adapters, packing, masks, schedule, memory options and mesh. It
must end with status 0, without a warning, with a lower loss than it began with and with an export.
What a tripwire says of such a run would be wrong.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import datasets  # noqa: E402, F401  what a run imports late
import orbax.checkpoint  # noqa: E402, F401
import transformers  # noqa: E402, F401
from kill_resume import fork  # noqa: E402
from small_run import CONFIG, rows_of, write_chats, write_model, write_recipe  # noqa: E402

from lora_tune import assets  # noqa: E402

DENSE = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "rope_theta": 500.0,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
HYBRID = {key: value for key, value in CONFIG.items() if key.startswith("linear_")}
VOCABULARY = json.loads((assets.resolve("lora_tune:tiny-qwen3-next") / "config.json").read_text())[
    "vocab_size"
]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "llama": {**DENSE, "mlp_bias": False, "attention_bias": True},
    "mistral": {**DENSE, "sliding_window": 16},
    "qwen2": {**DENSE, "use_sliding_window": False},
    "qwen3": {**DENSE, "tie_word_embeddings": False},
    "qwen3_moe": {**DENSE, **EXPERTS, "norm_topk_prob": True},
    "gemma3_text": {**DENSE, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma4_text": {
        **DENSE,
        "rope_theta": None,
        "sliding_window": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "qwen3_5_text": {**DENSE, **HYBRID, "full_attention_interval": 2},
    "qwen3_5_moe_text": {
        **DENSE,
        **HYBRID,
        **EXPERTS,
        "full_attention_interval": 4,
        "shared_expert_intermediate_size": 8,
    },
    "olmo_hybrid": {**DENSE, **HYBRID, "head_dim": None},
}
SHARED = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "dtype")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def drawn(rng: random.Random) -> dict[str, dict[str, Any]]:
    """The sections of a recipe that differ from those of `small_run`."""
    mesh = rng.choice([{}, {"data": 2}, {"fsdp": 2}, {"data": 2, "fsdp": 2}])
    return {
        "model": {
            "dtype": rng.choice(["float32", "bfloat16"]),
            "remat": rng.choice(["full", "dots", "none"]),
            "scan_layers": rng.random() < 0.8,
        },
        "lora": {
            "r": rng.choice([1, 4, 16]),
            "lora_alpha": rng.choice([4, 16]),
            "lora_dropout": rng.choice([0.0, 0.1]),
            "use_rslora": rng.random() < 0.3,
            "target_modules": rng.choice([ATTENTION, ["q_proj", "v_proj"], "all-linear"]),
        },
        "data": {
            "packing": rng.random() < 0.6,
            "max_length": rng.choice([48, 96]),
            "mask_history": rng.random() < 0.3,
            "train_on_eos": rng.choice(["turn", "last", "all"]),
        },
        "optim": {
            "learning_rate": rng.choice([0.003, 0.01]),
            "lr_scheduler_type": rng.choice(["cosine", "linear", "constant_with_warmup"]),
            "warmup_steps": rng.choice([1, 3]),
            "weight_decay": rng.choice([0.0, 0.1]),
            "max_grad_norm": rng.choice([1.0, None]),
        },
        "train": {
            "max_steps": 30,
            "batch_size": 8,
            "gradient_accumulation_steps": rng.choice([1, 1, 2]),
            "seed": rng.randrange(1000),
        },
        "eval": {"every": rng.choice([0, 10])},
        "log": {"every": rng.choice([1, 5])},
        "mesh": mesh,
    }


def healthy(folder: Path, family: str, sections: dict[str, dict[str, Any]]) -> str:
    """Runs one recipe; returns its first and last loss.

    Raises:
      SystemExit: it was stopped, warned of something or learned nothing.
    """
    folder.mkdir()
    absent = {} if family == "qwen3_next" else dict.fromkeys(CONFIG.keys() - {*SHARED})
    changes = {**absent, **FAMILIES[family], "model_type": family}
    model = write_model(folder / "model", **changes)
    chats = write_chats(folder / "chats.jsonl", 60)
    held_out = write_chats(folder / "held_out.jsonl", 5, first=100, ask="count up to")
    sections["data"]["eval_path"] = str(held_out)
    recipe = write_recipe(folder / "recipe.yaml", model=model, chats=chats)
    settings = [
        f"{name}.{key}={json.dumps(value)}"
        for name, section in sections.items()
        for key, value in section.items()
    ]
    status = os.waitstatus_to_exitcode(os.waitpid(fork(recipe, folder / "run", *settings), 0)[1])
    log = (folder / "run.log").read_text()
    shown = f"{family} {json.dumps(sections)}"
    if status or "warning:" in log:
        raise SystemExit(f"{shown}\n{log[-3000:]}")
    losses = [row["loss"] for row in rows_of(folder / "run") if "loss" in row]
    if not losses[-1] < losses[0] or not (folder / "run" / "adapter").is_dir():
        raise SystemExit(f"{shown}\nlosses {losses}\n{log[-3000:]}")
    return f"{losses[0]:.3f} -> {losses[-1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as place:
        for number in range(1, arguments.runs + 1):
            family, sections = [*FAMILIES][number % len(FAMILIES)], drawn(rng)
            said = healthy(Path(place) / str(number), family, sections)
            print(f"{number}: {family}, mesh {sections['mesh']}, loss {said}", flush=True)
    print(f"{arguments.runs} runs, no tripwire and no warning")


if __name__ == "__main__":
    main()
