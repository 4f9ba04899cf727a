# SPDX-License-Identifier: Apache-2.0
"""Adapters after injection: where they are, what they hold, and that the base is untouched."""

import collections
import functools

import engine_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from lora_tune import sharding
from lora_tune.errors import InputError
from lora_tune.hf.table import bind, module_name
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.inject import add_lora, b_norms
from lora_tune.lora.provider import LoRAScale
from lora_tune.models.decoder import DecoderOptions
from lora_tune.training.state import split_model, unflatten
from lora_tune.training.step import make_eval_step, make_step

# Prefix stack, nested runs of two and of one, suffix stack of two; experts in all but the prefix.
LAYERS = {
    "num_hidden_layers": 9,
    "layer_types": [cases.FULL] + [cases.LINEAR, cases.LINEAR, cases.FULL] * 2 + [cases.LINEAR] * 2,
    "mlp_only_layers": [0],
}
PER_LAYER = {
    cases.LINEAR: ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"],
    cases.FULL: [f"self_attn.{name}_proj" for name in "qkvo"],
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("experts.0.", "shared_expert.")


def expected_modules():
    """Every Hugging Face module that all-linear adapts, written out by layer."""
    for i, mixer in enumerate(LAYERS["layer_types"]):
        names = list(PER_LAYER[mixer])
        if i in LAYERS["mlp_only_layers"]:
            names += [f"mlp.{name}" for name in PROJECTIONS]
        else:
            names += [f"mlp.shared_expert.{name}" for name in PROJECTIONS]
            names += ["mlp.shared_expert_gate"]
            names += [f"mlp.experts.{e}.{name}" for e in range(4) for name in PROJECTIONS]
        yield from (f"model.layers.{i}.{name}" for name in names)


@functools.cache
def base():
    return cases.make(lora=None, **LAYERS)


@functools.cache
def adapted():
    return add_lora(base(), cases.ALL, seed=1)


def adapters(model):
    """(module, "kernel_lora_a" or "kernel_lora_b") -> its matrix, in the Hugging Face layout."""
    named = cases.by_name(model, split_model(model).trainable)
    return {(module_name(name), kind): array for (name, kind), array in named.items()}


def test_every_target_has_a_and_b_in_every_layer_of_every_stack():
    model = adapted()
    assert (len(model.prefix), model.plan.blocks, len(model.suffix)) == (1, 2, 1)
    found = adapters(model)
    assert {module for module, _ in found} == set(expected_modules())
    shapes = {
        module_name(n): leaf.hf_shape
        for leaf in bind(model.family, model)
        for n in leaf.names.ravel()
    }
    for module in expected_modules():
        outer, inner = shapes[module]
        assert found[module, "kernel_lora_a"].shape == (4, inner)
        assert found[module, "kernel_lora_b"].shape == (outer, 4)


def test_a_differs_everywhere_and_is_drawn_as_peft_draws_it():
    a = {module: x for (module, kind), x in adapters(adapted()).items() if kind == "kernel_lora_a"}
    seen = collections.Counter(x.tobytes() for x in a.values())
    assert max(seen.values()) == 1
    by_inner = collections.defaultdict(list)
    for x in a.values():
        assert x.dtype == np.float32
        by_inner[x.shape[1]].append(x * np.sqrt(x.shape[1]))
    for inner, scaled in by_inner.items():
        values = np.concatenate([x.ravel() for x in scaled])
        assert 0.97 < np.abs(values).max() <= 1, inner
        # The standard deviation of U(-1, 1) is 1 / sqrt(3), of its estimate about 0.26 / sqrt(n).
        assert abs(values.std() - 3**-0.5) < 4 * 0.26 / np.sqrt(values.size), inner
        assert abs(values.mean()) < 4 * 0.58 / np.sqrt(values.size), inner


def test_a_follows_from_the_seed_and_the_name_alone():
    unrolled = cases.make(DecoderOptions(scan_layers=False), lora=None, **LAYERS)
    other = adapters(add_lora(unrolled, cases.ALL, seed=1))
    for name, array in adapters(adapted()).items():
        np.testing.assert_array_equal(array, other[name])


def test_b_is_zero():
    b = [x for (_, kind), x in adapters(adapted()).items() if kind == "kernel_lora_b"]
    assert all(x.dtype == np.float32 and not x.any() for x in b)


TOKENS = np.random.default_rng(0).integers(1, 46, (2, 12), dtype=np.int32)


def logits_of(model):
    graphdef, state = nnx.split(model)
    return jax.jit(lambda state: nnx.merge(graphdef, state, copy=True)(TOKENS))(state)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_those_of_the_base_bit_for_bit(dtype):
    plain = cases.make(DecoderOptions(dtype=dtype, param_dtype=dtype), lora=None)
    expected = logits_of(plain)
    assert expected.dtype == dtype
    assert np.asarray(expected, np.float32).std() > 0.05
    everything = LoraConfig(r=4, target_modules=".*")  # the head too
    np.testing.assert_array_equal(logits_of(add_lora(plain, everything)), expected)


def pointers(weights):
    return {
        name: [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]
        for name, array in weights.items()
        if "lora" not in name
    }


@pytest.mark.smoke
def test_adapters_of_one_base_share_its_buffers_and_nothing_else():
    plain = split_model(base())
    first, second = (split_model(add_lora(base(), cases.ALL, seed=seed)) for seed in (1, 2))
    assert pointers(first.frozen) == pointers(second.frozen) == pointers(plain.trainable)
    assert not [name for name in plain.trainable if "lora" in name]
    for name, array in first.trainable.items():
        assert (array == second.trainable[name]).all() == name.endswith("_b"), name
        assert array.unsafe_buffer_pointer() != second.trainable[name].unsafe_buffer_pointer()


def axes_of(scan_axis):
    model = cases.abstract(DecoderOptions(param_scan_axis=scan_axis), **LAYERS)
    model = add_lora(model, cases.ALL)
    kinds = nnx.Any(nnx.LoRAParam, LoRAScale)
    return {
        "/".join(map(str, path)): (variable.get_metadata("axes"), variable.get_value().shape)
        for path, variable in nnx.to_flat_state(nnx.state(model, kinds))
    }


@pytest.mark.parametrize(
    ("scan_axis", "run", "block"),
    [
        (0, ("layer", 0, 1), ("block", "layer", 0, 1)),
        (1, (0, "layer", 1), (0, "block", "layer", 1)),
    ],
)
def test_logical_axes_of_adapters(scan_axis, run, block):
    """`run` and `block` say where the stack axes stand among the two axes of a matrix."""
    found = axes_of(scan_axis)
    assert all(len(axes) == len(shape) for axes, shape in found.values())

    def placed(layout, *axes):
        return tuple(axes[p] if isinstance(p, int) else p for p in layout)

    for stack, layout in (("blocks/runs/1", block), ("prefix/0", run)):
        for name, inner, outer in (("q_proj", "embed", "heads"), ("o_proj", "heads", "embed")):
            path = f"{stack}/self_attn/{name}/kernel_lora"
            assert found[f"{path}_a"][0] == placed(layout, inner, None)
            assert found[f"{path}_b"][0] == placed(layout, None, outer)
            assert found[f"{path}_scale"][0] == tuple(p for p in layout if isinstance(p, str))
    for stack, layout in (("blocks/runs/0", block), ("suffix/0", run)):
        path = f"{stack}/mlp/experts/down_proj/kernel_lora"
        lead = [p for p in layout if isinstance(p, str)]
        at = layout.index(lead[0])
        for kind, axes in (("a", ("expert", "mlp", None)), ("b", ("expert", None, "embed"))):
            expected = (*axes[:at], *lead, *axes[at:])
            assert found[f"{path}_{kind}"][0] == expected
    sizes = {"block": 2, "layer": 2, "expert": 4, "mlp": 8, "embed": 16, None: 4}
    for kind in "ab":
        axes, shape = found[f"blocks/runs/0/mlp/experts/down_proj/kernel_lora_{kind}"]
        assert shape == tuple(sizes[axis] for axis in axes)


def test_adapters_are_sharded_like_the_kernels_they_belong_to():
    mesh = sharding.make_mesh(fsdp=2, expert=2, tensor=2)
    model = cases.make(mesh=mesh, lora=cases.ALL, b_scale=0)
    split = split_model(model)
    for name, array in {**split.trainable, **split.frozen}.items():
        assert isinstance(array.sharding, NamedSharding), name
        asked = sharding.named_sharding(mesh, split.axes[name])
        assert array.sharding.is_equivalent_to(asked, array.ndim), name
        assert len(split.axes[name]) == array.ndim
    a = split.trainable["blocks/runs/0/mlp/experts/gate_proj/kernel_lora_a"]
    b = split.trainable["blocks/runs/0/mlp/experts/gate_proj/kernel_lora_b"]
    assert (a.shape, b.shape) == ((2, 2, 4, 16, 4), (2, 2, 4, 4, 8))
    assert {s.data.shape for s in a.addressable_shards} == {(2, 2, 2, 8, 4)}
    # B has no axis that `fsdp` cuts in the kernel, so it is cut along the one it has.
    assert {s.data.shape for s in b.addressable_shards} == {(2, 2, 2, 4, 2)}
    whole = split_model(cases.make(lora=cases.ALL, b_scale=0)).trainable
    for name, array in split.trainable.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(whole[name]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["q_porj"]}, "'q_porj' matches no module.*did you mean 'q_proj'"),
        ({"target_modules": ["q_proj", "qkv_proj"]}, "'qkv_proj' matches no module"),
        ({"target_modules": r".*\.qkv"}, "matches no module"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["wv"]}, "'wv' matches no module"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [9]}, "no layer"),
        ({"target_modules": ["q_proj"], "rank_pattern": {"k_proj": 2}}, "no adapted module"),
        ({"target_modules": [r"mlp.gate"]}, "'mlp.gate' matches no module"),
    ],
)
def test_a_target_that_matches_nothing_is_an_error(changes, message):
    with pytest.raises(InputError, match=message):
        add_lora(cases.abstract(), LoraConfig(**changes))


