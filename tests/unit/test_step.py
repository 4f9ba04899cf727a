# SPDX-License-Identifier: Apache-2.0
"""The training step on one device: its loss, its gradients, what it returns and what it holds."""

import dataclasses
import functools
from typing import Any

import engine_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_tune.lora.inject import add_lora
from lora_tune.models.decoder import DecoderOptions
from lora_tune.training.state import split_model
from lora_tune.training.step import make_eval_step, make_step

ROWS, LENGTH = 8, 56
# Odd lengths; with chunks of 16 tokens every document but the first starts inside a chunk.
LENGTHS = (13, 21, 7)
DOCS = cases.documents(LENGTHS)
SLOW_DECAY = -12.0
"""A_log for which the recurrent state keeps all but 1e-5 of itself over a row."""


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    model: Any
    split: Any
    trainable: dict[str, jax.Array]
    frozen: dict[str, jax.Array]
    optimizer: Any


@functools.cache
def setup():
    """A model whose linear attention forgets next to nothing, so that a leak would show."""
    model = cases.make(DecoderOptions(loss_chunk=20))
    split = split_model(model)
    frozen = {
        name: jnp.full_like(array, SLOW_DECAY) if name.endswith("A_log") else array
        for name, array in split.frozen.items()
    }
    return Setup(model, split, split.trainable, frozen, cases.recording_adamw())


@functools.cache
def traced(accumulation=1):
    s = setup()
    batch = cases.parts(cases.stack_rows([cases.row(DOCS, LENGTH)], ROWS), accumulation)
    step = cases.quick_jit(make_step(s.split, s.optimizer), donate_argnums=(0, 1))
    return step.trace(
        s.trainable, s.optimizer.init(s.trainable), s.frozen, batch, jax.random.key(0)
    )


@functools.cache
def lowered(accumulation=1):
    return traced(accumulation).lower()


@functools.cache
def compiled(accumulation=1):
    return lowered(accumulation).compile()


def run(batch, accumulation=1):
    """One step from the same start: metrics, and gradients by Hugging Face name."""
    s = setup()
    trainable = jax.tree.map(jnp.copy, s.trainable)
    _, opt_state, metrics = compiled(accumulation)(
        trainable,
        s.optimizer.init(trainable),
        s.frozen,
        cases.parts(batch, accumulation),
        jax.random.key(0),
    )
    return jax.device_get(metrics), cases.by_name(s.model, opt_state.gradients)


def rows_of(*rows):
    return cases.stack_rows(rows, ROWS)


@functools.cache
def packed():
    return run(rows_of(cases.row(DOCS, LENGTH)))


def assert_same(actual, expected):
    """Equal loss, counts and adapter gradients."""
    (metrics, gradients), (other_metrics, other_gradients) = actual, expected
    assert metrics["trained_tokens"] == other_metrics["trained_tokens"]
    assert metrics["tokens"] == other_metrics["tokens"]
    assert metrics["accuracy"] == other_metrics["accuracy"]
    np.testing.assert_allclose(metrics["loss"], other_metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], other_metrics["grad_norm"], rtol=1e-5)
    cases.assert_close(gradients, other_gradients, 1e-5)


pytestmark = pytest.mark.slow


def test_packed_equals_each_document_alone():
    alone = run(rows_of(*(cases.row([doc], LENGTH) for doc in DOCS)))
    assert_same(packed(), alone)
    assert min(np.abs(g).max() for g in packed()[1].values()) > 0


def test_a_leak_between_documents_would_show():
    """The same row as one document gives another loss: the test above can fail."""
    batch = rows_of(cases.row(DOCS, LENGTH))
    batch["segment_ids"] = np.minimum(batch["segment_ids"], 1)
    leaky = run(batch)
    assert abs(leaky[0]["loss"] - packed()[0]["loss"]) > 1e-3
    with pytest.raises(AssertionError):
        cases.assert_close(leaky[1], packed()[1], 1e-2)


