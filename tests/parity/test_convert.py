# SPDX-License-Identifier: Apache-2.0
"""The command `convert-adapter`, between adapters that peft wrote and adapters that it reads."""

import json

import numpy as np
import pytest
from hf_cases import CONFIG, leaves_of, random_adapters, tiny
from safetensors.torch import load_file, save_file
from test_peft_format import base, read_adapter, read_model  # noqa: F401  base is a fixture

from lora_tune import cli
from lora_tune.hf.peft import save_adapter
from lora_tune.lora.config import LoraConfig

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.parity,
    # peft 0.21 reads a property that transformers 5.24 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]
SPARSE, EXPERTS = 8, CONFIG["num_experts"]
PREFIX = "base_model.model.model.layers.0.mlp.experts."


def convert(old, new, layout, capsys, *words, status=0):
    assert cli.main(
        ["convert-adapter", f"from={old}", f"to={new}", f"layout={layout}", *words]
    ) == (status)
    out, err = capsys.readouterr()
    return err if status else out


def merged(base, folder):  # noqa: F811
    return read_adapter(read_model(base), folder).merge_and_unload().state_dict()


@pytest.fixture(scope="module")
def theirs(base, tmp_path_factory):  # noqa: F811
    """peft's own adapter of attention and of all routed experts, which it saves fused."""
    folder = tmp_path_factory.mktemp("theirs")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["q_proj", "out_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"q_proj": 2},
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = read_model(base)
    model.config._name_or_path = str(base)
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(folder)
    return folder


def close(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, atol=2e-5, rtol=1e-5, err_msg=name)


def test_fused_to_per_expert_and_back(base, theirs, tmp_path, capsys):  # noqa: F811
    expected = merged(base, theirs)
    assert not torch.equal(
        expected["model.layers.0.mlp.experts.down_proj"],
        read_model(base).state_dict()["model.layers.0.mlp.experts.down_proj"],
    )
    out = convert(theirs, tmp_path / "apart", "per-expert", capsys)
    keys = load_file(tmp_path / "apart" / "adapter_model.safetensors")
    others = len(load_file(theirs / "adapter_model.safetensors")) - 4 * SPARSE
    assert len(keys) == others + SPARSE * EXPERTS * 3 * 2
    assert keys[f"{PREFIX}1.gate_proj.lora_A.weight"].shape == (3, CONFIG["hidden_size"])
    assert f"{SPARSE * EXPERTS * 3} of them projections of routed experts" in out
    assert f"{others + 4 * SPARSE} tensors became {len(keys)}" in out
    close(merged(base, tmp_path / "apart"), expected)

    convert(tmp_path / "apart", tmp_path / "again", "fused", capsys)
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert config["base_model_name_or_path"] == str(base)
    keys = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert len(keys) == others + 4 * SPARSE
    close(merged(base, tmp_path / "again"), expected)


def test_the_layout_of_older_peft(base, theirs, tmp_path, capsys):  # noqa: F811
    """Up to peft 0.18 the A of experts was today's B, transposed expert by expert."""
    old = tmp_path / "old"
    old.mkdir()
    tensors = load_file(theirs / "adapter_model.safetensors")
    for key in [key for key in tensors if ".experts." in key and "lora_A" in key]:
        other = key.replace("lora_A", "lora_B")
        a, b = tensors[key], tensors[other]  # [E r, in], [out, r E]
        r = len(a) // EXPERTS
        tensors[key] = b.reshape(len(b), r, EXPERTS).permute(2, 1, 0).reshape(-1, len(b)).clone()
        into = a.shape[1]
        tensors[other] = a.reshape(EXPERTS, r, into).permute(2, 1, 0).reshape(into, -1).clone()
    save_file(tensors, old / "adapter_model.safetensors", {"format": "pt"})
    config = json.loads((theirs / "adapter_config.json").read_text())
    (old / "adapter_config.json").write_text(json.dumps(config | {"peft_version": "0.18.1"}))
    convert(old, tmp_path / "new", "per-expert", capsys)
    convert(theirs, tmp_path / "same", "per-expert", capsys)
    found, expected = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("new", "same")
    )
    assert all(torch.equal(found[key], expected[key]) for key in set(found) | set(expected))


def test_shared_experts_stay_beside_fused_ones(base, tmp_path, capsys):  # noqa: F811
    names = ("q_proj", "gate_proj", "up_proj", "down_proj")
    lora, leaves = LoraConfig(r=2, lora_alpha=3, target_modules=names), leaves_of(tiny())
    arrays = random_adapters(leaves, lora)
    save_adapter(arrays, leaves, lora, tmp_path / "a", model_type="qwen3_next", base=str(base))
    convert(tmp_path / "a", tmp_path / "fused", "fused", capsys)
    close(merged(base, tmp_path / "fused"), merged(base, tmp_path / "a"))
    convert(tmp_path / "fused", tmp_path / "back", "per-expert", capsys)
    tensors = [load_file(tmp_path / n / "adapter_model.safetensors") for n in ("a", "back")]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][key]) for key, tensor in tensors[0].items())
    configs = [
        json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("a", "back")
    ]
    assert configs[0] == configs[1]


def test_what_cannot_be_converted(base, theirs, tmp_path, capsys):  # noqa: F811
    def said(old, layout, *words):
        err = convert(old, tmp_path / "o", layout, capsys, *words, status=2)
        assert err.startswith("lora-tune: error: ")
        assert err.count("\n") == 1
        assert not (tmp_path / "o").exists()
        return err

    assert "expected one of per-expert, fused" in said(theirs, "flat")
    assert "holds no adapter" in said(base, "fused")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "adapter").symlink_to(theirs)
    assert f"did you mean from={tmp_path / 'run' / 'adapter'}?" in said(tmp_path / "run", "fused")
    assert "neither a model folder nor" in said(theirs, "fused", "model.path=./nowhere")
    lora, leaves = LoraConfig(r=2, target_modules=("q_proj",)), leaves_of(tiny())
    arrays = random_adapters(leaves, lora)
    save_adapter(arrays, leaves, lora, tmp_path / "q", model_type="qwen3_next", base=str(base))
    assert "adapts no routed experts" in said(tmp_path / "q", "fused")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    tensors = load_file(theirs / "adapter_model.safetensors")
    tensors.pop(f"{PREFIX}lora_B.weight")
    save_file(tensors, damaged / "adapter_model.safetensors", {"format": "pt"})
    config = (theirs / "adapter_config.json").read_text()
    (damaged / "adapter_config.json").write_text(config)
    assert "model.layers.0.mlp.experts has no lora_B" in said(damaged, "per-expert")
