# SPDX-License-Identifier: Apache-2.0
"""LoRA fine-tuning of Hugging Face models in JAX.

The names below are the public Python interface. Each is imported on first use, so that
`import lora_tune` neither loads jax nor starts a backend.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lora_tune.errors import InputError

if TYPE_CHECKING:
    from lora_tune.api import (
        add_lora,
        generate,
        load_adapter,
        load_model,
        load_run,
        save_adapter,
        save_merged,
        train,
    )
    from lora_tune.lora.config import LoraConfig

__version__ = "0.1.0"

__all__ = [
    "InputError",
    "LoraConfig",
    "add_lora",
    "generate",
    "load_adapter",
    "load_model",
    "load_run",
    "save_adapter",
    "save_merged",
    "train",
]

_HOMES = {
    "LoraConfig": "lora_tune.lora.config",
    "add_lora": "lora_tune.api",
    "generate": "lora_tune.api",
    "load_adapter": "lora_tune.api",
    "load_model": "lora_tune.api",
    "load_run": "lora_tune.api",
    "save_adapter": "lora_tune.api",
    "save_merged": "lora_tune.api",
    "train": "lora_tune.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'lora_tune' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
