# SPDX-License-Identifier: Apache-2.0
"""A model of a few kilobytes, conversations and a recipe: a whole run in seconds."""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import yaml
from safetensors.numpy import save_file

from lora_tune import assets, build
from lora_tune.hf.table import bind
from lora_tune.models.decoder import DecoderOptions
from lora_tune.training.metrics import CLOCK

# Two cycles of a run of two layers and a run of one.
CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "full_attention_interval": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
RECIPE: Mapping[str, Any] = {
    "model": {"dtype": "float32", "remat": "none"},
    "lora": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "in_proj_qkvz", "shared_expert.down_proj"],
    },
    "data": {"max_length": 48},
    "optim": {"learning_rate": 0.01},
    "train": {"max_steps": 4, "batch_size": 4, "seed": 3},
    "log": {"every": 1},
}


def write_model(folder: Path, *, weights: bool = True, **changes: Any) -> Path:
    """A model folder with the shipped tokenizer; `changes` go to the configuration."""
    shipped = assets.resolve("lora_tune:tiny-qwen3-next")
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(shipped / file, folder / file)
    vocabulary = json.loads((shipped / "config.json").read_text())["vocab_size"]
    config = {**CONFIG, "vocab_size": vocabulary, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        save_file(random_weights(folder), folder / "model.safetensors", {"format": "pt"})
    return folder


def random_weights(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of the model of a folder, by its name in the file."""
    source = build.find_source(str(folder), weights=False)
    options = DecoderOptions(dtype=jnp.dtype("float32"), param_dtype=jnp.dtype("float32"))
    model = build.abstract_model(source, options)
    rng = np.random.default_rng(5)
    return {
        str(name): 0.2 * rng.standard_normal(leaf.hf_shape, np.float32)
        for leaf in bind(model.family, model)
        for name in leaf.names.ravel()
    }


def write_chats(path: Path, count: int, *, first: int = 0, ask: str = "count to") -> Path:
    """Conversations of one and of two turns, all of different lengths in a short cycle.

    Most of those that begin with other numbers are the same again; with another `ask` none is.
    """
    lines = []
    for i in range(first, first + count):
        turns = [("user", f"{ask} {i % 5 + 1}"), ("assistant", " ".join("abcde"[: i % 5 + 1]))]
        turns += [("user", "again"), ("assistant", f"no {i % 7}")] if i % 3 == 0 else []
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_recipe(path: Path, *, model: Path, chats: Path, **changes: Mapping[str, Any]) -> Path:
    """A recipe file without `output_dir`; `changes` are whole or partial sections."""
    recipe = {name: dict(section) for name, section in RECIPE.items()}
    recipe["model"]["path"], recipe["data"]["path"] = str(model), str(chats)
    for name, section in changes.items():
        recipe[name] = {**recipe.get(name, {}), **section}
    path.write_text(yaml.safe_dump(recipe))
    return path


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run without the clock; every line must be whole."""
    raw = (run_dir / "metrics.jsonl").read_bytes()
    assert raw.endswith(b"\n"), "the last line is torn"
    rows = [json.loads(line) for line in raw.splitlines()]
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in rows]


def losses_of(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Step -> training loss."""
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def tree_of(folder: Path) -> dict[str, str]:
    """Every file and folder below a folder, with a hash of what it holds."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(
            path.read_bytes() if path.is_file() else b""
        ).hexdigest()
        for path in sorted(folder.rglob("*"))
    }


def leftovers(folder: Path) -> list[str]:
    """What only an interrupted write can have left."""
    names = (path.name for path in folder.rglob("*"))
    return [n for n in names if n.endswith((".partial", ".old", ".new")) or "orbax" in n]
