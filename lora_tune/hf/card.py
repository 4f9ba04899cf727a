# SPDX-License-Identifier: Apache-2.0
"""Model cards, and the command that serves an adapter."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from lora_tune.errors import listed

# The ranks that vLLM accepts for --max-lora-rank.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(name: str | None) -> bool:
    """Whether a name has the form `owner/name` of the hub."""
    return name is not None and _HUB_ID.fullmatch(name) is not None


def serve_command(base: str, rank: int, adapter: str = ".") -> str:
    """The vLLM command, for a shell, that serves an adapter of this rank (the largest in it)."""
    limit = next((r for r in VLLM_RANKS if r >= rank), VLLM_RANKS[-1])
    return (
        f"vllm serve {shlex.quote(base)} --enable-lora --max-lora-rank {limit} "
        f"--lora-modules adapter={shlex.quote(adapter)}"
    )


def largest_rank(config: Mapping[str, Any]) -> int:
    """The largest rank of a module; patterns on fused experts count half, as their pairs do."""
    ranks = [
        rank // 2 if name.endswith("gate_up_proj") else rank
        for name, rank in config["rank_pattern"].items()
    ]
    return max([config["r"], *ranks])


def adapter_card(config: Mapping[str, Any], *, parameters: int, notes: str = "") -> str:
    """README.md for an adapter folder, with the front matter that the hub reads.

    Args:
      config: content of `adapter_config.json`.
      parameters: number of parameters in the adapter.
      notes: Markdown on the training.
    """
    base, revision = config["base_model_name_or_path"], config["revision"]
    hub = is_hub_id(base)
    tags = [f"base_model:adapter:{base}"] if hub else []
    lines = ["---", *([f"base_model: {base}"] if hub else []), "library_name: peft"]
    lines += ["pipeline_tag: text-generation", "tags:"]
    lines += [f"- {tag}" for tag in [*tags, "lora", "transformers"]]
    model = f"[{base}](https://huggingface.co/{base})" if hub else f"`{base or 'the base model'}`"
    alpha = config["lora_alpha"]
    lines += [
        "---",
        "",
        "# LoRA adapter",
        "",
        f"A LoRA adapter for {model}" + (f" at revision `{revision}`." if revision else "."),
        "",
        f"- rank {config['r']}, alpha {alpha}" + (", rsLoRA" if config["use_rslora"] else ""),
        f"- {parameters:,} parameters",
        f"- modules: {_modules(config)}",
        "",
        *([notes.rstrip(), ""] if notes else []),
        "## Use",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{base or "BASE"}", dtype="auto")',
        'model = PeftModel.from_pretrained(base, ".")',
        "```",
        "",
        "```sh",
        serve_command(base or "BASE", largest_rank(config)),
        "```",
    ]
    return "\n".join(lines) + "\n"


def model_card(base: str | None, revision: str | None, *, notes: str) -> str:
    """README.md for the folder of a whole model that was trained from a base of the hub, if any.

    Args:
      base: hub id.
      revision: its commit.
      notes: Markdown on the training.
    """
    lines = ["---", *([f"base_model: {base}"] if base else []), "library_name: transformers"]
    lines += ["pipeline_tag: text-generation", "tags:", "- transformers", "---", ""]
    origin = f"[{base}](https://huggingface.co/{base})" if base else "a model of its own"
    at = f" at revision `{revision}`" if base and revision else ""
    lines += ["# Fine-tuned model", "", f"Trained from {origin}{at}.", "", notes.rstrip()]
    lines += ["", "## Use", "", "```sh", "vllm serve .", "```"]
    return "\n".join(lines) + "\n"


def _modules(config: Mapping[str, Any]) -> str:
    names = [*config["target_modules"], *(config["target_parameters"] or ())]
    return listed([f"`{name}`" for name in names], most=20)
