# SPDX-License-Identifier: Apache-2.0
"""Adapters out to and in from the PEFT format.

The layouts, for one projection of the base: ours are A `[in, r]` and B `[r, out]`, the update of
the kernel `[in, out]` is `scale * A @ B`; PEFT's are `lora_A.weight = A.T` `[r, in]` and
`lora_B.weight = B.T` `[out, r]`. Scale is not in the tensors: the configuration carries it.
Routed experts are written as one 2-D pair per expert, which PEFT, vLLM and SGLang read; in the
fused layout where PEFT reads no other.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from flax import nnx

from lora_tune.errors import InputError
from lora_tune.hf.adapters import Adapter, collect_adapters, factor_shapes, scale_shape
from lora_tune.hf.card import adapter_card
from lora_tune.hf.files import raise_listed
from lora_tune.hf.folder import new_folder, remedy
from lora_tune.hf.fused import Found, Pair, fuse_experts, split_fused
from lora_tune.hf.header import header_bytes, read_header, write_array
from lora_tune.hf.peft_config import (
    CONFIG_FILE,
    FUSED_TYPES,
    PARAMETER_TYPES,
    PROJECTIONS,
    Settings,
    Written,
    alpha_for,
    describe,
    is_taken,
    make_config,
    read_config,
    split_expert,
)
from lora_tune.hf.table import Leaf, Path, module_name
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.targets import Target, adaptable_modules, resolve, stack_targets

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


def save_adapter(
    state: nnx.State | Mapping[Path, Any],
    leaves: Sequence[Leaf],
    lora: LoraConfig,
    out_dir: FilePath | str,
    *,
    model_type: str,
    base: str | None,
    revision: str | None = None,
    allow_untrained: bool = False,
    notes: str = "",
    fused: bool | None = None,
) -> dict[str, Any]:
    """Writes a PEFT adapter: weights, configuration and model card.

    Rank slots that only pad a stack are cut off, layers without a target are left out, and routed
    experts get all three projections in one rank (zeros, which change nothing, where one was not
    adapted) because PEFT fuses them.

    Args:
      state: state or flat mapping that holds the adapters (see `collect_adapters`).
      leaves: the bound table of the model.
      lora: the configuration that the adapters were made with.
      out_dir: folder to write; may be an earlier result, which is then replaced.
      model_type: that of the base's `config.json`.
      base: hub id of the base model, or its folder when it has none.
      revision: commit of the base on the hub.
      allow_untrained: write an adapter whose every B is zero.
      notes: Markdown on the training, for the model card.
      fused: write routed experts in the fused layout; None where PEFT reads no other.

    Returns:
      The content of `adapter_config.json`.

    Raises:
      InputError: an adapter is untrained or not finite, `out_dir` is not ours to replace, PEFT
        cannot represent it, or the disk is full (nothing is left behind).
      ValueError: the state does not hold the adapters that `lora` describes.
    """
    pairs = adapter_pairs(state, leaves, lora, model_type=model_type)
    _check_trained(pairs, allow_untrained)
    ranks = {module: (len(pair.a), pair.scale) for module, pair in pairs.items()}
    fused = model_type in PARAMETER_TYPES if fused is None else fused
    written = Written(ranks, adaptable_modules(leaves), model_type, fused)
    config = make_config(written, lora, base=base, revision=revision)
    if fused:
        pairs = fuse_experts(pairs)
    with new_folder(FilePath(out_dir), kind="adapter") as folder:
        _write_weights(folder / WEIGHTS_FILE, pairs)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
        count = sum(pair.a.size + pair.b.size for pair in pairs.values())
        card = adapter_card(config, parameters=count, notes=notes)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return config


def adapter_pairs(
    state: nnx.State | Mapping[Path, Any],
    leaves: Sequence[Leaf],
    lora: LoraConfig,
    *,
    model_type: str,
) -> dict[str, Pair]:
    """What `save_adapter` writes for a state, by module: float32 pairs and their scales.

    Routed experts, which are fused only when they are written, are apart here.
    """
    pairs = _pairs(collect_adapters(state, leaves), leaves, lora)
    return _complete_experts(pairs, leaves, model_type)


def read_pairs(
    folder: FilePath | str, leaves: Sequence[Leaf], *, model_type: str
) -> dict[str, Pair]:
    """What an adapter's folder holds, by module; routed experts without any update are left out.

    Raises:
      InputError: as of `load_adapter`.
    """
    _, found, targets = _read(FilePath(folder), leaves, model_type)
    return {module: Pair(p.a, p.b, targets[module].scale) for module, p in found.items()}


def load_adapter(
    folder: FilePath | str, leaves: Sequence[Leaf], *, model_type: str, named: bool = False
) -> tuple[LoraConfig, dict[Path, Adapter]]:
    """Reads a plain LoRA adapter, one of ours or any that PEFT saved.

    Routed experts may lie as 2-D pairs per expert or fused (`target_parameters`); of the fused
    layout, that of PEFT 0.18 and earlier, which swaps in and out, is told by its shapes.

    Args:
      folder: `adapter_config.json` and `adapter_model.safetensors`.
      leaves: the bound table of the model.
      model_type: that of the base's `config.json`.
      named: whether a module that no target names, which PEFT leaves without its adapter, is an
        error; otherwise the tensors decide.

    Returns:
      A configuration that resolves to exactly the adapters found, and the adapters in float32 by
      the path of their kernel, shorter ranks padded with zeros to their stack's.

    Raises:
      InputError: DoRA, biases, saved modules or other extensions; a tensor that is unknown,
        missing its partner, mis-shaped or not finite; a rank other than the configuration's; with
        `named` also a module that no target names.
    """
    settings, found, targets = _read(FilePath(folder), leaves, model_type)
    if named:
        unnamed = [f"no target is called as {m} is" for m in found if not settings.names(m)]
        raise_listed(_disagree(FilePath(folder)), unnamed, most=3)
    return describe(targets, adaptable_modules(leaves), settings), _stack(found, targets, leaves)


def _read(
    folder: FilePath, leaves: Sequence[Leaf], model_type: str
) -> tuple[Settings, dict[str, Found], dict[str, Target]]:
    """The pairs of a folder with rank, alpha and scale of each, every key accounted for."""
    settings = read_config(folder)
    universe = adaptable_modules(leaves)
    where = f"{folder / WEIGHTS_FILE}: the adapter does not fit the model"
    found, problems = _unpack(_read_halves(folder), settings, _shapes(leaves))
    raise_listed(where, problems)
    targets = {}
    for module in found:
        try:
            targets[module] = _target(module, found, settings, model_type)
        except ValueError as error:
            problems.append(f"{module}: {error}")
    raise_listed(_disagree(folder), problems, most=3)
    raise_listed(where, _incomplete_experts(found, universe))
    if not targets:
        raise InputError(f"{folder / WEIGHTS_FILE}: holds no adapter")
    return settings, found, targets


def _disagree(folder: FilePath) -> str:
    return f"{folder}: {CONFIG_FILE} does not say what {WEIGHTS_FILE} holds; correct it"


def adapter_arrays(adapters: Mapping[Path, Adapter]) -> dict[Path, np.ndarray]:
    """The adapters by the paths of their variables, as `nnx.to_flat_state` names them."""
    arrays = {}
    for path, adapter in adapters.items():
        for suffix, array in (("a", adapter.a), ("b", adapter.b), ("scale", adapter.scale)):
            arrays[(*path[:-1], f"kernel_lora_{suffix}")] = array
    return arrays


def _pairs(
    adapters: Mapping[Path, Adapter], leaves: Sequence[Leaf], lora: LoraConfig
) -> dict[str, Pair]:
    """Cuts the stacks into modules, and checks them against the configuration."""
    targets = resolve(lora, adaptable_modules(leaves))
    stacks = stack_targets(leaves, targets)
    if set(stacks) != set(adapters):
        odd = sorted(".".join(map(str, path)) for path in set(stacks) ^ set(adapters))
        raise ValueError(f"adapters and configuration disagree on {', '.join(odd)}")
    pairs = {}
    for path, adapter in adapters.items():
        if not np.allclose(adapter.scale, stacks[path].scales, rtol=1e-6, atol=0):
            raise ValueError(f"{adapter.leaf.dotted}: scales differ from the configuration's")
        for cell in adapter.cells():
            module = adapter.module(cell)
            target = targets[module]
            a, b, _ = adapter.factors(cell)
            if np.any(a[:, target.r :]) and np.any(b[target.r :]):
                raise ValueError(f"{module}: acts beyond its rank {target.r}")
            pairs[module] = Pair(a[:, : target.r].T, b[: target.r].T, target.scale)
    return pairs


def _check_trained(pairs: Mapping[str, Pair], allow_untrained: bool) -> None:
    broken = [m for m, p in pairs.items() if not (_finite(p.a) and _finite(p.b))]
    raise_listed("the adapter holds NaN or infinity and is not written", broken)
    if not allow_untrained and not any(pair.b.any() for pair in pairs.values()):
        raise InputError(
            "the adapter is untrained (every B is zero) and is not written; train it first"
        )


def _finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(array).all())


def _shapes(leaves: Sequence[Leaf]) -> dict[str, tuple[int, ...]]:
    """Module -> (out, in) of every projection that can be adapted."""
    kernels = (leaf for leaf in leaves if leaf.adaptable)
    return {module_name(n): leaf.hf_shape for leaf in kernels for n in leaf.names.ravel()}


def _complete_experts(
    pairs: Mapping[str, Pair], leaves: Sequence[Leaf], model_type: str
) -> dict[str, Pair]:
    """Gives the experts of a layer all three projections, in one rank, gate and up in one scale."""
    routed = {m: expert for m in pairs if (expert := split_expert(m))}
    if routed and model_type not in FUSED_TYPES | PARAMETER_TYPES:
        raise InputError(f"adapters on routed experts of {model_type!r} cannot be written for PEFT")
    shapes = _shapes(leaves) if routed else {}
    complete = dict(pairs)
    for home in dict.fromkeys(expert[0] for expert in routed.values()):
        numbers = sorted({e for h, e, _ in routed.values() if h == home})
        first = {n: pairs.get(f"{home}.{numbers[0]}.{n}") for n in PROJECTIONS}
        r = max(len(pair.a) for pair in first.values() if pair)
        scales = [pair.scale for pair in first.values() if pair]
        fused = next((first[n].scale for n in PROJECTIONS[:2] if first[n]), scales[0])
        for name in PROJECTIONS:
            scale = first[name].scale if first[name] and name == "down_proj" else fused
            for e in numbers:
                module = f"{home}.{e}.{name}"
                complete[module] = _resized(pairs.get(module), shapes[module], r, scale)
    return complete


def _resized(pair: Pair | None, shape: tuple[int, ...], r: int, scale: float) -> Pair:
    """The same update in rank r and another scale; without a pair, no update."""
    out, into = shape
    a, b = np.zeros((r, into), np.float32), np.zeros((out, r), np.float32)
    if pair is not None:
        a[: len(pair.a)] = pair.a
        b[:, : len(pair.a)] = pair.b * np.float32(pair.scale / scale)
    return Pair(a, b, scale)


def _write_weights(path: FilePath, pairs: Mapping[str, Pair]) -> None:
    tensors = {}
    for module, pair in pairs.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = pair.a
        tensors[f"{PREFIX}{module}.lora_B.weight"] = pair.b
    names = sorted(tensors)
    with path.open("wb") as out:
        entries = ((n, "F32", tensors[n].shape, tensors[n].nbytes) for n in names)
        out.write(header_bytes(entries, {"format": "pt"}))
        for name in names:
            write_array(out, tensors[name])


Halves = dict[str, dict[str, np.ndarray]]


def _read_halves(folder: FilePath) -> Halves:
    """Module -> its A and B in float32; every key of the file is accounted for."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; only safetensors adapters can be read; {remedy(path.parent)}"
        )
    halves: Halves = {}
    problems = []
    for tensor in read_header(path)[0]:
        match = _KEY.fullmatch(tensor.name)
        if match is None:
            problems.append(f"{tensor.name} {_why_unknown(tensor.name)}")
            continue
        array = tensor.array().astype(np.float32)
        if not _finite(array):
            problems.append(f"{tensor.name} holds a NaN or an infinity")
        halves.setdefault(match["module"], {})[match["side"]] = array
    for module, sides in halves.items():
        problems += [f"{module} has no lora_{side}" for side in "AB" if side not in sides]
    raise_listed(f"{path}: cannot be read as a plain LoRA adapter", problems)
    return halves


