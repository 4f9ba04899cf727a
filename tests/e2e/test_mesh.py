# SPDX-License-Identifier: Apache-2.0
"""Training on eight fake devices equals training on one, for every kind of mesh."""

import functools
from typing import Any, NamedTuple

import engine_cases as cases
import jax
import numpy as np
import pytest

from lora_tune import build, sharding
from lora_tune.models import FAMILIES
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.training.state import split_model
from lora_tune.training.step import make_eval_step, make_step

ROWS, LENGTH, STEPS = 8, 24, 3
# Two blocks of (two dense linear layers, one sparse full-attention layer).
LAYERS = {
    "num_hidden_layers": 6,
    "layer_types": [cases.LINEAR, cases.LINEAR, cases.FULL] * 2,
    "mlp_only_layers": [0, 1, 3, 4],
}


class Trained(NamedTuple):
    model: Any
    split: Any
    losses: list[float]  # of every step, as norms; gradients are those of the first
    norms: list[float]
    gradients: dict[Any, np.ndarray]
    weights: dict[str, jax.Array]
    opt_state: Any
    opt_shardings: Any


def batches():
    """Rows with very different numbers of trained tokens, another batch every step."""
    lengths = ([24], [2], [11, 13], [5, 5, 5], [3], [20, 4], [17], [9, 6])
    for step in range(STEPS):
        rows = [
            cases.row(cases.documents(n, seed=8 * step + i), LENGTH) for i, n in enumerate(lengths)
        ]
        yield cases.stack_rows(rows, ROWS)


# Inputs of single layers; the last four layers read keys and values of the first two.
GEMMA4 = {
    "vocab_size": 46,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 5,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    # With 1e-3, norms of small values let gradients depend on the order of sums by 2e-5.
    "rms_norm_eps": 0.1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 46,
}


def gemma4(options):
    family = FAMILIES["gemma4_text"]
    return Decoder(family, family.read_config(GEMMA4), options)


def train(sizes, *, full=False, scan_axis=0, accumulation=1, other=None):
    mesh = sharding.make_mesh(**dict(sizes)) if sizes else None
    options = DecoderOptions(param_scan_axis=scan_axis, loss_chunk=40)
    lora = None if full else cases.ALL
    changes = {"model": other(options)} if other else LAYERS
    model = cases.make(options, lora=lora, mesh=mesh, **changes)
    split = split_model(model)
    # Adam divides a gradient's rounding error by the gradient itself. With epsilon a tenth of the
    # largest gradients (1e-2), weights agree as well as the gradients do, and not 1/epsilon worse.
    optimizer = cases.recording_adamw(learning_rate=3e-3, adam_epsilon=1e-3)
    opt_state, opt_shardings = build.init_optimizer(optimizer, split, mesh)
    outs = {}
    if mesh is not None:
        placed = split.shardings(mesh, split.trainable)
        outs = {"out_shardings": (placed, opt_shardings, None)}
    step = cases.quick_jit(make_step(split, optimizer, mesh=mesh), **outs)
    place = build.make_place(mesh, accumulation)
    weights, losses, norms, gradients = split.trainable, [], [], {}
    for batch in batches():
        weights, opt_state, metrics = step(
            weights, opt_state, split.frozen, place(batch), jax.random.key(0)
        )
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        gradients = gradients or cases.by_name(model, opt_state.gradients)
    return Trained(model, split, losses, norms, gradients, weights, opt_state, opt_shardings)


@functools.cache
def one_device(full):
    return train(None, full=full)


@functools.cache
def on_mesh(sizes, **options):
    return train(sizes, **options)


def assert_same_training(actual, expected):
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-5)
    cases.assert_close(actual.gradients, expected.gradients, 1e-5)
    weights = [cases.by_name(trained.model, trained.weights) for trained in (actual, expected)]
    cases.assert_close(*weights, 1e-5)
    start = cases.by_name(expected.model, expected.split.trainable)
    trained = {n: x for n, x in start.items() if n[1] != "layer_scalar"}  # those are buffers
    assert all((weights[0][name] != x).any() for name, x in trained.items())


