# SPDX-License-Identifier: Apache-2.0
"""A small Qwen3-Next with both scan levels, its batches and its steps, for tests of the engine."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from lora_tune import sharding
from lora_tune.hf.table import Leaf, bind, hf_state
from lora_tune.layers.weights import Initialiser
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.inject import adapter_filter, adapter_leaf, add_lora
from lora_tune.models import FAMILIES
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.models.initial import draw_leaf, initialise
from lora_tune.training.optim import make_optimizer

FAMILY = FAMILIES["qwen3_next"]
LINEAR, FULL = "linear_attention", "full_attention"
# Two blocks of (two sparse linear layers, one dense full-attention layer), then one dense layer:
# a nested run, a nested run of one, a stack outside the blocks, experts in the inner level.
CONFIG: dict[str, Any] = {
    "vocab_size": 46,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 7,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR, LINEAR, FULL, FULL],
    "mlp_only_layers": [2, 5, 6],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    # With the usual 1e-6, the norm after linear attention turns noise into signal wherever q.k is
    # near zero, as it is with random weights, and gradients then depend on the order of sums.
    "rms_norm_eps": 1e-2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
ALL = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
OPTIM: dict[str, Any] = {
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
}
PLAIN = DecoderOptions()


def abstract(options: DecoderOptions = PLAIN, *, family: Any = FAMILY, **changes: Any) -> Any:
    """The model without weights; `changes` go to the configuration."""
    return Decoder(family, family.read_config(CONFIG | changes), options)


def make(
    options: DecoderOptions = PLAIN,
    *,
    lora: LoraConfig | None = ALL,
    mesh: Mesh | None = None,
    b_scale: float = 0.1,
    model: Any = None,
    **changes: Any,
) -> Any:
    """The model with weights that let every layer count, and adapters whose B is not zero.

    `model` is another abstract model in the place of that which `changes` make.
    """
    model = abstract(options, **changes) if model is None else model
    shardings = None
    if mesh is not None:
        leaves = bind(model.family, model)
        shardings = {leaf.path: sharding.named_sharding(mesh, leaf.axes) for leaf in leaves}
    model = initialise(model, seed=0, shardings=shardings)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] == "embedding" or (path[-1] == "kernel" and path[-2] != "conv1d"):
            variable.set_value(5 * variable.get_value())
    if lora is None:
        return model
    model = add_lora(model, lora, seed=1)
    if b_scale:
        randomise_b(model, b_scale)
    return model


def randomise_b(model: Any, scale: float) -> None:
    """Draws every B by its Hugging Face name, so that it does not depend on the stacking."""
    leaves = leaves_of(model)
    for path, variable in nnx.to_flat_state(nnx.state(model, adapter_filter)):
        if path[-1] == "kernel_lora_b":
            value = variable.get_value()
            drawn = draw_leaf(leaves[path], Initialiser("normal", scale), 2, value.sharding)
            variable.set_value(drawn)


def leaves_of(model: Any) -> dict[tuple[Any, ...], Leaf]:
    """The leaf of every parameter by path, adapters included."""
    leaves = {leaf.path: leaf for leaf in bind(model.family, model)}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        leaves[path] = adapter_leaf(leaves[(*path[:-1], "kernel")], variable)
    return leaves


def by_name(model: Any, weights: Mapping[str, Any]) -> dict[tuple[str, str], np.ndarray]:
    """(Hugging Face tensor, last part of our path) -> its slice of flat weights or gradients."""
    return {
        (name, str(path[-1])): tensor
        for path, leaf in leaves_of(model).items()
        if "/".join(map(str, path)) in weights
        for name, tensor in hf_state(leaf, weights["/".join(map(str, path))])
    }


def assert_close(actual: Mapping[Any, Any], expected: Mapping[Any, Any], tolerance: float) -> None:
    """Every array of `actual` is within `tolerance` of `expected`, relative to the largest entry.

    The largest entry is that of all tensors of one kind, over all layers and experts. Gradients
    can be small, so an absolute bound would let anything pass.
    """
    assert actual.keys() == expected.keys()
    largest: dict[str, float] = {}
    for name, array in expected.items():
        kind = _kind(name)
        largest[kind] = max(largest.get(kind, 0.0), float(np.abs(array).max()))
    worst = {}
    for name, array in expected.items():
        want, got = np.asarray(array, np.float64), np.asarray(actual[name], np.float64)
        assert got.shape == want.shape, name
        error = np.abs(got - want).max() / (largest[_kind(name)] or 1.0)
        if not error <= tolerance:
            worst[name] = error
    assert not worst, sorted(worst.items(), key=lambda item: -item[1])[:5]


def _kind(name: Any) -> str:
    # The decay is made of in_proj_ba, A_log and dt_bias. The gradients of the last two are sums
    # over all tokens of terms that mostly cancel, so their rounding errors are those of the terms.
    kind = re.sub(r"\d+", "*", str(name))
    return re.sub(r"(A_log|dt_bias)', '\1'", "in_proj_ba.weight', 'kernel'", kind)


class Doc(NamedTuple):
    """One conversation: token ids, and which of them are trained."""

    tokens: np.ndarray
    trained: np.ndarray


def documents(lengths: Sequence[int], *, seed: int = 0) -> list[Doc]:
    """Random documents whose first token is never trained (nothing predicts it)."""
    rng = np.random.default_rng(seed)
    docs = []
    for n in lengths:
        trained = rng.random(n) < 0.6
        trained[0], trained[-1] = False, True
        docs.append(Doc(rng.integers(1, CONFIG["vocab_size"], n), trained))
    return docs


def row(docs: Sequence[Doc], length: int, *, before: int = 0, between: int = 0) -> dict[str, Any]:
    """Packs documents in one row `[length]`, with padding before and between them."""
    out = {
        "tokens": np.full(length, 7, np.int32),  # padding that must not matter
        "targets": np.zeros(length, np.int32),
        "weights": np.zeros(length, np.float32),
        "segment_ids": np.zeros(length, np.int32),
        "positions": np.zeros(length, np.int32),
    }
    at = before
    for number, doc in enumerate(docs, start=1):
        end = at + len(doc.tokens)
        out["tokens"][at:end] = doc.tokens
        out["targets"][at : end - 1] = doc.tokens[1:]
        out["weights"][at : end - 1] = doc.trained[1:]
        out["segment_ids"][at:end] = number
        out["positions"][at:end] = np.arange(end - at)
        at = end + between
    return out


def stack_rows(rows: Sequence[Mapping[str, Any]], count: int) -> dict[str, np.ndarray]:
    """Stacks rows to a batch `[count, T]`, filled up with rows of padding alone."""
    length = len(rows[0]["tokens"])
    rows = [*rows, *([row([], length)] * (count - len(rows)))]
    return {name: np.stack([r[name] for r in rows]) for name in rows[0]}


def parts(batch: Mapping[str, np.ndarray], accumulation: int) -> dict[str, jax.Array]:
    """`[rows, T]` -> `[A, rows / A, T]`."""
    return {
        name: jnp.asarray(array.reshape(accumulation, -1, array.shape[-1]))
        for name, array in batch.items()
    }


class Recorded(NamedTuple):
    """Optimizer state that also holds the last gradients, as the optimizer saw them."""

    inner: Any
    gradients: Any


def recording_adamw(**changes: Any) -> optax.GradientTransformation:
    """AdamW that keeps the gradients it was given, so that tests see them through the real step."""
    adamw, _ = make_optimizer(total_steps=100, **(OPTIM | changes))

    def init(params: Any) -> Recorded:
        return Recorded(adamw.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Recorded, params: Any = None) -> tuple[Any, Recorded]:
        changes, inner = adamw.update(updates, state.inner, params)
        return changes, Recorded(inner, updates)

    return optax.GradientTransformation(init, update)


@functools.cache
def compiler_options() -> dict[str, Any]:
    """Settings that let XLA compile several times faster; those of them that this JAX knows."""
    settings = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    known: dict[str, Any] = {}
    for option, off in settings.items():
        try:
            jax.jit(jnp.negative, compiler_options={option: off})(0.0)
        except jax.errors.JaxRuntimeError:
            continue
        known[option] = off
    return known


def quick_jit(f: Any, **options: Any) -> Any:
    """`jax.jit`, compiled fast rather than well."""
    return jax.jit(f, compiler_options=compiler_options(), **options)


def equations(jaxpr: Any, trips: int = 1) -> Iterator[tuple[Any, int]]:
    """Every equation of a jaxpr and of all jaxprs in it, with how many times scans run it."""
    for eqn in jaxpr.eqns:
        yield eqn, trips
        inner = trips * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for sub in jax.tree.leaves(eqn.params, is_leaf=lambda v: _as_jaxpr(v) is not None):
            if (found := _as_jaxpr(sub)) is not None:
                yield from equations(found, inner)


def _as_jaxpr(value: Any) -> Any:
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") else None
