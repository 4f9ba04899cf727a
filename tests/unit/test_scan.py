# SPDX-License-Identifier: Apache-2.0
"""The layer plan, stacks and the scan that runs them, against loops and hand-written plans."""

import dataclasses
import functools
import itertools

import engine_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from lora_tune import scan
from lora_tune.layers.weights import NORMAL, weight
from lora_tune.models import qwen3_next
from lora_tune.models.decoder import DecoderOptions
from lora_tune.scan import BLOCK, LAYER, plan_layers
from lora_tune.training.state import split_model, unflatten


def spelled(plan):
    """The plan as text: the letters of each run, runs joined by a dash."""
    prefix, cycle, suffix = (
        "-".join(run.kind * run.length for run in part)
        for part in (plan.prefix, plan.cycle, plan.suffix)
    )
    return prefix, cycle, plan.blocks, suffix


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("LLLF" * 12, ("", "LLL-F", 12, "")),
        ("FLLL" * 3, ("", "F-LLL", 3, "")),
        ("LFLLLFLL", ("", "L-F-LL", 2, "")),
        ("LLLF" * 2 + "LL", ("", "LLL-F", 2, "LL")),
        ("LLLF" * 2 + "F", ("", "LLL-F", 2, "F")),
        ("DD" + "LLLF" * 3, ("DD", "LLL-F", 3, "")),
        ("D" + "LF" * 2 + "LL", ("D", "L-F", 2, "LL")),
        ("ABCDE", ("A-B-C-D-E", "", 0, "")),
        ("LLLF", ("LLL-F", "", 0, "")),
        ("LLLLL", ("LLLLL", "", 0, "")),
        ("L", ("L", "", 0, "")),
        ("", ("", "", 0, "")),
    ],
)
def test_plans_written_by_hand(kinds, expected):
    assert spelled(plan_layers(kinds)) == expected


def laid_out(plan):
    """The kinds in the order in which the plan runs them."""
    kinds = [run.kind for run in plan.prefix for _ in range(run.length)]
    kinds += [run.kind for run in plan.cycle for _ in range(run.length)] * plan.blocks
    return kinds + [run.kind for run in plan.suffix for _ in range(run.length)]


def fewest_runs(kinds):
    """Runs of the best plan, by trying every prefix, cycle and number of blocks."""

    def runs(part):
        return len(list(itertools.groupby(part)))

    best = runs(kinds)
    for start, length in itertools.product(range(len(kinds)), range(1, len(kinds) + 1)):
        cycle = kinds[start : start + length]
        for blocks in range(2, (len(kinds) - start) // length + 1):
            stop = start + blocks * length
            if kinds[start:stop] == cycle * blocks:
                best = min(best, runs(kinds[:start]) + runs(cycle) + runs(kinds[stop:]))
    return best


def random_patterns():
    rng = np.random.default_rng(0)
    for n in range(1, 51):
        for letters in ("L", "LF", "LFD"):
            yield "".join(rng.choice(list(letters), n))
            cycle = "".join(rng.choice(list(letters), rng.integers(1, 7)))
            offset = rng.integers(0, 3)
            yield ("D" * offset + cycle * n)[:n]


def test_every_plan_gives_back_the_layers():
    for kinds in random_patterns():
        plan = plan_layers(kinds)
        assert laid_out(plan) == list(kinds), kinds
        numbers = np.concatenate([ids.ravel() for ids in plan.stacks().values()])
        assert sorted(numbers) == list(range(len(kinds))), kinds
        for path, ids in plan.stacks().items():
            runs = {"prefix": plan.prefix, "blocks": plan.cycle, "suffix": plan.suffix}[path[0]]
            assert {kinds[i] for i in ids.ravel()} == {runs[path[-1]].kind}, kinds
        assert plan.blocks != 1


def test_no_plan_has_fewer_runs():
    for kinds in (k for k in random_patterns() if len(k) <= 20):
        plan = plan_layers(kinds)
        assert len(plan.prefix + plan.cycle + plan.suffix) == fewest_runs(kinds), kinds


def test_unscanned_plan_is_one_stack_a_layer():
    plan = plan_layers("LLF", scan=False)
    assert {path: int(ids) for path, ids in plan.stacks().items()} == {
        ("layers", 0): 0,
        ("layers", 1): 1,
        ("layers", 2): 2,
    }


class Toy(nnx.Module):
    """`h <- tanh(h @ kernel + bias)`."""

    def __init__(self):
        self.kernel = weight((4, 4), jnp.float32, axes=("embed", "mlp"), init=NORMAL)
        self.bias = weight((4,), jnp.float32, axes=(None,), init=NORMAL)
        self.qwix_rngs = nnx.data(None)

    def __call__(self, h):
        y = jnp.einsum("bd,df->bf", h, self.kernel[...])
        return jnp.tanh(y + self.bias[...][None, :])


class ToyBlock(nnx.Module):
    def __init__(self, runs):
        self.runs = nnx.List(runs)
        self.qwix_rngs = nnx.data(None)


def filled(module):
    """The abstract module with random weights."""
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(module)
    arrays = jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape), s.dtype), state)
    return nnx.merge(graphdef, arrays)


