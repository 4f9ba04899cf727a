# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of the step on a TPU: programs compiled ahead of time for a slice, none run."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lora_tune import recipe as recipes
from lora_tune import scan, sharding
from lora_tune.generation import engine
from lora_tune.generation.sampling import Sampling
from lora_tune.layers.weights import NORMAL, weight
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.inject import add_lora
from lora_tune.models import FAMILIES
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.plan import abstract, cost
from lora_tune.plan.environment import no_cache
from lora_tune.plan.hlo import parse as parse_hlo
from lora_tune.plan.topologies import parse
from lora_tune.training.state import split_model

pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu: pip install '.[test]'")

SLICE = "v5p-8"
# Qwen3-Next in small: five blocks of three linear layers and one full-attention layer, 28 experts
# on four chips. No other size is 5 or 7, and rows of 192 tokens are as long as no weight.
BLOCKS, RUN, EXPERTS, CHIPS = 5, 3, 28, 4
# Nor 960 or 320.
TOKENS, VOCAB, PART = 192, 960, 320
CONFIG = {
    "model_type": "qwen3_next",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": (RUN + 1) * BLOCKS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
# These make no buffer of their own.
PASSIVE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"}


@pytest.fixture(scope="module", autouse=True)
def without_cache():
    with no_cache():
        yield


def mesh_of_slice(**sizes):
    return sharding.make_mesh(**sizes, devices=abstract.devices_of(parse(SLICE)[0]))


@pytest.fixture(scope="module")
def compiled_step():
    """The model, and its compiled training step."""
    recipe = recipes.Recipe(
        model=recipes.Model(path="small"),
        lora=recipes.Lora(r=8, lora_alpha=8),
        data=recipes.Data(max_length=TOKENS),
        train=recipes.Train(max_steps=100, batch_size=CHIPS, loss_chunk_size=PART),
    )
    model = abstract.make_model(recipe, CONFIG)
    program = abstract.trace(recipe, model, mesh_of_slice(expert=CHIPS))
    return model, program.traced.lower().compile()


@pytest.fixture(scope="module")
def step(compiled_step):
    """The model, and the compiled text of its training step."""
    model, compiled = compiled_step
    return model, compiled.as_text()


def buffers(hlo):
    """(operation, shape, instruction) of everything that the program puts in its main memory."""
    fused = False
    for line in hlo.splitlines():
        if line.endswith("{"):
            fused = "fused" in line.split("(")[0]
        found = re.match(r"\s+(?:ROOT )?%\S+ = (.*?)\s([a-z][\w-]*)\(", line)
        if found is None or fused or found[2] in PASSIVE:
            continue
        arrays = re.findall(r"\w+\[([\d,]*)\](\{[^}]*\})?", found[1])
        # The other results of `copy-start` are its operand and a flag.
        for dims, layout in arrays[:1] if found[2].endswith("-start") else arrays:
            if "S(1)" not in layout:  # vector memory, where small weights are fetched ahead
                yield found[2], tuple(map(int, filter(None, dims.split(",")))), line.strip()[:200]


@pytest.mark.slow
@pytest.mark.parametrize("layers", [BLOCKS, RUN], ids=["all blocks", "a run"])
def test_no_buffer_holds_the_experts_of_more_than_a_layer(step, layers):
    _, hlo = step
    shapes = [shape for _, shape, _ in buffers(hlo)]
    local = EXPERTS // CHIPS
    assert any(local in shape for shape in shapes)  # one layer's experts
    assert any(layers in shape for shape in shapes)  # saved inputs
    assert not [b for b in buffers(hlo) if layers in b[1] and local in b[1]]


@pytest.mark.slow
def test_no_frozen_stack_is_copied_whole(step):
    model, hlo = step
    split = split_model(model)
    stacks = set()
    for name, value in split.frozen.items():
        axes, shape = split.axes[name], value.shape
        # Vectors and the thinnest matrices are a few kilobytes: their layout may be changed.
        if axes[0] == scan.BLOCK and min(shape[-2:]) >= 64:
            local = (n // CHIPS if a == "expert" else n for n, a in zip(shape, axes, strict=True))
            stacks.add(tuple(sorted(n for n in local if n > 1)))
    assert len(stacks) > 5
    made = [(op, tuple(sorted(n for n in shape if n > 1))) for op, shape, _ in buffers(hlo)]
    assert [op for op, _ in made if re.match(r"copy|transpose", op)]
    assert not [m for m in made if m[1] in stacks]  # whatever the operation


@pytest.mark.slow
def test_frozen_experts_get_no_gradient(step):
    _, hlo = step
    kernels = [b for b in buffers(hlo) if b[0] == "custom-call" and "ragged-dot" in b[2]]
    products = [shape for _, shape, _ in kernels if len(shape) > 1]  # others are tables of groups
    # In each of two bodies: three forward; three recomputed and three of dx going back.
    assert len(products) == 2 * (3 + 3 + 3)
    assert all(len(shape) == 2 for shape in products)  # rows; dw would be [experts, in, out]


COLLECTIVES = r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


@pytest.mark.slow
def test_experts_stay_where_they_are(step):
    _, hlo = step
    moved = [b for b in buffers(hlo) if re.match(COLLECTIVES, b[0])]
    kinds = {re.match(COLLECTIVES, operation)[0] for operation, *_ in moved}
    assert {"all-gather", "all-to-all"} <= kinds  # layers are gathered, rows exchanged
    local = EXPERTS // CHIPS
    matrices = [b for b in moved if {EXPERTS, local} & set(b[1]) and math.prod(b[1]) >= 128 * 128]
    assert not matrices
    # Nor is a gather made of a sum over arrays of the gathered size.
    sums = [b for b in moved if b[0].startswith("all-reduce")]
    assert sums
    assert max(math.prod(shape) for _, shape, _ in sums) < 128 * 128


@pytest.mark.slow
def test_a_layer_runs_forward_twice_and_no_part_a_third_time(compiled_step):
    """XLA takes what does not change out of a loop: in one of a single step, all may look so."""
    _, compiled = compiled_step
    hlo = compiled.as_text()
    made = [tuple(sorted(n for n in b[1] if n > 1)) for b in buffers(hlo) if "all-gather" in b[0]]
    of_attention, of_delta_net = (256, 512), (256, 768)  # the first projections of each
    assert made.count(of_attention) == made.count(of_delta_net) == 2
    kernels = cost.count(parse_hlo(hlo), devices=CHIPS).kernels
    assert kernels["gated_delta_mixer"] == 2 * RUN * BLOCKS
    assert kernels["gated_delta_mixer_backward"] == RUN * BLOCKS


@pytest.mark.slow
def test_logits_of_the_whole_vocabulary_never_exist(step):
    _, hlo = step
    shapes = [shape for _, shape, _ in buffers(hlo)]
    assert any({TOKENS, PART} <= set(shape) for shape in shapes)
    assert not [s for s in shapes if VOCAB in s and math.prod(s) >= TOKENS * VOCAB]


@pytest.mark.slow
def test_the_base_is_not_an_output(compiled_step):
    model, compiled = compiled_step
    split = split_model(model)
    trained = sum(leaf.size for leaf in split.trainable.values()) * 4
    base = sum(leaf.size * leaf.dtype.itemsize for leaf in split.frozen.values()) / CHIPS
    stats = compiled.memory_analysis()
    assert stats.output_size_in_bytes < 3.2 * trained < base  # adapters and two moments
    assert stats.alias_size_in_bytes > 0.95 * stats.output_size_in_bytes - 2**16


class Toy(nnx.Module):
    """`h <- tanh(h @ kernel) + h`."""

    def __init__(self):
        self.kernel = weight((256, 256), jnp.bfloat16, axes=("embed", "mlp"), init=NORMAL)

    def __call__(self, h):
        return jnp.tanh(h @ self.kernel[...]) + h


class Block(nnx.Module):
    def __init__(self, runs):
        self.runs = nnx.List(runs)


def compile_toy(remat):
    """The gradient of three blocks of a run of two layers and a run of one, on `[4096, 256]`."""
    runs = [scan.create_stack(Toy(), length=n, axis=scan.LAYER) for n in (2, 1)]
    graphdef, state = nnx.split(scan.create_stack(Block(runs), length=3, axis=scan.BLOCK))

    def run_block(block, h, _):
        for run in block.runs:
            h, _ = scan.apply_stack(
                run, h, lambda toy, h, _: (toy(h), None), axis=scan.LAYER, remat=remat
            )
        return h, None

    def loss(state, h):
        h, _ = scan.apply_stack(nnx.merge(graphdef, state), h, run_block, axis=scan.BLOCK)
        return jnp.sum(h.astype(jnp.float32))

    mesh = mesh_of_slice(data=CHIPS)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = (state, jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16))
    return jax.jit(jax.grad(loss), in_shardings=place).lower(*args).compile()


def loops(hlo):
    lines = [line for line in hlo.splitlines() if re.search(r" while\(", line)]
    return len(lines), sum("skip-simplify-while-loops_trip-count-one" in line for line in lines)


def test_a_run_of_one_layer_stays_a_loop_in_both_directions():
    # Forward and backward: the blocks, the run of two, the run of one.
    assert loops(compile_toy("full").as_text()) == (6, 2)


def test_offload_keeps_layer_inputs_in_the_memory_of_the_host():
    kept = 3 * (2 + 1) * math.prod((4096, 256)) * 2
    on_device = compile_toy("full").memory_analysis()
    assert on_device.host_temp_size_in_bytes == 0
    offloaded = compile_toy("offload").memory_analysis()
    assert offloaded.host_temp_size_in_bytes == kept
    assert offloaded.temp_size_in_bytes < on_device.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 32])
