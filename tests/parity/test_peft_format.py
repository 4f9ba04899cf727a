# SPDX-License-Identifier: Apache-2.0
"""Saved adapters, read by peft itself on a random transformers Qwen3-Next."""

import json
import re
import warnings

import numpy as np
import pytest
from hf_cases import CONFIG, EVERYWHERE, FAMILY, deltas, leaves_of, random_adapters, tiny

from lora_tune.hf.load import load_params
from lora_tune.hf.peft import adapter_arrays, load_adapter, save_adapter
from lora_tune.hf.save import save_full, save_merged
from lora_tune.hf.table import hf_state
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.targets import adaptable_modules, resolve

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.parity,
    # peft 0.21 reads a property that transformers 5.24 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

CASES = {
    "everything": LoraConfig(r=4, lora_alpha=10, target_modules=EVERYWHERE, lora_dropout=0.1),
    "default": LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1),
    "all-linear": LoraConfig(r=2, lora_alpha=3, target_modules="all-linear"),
    "attention": LoraConfig(r=3, lora_alpha=10, target_modules=("q_proj",), lora_dropout=0.1),
    "shared only": LoraConfig(r=4, target_modules=("shared_expert.down_proj",)),
    "routed only": LoraConfig(r=4, target_modules=r".*\.experts\..*"),
    "routed gate only": LoraConfig(r=4, target_modules=r".*\.experts\.\d+\.gate_proj"),
    "routed down only": LoraConfig(r=4, target_modules=r".*\.experts\.\d+\.down_proj"),
    "routed, rslora": LoraConfig(r=4, target_modules=EVERYWHERE, use_rslora=True),
    "layers": LoraConfig(r=4, target_modules=EVERYWHERE, layers_to_transform=(1, 3, 8)),
    "patterns": LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=EVERYWHERE,
        exclude_modules=r"model\.layers\.2\..*",
        rank_pattern={r"layers\.3\..*": 2, "up_proj": 5, "k_proj": 1},
        alpha_pattern={r"experts\.\d+\.up_proj": 3, r"layers\.4\..*": 9, "shared_expert_gate": 1},
    ),
    "patterns, rslora": LoraConfig(
        r=4,
        target_modules=EVERYWHERE,
        use_rslora=True,
        rank_pattern={"down_proj": 3, "in_proj_ba": 2},
        alpha_pattern={r"layers\.[0-3]\.mlp\..*": 5},
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random transformers model, in a folder as transformers writes it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return folder


def read_model(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def read_adapter(model, folder):
    """Loads in peft; a warning (missing or unexpected keys, unmatched targets) is an error.

    One is peft's own: it looks for `rank_pattern` and `alpha_pattern` keys among modules only and
    so reports those for parameters, its own `.*\\.gate_up_proj` included, though it applies them.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        wrapped = peft.PeftModel.from_pretrained(model, folder)
    for warning in caught:
        text = str(warning.message)
        assert "_pattern keys did not match any targeted module" in text, text
        keys = re.findall(r"'([^']+)'", text)
        assert all(re.search(r"(gate_up_proj|down_proj|\.weight)$", key) for key in keys), text
    return wrapped


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Per-expert tensors as transformers holds them in memory."""
    out = {k: v for k, v in tensors.items() if ".experts." not in k}
    homes = {k.split(".experts.")[0] + ".experts" for k in tensors if ".experts." in k}
    for home in homes:
        rows = []
        for e in range(CONFIG["num_experts"]):
            gate, up = (tensors[f"{home}.{e}.{n}_proj.weight"] for n in ("gate", "up"))
            rows.append(np.concatenate([gate, up]))
        out[f"{home}.gate_up_proj"] = np.stack(rows)
        down = [tensors[f"{home}.{e}.down_proj.weight"] for e in range(CONFIG["num_experts"])]
        out[f"{home}.down_proj"] = np.stack(down)
    return out


@pytest.mark.parametrize("psa", [0, 1])
def test_import_matches_what_transformers_holds(base, psa):
    model = tiny(psa=psa)
    state = load_params(model, FAMILY, base)
    ours = {}
    for leaf in leaves_of(model):
        value = state
        for key in leaf.path:
            value = value[key]
        ours |= dict(hf_state(leaf, value.get_value()))
    theirs = read_model(base).state_dict()
    ours = fused(ours)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor.numpy(), err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_peft_reads_every_tensor_and_computes_our_update(base, tmp_path, case):
    lora = CASES[case]
    leaves = leaves_of(tiny())
    arrays = random_adapters(leaves, lora)
    save_adapter(arrays, leaves, lora, tmp_path / "a", model_type="qwen3_next", base=str(base))
    model = read_model(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    wrapped = read_adapter(model, tmp_path / "a")
    for name, tensor in wrapped.state_dict().items():
        if "lora_B" in name and not case.startswith("routed"):
            assert tensor.any(), f"{name} was not loaded"
    after = wrapped.merge_and_unload().state_dict()

    zeros = {n: np.zeros(leaf.hf_shape) for leaf in leaves for n in leaf.names.ravel()}
    expected = fused(zeros | deltas(leaves, arrays))
    for name, tensor in after.items():
        change = (tensor.double() - before[name].double()).numpy()
        np.testing.assert_allclose(change, expected[name], atol=2e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_own_adapter_comes_back(base, tmp_path, case):
    lora = CASES[case]
    leaves = leaves_of(tiny(psa=1))
    arrays = random_adapters(leaves, lora)
    save_adapter(arrays, leaves, lora, tmp_path / "a", model_type="qwen3_next", base=str(base))
    read, adapters = load_adapter(tmp_path / "a", leaves, model_type="qwen3_next")
    ours = resolve(lora, adaptable_modules(leaves))
    theirs = resolve(read, adaptable_modules(leaves))
    assert set(theirs) == set(ours)
    expected, found = deltas(leaves, arrays), deltas(leaves, adapter_arrays(adapters))
    assert set(found) == set(expected)
    for name, delta in expected.items():
        np.testing.assert_allclose(found[name], delta, atol=1e-5, rtol=1e-5, err_msg=name)


def test_adapter_of_peft_comes_in(base, tmp_path):
    """peft's own save: 2-D pairs for linears, fused pairs for the routed experts."""
    model = read_model(base)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["q_proj", "in_proj_qkvz", "out_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"q_proj": 2},
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    wrapped.save_pretrained(tmp_path / "theirs")
    before = read_model(base).state_dict()
    after = wrapped.merge_and_unload().state_dict()

    leaves = leaves_of(tiny())
    read, adapters = load_adapter(tmp_path / "theirs", leaves, model_type="qwen3_next")
    zeros = {n: np.zeros(leaf.hf_shape) for leaf in leaves for n in leaf.names.ravel()}
    ours = fused(zeros | deltas(leaves, adapter_arrays(adapters)))
    for name, tensor in after.items():
        change = (tensor.double() - before[name].double()).numpy()
        np.testing.assert_allclose(ours[name], change, atol=2e-5, rtol=1e-5, err_msg=name)
    assert resolve(read, adaptable_modules(leaves))["model.layers.3.self_attn.q_proj"].r == 2


@pytest.mark.parametrize("only", ["gate_up_proj", "down_proj"])
def test_one_fused_parameter_alone_comes_in(base, tmp_path, only):
    model = read_model(base)
    config = peft.LoraConfig(
        r=2,
        target_modules=[],
        target_parameters=[f"mlp.experts.{only}"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(tmp_path / "theirs")
    before, after = read_model(base).state_dict(), wrapped.merge_and_unload().state_dict()
    leaves = leaves_of(tiny())
    _, adapters = load_adapter(tmp_path / "theirs", leaves, model_type="qwen3_next")
    zeros = {n: np.zeros(leaf.hf_shape) for leaf in leaves for n in leaf.names.ravel()}
    ours = fused(zeros | deltas(leaves, adapter_arrays(adapters)))
    name = f"model.layers.2.mlp.experts.{only}"
    change = (after[name].double() - before[name].double()).numpy()
    assert np.abs(change).max() > 1e-3
    np.testing.assert_allclose(ours[name], change, atol=2e-5, rtol=1e-5)


def test_merged_folder_loads_in_transformers(base, tmp_path):
    lora = CASES["everything"]
    leaves = leaves_of(tiny())
    arrays = random_adapters(leaves, lora)
    save_merged(arrays, leaves, FAMILY, base, tmp_path / "merged")
    merged, before = read_model(tmp_path / "merged").state_dict(), read_model(base).state_dict()
    zeros = {n: np.zeros(leaf.hf_shape) for leaf in leaves for n in leaf.names.ravel()}
    expected = fused(zeros | deltas(leaves, arrays))
    for name, tensor in merged.items():
        change = (tensor.double() - before[name].double()).numpy()
        np.testing.assert_allclose(change, expected[name], atol=2e-5, rtol=1e-5, err_msg=name)


def test_full_export_loads_in_transformers(base, tmp_path):
    model = tiny()
    state = load_params(model, FAMILY, base)
    save_full(state, leaves_of(model), FAMILY, base, tmp_path / "full", max_shard_bytes=20_000)
    assert json.loads((tmp_path / "full" / "config.json").read_text())["dtype"] == "float32"
    ours, theirs = read_model(tmp_path / "full").state_dict(), read_model(base).state_dict()
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
