# SPDX-License-Identifier: Apache-2.0
"""The merged checkpoint against its base, tensor by tensor, and what rounding took."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lora_tune.hf.files import read_json
from lora_tune.hf.folder import lost_files
from lora_tune.hf.fused import Pair
from lora_tune.hf.load import open_base
from lora_tune.hf.table import Leaf, hf_state
from lora_tune.hf.table import Path as LeafPath
from lora_tune.hf.tensors import DTYPES, Tensor
from lora_tune.models.family import Family


@dataclasses.dataclass
class Changes:
    """What became of the base's tensors.

    Attributes:
      changed, unchanged: tensors whose bytes differ, and do not.
      parameters: kind of tensor (numbers as `*`) -> parameters whose value differs.
      max_rounding: largest difference of a merged value from the exact sum.
      update_lost: norm of all such differences over the norm of all updates.
      problems: one sentence for each tensor that is not what it should be.
    """

    changed: int = 0
    unchanged: int = 0
    parameters: dict[str, int] = dataclasses.field(default_factory=dict)
    max_rounding: float = 0.0
    update_lost: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)


def kind_of(name: str) -> str:
    """The name with its numbers as `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def compare(
    base_folder: Path, merged: Path | None, family: Family, pairs: Mapping[str, Pair]
) -> Changes:
    """Compares a merged folder with its base, or says what a merge would do where there is none.

    Args:
      base_folder: the base checkpoint.
      merged: the merged one.
      family: their table.
      pairs: the updates by module; without any, whatever has changed is right.

    Raises:
      InputError: a checkpoint cannot be read.
    """
    base = open_base(base_folder, family)
    other = None if merged is None else open_base(merged, family)
    updates = {f"{module}.weight": pair for module, pair in pairs.items()}
    found = Changes()
    lost = whole = 0.0
    for name, tensor in base.tensors.items():
        new = None if other is None else other.tensors.get(name)
        if other is not None and new is None:
            found.problems.append(f"{name}: is in the base, and not in {other.folder.name}/")
            continue
        if name in updates:
            square, of = _check_update(tensor, new, updates[name], found)
            lost, whole = lost + square, whole + of
        if new is not None:
            _count(tensor, new, found, expected=not updates or name in updates)
    if other is not None:
        extra = sorted(set(other.tensors) - set(base.tensors))
        found.problems += [f"{n}: is in {other.folder.name}/, and not in the base" for n in extra]
        found.problems += _companion_problems(base_folder, other.folder, family, full=not updates)
    found.update_lost = (lost / whole) ** 0.5 if whole else 0.0
    return found


def compare_trained(
    merged: Path, family: Family, leaves: Sequence[Leaf], weights: Mapping[LeafPath, Any]
) -> list[str]:
    """Compares a fully trained model's folder with the weights that were trained.

    Args:
      merged: the folder.
      family: its table.
      leaves: the bound table.
      weights: the parameters, by path.

    Returns:
      One sentence for each tensor that is not the trained one, rounded to its type.

    Raises:
      InputError: the folder cannot be read.
    """
    tensors, problems = open_base(merged, family).tensors, []
    for leaf in leaves:
        for name, trained in hf_state(leaf, weights[leaf.path]):
            if name not in tensors:
                problems.append(f"{name}: was trained, and is not in {merged.name}/")
                continue
            stored = tensors[name].array()
            if not np.array_equal(stored, trained.astype(stored.dtype)):
                problems.append(f"{name}: differs from the checkpoint")
    return problems


def _companion_problems(base: Path, merged: Path, family: Family, *, full: bool) -> list[str]:
    """What is wrong beside the weights: files are gone, or the configuration is not the base's.

    That of `full` training has types of its own.
    """
    name = "config.json"
    wanted, found = family.portable_config(read_json(base / name)), read_json(merged / name)
    own = ("dtype", "torch_dtype") if full else ()
    if any(wanted.get(k) != found.get(k) for k in {*wanted, *found}.difference(own)):
        return [f"{merged.name}/{name}: is not that of the base"]
    return [f"{merged.name}/{each}: was written, and is not there" for each in lost_files(merged)]


def _count(tensor: Tensor, new: Tensor, found: Changes, *, expected: bool) -> None:
    old_bytes, new_bytes = tensor.bytes(), new.bytes()
    if (tensor.dtype, tensor.shape) == (new.dtype, new.shape):
        different = old_bytes != new_bytes
        if not different.any():
            found.unchanged += 1
            return
        width = len(old_bytes) // max(1, int(np.prod(tensor.shape)))
        count = int(different.reshape(-1, width).any(axis=1).sum())
    else:
        count = int(np.prod(new.shape))
        if expected and tensor.shape != new.shape:
            shapes = f"{list(new.shape)}, in the base {list(tensor.shape)}"
            found.problems.append(f"{tensor.name}: has the shape {shapes}")
    found.changed += 1
    kind = kind_of(tensor.name)
    found.parameters[kind] = found.parameters.get(kind, 0) + count
    if not expected:
        found.problems.append(f"{tensor.name}: differs from the base, and was not trained")


def _check_update(
    tensor: Tensor, new: Tensor | None, pair: Pair, found: Changes
) -> tuple[float, float]:
    """Squared norms of what rounding took and of the update; notes what is beyond one rounding."""
    update = np.float32(pair.scale) * (pair.b @ pair.a)
    exact = tensor.array().astype(np.float32) + update
    if new is None:
        stored = exact.astype(DTYPES[tensor.dtype])
    elif new.shape != tensor.shape:
        return 0.0, 0.0  # said by _count
    else:
        stored = new.array()
    with np.errstate(invalid="ignore"):  # what is not finite is beyond any bound
        off = np.abs(exact - stored.astype(np.float32))
    # Sums in another order, and one rounding of the type.
    spacing = {"BF16": 2.0**-8, "F16": 2.0**-11}.get(tensor.dtype, 2.0**-23)
    bound = spacing * np.abs(exact) + 1e-6 * max(1e-3, float(np.abs(exact).max(initial=0.0)))
    if not (off <= bound).all():
        found.problems.append(
            f"{tensor.name}: is off the base with its update by {off.max():.3g}, more than one "
            f"rounding of {tensor.dtype}"
        )
    found.max_rounding = float(np.maximum(found.max_rounding, off.max(initial=0.0)))
    return float(np.square(off).sum()), float(np.square(update).sum())