def test_a_decode_step_copies_no_weight_and_no_cache(rows):
    """The engine's own step, on rows of 16,384 slots at the published head sizes."""
    family = FAMILIES["qwen3_next"]
    sizes = {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
    config = family.read_config({**CONFIG, **sizes, "num_hidden_layers": 10})
    options = DecoderOptions(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    model = add_lora(Decoder(family, config, options), LoraConfig(r=8, lora_alpha=8))
    split = split_model(model)
    mesh = mesh_of_slice(data=CHIPS)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def placed(tree):
        return jax.tree.map(lambda leaf: leaf.update(sharding=place), tree)

    arrays = placed({**split.frozen, **split.trainable})
    program = engine.program_of(split.graphdef, place)
    state = placed(program.create.eval_shape(arrays, rows, 16_384, True))
    ones = jnp.ones((rows, 1), jnp.int32)
    draw = (Sampling(temperature=1.0, repetition_penalty=1.1), jax.random.key(0))
    rest = placed(jax.eval_shape(lambda: (ones, ones, 1, *draw, jnp.arange(rows), jnp.full(8, -1))))
    compiled = program.advance.lower(arrays, state, *rest).compile()
    # Vectors and the thinnest matrices are a few kilobytes: their layout may be changed.
    weights = [leaf for leaf in arrays.values() if min(leaf.shape[-2:]) >= 128]
    # And so are the convolution windows of two rows.
    large = [leaf for leaf in jax.tree.leaves(state.cache.layers) if leaf.size >= 2**20]
    whole = {tuple(sorted(n for n in leaf.shape if n > 1)) for leaf in (*weights, *large)}
    copies = [b for b in buffers(compiled.as_text()) if b[0] in ("copy", "copy-start", "transpose")]
    # What fits is kept in vector memory (S(1)) for the step and written back: no second copy.
    copies = [c for c in copies if "S(1)" not in c[2]]
    assert copies
    assert not [c for c in copies if tuple(sorted(n for n in c[1] if n > 1)) in whole]
    donated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= donated