def assert_placed_as_asked(trained, mesh_sizes):
    mesh = sharding.make_mesh(**dict(mesh_sizes))
    asked = trained.split.shardings(mesh, trained.weights)
    for name, array in trained.weights.items():
        assert array.sharding.is_equivalent_to(asked[name], array.ndim), name
        assert np.prod(array.sharding.shard_shape(array.shape)) * parts(asked[name]) == array.size
        moment = trained.opt_state.gradients[name]
        assert moment.sharding.is_equivalent_to(asked[name], moment.ndim), name
    for array, placed in zip(
        jax.tree.leaves(trained.opt_state), jax.tree.leaves(trained.opt_shardings), strict=True
    ):
        assert array.sharding.is_equivalent_to(placed, array.ndim)


def parts(placed):
    """In how many different parts a sharding cuts an array."""
    dims = [dim if isinstance(dim, tuple) else (dim,) for dim in placed.spec if dim]
    return int(np.prod([placed.mesh.shape[axis] for dim in dims for axis in dim]))


MESHES = {
    "data 8": ((("data", 8),), {}),
    "fsdp 8": ((("fsdp", 8),), {"scan_axis": 1}),
    "data 2, fsdp 2, expert 2": ((("data", 2), ("fsdp", 2), ("expert", 2)), {}),
    "expert 4, tensor 2": ((("expert", 4), ("tensor", 2)), {"accumulation": 2}),
    "fsdp 4, tensor 2": ((("fsdp", 4), ("tensor", 2)), {}),
    "tensor 2": ((("tensor", 2),), {}),
    # Two key heads and four value heads of linear attention, two key/value heads and four queries.
    "expert 2, sequence 2, tensor 2": ((("expert", 2), ("sequence", 2), ("tensor", 2)), {}),
}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", MESHES)
def test_adapters_train_as_on_one_device(name):
    sizes, options = MESHES[name]
    trained = on_mesh(sizes, **options)
    kinds = {(n.split(".")[4], kind) for n, kind in trained.gradients if "experts" in n}
    assert kinds == {("experts", "kernel_lora_a"), ("experts", "kernel_lora_b")}
    assert_same_training(trained, one_device(False))
    assert_placed_as_asked(trained, sizes)


@pytest.mark.parametrize("full", [False, True])
def test_gemma4_trains_as_on_one_device(full):
    """What layers hand to each other and what each gets of the tokens, cut over devices."""
    sizes = (("fsdp", 2), ("sequence", 2), ("tensor", 2))
    trained = train(sizes, full=full, other=gemma4)
    assert any("per_layer_model_projection" in name for name, _ in trained.gradients)
    assert_same_training(trained, train(None, full=full, other=gemma4))
    assert_placed_as_asked(trained, sizes)


@pytest.mark.parametrize("name", ["data 2, fsdp 2, expert 2", "expert 2, sequence 2, tensor 2"])
def test_every_parameter_trains_as_on_one_device(name):
    sizes, options = MESHES[name]
    trained = on_mesh(sizes, full=True, **options)
    assert_same_training(trained, one_device(True))
    assert_placed_as_asked(trained, sizes)


def test_evaluation_sums_over_the_whole_mesh():
    batch = next(batches())
    sums = []
    for sizes in (None, MESHES["expert 2, sequence 2, tensor 2"][0]):
        trained = on_mesh(sizes) if sizes else one_device(False)
        mesh = sharding.make_mesh(**dict(sizes)) if sizes else None
        rows = {name: array[0] for name, array in build.make_place(mesh, 1)(batch).items()}
        step = cases.quick_jit(make_eval_step(trained.split, mesh=mesh))
        sums.append(jax.device_get(step(trained.split.trainable, trained.split.frozen, rows)))
    one, many = sums
    np.testing.assert_allclose(many.pop("nll"), one.pop("nll"), rtol=1e-5)
    assert one == many
    assert one["documents"] >= (batch["weights"] > 0).any(1).sum() > 0
