# SPDX-License-Identifier: Apache-2.0
"""Adapter gradients, logits and one optimizer step equal those of PEFT on torch.

Both sides hold the same adapter: ours is saved, and PEFT reads it. Gradients and the step come
out of the training step that a run compiles.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from family_shapes import FAMILIES
from hf_cases import EVERYWHERE, random_adapters
from torch_models import (
    TINY,
    exact,
    in_float64,
    our_logits,
    random_tokens,
    read_theirs,
    torch,
    write_checkpoint,
)

import lora_tune
from lora_tune.hf.peft_config import split_expert
from lora_tune.hf.table import Leaf, bind, module_name
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.inject import adapted_stacks
from lora_tune.training.optim import make_optimizer
from lora_tune.training.state import split_model
from lora_tune.training.step import make_step

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    # peft 0.21 reads a property that transformers 5.24 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # peft 0.21 looks for pattern keys among modules only, and applies those of parameters.
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module"),
]

TOLERANCE = 1e-4
"""Of logits, and of gradients of the mean loss: absolute, and relative to a tensor's largest."""
STEP_TOLERANCE = 1e-5
# The first step of Adam is about the sign of a gradient, which rounding decides where a gradient
# is about zero; with this epsilon the step is a smooth function.
ADAM = {"learning_rate": 1e-3, "weight_decay": 0.1, "adam_epsilon": 1e-3, "max_grad_norm": 0.5}
BETAS = (0.9, 0.99)

Pairs = dict[str, tuple[np.ndarray, np.ndarray]]
"""Module name -> what belongs to A `[r, in]` and to B `[out, r]`."""


@dataclasses.dataclass(frozen=True)
class Case:
    lora: LoraConfig
    layout: dict[str, Any] = dataclasses.field(default_factory=dict)
    accumulation: int = 1


CASES = {
    "qwen3_next": Case(LoraConfig(r=4, lora_alpha=10, target_modules=EVERYWHERE)),
    "qwen3_next, patterns and rslora": Case(
        LoraConfig(
            r=4,
            lora_alpha=3,
            target_modules=EVERYWHERE,
            exclude_modules=r"model\.layers\.(2|7)\..*(qkvz|q_proj)",
            use_rslora=True,
            rank_pattern={r"layers\.3\..*_proj": 2, r"experts\.\d+\.down_proj": 3, "out_proj": 5},
            alpha_pattern={r"experts\.\d+\.(gate|up)_proj": 5, r"layers\.[4-6]\..*": 1},
        ),
        {"param_scan_axis": 1},
        2,
    ),
    "llama": Case(
        LoraConfig(r=4, lora_alpha=10, target_modules="all-linear"), {"remat": "none"}, 2
    ),
    **{
        family: Case(LoraConfig(r=3, lora_alpha=9, target_modules=FAMILIES[family].targets))
        for family in FAMILIES.keys() - {"llama", "gemma3", "gemma4", "qwen3_5", "qwen3_5_moe_text"}
    },
}
"""Of families with a text model alone and inside a multimodal one, one of the two."""
# Two blocks of two stacks each, and a dense layer after them.
QWEN3_NEXT = {
    "layer_types": [*([*["linear_attention"] * 3, "full_attention"] * 2), "full_attention"]
}


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    """The checkpoint of a case, of the family's whole shape."""

    @functools.cache
    def write(family: str) -> Any:
        shapes = FAMILIES[family].shapes.values() if family in FAMILIES else [QWEN3_NEXT]
        folder = tmp_path_factory.mktemp(family)
        return write_checkpoint(folder, model_type=family, seed=1, **next(iter(shapes)))

    return lambda case: write(case.partition(",")[0])


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    """Four rows: a whole one, two that end or begin with padding, and an all but empty one."""
    tokens = random_tokens(4, 70, seed=2)
    place = np.arange(70)[None, :]
    first, end = np.array([[0, 0, 9, 67], [70, 66, 70, 70]])[:, :, None]
    real = (place >= first) & (place < end)
    has_next = real & np.pad(real[:, 1:], ((0, 0), (0, 1)))
    trained = has_next & (np.random.default_rng(3).random(real.shape) < 0.7)
    return {
        "tokens": tokens,
        "targets": np.where(has_next, np.roll(tokens, -1, axis=1), 0),
        "weights": trained.astype(np.float32),
        "segment_ids": real.astype(np.int32),
        "positions": np.where(real, place - real.argmax(axis=1)[:, None], 0).astype(np.int32),
    }