def _why_unknown(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "belongs to DoRA, which is not supported"
    if "lora_embedding" in name:
        return "adapts an embedding, which is not supported"
    if ".lora_" not in name:
        return "is a whole weight (modules_to_save or bias), which is not supported"
    return f"is unknown, expected {PREFIX}MODULE.lora_A.weight or .lora_B.weight"


def _unpack(
    halves: Halves, settings: Settings, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Found], list[str]]:
    found: dict[str, Found] = {}
    problems = []
    for module, sides in halves.items():
        a, b = sides["A"], sides["B"]
        home = module.removesuffix(".base_layer")
        if module in shapes:
            out, into = shapes[module]
            r = len(a) if a.ndim else 0
            if r and (a.shape, b.shape) == ((r, into), (out, r)):
                found[module] = Found(a, b)
            else:
                problems.append(
                    f"{module} has A {list(a.shape)} and B {list(b.shape)}, expected "
                    f"[r, {into}] and [{out}, r]"
                )
        elif f"{home}.0.down_proj" in shapes:
            alone = f"{home}.base_layer" not in halves
            parts = split_fused(module, sides, settings, shapes, alone=alone)
            problems += [parts] if isinstance(parts, str) else []
            found |= {} if isinstance(parts, str) else parts
        else:
            problems.append(f"{module} is no projection of this model")
    kept = {m: p for m, p in found.items() if not split_expert(m) or p.a.any() or p.b.any()}
    return kept, problems