def test_adapters_are_not_added_twice():
    with pytest.raises(InputError, match="already has adapters"):
        add_lora(adapted(), cases.ALL)


PATTERNS = LoraConfig(
    r=4,
    lora_alpha=8,
    lora_dropout=0.25,
    target_modules=["q_proj", "o_proj", "in_proj_qkvz", "up_proj"],
    exclude_modules=r".*shared_expert\..*|.*layers\.6\.mlp\..*",
    rank_pattern={r"layers\.3\..*in_proj_qkvz": 2, r"layers\.1\.mlp\.experts\.\d\.up_proj": 3},
    alpha_pattern={r"layers\.4\.linear_attn\.in_proj_qkvz": 32},
    layers_to_transform=[1, 3, 4, 5, 6],
)
# (rank, scale) of the modules in which they are not (4, 8 / 4).
SPECIAL = {
    "model.layers.3.linear_attn.in_proj_qkvz": (2, 4.0),
    "model.layers.4.linear_attn.in_proj_qkvz": (4, 8.0),
} | {f"model.layers.1.mlp.experts.{e}.up_proj": (3, 8 / 3) for e in range(4)}


def expected_rank(module):
    """Rank and scale of a module that shares its stack with an adapted one; 0 if it has none."""
    layer = int(module.split(".")[2])
    if layer not in PATTERNS.layers_to_transform:
        return 0, 0.0
    return SPECIAL.get(module, (4, 2.0))


