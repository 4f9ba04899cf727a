# SPDX-License-Identifier: Apache-2.0
"""The other side of the proof: transformers and PEFT on torch. Only this file imports them."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from lora_tune.errors import InputError
from lora_tune.hf.fused import Pair
from lora_tune.hf.peft_config import split_expert

_UPDATE_TOLERANCE = 1e-5
"""Of the largest weight of a tensor: float32 sums in another order."""


@dataclasses.dataclass
class Loaded:
    """What PEFT made of an adapter.

    Attributes:
      base_logits: float32 `[rows, T, V]`, of the base alone.
      logits: the same with the adapter.
      parameters: tensor of transformers -> parameters whose value the adapter changes.
      max_update_error: largest difference of an update from scale * B A.
      problems: one sentence for each thing that PEFT did not take, or took as something else.
    """

    base_logits: np.ndarray
    logits: np.ndarray
    parameters: dict[str, int]
    max_update_error: float
    problems: list[str]


def require(*names: str) -> None:
    """Checks that packages can be imported.

    Raises:
      InputError: naming those that cannot, and what to install.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise InputError(
            f"prove compares with PEFT and transformers on torch, and {' and '.join(missing)} "
            f"cannot be imported; pip install {' '.join(missing)}"
        )


def versions() -> dict[str, str]:
    """The version of each package of the other side."""
    from importlib.metadata import version

    return {name: version(name) for name in ("peft", "torch", "transformers")}


def read_model(folder: Path) -> tuple[Any, list[str]]:
    """A checkpoint as transformers reads it, in float32, and the tensors that it did not find."""
    import torch
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained
    options = {"attn_implementation": "eager", "output_loading_info": True}
    with _quiet():
        model, info = read(folder, dtype=torch.float32, **options)
    problems = [
        f"{key if isinstance(key, str) else key[0]}: {said} by transformers in {folder.name}/"
        for keys, said in (("missing_keys", "not found"), ("mismatched_keys", "of another shape"))
        for key in info[keys]
    ]
    return model.eval(), problems


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits `[rows, T, V]`, row by row."""
    import torch

    with torch.no_grad(), _quiet():
        rows = [model(torch.tensor(row[None]).long(), use_cache=False).logits for row in tokens]
    return torch.cat(rows).float().numpy()


def load_adapter(
    base: Path, adapter: Path, tokens: np.ndarray, pairs: Mapping[str, Pair]
) -> Loaded:
    """Loads an adapter on its base with PEFT, runs both, and merges to see what has changed.

    Args:
      base: the base checkpoint.
      adapter: the adapter's folder.
      tokens: int `[rows, T]`.
      pairs: the updates that are expected, by module.

    Raises:
      InputError: PEFT does not load it at all.
    """
    from peft import PeftModel

    model, problems = read_model(base)
    base_logits = logits_of(model, tokens)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings(record=True) as caught, _quiet():
        warnings.simplefilter("always")
        try:
            wrapped = PeftModel.from_pretrained(model, str(adapter)).eval()
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:400]
            raise InputError(f"PEFT refuses {adapter.name}/: {reason}") from error
    problems += _complaints(caught)
    logits = logits_of(wrapped, tokens)
    with _quiet():
        after = wrapped.merge_and_unload().state_dict()
    loaded = Loaded(base_logits, logits, {}, 0.0, problems)
    _compare_weights(before, after, pairs, loaded)
    return loaded


def _complaints(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """What PEFT says of keys that it did not find or did not want."""
    texts = [" ".join(str(warning.message).split()) for warning in caught]
    said = [text for text in texts if "adapter keys" in text or "unexpected" in text.lower()]
    return [f"PEFT: {text[:400]}" for text in said]


def _compare_weights(
    before: Mapping[str, Any], after: Mapping[str, Any], pairs: Mapping[str, Pair], loaded: Loaded
) -> None:
    expected = _by_tensor(pairs)
    for name in [name for name in expected if name not in before]:
        loaded.problems.append(f"{name}: is adapted, and transformers has no such tensor")
    for name, old in before.items():
        new = after[name]
        count = int((new != old).sum())
        if count:
            loaded.parameters[name] = count
        if name not in expected:
            if count:
                loaded.problems.append(f"{name}: PEFT changes it, and it was not trained")
            continue
        change = (new - old).numpy()
        wanted = np.zeros_like(change)
        for place, module in expected[name]:
            pair = pairs[module]
            wanted[_slice(place, change)] += np.float32(pair.scale) * (pair.b @ pair.a)
        off = float(np.abs(change - wanted).max(initial=0.0))
        loaded.max_update_error = float(np.maximum(loaded.max_update_error, off))
        if not off <= _UPDATE_TOLERANCE * max(1.0, float(new.abs().max())):
            loaded.problems.append(f"{name}: PEFT's update differs from ours by {off:.3g}")


Place = tuple[int, str] | None


def _by_tensor(pairs: Mapping[str, Pair]) -> dict[str, list[tuple[Place, str]]]:
    """Tensor of transformers -> what is updated in it: (expert and projection, module)."""
    found: dict[str, list[tuple[Place, str]]] = {}
    for module in pairs:
        expert = split_expert(module)
        if expert is None:
            found.setdefault(f"{module}.weight", []).append((None, module))
        else:
            home, number, name = expert
            tensor = f"{home}.{'down_proj' if name == 'down_proj' else 'gate_up_proj'}"
            found.setdefault(tensor, []).append(((number, name), module))
    return found


def _slice(place: Place, tensor: np.ndarray) -> Any:
    """Where an update lies in its tensor: gate above up in experts."""
    if place is None:
        return ...
    number, name = place
    half = tensor.shape[1] // 2
    rows = {"gate_proj": slice(None, half), "up_proj": slice(half, None)}
    return number, rows.get(name, slice(None))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and remarks of transformers."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
