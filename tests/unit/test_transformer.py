# SPDX-License-Identifier: Apache-2.0
"""What the configuration of attention-and-MLP models may say; tests/parity compares the numbers."""

import re

import jax
import jax.numpy as jnp
import pytest

from lora_tune.errors import InputError
from lora_tune.models import FAMILIES
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.models.initial import initialise
from lora_tune.models.kinds import FULL, KEPT, OWN, SHARED, SLIDING
from lora_tune.scan import plan_layers
from lora_tune.training.optim import make_optimizer
from lora_tune.training.state import split_model
from lora_tune.training.step import make_step

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0}


def read(family, **fields):
    return FAMILIES[family].read_config(fields)


def test_sizes_that_follow_from_others():
    config = read("llama", hidden_size=96, num_attention_heads=6, head_dim=None)
    assert (config.num_key_value_heads, config.head_dim) == (6, 16)
    assert len(set(config.layer_kinds())) == 1


def test_llama3_stretches_slow_rotations_only():
    # Wavelengths of Llama 3.1: dimensions that turn more than 4 times within 8192 positions keep
    # their frequency, those that turn less than once have it divided by 8.
    sizes = {"rope_theta": 500000.0, "head_dim": 128}
    plain = read("llama", **sizes).rope(FULL).frequencies()
    scaled = read("llama", **sizes, rope_scaling=LLAMA3).rope(FULL).frequencies()
    turns = 8192 * plain / 6.283185307
    assert (scaled[turns > 4] == plain[turns > 4]).all()
    assert scaled[turns < 1] == pytest.approx(plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_yarn_keeps_fast_rotations_and_the_original_context_may_stand_at_the_top():
    sizes = {"rope_theta": 1e6, "head_dim": 128, "original_max_position_embeddings": 32768}
    plain = read("qwen2", rope_theta=1e6, head_dim=128).rope(FULL).frequencies()
    rope = read("qwen2", **sizes, rope_scaling=YARN).rope(FULL)
    scaled = rope.frequencies()
    assert rope.magnitude == pytest.approx(1.1386294)  # 1 + ln(4) / 10
    turns = 32768 * plain / 6.283185307
    # Both ends are rounded outwards, by less than a pair of dimensions.
    assert (scaled[turns > 41] == plain[turns > 41]).all()
    assert scaled[turns < 0.8] == pytest.approx(plain[turns < 0.8] / 4)
    inside = read("qwen2", **sizes, rope_scaling=YARN | {"attention_factor": 1.0}).rope(FULL)
    assert inside.magnitude == 1.0


def test_windows():
    late = {"num_hidden_layers": 4, "max_window_layers": 3, "sliding_window": 7}
    config = read("qwen2", **late, use_sliding_window=True)
    assert (config.layer_types, config.sliding_window) == ((FULL,) * 3 + (SLIDING,), 7)
    config = read("qwen2", **late, use_sliding_window=False)
    assert (config.layer_types, config.sliding_window) == ((FULL,) * 4, None)
    listed = [SLIDING, FULL, SLIDING, FULL]
    config = read("qwen2", **late, use_sliding_window=True, layer_types=listed)
    assert config.layer_types == tuple(listed)
    assert set(read("mistral", sliding_window=None).layer_types) == {FULL}
    # transformers takes 4,096 where the file is silent.
    config = read("mistral")
    assert (set(config.layer_types), config.sliding_window) == ({SLIDING}, 4096)


def test_gemma3_has_a_cycle_and_a_rope_for_each_type():
    config = read("gemma3_text", num_hidden_layers=8, sliding_window=512, head_dim=8)
    assert config.layer_types == (SLIDING,) * 5 + (FULL,) + (SLIDING,) * 2
    assert (config.rope(FULL).theta, config.rope(SLIDING).theta) == (1e6, 1e4)
    assert config.attention_scale == 1 / 16  # 256 ** -0.5, whatever the heads' width
    older = {"rope_theta": 9.0, "rope_local_base_freq": 7.0, "rope_scaling": None}
    config = read("gemma3_text", **older | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert (config.rope(FULL).theta, config.rope(SLIDING).theta) == (9.0, 7.0)
    assert config.rope(FULL).rope_type == "linear"
    assert config.rope(SLIDING).rope_type == "default"


def test_gemma4_has_other_heads_in_layers_without_a_window():
    small = {"num_hidden_layers": 7, "head_dim": 8}
    config = read("gemma4_text", **small)
    assert config.layer_types == (SLIDING,) * 5 + (FULL, FULL)  # the last one always
    assert (config.heads(SLIDING), config.heads(FULL)) == ((4, 8), (4, 512))
    # A quarter of the pairs turns, by the frequencies of whole heads.
    frequencies = config.rope(FULL).frequencies()
    assert frequencies.shape == (256,)
    assert frequencies[63] == pytest.approx(1e6 ** (-63 / 256))
    assert not frequencies[64:].any()
    assert config.rope(SLIDING).rope_type == "default"
    assert not config.values_are_keys(FULL)
    fewer = {"num_global_key_value_heads": 2, "attention_k_eq_v": True}
    config = read("gemma4_text", **small, **fewer)
    assert (config.heads(SLIDING), config.heads(FULL)) == ((4, 8), (2, 512))
    assert config.values_are_keys(FULL)
    assert not config.values_are_keys(SLIDING)
    # transformers counts them only where keys are the values.
    config = read("gemma4_text", **small, **fewer | {"attention_k_eq_v": False})
    assert config.heads(FULL) == (4, 512)


@pytest.mark.parametrize(
    ("layer", "heads"),
    [
        ({"head_dim": 16, "num_key_value_heads": 2}, (2, 16)),
        ({"head_dim": 16}, (4, 16)),
        ({"num_key_value_heads": 2}, (2, 8)),
        (None, (4, 8)),
    ],
)
def test_gemma4_as_transformers_writes_it(layer, heads):
    """Numbers of layers are of equal length; what is as everywhere is left out."""
    small = {"num_hidden_layers": 11, "head_dim": 8}
    layers = {} if layer is None else {"05": layer, "10": layer}
    config = read("gemma4_text", **small, per_layer_config=layers)
    assert config.layer_types == ((SLIDING,) * 5 + (FULL,)) + ((SLIDING,) * 4 + (FULL,))
    assert (config.heads(SLIDING), config.heads(FULL)) == ((4, 8), heads)


def test_gemma4_shares_keys_and_values_of_the_last_layers():
    """As the E2B model has it: 35 layers, the last 20 of which read what layers 13 and 14 keep."""
    types = ([SLIDING] * 4 + [FULL]) * 7
    sizes = {"num_hidden_layers": 35, "num_kv_shared_layers": 20}
    kinds = read("gemma4_text", **sizes, layer_types=types).layer_kinds()
    assert [kind.keys for kind in kinds] == [OWN] * 13 + [KEPT] * 2 + [SHARED] * 20
    assert [kind.layer_type for kind in kinds] == types
    plan = plan_layers(kinds)
    assert (plan.blocks, plan.cycle_length, len(plan.prefix), len(plan.suffix)) == (4, 5, 7, 0)


def test_fields_of_published_sparse_models_that_ask_for_nothing():
    read("qwen3_moe", shared_expert_intermediate_size=0, use_qk_norm=True)


def test_a_fault_is_named_once():
    with pytest.raises(InputError) as caught:
        read("gemma4_text", per_layer_config={"3": {"head_dim": 4}})
    assert str(caught.value).count("per_layer_config") == 1


def test_full_training_leaves_the_scalars_of_gemma4_alone():
    """They are buffers in transformers: neither gradient nor weight decay moves them."""
    family = FAMILIES["gemma4_text"]
    config = family.read_config(
        {
            "vocab_size": 16,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 4,
            "global_head_dim": 4,
            "hidden_size_per_layer_input": 0,
        }
    )
    split = split_model(initialise(Decoder(family, config, DecoderOptions()), seed=0))
    weights = {
        name: jnp.full_like(array, 0.625) if name.endswith("layer_scalar") else array
        for name, array in split.trainable.items()
    }
    optimizer, _ = make_optimizer(
        learning_rate=0.1,
        total_steps=2,
        lr_scheduler_type="constant",
        warmup_steps=0,
        warmup_ratio=0.0,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.99,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
    )
    tokens = jnp.arange(8, dtype=jnp.int32)[None, None, :]
    batch = {
        "tokens": tokens,
        "targets": tokens[..., ::-1],
        "positions": tokens,
        "segment_ids": jnp.ones_like(tokens),
        "weights": jnp.ones(tokens.shape, jnp.float32),
    }
    step = jax.jit(make_step(split, optimizer))
    after, _, _ = step(weights, optimizer.init(weights), split.frozen, batch, jax.random.key(0))
    kept = {name for name, array in weights.items() if (array == after[name]).all()}
    assert kept == {name for name in weights if name.endswith("layer_scalar")}
    assert len(kept) == 1


def test_a_multimodal_gemma3_says_little():
    text = {"hidden_size": 64, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    text |= {"model_type": "gemma3_text", "sliding_window": 1024}
    config = read("gemma3", text_config=text, vision_config={}, mm_tokens_per_image=256)
    assert (config.hidden_size, config.sliding_window, config.head_dim) == (64, 1024, 256)
    assert config.tie_word_embeddings


def test_fields_that_change_nothing_pass():
    read(
        "llama",
        _name_or_path="x",
        torch_dtype="bfloat16",
        pretraining_tp=1,
        use_cache=True,
        sliding_window=None,
        rope_interleaved=False,
        rope_scaling=None,
    )


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"attention_bias": 1}, "attention_bias is 1, expected true or false"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("llama", {"quantization_config": {}}, "quantization_config={}"),
        ("llama", {"attention_sinks": 4}, "attention_sinks=4 is unknown to this family"),
        ("llama", {"sliding_window": 512}, "sliding_window=512 is unknown to this family"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved=True is unknown"),
        ("llama", {"hidden_size": "96"}, "hidden_size is '96'"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("llama", {"num_key_value_heads": 5}, "multiple of num_key_value_heads"),
        ("llama", {"head_dim": 5}, "head_dim is 5, expected an even number"),
        ("llama", {"head_dim": "a"}, "head_dim is 'a'"),
        ("llama", {"rope_theta": 0}, "rope_theta is 0"),
        ("llama", {"rope_theta": float("inf")}, "rope_theta is inf, expected a finite number"),
        ("llama", {"rope_parameters": {"rope_theta": "a"}}, "rope_parameters.rope_theta is 'a'"),
        ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0, expected a finite number above 0"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ("llama", {"rope_scaling": 2.0}, "rope_scaling is 2.0"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "rope_scaling.type='longrope'"),
        ("llama", {"rope_parameters": {"rope_type": ["a"]}}, "rope_parameters.rope_type=['a']"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("llama", {"rope_scaling": {"mrope_section": [1, 1]}}, "mrope_section=[1, 1] is unknown"),
        ("llama", {"rope_scaling": {**LLAMA3, "factor": None}}, "rope_scaling.factor is None"),
        ("llama", {"rope_scaling": {**LLAMA3, "factor": float("nan")}}, "factor is nan"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor is missing"),
        ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "above low_freq_factor"),
        (
            "llama",
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor is missing",
        ),
        ("qwen2", {"rope_scaling": {**YARN, "beta_fast": -1}}, "beta_fast is -1"),
        ("qwen2", {"rope_scaling": {**YARN, "truncate": 1}}, "truncate is 1"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
        ("qwen2", {"sliding_window": 0}, "sliding_window is 0"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers is -1"),
        (
            "qwen2",
            {"max_window_layers": "3", "use_sliding_window": True},
            "max_window_layers is '3'",
        ),
        ("qwen2", {"layer_types": ["chunked_attention"]}, "layer_types is ['chunked_attention']"),
        ("qwen2", {"layer_types": [["a"]]}, "layer_types is [['a']]"),
        ("qwen2", {"layer_types": [{}]}, "layer_types is [{}]"),
        ("qwen2", {"layer_types": [FULL]}, "layer_types lists 1 layers"),
        ("qwen2", {"layer_types": [SLIDING] * 32}, "no sliding_window (use_sliding_window)"),
        ("qwen2", {"attention_bias": True}, "attention_bias=True is unknown"),
        ("mistral", {"layer_types": [FULL] * 32}, "layer_types="),
        ("qwen3_moe", {"num_experts": 4}, "num_experts_per_tok must be between 1 and num_experts"),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 8}, "leave out one of them"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm=False is not supported"),
        (
            "qwen3_moe",
            {"shared_expert_intermediate_size": 8},
            "shared_expert_intermediate_size=8 is not supported",
        ),
        ("qwen3_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers is ['a']"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window is null"),
        ("gemma3_text", {"rope_parameters": {"factor": 8}}, "rope_parameters.factor=8 is unknown"),
        (
            "gemma3_text",
            {"rope_parameters": {SLIDING: {"rope_type": "linear"}}},
            "rope_parameters.sliding_attention.factor is missing",
        ),
        ("gemma3_text", {"rope_parameters": {FULL: 3}}, "rope_parameters.full_attention is 3"),
        (
            "gemma3_text",
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            "rope_scaling.type='linear' is not read in this family; write rope_type",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {FULL: YARN | {"truncate": False}}},
            "rope_parameters.full_attention.truncate=False is not supported",
        ),
        (
            "gemma4_text",
            {"vocab_size_per_layer_input": 262143},
            "vocab_size_per_layer_input is 262143, expected at least vocab_size (262144)",
        ),
        ("gemma4_text", {"hidden_size_per_layer_input": -1}, "_input is -1, expected at least 0"),
        ("gemma4_text", {"rope_theta": 7.0}, "rope_theta=7.0 is unknown"),
        ("gemma4_text", {"rope_local_base_freq": 7.0}, "rope_local_base_freq=7.0 is unknown"),
        ("gemma4_text", {"rope_scaling": {"factor": 8}}, "rope_scaling={'factor': 8} is unknown"),
        ("gemma4_text", {"sliding_window_pattern": 2}, "sliding_window_pattern=2 is unknown"),
        ("gemma4_text", {"layer_types": [SLIDING] * 30}, "layer_types ends in"),
        ("gemma4_text", {"layer_types": 5, "per_layer_config": {}}, "layer_types is 5"),
        (
            "gemma4_text",
            {"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 2}}},
            "rope_parameters.full_attention.partial_rotary_factor is 2, expected at most 1",
        ),
        ("gemma4_text", {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1, expected at"),
        (
            "gemma4_text",
            {"num_kv_shared_layers": 30},
            "num_kv_shared_layers is 30, expected less than num_hidden_layers (30)",
        ),
        (
            "gemma4_text",
            {"num_kv_shared_layers": 25},
            "num_kv_shared_layers is 25, but no earlier layer is of type 'full_attention'",
        ),
        ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block=True is not supported"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "attention='all' is not supported"),
        (
            "gemma4_text",
            {"final_logit_softcapping": 0.0},
            "final_logit_softcapping is 0.0",
        ),
        ("gemma4_text", {"global_head_dim": "a"}, "global_head_dim is 'a'"),
        ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config="),
        ("gemma4_text", {"per_layer_config": {"5": {"head_dim": 4}}}, "per_layer_config="),
        ("gemma4_text", {"per_layer_config": [1]}, "per_layer_config is [1]"),
        ("gemma4_text", {"per_layer_config": {"x": {}}}, "per_layer_config.x is no layer"),
        ("gemma4_text", {"per_layer_config": {"5": 3}}, "per_layer_config.5 is 3"),
        ("gemma4_text", {"per_layer_config": {"5": {"skip": []}}}, "per_layer_config.5 has skip"),
        (
            "gemma4_text",
            {"per_layer_config": {"5": {"head_dim": "a"}}},
            "per_layer_config.5.head_dim is 'a'",
        ),
        ("llama", {"num_experts": 4}, "num_experts=4 is unknown"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias=True is unknown"),
    ],
)
def test_what_the_layers_lack_is_named(family, fields, named):
    with pytest.raises(InputError, match=re.escape(f"config.json ({family})")) as caught:
        read(family, **fields)
    assert named in str(caught.value)