BFLOAT16 = DecoderOptions(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
BATCH = cases.stack_rows([cases.row(cases.documents([10, 9]), 20)], 2)


@functools.cache
def patterned():
    """A bfloat16 model with per-layer ranks; its B is random where a rank slot is in use."""
    model = cases.make(BFLOAT16, lora=PATTERNS)
    split = split_model(model)
    start = dict(split.trainable)
    for name in [name for name in start if name.endswith("_b")]:
        used = jnp.any(start[name.removesuffix("b") + "a"] != 0, axis=-2)
        start[name] = jnp.where(used[..., :, None], start[name], 0)
    return model, split, start


@functools.cache
def stepper():
    """AdamW with steps of 1e-6, as a function of (trainable, opt_state, key)."""
    _, split, _ = patterned()
    optimizer = cases.recording_adamw(learning_rate=1e-6, weight_decay=0.5)
    step = make_step(split, optimizer, dropout=True)
    batch = cases.parts(BATCH, 1)
    jitted = cases.quick_jit(step, donate_argnums=(0, 1))

    def run(trainable, opt_state, seed):
        return jitted(trainable, opt_state, split.frozen, batch, jax.random.key(seed))

    return optimizer, run


@functools.cache
def after_three_steps():
    """Trainable weights after three steps, and the losses on the way."""
    optimizer, step = stepper()
    trainable = jax.tree.map(jnp.copy, patterned()[2])
    opt_state, losses = optimizer.init(trainable), []
    for seed in range(3):
        trainable, opt_state, metrics = step(trainable, opt_state, seed)
        losses.append(float(metrics["loss"]))
    return trainable, losses


def test_ranks_and_scales_by_layer():
    model, split, _ = patterned()
    scales = {name: array for name, array in split.frozen.items() if name.endswith("_scale")}
    assert set(map(str, (a.dtype for a in scales.values()))) == {"float32"}
    leaves = {"/".join(map(str, leaf.path)): leaf for leaf in bind(model.family, model)}
    for name, scale in scales.items():
        names = leaves[name.removesuffix("_lora_scale")].names
        for cell in np.ndindex(scale.shape):
            module = module_name(np.ravel(names[cell])[0])
            assert scale[cell] == np.float32(expected_rank(module)[1]), module
    a = {module: x for (module, kind), x in adapters(model).items() if kind == "kernel_lora_a"}
    assert {module for module in a if expected_rank(module)[0] == 0} == {
        "model.layers.0.linear_attn.in_proj_qkvz",
        *(f"model.layers.0.mlp.experts.{e}.up_proj" for e in range(4)),
        *(f"model.layers.2.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj")),
        "model.layers.2.mlp.up_proj",
    }
    for module, x in a.items():
        assert (np.abs(x).sum(1) > 0).tolist() == [i < expected_rank(module)[0] for i in range(4)]