def nested(*, scan_axis=0, lengths=(3, 1), blocks=2):
    runs = [scan.create_stack(Toy(), length=n, axis=LAYER, scan_axis=scan_axis) for n in lengths]
    return scan.create_stack(ToyBlock(runs), length=blocks, axis=BLOCK, scan_axis=scan_axis)


@pytest.mark.parametrize(
    ("scan_axis", "kernel", "bias"),
    [
        (0, (BLOCK, LAYER, "embed", "mlp"), (BLOCK, LAYER, None)),
        (1, ("embed", BLOCK, LAYER, "mlp"), (None, BLOCK, LAYER)),
        (2, ("embed", "mlp", BLOCK, LAYER), (None, BLOCK, LAYER)),
    ],
)
def test_stack_axes_are_named_and_placed(scan_axis, kernel, bias):
    run = nested(scan_axis=scan_axis).runs[0]
    sizes = {BLOCK: 2, LAYER: 3, "embed": 4, "mlp": 4, None: 4}
    for variable, axes in ((run.kernel, kernel), (run.bias, bias)):
        assert variable.get_metadata("axes") == axes
        assert variable.get_value().shape == tuple(sizes[axis] for axis in axes)


def run_nested(block_stack, h, *, call, scan_axis=0):
    def run_block(block, h, _):
        ys = []
        for run in block.runs:
            h, y = scan.apply_stack(run, h, call, axis=LAYER, remat="full", scan_axis=scan_axis)
            ys.append(y)
        return h, tuple(ys)

    return scan.apply_stack(block_stack, h, run_block, axis=BLOCK, scan_axis=scan_axis)


def vars_of(toy):
    return toy.kernel, toy.bias


def layer_value(variable, block, layer):
    """One layer's part of a stacked variable, by plain indexing."""
    place = variable.get_metadata("axes").index(BLOCK)
    return np.take(np.take(np.asarray(variable[...]), block, place), layer, place)


@pytest.mark.smoke
@pytest.mark.parametrize("scan_axis", [0, 1])
def test_nested_stacks_run_in_layer_order(scan_axis):
    stack = filled(nested(scan_axis=scan_axis))
    h = jnp.ones((2, 4))
    out, (first, second) = jax.jit(
        lambda h: run_nested(
            stack, h, call=lambda layer, h, _: (layer(h), h[0, 0]), scan_axis=scan_axis
        )
    )(h)
    seen = []
    for block, (run, length) in itertools.product(range(2), enumerate((3, 1))):
        for i in range(length):
            seen.append(float(h[0, 0]))
            kernel, bias = (layer_value(v, block, i) for v in vars_of(stack.runs[run]))
            h = np.tanh(np.asarray(h) @ kernel + bias[None, :])
    np.testing.assert_allclose(out, h, atol=1e-6)
    ys = [y for block in range(2) for y in (*first[block], *second[block])]
    np.testing.assert_allclose(ys, seen, atol=1e-6)


