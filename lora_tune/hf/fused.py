# SPDX-License-Identifier: Apache-2.0
"""PEFT's fused layout of adapters on routed experts: two parameters in place of many projections.

transformers holds the experts of a layer as `gate_up_proj` `[E, 2 I, D]` and `down_proj`
`[E, D, I]`, and PEFT wraps each of them in one adapter for all experts: A `[E r, in]`, expert by
expert, and B `[out, r E]`, rank by rank, so that expert e has `A[e r : (e + 1) r]` and
`B[:, e::E]`. The wrapper that it puts on first, that of `gate_up_proj`, is called `base_layer`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from lora_tune.hf.peft_config import PROJECTIONS, Settings, split_expert


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """One module's tensors in PEFT's layout: A `[r, in]`, B `[out, r]`, and their scale."""

    a: np.ndarray
    b: np.ndarray
    scale: float


@dataclasses.dataclass(frozen=True)
class Origin:
    """The fused parameter that a pair came from, and the rank of its adapter."""

    parameter: str
    r: int


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A pair read from a file; `fused` is where it came from, None for a 2-D pair."""

    a: np.ndarray
    b: np.ndarray
    fused: Origin | None = None


def fuse_experts(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Joins the adapters of routed experts; other modules stay as they are.

    Of `gate_up_proj` the rank is twice that of gate and up, whose A need not be the same: in each
    expert's B the first ranks reach the rows of gate, the others those of up.

    Args:
      pairs: by module; the experts of a layer have all three projections, in one rank.
    """
    joined = {module: pair for module, pair in pairs.items() if split_expert(module) is None}
    experts = [expert for module in pairs if (expert := split_expert(module))]
    for home in dict.fromkeys(expert[0] for expert in experts):
        numbers = sorted({e for h, e, _ in experts if h == home})
        gates, ups, downs = ([pairs[f"{home}.{e}.{n}"] for e in numbers] for n in PROJECTIONS)
        both = [_side_by_side(gate, up) for gate, up in zip(gates, ups, strict=True)]
        joined[f"{home}.base_layer"], joined[home] = _join(both), _join(downs)
    return joined


def _side_by_side(gate: Pair, up: Pair) -> Pair:
    zeros = np.zeros_like(gate.b)
    b = np.block([[gate.b, zeros], [zeros, up.b]])
    return Pair(np.concatenate([gate.a, up.a]), b, gate.scale)


def _join(pairs: Sequence[Pair]) -> Pair:
    b = np.stack([pair.b for pair in pairs], axis=-1)  # [out, r, E]
    return Pair(np.concatenate([pair.a for pair in pairs]), b.reshape(len(b), -1), pairs[0].scale)


def split_fused(
    module: str,
    sides: Mapping[str, np.ndarray],
    settings: Settings,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    alone: bool,
) -> dict[str, Found] | str:
    """Cuts the adapter of a fused expert parameter into pairs, or says what is wrong with it.

    What `fuse_experts` joined comes out as it was. When only one parameter of a layer is adapted,
    the key does not tell which, and the configuration decides. Where sizes allow both of PEFT's
    layouts, the version that it recorded tells them apart; a file without one has today's.

    Args:
      module: that of the key: `….experts` or `….experts.base_layer`.
      sides: its A and B.
      settings: of the adapter.
      shapes: module -> (out, in) of every projection of the model.
      alone: the layer has no `base_layer`.
    """
    home = module.removesuffix(".base_layer")
    a, b = sides["A"], sides["B"]
    gate_up = f"{home}.gate_up_proj"
    inner = module != home or (alone and settings.lists(gate_up))
    if alone and inner and settings.lists(f"{home}.down_proj"):
        return f"{module} has one adapter, but target_parameters names two"
    experts = sum(m.startswith(f"{home}.") and m.endswith(".down_proj") for m in shapes)
    names = PROJECTIONS[:2] if inner else PROJECTIONS[2:]
    into = shapes[f"{home}.0.{names[0]}"][1]
    rows = [shapes[f"{home}.0.{name}"][0] for name in names]
    r = len(a) // experts
    today = (a.shape, b.shape) == ((experts * r, into), (sum(rows), experts * r))
    older = (a.shape, b.shape) == ((experts * r, sum(rows)), (into, experts * r))
    if r and today and not (older and settings.transposes_fused):
        a3 = a.reshape(experts, r, into)
        b3 = b.reshape(sum(rows), r, experts).transpose(2, 0, 1)
    elif r and older:
        # PEFT 0.18 and earlier: B A is the transposed update.
        old_a, old_b = a.reshape(experts, r, -1), b.reshape(into, r, experts)
        a3, b3 = old_b.transpose(2, 1, 0), old_a.transpose(0, 2, 1)
    else:
        return (
            f"{module} has A {list(a.shape)} and B {list(b.shape)}, expected "
            f"[{experts} r, {into}] and [{sum(rows)}, r {experts}]"
        )
    origin = Origin(gate_up if inner else f"{home}.down_proj", r)
    parts = _own_ranks(a3, np.split(b3, np.cumsum(rows)[:-1], axis=1))
    return {
        f"{home}.{e}.{name}": Found(part_a[e], part_b[e], origin)
        for name, (part_a, part_b) in zip(names, parts, strict=True)
        for e in range(experts)
    }


def _own_ranks(a: np.ndarray, parts: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """A `[E, r, in]` and B `[E, out, r]` of each part; two that share no rank have half of them."""
    half = a.shape[1] // 2
    if len(parts) == 2 and a.shape[1] == 2 * half:
        gate, up = parts
        if not gate[..., half:].any() and not up[..., :half].any():
            return [(a[:, :half], gate[..., :half]), (a[:, half:], up[..., half:])]
    return [(a, part) for part in parts]