@pytest.mark.slow
def test_slots_that_are_not_wanted_stay_exactly_zero_under_adamw():
    model, _, start = patterned()
    trainable, _ = after_three_steps()
    before, after = cases.by_name(model, start), cases.by_name(model, trainable)
    for (name, kind), x in after.items():
        r = expected_rank(module_name(name))[0]
        used, unused = (x[:r], x[r:]) if kind.endswith("_a") else (x[:, :r], x[:, r:])
        assert not unused.any(), name
        moved = (x != before[name, kind]).sum()
        assert moved >= 0.9 * used.size, (name, kind)  # float32: a step of 1e-6 is not lost


@pytest.mark.slow
def test_adapters_of_a_bfloat16_base_are_float32_and_the_base_stays():
    _, split, _ = patterned()
    kept = pointers(split.frozen)
    trainable, losses = after_three_steps()
    assert {array.dtype for array in trainable.values()} == {jnp.dtype("float32")}
    base_types = {a.dtype for name, a in split.frozen.items() if "lora" not in name}
    assert base_types == {jnp.dtype("bfloat16")}
    assert np.isfinite(losses).all()
    assert pointers(split.frozen) == kept
    plain = split_model(cases.make(BFLOAT16, lora=None)).trainable
    for name, array in plain.items():
        np.testing.assert_array_equal(split.frozen[name], array)


