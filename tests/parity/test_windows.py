# SPDX-License-Identifier: Apache-2.0
"""Windows of every family: transformers and PEFT read them as models of their own."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import random_adapters
from safetensors.torch import load_file
from torch_models import FAMILIES, our_logits, random_tokens, write_checkpoint

from lora_tune import build
from lora_tune.hf.hub import Source
from lora_tune.hf.peft import adapter_pairs, save_adapter
from lora_tune.hf.table import bind
from lora_tune.lora.config import LoraConfig
from lora_tune.models.decoder import DecoderOptions
from lora_tune.proof import reference
from lora_tune.proof.cut import cut_adapter, cut_base
from lora_tune.proof.windows import Window, measure, plan_windows

pytest.importorskip("peft")
pytestmark = [pytest.mark.parity, pytest.mark.slow]

OPTIONS = DecoderOptions(dtype=jnp.float32, param_dtype=jnp.float32, remat="none")
CASES = (*FAMILIES, "qwen2, windows")
SPARSE = ("qwen3_next", "qwen3_moe", "qwen3_5_moe_text", "qwen3_5_moe")


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


def abstract(folder):
    return build.abstract_model(Source(folder, None, None), OPTIONS)


@pytest.mark.parametrize(
    ("case", "parted"), [*((case, False) for case in CASES), *((case, True) for case in SPARSE)]
)
def test_the_last_window(case, parted, tmp_path):
    model_type, *windowed = case.split(", ")
    changes = {}
    if windowed:
        changes = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 5}
    elif model_type.startswith("gemma4"):
        changes = {"hidden_size_per_layer_input": 0}
    base = write_checkpoint(tmp_path / "base", model_type=model_type, **changes)
    model = abstract(base)
    leaves, family = bind(model.family, model), model.family
    experts = getattr(model.config, "num_experts", 0)
    last = model.config.num_hidden_layers - 1
    lora = LoraConfig(
        r=2, lora_alpha=6, target_modules="all-linear", rank_pattern={rf"layers\.{last}\..*": 3}
    )
    arrays = random_adapters(leaves, lora)
    arrays = {path: a * 0.2 if path[-1] == "kernel_lora_b" else a for path, a in arrays.items()}
    adapter = tmp_path / "adapter"
    save_adapter(arrays, leaves, lora, adapter, model_type=model_type, base=str(base))
    pairs = adapter_pairs(arrays, leaves, lora, model_type=model_type)

    length, sizes = model.plan.cycle_length or (1 if parted else 2), measure(leaves)
    part = range(0, 2) if parted else None
    each = sorted(sizes.of(Window((i,), part), experts) - sizes.outside for i in range(last + 1))
    config = json.loads((base / "config.json").read_text())
    limit = sizes.outside + sum(each[-length:])
    windows, _ = plan_windows(config, family, leaves, limit)
    assert len(windows) > 1
    window = [window for window in windows if (window.experts is not None) == parted][-1]
    assert window.experts == (range(4, 6) if parted else None)
    cut_base(base, tmp_path / "window", family, window)
    assert cut_adapter(adapter, tmp_path / "part", window, experts)

    held = {new: pair for name, pair in pairs.items() if (new := window.inside(name))}
    tokens = random_tokens(2, 12)
    theirs = reference.load_adapter(tmp_path / "window", tmp_path / "part", tokens, held)
    assert theirs.problems == []
    ours = build.load_weights(abstract(tmp_path / "window"), mesh=None)
    logits = our_logits(build.with_adapter(ours, tmp_path / "part"), tokens)
    largest = max(1.0, float(np.abs(logits).max()))
    np.testing.assert_allclose(theirs.logits, logits, rtol=0, atol=1e-4 * largest)
    assert np.abs(theirs.logits - theirs.base_logits).max() > 0.01


def test_a_window_holds_the_bytes_of_its_layers_and_experts(tmp_path):
    base = write_checkpoint(tmp_path / "base")
    window = Window((5, 7), range(2, 5))
    cut_base(base, tmp_path / "window", abstract(base).family, window)
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "window"))
    assert cut["model.embed_tokens.weight"].equal(whole["model.embed_tokens.weight"])
    for new, old in (
        ("0.linear_attn.in_proj_qkvz", "5.linear_attn.in_proj_qkvz"),
        ("1.self_attn.q_proj", "7.self_attn.q_proj"),
        ("1.mlp.experts.0.up_proj", "7.mlp.experts.2.up_proj"),
        ("1.mlp.experts.2.down_proj", "7.mlp.experts.4.down_proj"),
    ):
        assert cut[f"model.layers.{new}.weight"].equal(whole[f"model.layers.{old}.weight"])
    router = whole["model.layers.7.mlp.gate.weight"]
    assert cut["model.layers.1.mlp.gate.weight"].equal(router[2:5])
    assert not any("layers.2." in name or "experts.3." in name for name in cut)
    config = json.loads((tmp_path / "window" / "config.json").read_text())
    assert config["layer_types"] == ["linear_attention", "full_attention"]
    assert (config["num_experts"], config["mlp_only_layers"]) == (3, [])
