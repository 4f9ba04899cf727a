# SPDX-License-Identifier: Apache-2.0
"""The adapter format without peft; tests/parity/test_peft_format.py has peft read it."""

import json
import os

import jax
import numpy as np
import pytest
from flax import nnx
from hf_cases import EVERYWHERE, deltas, leaves_of, random_adapters, tiny
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lora_tune.errors import InputError
from lora_tune.hf.card import serve_command
from lora_tune.hf.peft import adapter_arrays, load_adapter, save_adapter
from lora_tune.hf.peft_config import cover
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.targets import adaptable_modules, resolve

P = "base_model.model.model.layers."


def save(arrays, leaves, lora, folder, **options):
    options = {"model_type": "qwen3_next", "base": "Qwen/Qwen3-Next", "revision": "abc"} | options
    return save_adapter(arrays, leaves, lora, folder, **options)


@pytest.fixture(scope="module")
def leaves():
    return leaves_of(tiny())


def test_default_adapter_on_disk(tmp_path, leaves):
    lora = LoraConfig(r=4, lora_alpha=8)
    arrays = random_adapters(leaves, lora)
    save(arrays, leaves, lora, tmp_path / "a")
    with safe_open(tmp_path / "a" / "adapter_model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    a = arrays["blocks", "runs", 0, "linear_attn", "out_proj", "kernel_lora_a"]
    b = arrays["blocks", "runs", 0, "linear_attn", "out_proj", "kernel_lora_b"]
    for block in range(2):
        for layer in range(3):
            key = f"{P}{4 * block + layer}.linear_attn.out_proj"
            np.testing.assert_array_equal(tensors[f"{key}.lora_A.weight"], a[block, layer].T)
            np.testing.assert_array_equal(tensors[f"{key}.lora_B.weight"], b[block, layer].T)
    assert tensors[f"{P}8.mlp.up_proj.lora_B.weight"].shape == (20, 4)
    assert not any(".experts." in name for name in tensors)
    assert {t.dtype for t in tensors.values()} == {np.dtype(np.float32)}
    # 7 linear layers x 3, 2 full x 4, 8 sparse x 3 shared, 1 dense x 3; A and B each
    assert len(tensors) == 2 * (7 * 3 + 2 * 4 + 8 * 3 + 3)


def test_config_has_the_conservative_fields(tmp_path, leaves):
    lora = LoraConfig(r=4, lora_alpha=8)
    save(random_adapters(leaves, lora), leaves, lora, tmp_path / "a")
    text = (tmp_path / "a" / "adapter_config.json").read_text()
    config = json.loads(text)
    assert text == json.dumps(config, indent=2, sort_keys=True) + "\n"
    mlp = [f"mlp.{n}_proj.weight" for n in ("down", "gate", "up")]
    shared = [f"shared_expert.{n}_proj.weight" for n in ("down", "gate", "up")]
    assert config == {
        "alpha_pattern": {},
        "base_model_name_or_path": "Qwen/Qwen3-Next",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "rank_pattern": {},
        "revision": "abc",
        "target_modules": [
            *("in_proj_ba", "in_proj_qkvz", "k_proj", "o_proj", "out_proj", "q_proj", "v_proj")
        ],
        "target_parameters": mlp + shared,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def test_routed_experts_are_listed_as_serving_expects(tmp_path, leaves):
    lora = LoraConfig(r=4, target_modules=("gate_proj", "up_proj", "down_proj"))
    config = save(random_adapters(leaves, lora), leaves, lora, tmp_path / "a")
    assert config["target_modules"] == ["down_proj", "gate_proj", "up_proj"]
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (4, {}, {})
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert tensors[f"{P}7.mlp.experts.3.down_proj.lora_A.weight"].shape == (4, 12)


def test_targets_that_a_suffix_would_overmatch_are_spelled_out(tmp_path, leaves):
    lora = LoraConfig(r=4, target_modules=("q_proj", "out_proj"), layers_to_transform=(3, 4))
    config = save(random_adapters(leaves, lora), leaves, lora, tmp_path / "a")
    assert config["target_modules"] == [
        "layers.3.self_attn.q_proj",
        "layers.4.linear_attn.out_proj",
    ]


def test_cover_is_exact_and_short():
    universe = ["m.0.a.q", "m.0.b.q", "m.10.a.q", "m.0.a.k", "m.10.a.k"]
    assert cover(["m.0.a.k", "m.10.a.k"], universe) == ["k"]
    assert cover(["m.0.a.q", "m.10.a.q"], universe) == ["a.q"]
    assert cover(["m.0.a.q"], universe) == ["m.0.a.q"]
    assert cover(["m.0.a.k", "m.10.a.k"], universe, least=2) == ["a.k"]
    assert cover(["m.0.a.k", "m.10.a.k"], universe, part="m") == ["m.0.a.k", "m.10.a.k"]


@pytest.mark.parametrize("psa", [0, 1])
def test_round_trip_is_bit_exact_in_every_layout(tmp_path, psa):
    leaves = leaves_of(tiny(psa=psa))
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=EVERYWHERE, use_rslora=True)
    arrays = random_adapters(leaves, lora)
    save(arrays, leaves, lora, tmp_path / "a")
    for other in (leaves, leaves_of(tiny(scan=False))):
        read, adapters = load_adapter(tmp_path / "a", other, model_type="qwen3_next")
        assert set(resolve(read, adaptable_modules(other))) == set(
            resolve(lora, adaptable_modules(leaves))
        )
        found = adapter_arrays(adapters)
        if other is leaves:
            assert set(found) == set(arrays)
            for path, array in arrays.items():
                np.testing.assert_array_equal(found[path], array, err_msg=str(path))
        else:
            ours, theirs = deltas(leaves, arrays), deltas(other, found)
            assert set(ours) == set(theirs)
            for name, delta in ours.items():
                np.testing.assert_array_equal(theirs[name], delta, err_msg=name)


def test_a_sharded_state_is_gathered_whole(tmp_path, leaves):
    lora = LoraConfig(r=4, target_modules=EVERYWHERE)
    arrays = random_adapters(leaves, lora)
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("x",))
    flat = {}
    for path, array in arrays.items():
        split = [n % 8 == 0 for n in array.shape]
        axis = split.index(True) if any(split) else None
        spec = PartitionSpec(*("x" if i == axis else None for i in range(array.ndim)))
        flat[path] = nnx.LoRAParam(jax.device_put(array, NamedSharding(mesh, spec)))
    save(nnx.from_flat_state(flat), leaves, lora, tmp_path / "sharded")
    save(arrays, leaves, lora, tmp_path / "host")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        ours, theirs = (tmp_path / name / file for name in ("sharded", "host"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_layers_of_shorter_rank_are_cut_and_padded_back(tmp_path, leaves):
    lora = LoraConfig(
        r=4, target_modules=("out_proj",), rank_pattern={r"layers\.[04]\..*": 6}, lora_alpha=3
    )
    arrays = random_adapters(leaves, lora)
    config = save(arrays, leaves, lora, tmp_path / "a")
    assert config["rank_pattern"] == {
        r"layers\.0\.linear_attn\.out_proj": 6,
        r"layers\.4\.linear_attn\.out_proj": 6,
    }
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert tensors[f"{P}1.linear_attn.out_proj.lora_A.weight"].shape == (4, 16)
    assert tensors[f"{P}4.linear_attn.out_proj.lora_A.weight"].shape == (6, 16)
    _, adapters = load_adapter(tmp_path / "a", leaves, model_type="qwen3_next")
    for path, array in adapter_arrays(adapters).items():
        np.testing.assert_array_equal(array, arrays[path])


def test_fused_layout_goes_out_and_comes_in(tmp_path, leaves):
    """For models whose experts PEFT knows as parameters alone; gate and up have each an own A."""
    lora = LoraConfig(r=4, lora_alpha=6, target_modules=EVERYWHERE, layers_to_transform=(1, 3, 8))
    arrays = random_adapters(leaves, lora)
    config = save(arrays, leaves, lora, tmp_path / "a", model_type="qwen3_5_moe")
    homes = [f"layers.{i}.mlp.experts" for i in (1, 3)]
    assert config["target_parameters"] == sorted(
        f"{home}.{name}" for home in homes for name in ("gate_up_proj", "down_proj")
    )
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    shapes = {
        name.removeprefix(f"{P}1.mlp.experts."): tensor.shape
        for name, tensor in tensors.items()
        if f"{homes[0]}." in name
    }
    assert shapes == {
        "base_layer.lora_A.weight": (4 * 8, 16),
        "base_layer.lora_B.weight": (2 * 12, 8 * 4),
        "lora_A.weight": (4 * 4, 12),
        "lora_B.weight": (16, 4 * 4),
    }
    read, adapters = load_adapter(tmp_path / "a", leaves, model_type="qwen3_5_moe")
    universe = adaptable_modules(leaves)
    assert resolve(read, universe) == resolve(lora, universe)
    found = adapter_arrays(adapters)
    for path, array in arrays.items():
        np.testing.assert_array_equal(found[path], array, err_msg=str(path))

    everywhere = LoraConfig(r=4, lora_alpha=6, target_modules=EVERYWHERE)
    arrays = random_adapters(leaves, everywhere)
    config = save(arrays, leaves, everywhere, tmp_path / "b", model_type="qwen3_5_moe")
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


def test_what_must_not_be_exported(tmp_path, leaves):
    lora = LoraConfig(r=4)
    arrays = random_adapters(leaves, lora)
    untrained = {p: np.zeros_like(v) if p[-1].endswith("_b") else v for p, v in arrays.items()}
    with pytest.raises(InputError, match="untrained"):
        save(untrained, leaves, lora, tmp_path / "a")
    path = ("blocks", "runs", 1, "self_attn", "o_proj", "kernel_lora_a")
    broken = arrays | {path: np.full_like(arrays[path], np.nan)}
    with pytest.raises(InputError, match=r"layers\.3\.self_attn\.o_proj"):
        save(broken, leaves, lora, tmp_path / "a")
    missing = {p: v for p, v in arrays.items() if p[:-1] != path[:-1]}
    with pytest.raises(ValueError, match=r"disagree on blocks\.runs\.1\.self_attn\.o_proj"):
        save(missing, leaves, lora, tmp_path / "a")
    with pytest.raises(ValueError, match="scales differ"):
        save(arrays, leaves, LoraConfig(r=4, lora_alpha=7), tmp_path / "a")
    routed = LoraConfig(r=4, target_modules=r".*experts\..*")
    with pytest.raises(InputError, match="'llama'"):
        save(random_adapters(leaves, routed), leaves, routed, tmp_path / "a", model_type="llama")
    assert os.listdir(tmp_path) == []
    save(untrained, leaves, lora, tmp_path / "a", allow_untrained=True)


def test_values_beyond_a_layers_rank_are_an_error(tmp_path, leaves):
    lora = LoraConfig(r=4, target_modules=("q_proj",), rank_pattern={r"layers\.3\..*": 2})
    arrays = random_adapters(leaves, lora)
    for path in arrays:
        if path[-1] in ("kernel_lora_a", "kernel_lora_b"):
            arrays[path][0, 0] += 1
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.q_proj: acts beyond its rank 2"):
        save(arrays, leaves, lora, tmp_path / "a")


def test_a_full_disk_leaves_nothing(tmp_path, leaves, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lora_tune.hf.peft.write_array", full)
    lora = LoraConfig(r=4)
    with pytest.raises(InputError, match="No space left"):
        save(random_adapters(leaves, lora), leaves, lora, tmp_path / "a")
    assert os.listdir(tmp_path) == []


@pytest.fixture
def plain(tmp_path, leaves):
    lora = LoraConfig(r=2, target_modules=("q_proj",))
    folder = tmp_path / "a"
    save(random_adapters(leaves, lora), leaves, lora, folder)
    return folder


def edit(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"r": 0}, "r=0"),
        ({"lora_alpha": None}, "lora_alpha=None"),
        ({"r": 3}, "its rank is 2, by r and rank_pattern 3"),
        ({"target_modules": ["nope"]}, "no target is called as model.layers."),
        ({"target_modules": [3]}, "target_modules=[3]"),
        ({"alpha_pattern": {"(": 2}}, "alpha_pattern={'(': 2}"),
        ({"rank_pattern": [2]}, "rank_pattern=[2]"),
        ({"lora_dropout": " "}, "lora_dropout=' '"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path=5"),
    ],
)
def test_adapters_that_are_not_plain_lora_are_refused(plain, leaves, fields, part):
    edit(plain, **fields)
    with pytest.raises(InputError) as caught:
        load_adapter(plain, leaves, model_type="qwen3_next", named=True)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({f"{P}3.self_attn.q_proj.lora_magnitude_vector": (32,)}, "DoRA"),
        ({"base_model.model.lm_head.weight": (40, 16)}, "modules_to_save"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (2, 40)}, "embedding"),
        ({"model.layers.3.self_attn.k_proj.lora_A.weight": (2, 16)}, "is unknown, expected"),
        ({f"{P}3.self_attn.k_proj.lora_A.weight": (2, 16)}, "k_proj has no lora_B"),
        ({f"{P}3.self_attn.q_proj.lora_A.weight": (2, 17)}, "expected [r, 16]"),
        ({f"{P}0.mlp.gate.lora_{s}.weight": (2, 2) for s in "AB"}, "no projection"),
        (
            {
                f"{P}0.mlp.experts.1.up_proj.lora_A.weight": (2, 16),
                f"{P}0.mlp.experts.1.up_proj.lora_B.weight": (12, 2),
            },
            "experts.0.up_proj has no adapter, though other experts do",
        ),
    ],
)
def test_every_key_is_accounted_for(plain, leaves, changes, part):
    path = plain / "adapter_model.safetensors"
    extra = {name: np.ones(shape, np.float32) for name, shape in changes.items()}
    save_file(load_file(path) | extra, path)
    with pytest.raises(InputError) as caught:
        load_adapter(plain, leaves, model_type="qwen3_next")
    assert part in str(caught.value)