def _target(module: str, found: Mapping[str, Found], settings: Settings, model_type: str) -> Target:
    """Rank, alpha and scale of a module, looked up as PEFT does; ValueError if ranks disagree."""
    pair = found[module]
    r, expert = len(pair.a), split_expert(module)
    target, held = settings.target(module), r
    if pair.fused is not None:
        target, held = settings.target(pair.fused.parameter), pair.fused.r
    elif expert is None and is_taken(module, model_type) and settings.lists(f"{module}.weight"):
        target = settings.target(f"{module}.weight")
    elif expert is not None and model_type in FUSED_TYPES:
        home, number, name = expert
        both = [f"{home}.{number}.{n}" for n in PROJECTIONS[:2]]
        key = "down_proj" if name == "down_proj" else "gate_up_proj"
        fused = settings.fused_target(f"{home}.{key}")
        if fused is not None:
            target = fused
            held = (
                r
                if name == "down_proj"
                else sum(len(found[m].a) if m in found else r for m in both)
            )
    if target.r != held:
        raise ValueError(f"its rank is {held}, by r and rank_pattern {target.r}")
    return Target(r, alpha_for(target.scale, r, settings.use_rslora), target.scale)


def _incomplete_experts(found: Mapping[str, Found], universe: Sequence[str]) -> list[str]:
    """Experts of a layer are adapted together: names those that lack what others have."""
    kinds = {(e[0], e[2]) for m in found if (e := split_expert(m))}
    expected = (m for m in universe if (e := split_expert(m)) and (e[0], e[2]) in kinds)
    return [
        f"{module} has no adapter, though other experts do"
        for module in expected
        if module not in found
    ]


def _stack(
    found: Mapping[str, Found], targets: Mapping[str, Target], leaves: Sequence[Leaf]
) -> dict[Path, Adapter]:
    adapters = {}
    by_path = {leaf.path: leaf for leaf in leaves}
    for path, stack in stack_targets(leaves, targets).items():
        leaf = by_path[path]
        a, b = (np.zeros(shape, np.float32) for shape in factor_shapes(leaf, stack.r))
        adapter = Adapter(leaf, a, b, stack.scales.reshape(scale_shape(leaf)))
        for cell in adapter.cells():
            pair, place = found[adapter.module(cell)], leaf.place(cell)
            a[place][:, : len(pair.a)] = pair.a.T
            b[place][: len(pair.a)] = pair.b.T
        adapters[path] = adapter
    return adapters
