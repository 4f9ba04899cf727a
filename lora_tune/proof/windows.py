# SPDX-License-Identifier: Apache-2.0
"""Which layers and experts of a large base make small models that together are all of it."""

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lora_tune.errors import InputError
from lora_tune.hf.header import nbytes
from lora_tune.hf.table import Leaf
from lora_tune.hf.tensors import Tensor
from lora_tune.models.family import Family
from lora_tune.scan import plan_layers

_LAYER = re.compile(r"\blayers\.(\d+)\b")
_EXPERT = re.compile(r"\bexperts\.(\d+)\b")
_EVERY_TYPE = ("olmo_hybrid",)
"""Model types that transformers refuses without a layer of each type."""
_ENTANGLED = ("hidden_size_per_layer_input", "num_kv_shared_layers")
"""Sizes of what layers share with others or have in one tensor; 0 where they do not."""
UNUSED = "mtp."
"""How the names of tensors begin that no other program asks for, and that may be large."""
_LEAST = 2
"""Experts in a window; with one, the router has no choice."""


@dataclasses.dataclass(frozen=True)
class Window:
    """A smaller model cut from a large one.

    Attributes:
      layers: numbers of its layers, ascending.
      experts: the routed experts that every layer keeps, None for all of them.
    """

    layers: tuple[int, ...]
    experts: range | None = None

    def inside(self, name: str) -> str | None:
        """A name of the large model as the window has it; None for what is not in it."""
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        if layer is not None:
            if int(layer[1]) not in self.layers:
                return None
            name = _LAYER.sub(f"layers.{self.layers.index(int(layer[1]))}", name, count=1)
        if expert is not None and self.experts is not None:
            if int(expert[1]) not in self.experts:
                return None
            name = _EXPERT.sub(f"experts.{int(expert[1]) - self.experts.start}", name, count=1)
        return name

    def outside(self, text: str, prefix: str) -> str:
        """A text that names what is in the window, with the names of the large model.

        Layers stand behind `prefix`, with `{i}` for the number; those of a vision tower do not.
        """
        numbered = re.escape(prefix).replace(re.escape("{i}"), r"(\d+)")

        def layer(match: re.Match[str]) -> str:
            i = int(match[1])
            return prefix.format(i=self.layers[i]) if i < len(self.layers) else match[0]

        def expert(match: re.Match[str]) -> str:
            return f"experts.{int(match[1]) + (self.experts.start if self.experts else 0)}"

        return _EXPERT.sub(expert, re.sub(rf"\b{numbered}", layer, text))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes of a model in float32: outside its layers, of every layer, of each of its experts."""

    outside: int
    layers: Mapping[int, int]
    experts: Mapping[int, int]

    def of(self, window: Window, count: int) -> int:
        """Those of a window of a model of `count` experts."""
        kept = count if window.experts is None else len(window.experts)
        inside = sum(self.layers[i] + kept * self.experts.get(i, 0) for i in window.layers)
        return self.outside + inside


def measure(leaves: Sequence[Leaf], carried: Sequence[Tensor] = ()) -> Sizes:
    """The sizes of a model from its bound table, and of what every window carries besides."""
    kept = (tensor for tensor in carried if not tensor.name.startswith(UNUSED))
    outside = sum(4 * math.prod(tensor.shape) for tensor in kept)
    layers, experts = defaultdict[int, int](int), defaultdict[int, int](int)
    for leaf in leaves:
        each = nbytes(leaf.hf_shape, np.dtype(np.float32))
        for name in map(str, leaf.names.ravel()):
            layer, expert = _LAYER.search(name), _EXPERT.search(name)
            if layer is None:
                outside += each
            elif expert is None:
                layers[int(layer[1])] += each
            elif expert[1] == "0":
                experts[int(layer[1])] += each
    return Sizes(outside, layers, experts)


def cut_config(hf: Mapping[str, Any], family: Family, window: Window) -> dict[str, Any]:
    """The `config.json` of a window.

    Raises:
      InputError: the family has no model of just these layers.
    """
    hf = family.portable_config(hf)
    config = family.read_config(hf)
    text = dict(hf.get("text_config", hf))
    text["num_hidden_layers"] = len(window.layers)
    types = getattr(config, "layer_types", ())
    if "layer_types" in text or len(set(types)) > 1:
        text["layer_types"] = [types[i] for i in window.layers]
    sparse = getattr(config, "sparse_layers", ())
    if len(set(sparse)) > 1:
        text["mlp_only_layers"] = [j for j, i in enumerate(window.layers) if not sparse[i]]
        text["decoder_sparse_step"] = 1
    if text.get("per_layer_config"):
        own = {int(i): fields for i, fields in text["per_layer_config"].items()}
        kept = {str(j): own[i] for j, i in enumerate(window.layers) if i in own}
        text["per_layer_config"] = kept
    if window.experts is not None:
        text["num_experts"] = count = len(window.experts)
        text.pop("num_local_experts", None)
        text["num_experts_per_tok"] = min(config.num_experts_per_tok, count)
    cut = {**hf, "text_config": text} if "text_config" in hf else text
    kinds = config.layer_kinds()
    lacking = hf.get("model_type") in _EVERY_TYPE and set(text["layer_types"]) != set(types)
    found = tuple(family.read_config(cut).layer_kinds())
    if lacking or found != tuple(kinds[i] for i in window.layers):
        raise InputError(f"layers {list(window.layers)} alone are no model of this family")
    return cut


def plan_windows(
    hf: Mapping[str, Any],
    family: Family,
    leaves: Sequence[Leaf],
    limit: float,
    carried: Sequence[Tensor] = (),
) -> tuple[list[Window], int]:
    """Windows that hold every layer and every expert of a model.

    Whole cycles of layers with all their experts if they fit, as many as do; or one cycle with a
    part of the experts at a time; or single layers.

    Args:
      hf: its `config.json`.
      family: its family.
      leaves: its bound table.
      limit: bytes that a window may take in float32.
      carried: tensors of the base that the model does not hold, as a vision tower.

    Returns:
      The windows, and the bytes of the largest one.

    Raises:
      InputError: not even the smallest window fits, or layers cannot be taken apart.
    """
    config, sizes = family.read_config(hf), measure(leaves, carried)
    if entangled := [name for name in _ENTANGLED if getattr(config, name, 0)]:
        raise InputError(
            f"the base takes over limit_gb={limit / 1e9:g} in float32, and its layers cannot be "
            f"proved apart ({', '.join(entangled)}): raise limit_gb where four times that is there"
        )
    layers = config.num_hidden_layers
    count = getattr(config, "num_experts", 0)
    cycle = plan_layers(config.layer_kinds()).cycle_length or 1
    least = 0
    for length, parts in _shapes(layers, cycle, count if sizes.experts else 0):
        windows = [
            Window(chunk, experts)
            for chunk in _chunks(hf, family, layers, length)
            for experts in _parts(count, parts if any(i in sizes.experts for i in chunk) else 1)
        ]
        least = max(sizes.of(window, count) for window in windows)
        if least <= limit:
            return windows, least
    raise InputError(
        f"the smallest models that could be cut from it take {least / 1e9:.2g} GB in float32, over "
        f"limit_gb={limit / 1e9:g}; prove holds one about four times: raise limit_gb where the "
        "memory is there"
    )


def _shapes(layers: int, cycle: int, experts: int) -> Iterator[tuple[int, int]]:
    """(layers in a window, parts that the experts are cut into), the preferred ones first."""
    most = layers // cycle * cycle
    yield from ((length, 1) for length in range(most, 0, -cycle))
    yield from ((cycle, parts) for parts in range(2, experts // _LEAST + 1))
    yield from ((1, parts) for parts in range(1, max(1, experts // _LEAST) + 1))


def _chunks(
    hf: Mapping[str, Any], family: Family, layers: int, length: int
) -> Iterator[tuple[int, ...]]:
    """Consecutive layers, with one more where the family has no model of them alone."""
    for start in range(0, layers, length):
        chunk = range(start, min(start + length, layers))
        others = (i for i in reversed(range(layers)) if i not in chunk)
        tried = (tuple(chunk), *(tuple(sorted((*chunk, i))) for i in others))
        yield next((each for each in tried if _is_model(hf, family, each)), tried[0])


def _is_model(hf: Mapping[str, Any], family: Family, layers: tuple[int, ...]) -> bool:
    try:
        cut_config(hf, family, Window(layers))
    except InputError:
        return False
    return True


def _parts(count: int, parts: int) -> list[range | None]:
    if parts == 1:
        return [None]
    ends = [round(i * count / parts) for i in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]