def test_missing_and_damaged_adapter_files(plain, leaves, tmp_path):
    path = plain / "adapter_model.safetensors"
    tensors = load_file(path)
    name = f"{P}3.self_attn.q_proj.lora_B.weight"
    save_file(tensors | {name: np.full_like(tensors[name], np.inf)}, path)
    with pytest.raises(InputError, match=r"q_proj\.lora_B\.weight holds a NaN"):
        load_adapter(plain, leaves, model_type="qwen3_next")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InputError, match="not a valid safetensors file"):
        load_adapter(plain, leaves, model_type="qwen3_next")
    path.unlink()
    with pytest.raises(InputError, match="no such file"):
        load_adapter(plain, leaves, model_type="qwen3_next")
    with pytest.raises(InputError, match="cannot be read"):
        load_adapter(tmp_path / "absent", leaves, model_type="qwen3_next")


def test_fused_layout_of_old_peft_is_told_by_its_shapes(tmp_path, leaves):
    """delta_e = B[:, e::E] @ A[e r : (e+1) r], transposed up to peft 0.18."""
    rng = np.random.default_rng(0)
    e, r, h, i = 4, 2, 16, 12
    key = f"{P}2.mlp.experts"
    a = rng.standard_normal((e * r, h)).astype(np.float32)
    b = rng.standard_normal((i, r * e)).astype(np.float32)  # down_proj: weight [h, i]
    save_file(
        {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b},
        tmp_path / "adapter_model.safetensors",
    )
    config = {
        "peft_type": "LORA",
        "r": r,
        "lora_alpha": 6,
        "target_parameters": ["model.layers.2.mlp.experts.down_proj"],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    _, adapters = load_adapter(tmp_path, leaves, model_type="qwen3_next")
    found = deltas(leaves, adapter_arrays(adapters))
    for k in range(e):
        expected = 3 * (b[:, k::e].astype(float) @ a[k * r : (k + 1) * r].astype(float)).T
        np.testing.assert_allclose(
            found[f"model.layers.2.mlp.experts.{k}.down_proj.weight"], expected, rtol=1e-6
        )


@pytest.mark.parametrize(("hidden", "experts"), [(32, 16), (16, 16)])
def test_fused_layout_where_both_orders_fit_the_sizes(tmp_path, hidden, experts):
    """gate_up_proj is square with experts of half the width, down_proj with those of all of it."""
    square = leaves_of(tiny(hidden_size=hidden, moe_intermediate_size=experts))
    lora = LoraConfig(r=4, target_modules=EVERYWHERE)
    arrays = random_adapters(square, lora)
    config = save(arrays, square, lora, tmp_path / "a", model_type="qwen3_5_moe_text")

    def read():
        _, adapters = load_adapter(tmp_path / "a", square, model_type="qwen3_5_moe_text")
        return adapter_arrays(adapters)

    path = tmp_path / "a" / "adapter_config.json"
    for recorded in ({}, {"peft_version": None}, {"peft_version": "0.19.0"}):
        path.write_text(json.dumps(config | recorded))
        found = read()
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array, err_msg=str(name))
    # Of the PEFT that transposed, the file means another update where shapes cannot tell.
    path.write_text(json.dumps(config | {"peft_version": "0.18.1"}))
    ours, theirs = deltas(square, arrays), deltas(square, read())
    tails = ("down_proj",) if hidden == experts else ("gate_proj", "up_proj")
    for name, update in ours.items():
        is_square = ".experts." in name and name.split(".")[-2] in tails
        assert np.allclose(update, theirs[name], atol=1e-6) == (not is_square), name


@pytest.mark.parametrize(("rank", "limit"), [(1, 1), (2, 8), (16, 16), (20, 32), (200, 256)])
def test_the_serve_command_allows_the_rank(rank, limit):
    assert f"--max-lora-rank {limit} " in serve_command("Qwen/Q", rank)


def test_the_card_names_the_base(tmp_path, leaves):
    lora = LoraConfig(r=4)
    arrays = random_adapters(leaves, lora)
    save(arrays, leaves, lora, tmp_path / "a")
    front = (tmp_path / "a" / "README.md").read_text().split("---")[1].splitlines()
    assert front[1:] == [
        "base_model: Qwen/Qwen3-Next",
        "library_name: peft",
        "pipeline_tag: text-generation",
        "tags:",
        "- base_model:adapter:Qwen/Qwen3-Next",
        "- lora",
        "- transformers",
    ]
    save(arrays, leaves, lora, tmp_path / "b", base="/somewhere/local", revision=None)
    assert "base_model:" not in (tmp_path / "b" / "README.md").read_text()
