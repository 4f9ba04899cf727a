# SPDX-License-Identifier: Apache-2.0
"""Figures of the machine: operations against those of a traced program and plain arithmetic."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_tune import build
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.inject import add_lora
from lora_tune.models.decoder import DecoderOptions
from lora_tune.plan.model_flops import flops_per_token
from lora_tune.plan.roofline import peak_flops
from lora_tune.training.gauges import Gauges
from lora_tune.training.state import split_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}
NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


def model_of(config, *, lora=None):
    options = DecoderOptions(scan_layers=False, remat="none")
    model = build.decoder_of(config, options, where="here")
    return model if lora is None else add_lora(model, lora)


def operations(config, lengths, *, lora=None):
    model = model_of(config, lora=lora)
    return flops_per_token(model, split_model(model), np.asarray(lengths))


def test_a_forward_pass_has_the_products_of_its_traced_program():
    length = 16
    graphdef, state = nnx.split(model_of(LLAMA))

    def forward(state, tokens):
        return nnx.merge(graphdef, state, copy=True)(tokens)

    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    products = _products(jax.make_jaxpr(forward)(state, tokens).jaxpr)
    # The program computes all pairs of tokens; in a document of 2 T - 1 a token sees T on average.
    assert operations(LLAMA, [2 * length - 1]) == 3 * products / length


def _products(jaxpr):
    """Operations of all matrix products of a jaxpr without loops."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = np.prod([eqn.invars[0].aval.shape[i] for i in contracted])
            total += 2 * int(np.prod(eqn.outvars[0].aval.shape)) * int(inner)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                assert eqn.primitive.name not in ("scan", "while")
                total += _products(inner)
    return total


def test_frozen_weights_cost_two_thirds_and_adapters_all():
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    # One token alone: attention is one pair, 12 x heads x width.
    mixing = 12 * 32 * 3
    full = operations(LLAMA, [1]) - mixing
    adapters = 3 * 2 * (32 + 32 + 48 + 32)
    assert operations(LLAMA, [1], lora=lora) - mixing == full * 2 / 3 + 6 * adapters


def test_experts_count_by_their_share_and_the_delta_rule_by_its_recurrence():
    mlp = 2 * 3 * 16 * 8 + 3 * 16 * 6 + 16 * 8 + 16  # experts, shared expert, router, its gate
    delta = 16 * (2 * 16 + 2 * 16 + 8) + 4 * (2 * 16 + 16) + 16 * 16
    attention = 16 * (2 * 16 + 8 + 8) + 16 * 16
    weights = 3 * mlp + 2 * delta + attention + 16 * 64
    mixing = 2 * 18 * 4 * 8 * 4 + 12 * 16 * 3.0  # documents of 5: a token sees 3
    assert operations(NEXT, [5, 5]) == 6 * weights + mixing
    lora = LoraConfig(r=2, target_modules=r".*experts\.\d+\.gate_proj")
    adapters = 3 * 2 * 2 * (16 + 8)
    assert operations(NEXT, [5], lora=lora) == pytest.approx(4 * weights + 6 * adapters + mixing)


def test_a_window_bounds_what_a_token_sees():
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 3}
    plain = operations(config, [1]) - 12 * 32 * 3
    seen = (1 + 2 + 3 * 5) / 7
    assert operations(config, [7]) == pytest.approx(plain + 12 * 32 * 3 * seen)


@dataclasses.dataclass
class Device:
    peak: int | None
    process_index: int = 0

    def memory_stats(self):
        return None if self.peak is None else {"peak_bytes_in_use": self.peak}


def test_rows_have_speed_share_of_the_peak_waiting_and_memory():
    gauges = Gauges([Device(5), Device(7), Device(99, process_index=1)], 4e6, 1e9)
    row = gauges.read(tokens=600, seconds=2.0, waited=0.5)
    assert row.pop("host_rss_bytes") > 10e6
    assert row == {
        "tokens_per_second_per_device": 100.0,
        "mfu": 100.0 * 4e6 / 1e9,
        "input_bound_fraction": 0.25,
        "device_peak_bytes": 7,
    }


def test_what_is_not_known_is_null(monkeypatch, tmp_path):
    monkeypatch.setattr("lora_tune.training.gauges._STATM", tmp_path / "none")
    row = Gauges([Device(None)], 4e6, None).read(tokens=1, seconds=1.0, waited=0.0)
    assert row["mfu"] is row["device_peak_bytes"] is row["host_rss_bytes"] is None


def test_resident_memory_is_what_the_system_says():
    before = Gauges().read(tokens=1, seconds=1.0, waited=0.0)["host_rss_bytes"]
    held = np.ones(64 << 20, np.uint8)
    after = Gauges().read(tokens=1, seconds=1.0, waited=0.0)["host_rss_bytes"]
    assert held.nbytes * 0.9 < after - before < held.nbytes * 1.5
    assert after < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        ("TPU v5", 459e12),
        ("TPU v5 lite", 197e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("cpu", None),
    ],
)
def test_peaks_are_those_that_the_makers_publish(kind, rate):
    assert peak_flops(kind) == rate
