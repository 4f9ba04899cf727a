# SPDX-License-Identifier: Apache-2.0
"""Recipes: the typed schema, reading one with overrides, and writing the resolved one."""

from lora_tune.recipe.files import find, of_run, save, shipped
from lora_tune.recipe.parse import load
from lora_tune.recipe.schema import (
    Data,
    Eval,
    Log,
    Lora,
    Mesh,
    Model,
    Optim,
    Recipe,
    Save,
    Train,
)

__all__ = [
    "Data",
    "Eval",
    "Log",
    "Lora",
    "Mesh",
    "Model",
    "Optim",
    "Recipe",
    "Save",
    "Train",
    "find",
    "load",
    "of_run",
    "save",
    "shipped",
]
