# SPDX-License-Identifier: Apache-2.0
"""Where bfloat16 is rounded: norms and activations bit for bit as in torch."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_tune.layers.activations import ACTIVATIONS
from lora_tune.layers.norms import GatedRMSNorm
from lora_tune.models import FAMILIES

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

NORMS = {
    "gemma3_text": "Gemma3RMSNorm",
    "gemma4_text": "Gemma4RMSNorm",
    "llama": "LlamaRMSNorm",
    "mistral": "MistralRMSNorm",
    "olmo_hybrid": "OlmoHybridRMSNorm",
    "qwen2": "Qwen2RMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "qwen3_5_text": "Qwen3_5RMSNorm",
    "qwen3_5_moe_text": "Qwen3_5MoeRMSNorm",
    "qwen3_moe": "Qwen3MoeRMSNorm",
    "qwen3_next": "Qwen3NextRMSNorm",
}
GATED = {n: c + "Gated" for n, c in NORMS.items() if n.startswith(("olmo", "qwen3_5", "qwen3_n"))}
WIDTH = 16


def theirs(family, name):
    home = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{home}.modeling_{home}")
    return getattr(module, name)(WIDTH, eps=1e-6).to(torch.bfloat16)


def draw(*shape):
    """bfloat16 for both sides: eighths, so that squares add up to the same in any order."""
    x = np.random.default_rng(len(shape)).integers(-40, 41, shape) / 8
    return jnp.asarray(x, jnp.bfloat16), torch.tensor(x, dtype=torch.bfloat16)


def assert_equal_bits(ours, wanted):
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(ours, np.float32), wanted.detach().float().numpy())


def filled(make, norm):
    """Our norm and theirs with the same weight."""
    mine, other = draw(WIDTH)
    with torch.no_grad():
        norm.weight.copy_(other)
    ours = make(WIDTH, eps=1e-6, dtype=jnp.bfloat16)
    ours.weight = nnx.Param(mine)
    return ours, norm


def test_every_family_has_a_norm_here():
    assert {*NORMS} == {n for n in FAMILIES if f"{n}_text" not in FAMILIES}


@pytest.mark.parametrize("family", NORMS)
def test_norms(family):
    ours, norm = filled(FAMILIES[family].make_norm, theirs(family, NORMS[family]))
    x, other = draw(200, WIDTH)
    assert_equal_bits(ours(x), norm(other))


@pytest.mark.parametrize("family", GATED)
def test_gated_norms(family):
    ours, norm = filled(GatedRMSNorm, theirs(family, GATED[family]))
    x, other = draw(200, WIDTH)
    gate, their_gate = (y[::-1] if isinstance(y, jax.Array) else y.flip(0) for y in (x, other))
    assert_equal_bits(ours(x, gate), norm(other, their_gate))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    from transformers.activations import ACT2FN

    every = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), jnp.bfloat16)
    # Without the least numbers, which XLA takes as 0, and without the tail on the left, where
    # 1 + tanh(x), or exp(-x), leaves little but the last bit of a library's own function.
    tail = {"silu": -80, "gelu_pytorch_tanh": -2}[name]
    x = every[(every > tail) & (abs(every) > 1e-30)]
    assert len(x) > 30_000
    wanted = ACT2FN[name](torch.tensor(np.asarray(x, np.float32)).to(torch.bfloat16))
    assert_equal_bits(jax.jit(ACTIVATIONS[name])(x), wanted)