@pytest.mark.parametrize(
    "padding",
    [{"before": LENGTH - sum(LENGTHS)}, {"between": 3}, {"before": 3, "between": 1}],
    ids=["left", "between", "everywhere"],
)
def test_padding_anywhere_changes_nothing(padding):
    assert_same(run(rows_of(cases.row(DOCS, LENGTH, **padding))), packed())


def test_rows_of_padding_alone_change_nothing_and_give_finite_gradients():
    last = {
        name: np.roll(array, 3, axis=0) for name, array in rows_of(cases.row(DOCS, LENGTH)).items()
    }
    assert_same(run(last), packed())
    metrics, gradients = run(rows_of(cases.row([], LENGTH)))
    assert metrics["loss"] == metrics["grad_norm"] == metrics["trained_tokens"] == 0
    assert all(not g.any() for g in gradients.values())


def test_a_row_without_a_trained_token_changes_no_gradient():
    batch = rows_of(cases.row(DOCS, LENGTH), cases.row(cases.documents([30], seed=5), LENGTH))
    batch["weights"][1] = 0
    metrics, gradients = run(batch)
    assert all(np.isfinite(g).all() for g in gradients.values())
    assert metrics["trained_tokens"] == packed()[0]["trained_tokens"]
    np.testing.assert_allclose(metrics["loss"], packed()[0]["loss"], rtol=1e-5)
    cases.assert_close(gradients, packed()[1], 1e-5)


def test_labels_of_prompt_tokens_do_not_reach_the_gradient():
    batch = rows_of(cases.row(DOCS, LENGTH))
    other = dict(batch, targets=np.where(batch["weights"] > 0, batch["targets"], 17))
    assert (other["targets"] != batch["targets"]).sum() > 5
    for (name, got), want in zip(run(other)[1].items(), packed()[1].values(), strict=True):
        np.testing.assert_array_equal(got, want, err_msg=str(name))


def ragged_batch():
    """Eight rows of very different numbers of trained tokens, one of them with none."""
    lengths = ([40], [3], [11, 29], [5, 5, 5], [2], [48], [17, 4], [9])
    batch = cases.stack_rows(
        [cases.row(cases.documents(n, seed=i), LENGTH) for i, n in enumerate(lengths)], ROWS
    )
    batch["weights"][7] = 0
    return batch


def test_accumulation_of_eight_equals_one_batch_of_eight():
    batch = ragged_batch()
    assert len(set(batch["weights"].sum(1))) > 5
    assert_same(run(batch, accumulation=8), run(batch))


