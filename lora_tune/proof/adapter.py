# SPDX-License-Identifier: Apache-2.0
"""The exported adapter against what the run has trained: every module, rank, scale and value."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lora_tune.hf.fused import Pair
from lora_tune.hf.peft import adapter_pairs, read_pairs
from lora_tune.hf.peft_config import split_expert
from lora_tune.trained import Trained

Pairs = Mapping[str, Pair]


def trained_pairs(run: Trained) -> Pairs:
    """What the run's checkpoint says that its adapter is; zeros where there is no checkpoint."""
    assert run.lora is not None
    state = run.adapter_state()
    return adapter_pairs(state, run.leaves, run.lora, model_type=run.model_type)


def compare(folder: Path, run: Trained) -> tuple[Pairs, list[str]]:
    """Reads an adapter's folder and says what differs from the run.

    Without a checkpoint, ranks and scales are compared with the recipe, and values with nothing.

    Returns:
      Its pairs by module, and one sentence for each difference.

    Raises:
      InputError: the folder cannot be read as an adapter of this model; it names the tensors.
    """
    found = read_pairs(folder, run.leaves, model_type=run.model_type)
    trained = trained_pairs(run)
    known = run.step is not None
    problems = [
        f"{module}: was trained, and is not in {folder.name}/"
        for module, pair in trained.items()
        if module not in found and _counts(module, pair, known)
    ]
    for module, pair in found.items():
        wanted = trained.get(module)
        if wanted is None:
            problems.append(f"{module}: is in {folder.name}/, and was not trained")
        else:
            difference = _difference(pair, wanted, values=known)
            problems += [f"{module}: {difference}"] if difference else []
    return found, problems


def _counts(module: str, pair: Pair, known: bool) -> bool:
    """Whether a module must be there: experts without any update are filled up, or left out."""
    if split_expert(module) is None:
        return True
    return known and bool(pair.a.any() or pair.b.any())


def _difference(found: Pair, trained: Pair, *, values: bool) -> str | None:
    if found.a.shape != trained.a.shape:
        return f"has rank {len(found.a)}, was trained with {len(trained.a)}"
    if not math.isclose(found.scale, trained.scale, rel_tol=1e-6):
        return (
            f"has scale {found.scale:g} by adapter_config.json (lora_alpha and r), was trained "
            f"with {trained.scale:g}"
        )
    if values:
        for side, a, b in (("A", found.a, trained.a), ("B", found.b, trained.b)):
            if not np.array_equal(a, b):
                return f"lora_{side} differs from the checkpoint by {np.abs(a - b).max():.3g}"
    return None