@dataclasses.dataclass(frozen=True)
class Side:
    """What one side computed."""

    logits: np.ndarray
    loss: float
    gradients: Pairs
    before: Pairs
    after: Pairs


def recording(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, whose state also keeps the gradients that it was given."""

    def init(params: Any) -> Any:
        return inner.init(params), jax.tree.map(jnp.zeros_like, params)

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, inner_state = inner.update(grads, state[0], params)
        return updates, (inner_state, grads)

    return optax.GradientTransformation(init, update)


def run_ours(model: Any, batch: dict[str, np.ndarray], accumulation: int) -> Side:
    optimizer, _ = make_optimizer(
        **ADAM,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        total_steps=1,
        lr_scheduler_type="constant",
        warmup_steps=0,
        warmup_ratio=0.0,
    )
    optimizer, split = recording(optimizer), split_model(model)
    parts = {k: v.reshape(accumulation, -1, v.shape[-1]) for k, v in batch.items()}
    step = jax.jit(make_step(split, optimizer))
    after, (_, gradients), metrics = step(
        split.trainable, optimizer.init(split.trainable), split.frozen, parts, jax.random.key(0)
    )
    pairs = [our_pairs(model, weights) for weights in (gradients, split.trainable, after)]
    logits = our_logits(model, batch["tokens"], batch["segment_ids"])
    return Side(logits, float(metrics["loss"]), *pairs)


def our_pairs(model: Any, weights: dict[str, jax.Array]) -> Pairs:
    leaves = bind(model.family, model)
    stacks = adapted_stacks(leaves, model.adapter.config)
    pairs = {}
    for leaf in (leaf for leaf in leaves if leaf.path in stacks):
        home = "/".join(map(str, leaf.path[:-1]))
        a, b = (np.asarray(weights[f"{home}/kernel_lora_{n}"]) for n in "ab")
        for cell, r in _ranks(leaf, stacks[leaf.path].ranks):
            place = leaf.place(cell)
            unused = (a[place][:, r:], b[place][r:])
            assert not any(part.any() for part in unused), leaf.dotted
            if r:
                pairs[module_name(leaf.names[cell])] = (a[place][:, :r].T, b[place][:r].T)
    return pairs


def _ranks(leaf: Leaf, ranks: np.ndarray) -> Any:
    return [(cell, int(ranks[cell[: ranks.ndim]])) for cell in np.ndindex(leaf.names.shape)]


def run_theirs(model: Any, batch: dict[str, np.ndarray], ranks: dict[str, int]) -> Side:
    tensors = {name: torch.tensor(array) for name, array in batch.items()}
    before = their_pairs(model, ranks, lambda p: p)
    mask = tensors["segment_ids"].long()
    with in_float64():
        logits = model(tensors["tokens"].long(), attention_mask=mask, use_cache=False).logits
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tensors["targets"].flatten().long(), reduction="none"
    )
    loss = (nll * tensors["weights"].flatten()).sum() / tensors["weights"].sum()
    loss.backward()
    clear_cross_terms(model)
    gradients = their_pairs(model, ranks, lambda p: p.grad)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=ADAM["learning_rate"],
        betas=BETAS,
        eps=ADAM["adam_epsilon"],
        weight_decay=ADAM["weight_decay"],
    )
    torch.nn.utils.clip_grad_norm_(trained, ADAM["max_grad_norm"])
    optimizer.step()
    after = their_pairs(model, ranks, lambda p: p)
    return Side(logits.detach().numpy(), loss.item(), gradients, before, after)


def clear_cross_terms(model: Any) -> None:
    """Drops gradients that exist in PEFT's fused form alone.

    There, B of gate_up is `[gate | up, r * experts]` with the ranks of gate in the first half of
    the columns: the blocks from gate ranks to up outputs and back are zeros that we do not hold.
    """
    for name, parameter in model.named_parameters():
        if ".experts.base_layer.lora_B" in name:
            rows, columns = (n // 2 for n in parameter.shape)
            parameter.grad[:rows, columns:] = 0
            parameter.grad[rows:, :columns] = 0


def their_pairs(model: Any, ranks: dict[str, int], of: Any) -> Pairs:
    """PEFT's tensors by module; the fused experts are taken apart."""
    held: dict[str, dict[str, np.ndarray]] = {}
    for name, parameter in model.named_parameters():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.default\.weight", name)
        if match:
            assert parameter.requires_grad, name
            held.setdefault(match[1], {})[match[2]] = of(parameter).detach().numpy().copy()
    pairs = {}
    for module, r in ranks.items():
        expert = split_expert(module)
        a, b = _expert_pair(held, *expert) if expert else (held[module]["A"], held[module]["B"])
        pairs[module] = (a[:r], b[:, :r])
    return pairs


def _expert_pair(held: Any, home: str, e: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of A are expert-major, columns of B rank-major; gate_up is the inner wrapper."""
    pair = held[home if name == "down_proj" else f"{home}.base_layer"]
    experts = TINY["num_experts"]
    r = len(pair["A"]) // experts
    a, b = pair["A"][e * r : (e + 1) * r], pair["B"][:, e::experts]
    if name == "down_proj":
        return a, b
    half, rows = r // 2, len(b) // 2
    if name == "gate_proj":
        return a[:half], b[:rows, :half]
    return a[half:], b[rows:, half:]


@pytest.fixture(scope="module", params=sorted(CASES))
def sides(request, base_of, batch, tmp_path_factory) -> tuple[Side, Side]:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("adapter") / "a"
    base = base_of(request.param)
    model, _ = lora_tune.load_model(base, dtype="float32", **case.layout)
    lora_tune.add_lora(model, case.lora)
    randomise(model, case.lora)
    lora_tune.save_adapter(model, folder)
    ours = run_ours(model, batch, case.accumulation)
    # With float32, some of their gradients are off by the tolerance.
    wrapped = peft.PeftModel.from_pretrained(exact(read_theirs(base)), folder, is_trainable=True)
    wrapped = wrapped.double()
    ranks = {module: len(a) for module, (a, _) in ours.before.items()}
    return ours, run_theirs(wrapped, batch, ranks)


def randomise(model: Any, lora: LoraConfig) -> None:
    """Gives A and B values of the size that training gives them."""
    for path, array in random_adapters(bind(model.family, model), lora).items():
        module = model
        for part in path[:-1]:
            module = module[part] if isinstance(part, int) else getattr(module, part)
        variable = getattr(module, path[-1])
        if path[-1] != "kernel_lora_scale":
            variable.set_value(jnp.asarray(0.15 * array))


def test_both_sides_hold_the_same_adapter(sides):
    ours, theirs = sides
    for module, pair in ours.before.items():
        for mine, other in zip(pair, theirs.before[module], strict=True):
            np.testing.assert_array_equal(mine, other, err_msg=module)
            assert mine.any()


def test_logits_and_loss(sides, batch):
    ours, theirs = sides
    real = batch["segment_ids"] > 0
    np.testing.assert_allclose(ours.logits[real], theirs.logits[real], atol=TOLERANCE, rtol=0)
    assert abs(ours.loss - theirs.loss) < TOLERANCE


def test_gradients(sides):
    ours, theirs = sides
    assert ours.gradients.keys() == ours.before.keys()
    for module, both in ours.gradients.items():
        for side, mine, other in zip("AB", both, theirs.gradients[module], strict=True):
            name, scale = f"{module} lora_{side}", np.abs(other).max()
            assert scale > 0 or ".experts." in module, f"{name} has no gradient"
            np.testing.assert_allclose(mine, other, atol=TOLERANCE, rtol=0, err_msg=name)
            atol = TOLERANCE * scale
            np.testing.assert_allclose(mine, other, atol=atol, rtol=0, err_msg=name)
    for kind, modules in by_kind(ours.gradients).items():
        assert max(np.abs(theirs.gradients[m][0]).max() for m in modules) > 1e-3, kind


def by_kind(modules: Iterable[str]) -> dict[str, list[str]]:
    """Modules by where they are in a layer, the number of an expert aside; all of them."""
    kinds: dict[str, list[str]] = {}
    for module in modules:
        kind = re.sub(r"^.*\.layers\.\d+\.|(?<=experts\.)\d+\.", "", module)
        kinds.setdefault(kind, []).append(module)
    return kinds


def test_one_step_of_adamw(sides):
    ours, theirs = sides
    moved = 0.0
    for module, pair in ours.after.items():
        for side in range(2):
            np.testing.assert_allclose(
                pair[side], theirs.after[module][side], atol=STEP_TOLERANCE, rtol=0, err_msg=module
            )
            moved = max(moved, np.abs(pair[side] - ours.before[module][side]).max())
    assert moved > 1e-4