@pytest.mark.parametrize("scan_axis", [0, 1])
def test_only_variables_born_in_the_body_leave_the_scan(scan_axis):
    stack = nested(scan_axis=scan_axis)

    def give_birth(layer, h, _):
        if not hasattr(layer, "adapter"):
            layer.adapter = nnx.LoRAParam(jnp.zeros((4, 5)), axes=("embed", None))
        return layer(h), None

    def run(state):
        module = nnx.merge(nnx.graphdef(stack), state, copy=True)
        run_nested(module, jnp.ones((2, 4)), call=give_birth, scan_axis=scan_axis)
        return nnx.state(module, nnx.LoRAParam)

    state = nnx.state(stack)
    born = dict(nnx.to_flat_state(jax.eval_shape(run, state)))
    assert set(born) == {("runs", 0, "adapter"), ("runs", 1, "adapter")}
    for path, length in zip(born, (3, 1), strict=True):
        axes = born[path].get_metadata("axes")
        expected = (BLOCK, LAYER, "embed", None) if not scan_axis else ("embed", BLOCK, LAYER, None)
        assert axes == expected
        sizes = {BLOCK: 2, LAYER: length, "embed": 4, None: 5}
        assert born[path].get_value().shape == tuple(sizes[axis] for axis in axes)
    shapes = [
        var.aval.shape
        for eqn, _ in cases.equations(jax.make_jaxpr(run)(state).jaxpr)
        if eqn.primitive.name == "scan"
        for var in eqn.outvars[eqn.params["num_carry"] :]
    ]
    assert shapes
    # The sizes of adapters, stacked or not, are multiples of 5; those of the base are not.
    assert all(np.prod(shape) % 5 == 0 for shape in shapes), shapes


def test_every_layer_draws_from_its_own_key():
    stack = filled(nested(lengths=(3, 3)))

    def draw(layer, h, _):
        return layer(h), jax.random.key_data(layer.qwix_rngs.dropout())

    def keys(seed):
        def run(h):
            module = nnx.clone(stack)
            module.set_attributes(qwix_rngs=nnx.Rngs(dropout=seed))
            return run_nested(module, h, call=draw)[1]

        return np.concatenate([y.reshape(-1, 2) for y in jax.jit(run)(jnp.ones((2, 4)))])

    assert len(np.unique(keys(0), axis=0)) == 2 * (3 + 3)
    np.testing.assert_array_equal(keys(0), keys(0))
    assert not (keys(0)[:, None] == keys(1)[None]).all(-1).any()


def lowered_text(length):
    stack = filled(scan.create_stack(Toy(), length=length, axis=LAYER))

    def run(h):
        return scan.apply_stack(stack, h, lambda layer, h, _: (layer(h), None), axis=LAYER)[0]

    return jax.jit(run).lower(jnp.ones((2, 4))).as_text()


def test_a_run_of_one_layer_stays_a_loop():
    assert "skip-simplify-while-loops_trip-count-one" in lowered_text(1)
    assert "skip-simplify-while-loops_trip-count-one" not in lowered_text(2)


def test_same_weights_over_several_inputs():
    head = filled(Toy())
    xs = jnp.arange(24.0).reshape(3, 2, 4) / 24

    def run(x):
        return scan.apply_stack(
            head, None, lambda toy, _, x: (None, toy(x)), axis="chunk", xs=x, length=3
        )[1]

    kernel, bias = (np.asarray(v[...]) for v in vars_of(head))
    expected = np.tanh(np.asarray(xs) @ kernel + bias)
    np.testing.assert_allclose(jax.jit(run)(xs), expected, atol=1e-6)