def test_loss_is_the_mean_over_trained_tokens():
    """Against log-softmax of the model's own logits, in float64."""
    s, batch = setup(), ragged_batch()
    model = s.split.merge()
    evaluate = make_eval_step(s.split)

    def logits_and_sums(trainable, frozen, batch):
        model = dataclasses.replace(s.split, frozen=frozen).merge(trainable)
        logits = model(batch["tokens"], batch["segment_ids"], batch["positions"])
        return logits, evaluate(trainable, frozen, batch)

    logits, sums = jax.device_get(
        cases.quick_jit(logits_and_sums)(s.trainable, s.frozen, dict(batch))
    )
    assert model.config.vocab_size == logits.shape[-1]
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    weights, trained = batch["weights"], batch["weights"] > 0
    correct = logits.argmax(-1) == batch["targets"]
    metrics, _ = run(batch)
    np.testing.assert_allclose(metrics["loss"], (nll * weights).sum() / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(sums["nll"], (nll * weights).sum(), rtol=1e-5)
    accuracy = (correct & trained).sum() / trained.sum()
    np.testing.assert_allclose(metrics["accuracy"], accuracy, rtol=1e-6)
    assert sums["trained_tokens"] == metrics["trained_tokens"] == trained.sum()
    assert metrics["tokens"] == (batch["segment_ids"] > 0).sum()
    documents = [
        (trained[r] & (batch["segment_ids"][r] == s), correct[r])
        for r in range(ROWS)
        for s in range(1, batch["segment_ids"][r].max() + 1)
    ]
    answered = [hits[own].all() for own, hits in documents if own.any()]
    assert sums["documents"] == len(answered) == 11
    assert sums["exact_documents"] == sum(answered)


def test_gradient_is_that_of_the_loss():
    """The directional derivative along the gradient itself, by central differences.

    The step is one in which no token changes its experts: that moves the loss by 1e-4 at once.
    """
    s, batch = setup(), rows_of(cases.row(DOCS, LENGTH))
    step, opt_state = compiled(), s.optimizer.init
    start = jax.tree.map(jnp.copy, s.trainable)
    parts = cases.parts(batch, 1)
    _, state, metrics = step(start, opt_state(start), s.frozen, parts, jax.random.key(0))
    norm = float(metrics["grad_norm"])
    losses = []
    for sign in (1, -1):
        moved = {n: x + sign * 2e-4 / norm * state.gradients[n] for n, x in s.trainable.items()}
        losses.append(
            float(step(moved, opt_state(moved), s.frozen, parts, jax.random.key(0))[2]["loss"])
        )
    np.testing.assert_allclose((losses[0] - losses[1]) / 4e-4, norm, rtol=1e-2)


def scan_outputs(jaxpr):
    return [
        var.aval.shape
        for eqn, _ in cases.equations(jaxpr.jaxpr)
        if eqn.primitive.name == "scan"
        for var in eqn.outvars
    ]


def test_no_scan_gives_back_a_base_weight():
    """Neither per layer nor stacked: a scan that returned its weights would copy the base."""
    shapes = scan_outputs(traced().jaxpr)
    adapters = {array.shape for array in setup().trainable.values()}
    activations = {(2, 2, ROWS, LENGTH, 16), (2, 1, ROWS, LENGTH, 16)}
    assert adapters & set(shapes)  # the walk sees the gradients of adapters leave scans
    assert activations & set(shapes)
    frozen = {array.shape for name, array in setup().frozen.items() if "lora" not in name}
    inner = {shape[1:] for shape in frozen} | {shape[2:] for shape in frozen}
    large = {s for s in frozen | inner if np.prod(s) >= 200} - adapters
    assert not large & set(shapes)


def test_no_scan_gives_back_matrices_of_experts_where_activations_are_kept():
    """Nor blocks of them: the backward pass of the grouped matmul takes them from the base."""
    width = 11  # of the experts, and of nothing else in the model
    options = DecoderOptions(remat="none")
    split = split_model(cases.make(options, moe_intermediate_size=width))
    step = make_step(split, setup().optimizer)
    state = setup().optimizer.init(split.trainable)
    batch = cases.parts(cases.stack_rows([cases.row(DOCS, LENGTH)], ROWS), 1)
    jaxpr = jax.make_jaxpr(step)(split.trainable, state, split.frozen, batch, jax.random.key(0))
    shapes = set(scan_outputs(jaxpr)) - {array.shape for array in split.trainable.values()}
    matrices = {s[-2:] for s in (a.shape for a in split.frozen.values()) if width in s}
    assert matrices == {(16, width), (width, 16)}
    assert any(width in shape for shape in shapes)  # activations of experts are kept
    assert not {shape for shape in shapes if shape[-2:] in matrices}


def test_full_training_keeps_no_rounded_copy_of_its_weights():
    """Where activations are kept, the weights cast to bfloat16 are not: they are cast again."""
    width = 11
    options = DecoderOptions(dtype=jnp.bfloat16, param_dtype=jnp.float32, remat="none")
    model = cases.make(options, lora=None, moe_intermediate_size=width)
    graphdef, weights = nnx.split(model)

    def loss(weights):
        nll, _ = nnx.merge(graphdef, weights, copy=True)(tokens, targets=tokens)
        return jnp.sum(nll)

    tokens = jnp.ones((1, LENGTH), jnp.int32)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(weights)
    found = {
        (var.aval.dtype.name, var.aval.shape)
        for eqn, _ in cases.equations(jaxpr.jaxpr)
        if eqn.primitive.name == "scan"
        for var in eqn.outvars
    }
    matrices = ((16, width), (width, 16))
    assert any(kind == "float32" and shape[-2:] in matrices for kind, shape in found)  # gradients
    assert any(kind == "bfloat16" and width in shape for kind, shape in found)  # activations
    assert not [f for f in found if f[0] == "bfloat16" and f[1][-2:] in matrices]


def test_frozen_weights_are_inputs_only():
    jaxpr = traced().jaxpr.jaxpr
    s = setup()
    count = len(jax.tree.leaves((s.trainable, s.optimizer.init(s.trainable))))
    frozen = jaxpr.invars[count : count + len(s.frozen)]
    assert [var.aval.shape for var in frozen] == [s.frozen[n].shape for n in sorted(s.frozen)]
    assert not set(map(id, frozen)) & set(map(id, jaxpr.outvars))
    trainable, state, metrics = jax.tree.map(lambda x: x.shape, traced().out_info)
    assert trainable.keys() == s.trainable.keys()
    assert state.gradients.keys() == s.trainable.keys()
    assert set(metrics) == {"loss", "accuracy", "grad_norm", "trained_tokens", "tokens"}


def nbytes(tree):
    return sum(array.nbytes for array in jax.tree.leaves(tree))


def test_compiled_step_holds_what_it_must():
    """Outputs are adapters, optimizer state and scalars; the first two reuse their inputs."""
    s = setup()
    held = nbytes((s.trainable, s.optimizer.init(s.trainable)))
    memory = compiled().memory_analysis()
    scalars = memory.output_size_in_bytes - held
    # Five float32 scalars, and the table of pointers to the outputs.
    outputs = len(jax.tree.leaves(traced().out_info))
    assert 5 * 4 <= scalars <= 5 * 4 + 8 * (outputs + 1)
    # The gradients of the step before are not read, so they are no inputs of the compiled step.
    assert memory.alias_size_in_bytes == held - nbytes(s.trainable)
    assert memory.output_size_in_bytes < held + nbytes(s.frozen)


def test_base_buffers_are_the_same_after_a_step():
    s = setup()
    pointers = {name: array.unsafe_buffer_pointer() for name, array in s.frozen.items()}
    before = {name: np.asarray(array) for name, array in s.frozen.items()}
    run(rows_of(cases.row(DOCS, LENGTH)))
    for name, array in s.frozen.items():
        assert array.unsafe_buffer_pointer() == pointers[name]
        np.testing.assert_array_equal(array, before[name])


def test_all_logits_never_exist_at_once():
    """The largest array of tokens by vocabulary is that of one part of `loss_chunk` entries."""
    vocab, tokens = setup().model.config.vocab_size, ROWS * LENGTH
    shapes = {
        var.aval.shape
        for eqn, _ in cases.equations(traced().jaxpr.jaxpr)
        for var in eqn.outvars
        if hasattr(var.aval, "shape")
    }
    assert (tokens, 20) in shapes
    whole = [shape for shape in shapes if vocab in shape and np.prod(shape) >= tokens * vocab]
    assert not whole


def test_a_run_of_one_layer_is_a_scheduling_barrier():
    text = lowered().as_text()
    # The two stacks of one attention layer each, forward and backward.
    assert text.count("skip-simplify-while-loops_trip-count-one") >= 4


def test_injection_holds_only_adapters():
    """add_lora traces abstractly: building the adapted model costs no forward pass."""
    plain = cases.make(lora=None)
    live = nbytes(jax.live_arrays())
    adapted = add_lora(plain, cases.ALL)
    grown = nbytes(jax.live_arrays()) - live
    split = split_model(adapted)
    scales = sum(x.nbytes for name, x in split.frozen.items() if name.endswith("_scale"))
    assert grown <= nbytes(split.trainable) + scales + 4096