@pytest.mark.slow
def test_dropout_follows_from_the_key():
    optimizer, step = stepper()
    losses = []
    for seed in (0, 0, 1):
        trainable = jax.tree.map(jnp.copy, patterned()[2])
        losses.append(float(step(trainable, optimizer.init(trainable), seed)[2]["loss"]))
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.parametrize("scan_axis", [0, 1])
def test_a_layer_that_learns_nothing_does_not_hide_in_its_stack(scan_axis):
    some = [0, 3, 6, 7]
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], layers_to_transform=some)
    options = DecoderOptions(param_scan_axis=scan_axis)
    model = cases.make(options, lora=config, **LAYERS)
    weights = split_model(model).trainable
    measure = b_norms(model, config)
    moved = measure(weights)
    experts = [f"model.layers.{i}.mlp.{part}up_proj" for i in (3, 6, 7) for part in EXPERTS]
    attention = [f"model.layers.{i}.self_attn.q_proj" for i in (0, 3, 6)]
    assert set(moved) == {*experts, *attention, "model.layers.0.mlp.up_proj"}
    assert all(norm > 0 for norm in moved.values())
    for name, array in cases.by_name(model, weights).items():
        if name == ("model.layers.6.self_attn.q_proj.weight", "kernel_lora_b"):
            assert moved[name[0].removesuffix(".weight")] == pytest.approx(np.linalg.norm(array))
    (name,) = [n for n in weights if n.endswith("self_attn/q_proj/kernel_lora_b") and "blocks" in n]
    axes = split_model(model).axes[name]
    second = tuple(1 if axis == "block" else slice(None) for axis in axes)
    still = measure({**weights, name: weights[name].at[second].set(0.0)})
    assert [module for module, norm in still.items() if norm == 0] == [attention[-1]]


def test_the_head_is_watched_too():
    config = LoraConfig(r=2, target_modules=["lm_head"])
    model = cases.make(lora=config)
    weights = split_model(model).trainable
    (b,) = (array for name, array in weights.items() if name.endswith("lora_b"))
    assert b_norms(model, config)(weights) == {"lm_head": pytest.approx(float(jnp.linalg.norm(b)))}


def draws(f, *args):
    """Number of random draws in the program of a function."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return sum(eqn.primitive.name == "random_bits" for eqn, _ in cases.equations(jaxpr))


def test_evaluation_and_generation_drop_nothing():
    _, split, _ = patterned()
    batch = {name: array[0] for name, array in cases.parts(BATCH, 1).items()}
    assert not draws(make_eval_step(split), split.trainable, split.frozen, batch)
    assert not draws(lambda tokens: split.merge()(tokens), batch["tokens"])


def test_every_layer_drops_other_inputs(monkeypatch):
    seen = []
    bernoulli = jax.random.bernoulli

    def recording(key, p, shape):
        jax.debug.callback(lambda data: seen.append(tuple(data.tolist())), jax.random.key_data(key))
        return bernoulli(key, p, shape)

    monkeypatch.setattr(jax.random, "bernoulli", recording)
    _, split, _ = patterned()

    def run(weights, key):
        model = nnx.merge(split.graphdef, unflatten(weights), copy=True)
        model.set_attributes(qwix_rngs=nnx.Rngs(dropout=key))
        return model(BATCH["tokens"])

    weights = {**split.trainable, **split.frozen}
    cases.quick_jit(run)(weights, jax.random.key(0)).block_until_ready()
    jax.effects_barrier()
    # Two stacks of 2 x 2 (linear, experts), three of 2 x 1 (attention, dense), two of one layer.
    assert len(seen) == 2 * 4 + 3 * 2 + 2 * 1
    assert len(set(seen)) == len(seen)