def test_a_stack_without_its_axis_is_refused():
    with pytest.raises(ValueError, match="no variable with that axis"):
        scan.apply_stack(filled(Toy()), jnp.ones((2, 4)), lambda m, h, _: (m(h), None), axis=LAYER)


class MarkedLayer(qwen3_next.Layer):
    """A layer whose every forward evaluation shows in the jaxpr."""

    def __call__(self, h, inputs, entry=None):
        return super().__call__(checkpoint_name(h, "layer"), inputs, entry)


MARKED = dataclasses.replace(cases.FAMILY, make_layer=MarkedLayer)
BATCH = cases.stack_rows([cases.row(cases.documents([7, 5]), 12)], 2)


@functools.cache
def outcome(*, scanned=True, scan_axis=0, remat="full", lora=cases.ALL):
    """Model, jaxpr of the gradient of everything, scores and gradients."""
    options = DecoderOptions(
        scan_layers=scanned, param_scan_axis=scan_axis, remat=remat, loss_chunk=10
    )
    model = cases.make(options, family=MARKED, lora=lora)
    split = split_model(model)
    batch = {name: jnp.asarray(array) for name, array in BATCH.items()}

    def loss(weights):
        model = nnx.merge(split.graphdef, unflatten(weights), copy=True)
        nll, _ = model(
            batch["tokens"], batch["segment_ids"], batch["positions"], targets=batch["targets"]
        )
        return jnp.sum(nll * batch["weights"]), nll

    weights = {**split.trainable, **split.frozen}
    traced = cases.quick_jit(jax.grad(loss, has_aux=True)).trace(weights)
    gradients, nll = traced.lower().compile()(weights)
    return model, traced.jaxpr, nll, gradients


SCANNED = [
    {"scan_axis": scan_axis, "remat": remat} for scan_axis in (0, 1) for remat in ("full", "none")
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SCANNED, ids=str)
def test_scan_equals_the_unrolled_loop(case):
    unrolled, _, expected_nll, expected = outcome(scanned=False)
    model, _, nll, gradients = outcome(**case)
    assert model.plan.blocks == 2
    assert nll[0, 0] > 0
    np.testing.assert_allclose(nll, expected_nll, rtol=1e-5, atol=1e-5)
    actual, expected = cases.by_name(model, gradients), cases.by_name(unrolled, expected)
    assert {kind for _, kind in actual} >= {"kernel", "kernel_lora_a", "kernel_lora_b", "weight"}
    assert all(np.abs(g).max() > 0 for (_, kind), g in actual.items() if "lora" in kind)
    cases.assert_close(actual, expected, 1e-5)


@pytest.mark.slow
def test_full_training_takes_the_same_gradients_from_a_scan():
    """Without adapters no weight is frozen, and stacks are sliced instead of indexed."""
    unrolled, _, expected_nll, expected = outcome(scanned=False, lora=None)
    model, _, nll, gradients = outcome(lora=None)
    np.testing.assert_allclose(nll, expected_nll, rtol=1e-5, atol=1e-5)
    actual, expected = cases.by_name(model, gradients), cases.by_name(unrolled, expected)
    assert all(np.abs(g).max() > 0 for (name, _), g in actual.items() if "experts" not in name)
    cases.assert_close(actual, expected, 1e-5)


def times(jaxpr, primitive, **params):
    return sum(
        trips
        for eqn, trips in cases.equations(jaxpr)
        if eqn.primitive.name == primitive and params.items() <= eqn.params.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SCANNED, {"scanned": False}], ids=str)
def test_a_layer_runs_forward_once_or_with_remat_twice(case):
    model, jaxpr, _, _ = outcome(**case)
    passes = 1 if case.get("remat") == "none" else 2
    assert times(jaxpr, "name", name="layer") == passes * model.config.num_hidden_layers
    sparse = sum(is_sparse for _, is_sparse in model.config.layer_kinds())
    assert times(jaxpr, "top_k") == sparse  # where tokens go is decided once
