# SPDX-License-Identifier: Apache-2.0
"""What a whole run writes, read by peft and transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from hf_cases import EVERYWHERE
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch_models import (
    our_logits,
    random_tokens,
    read_theirs,
    their_logits,
    torch,
    write_checkpoint,
)

import lora_tune

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    # peft 0.21 reads a property that transformers 5.24 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # peft 0.21 looks for pattern keys among modules only, and applies those of parameters.
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module"),
]

TOLERANCE = 1e-4
# Tensors of the multi-token prediction head, which transformers and we pass over.
EXTRA = {
    "mtp.fc.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.full((5, 2), -0.3, dtype=torch.bfloat16),
    "mtp.layers.0.self_attn.q_proj.weight": torch.tensor([[1.5, float("inf")]]),
    "mtp.norm.weight": torch.zeros(0),
}


# A buffer that transformers once saved among the weights of Llama.
EXTRA_LLAMA = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(8, dtype=torch.float32)}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BASES = {
    "qwen3_next": (
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "mlp_only_layers": [2],
        },
        EXTRA,
        EVERYWHERE,
    ),
    "llama": ({"num_hidden_layers": 2, "tie_word_embeddings": True}, EXTRA_LLAMA, LINEARS),
}


def write_base(folder: Path, family: str) -> Path:
    changes, extra, _ = BASES[family]
    write_checkpoint(folder, model_type=family, **changes)
    path = folder / "model.safetensors"
    save_file(load_file(path) | extra, path, {"format": "pt"})
    return folder


def write_recipe(folder: Path, base: Path, targets: tuple[str, ...]) -> Path:
    turns = [(f"w{i} w{i + 1}", f"w{i + 2} w{i} w{i}") for i in range(6, 36)]
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in turns
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "output_dir": str(folder / "run"),
        "model": {"path": str(base), "dtype": "float32"},
        "lora": {"r": 4, "lora_alpha": 10, "target_modules": list(targets)},
        "data": {"path": str(folder / "chats.jsonl"), "max_length": 40},
        "optim": {"learning_rate": 0.02, "lr_scheduler_type": "constant"},
        "train": {"max_steps": 3, "batch_size": 4},
        "save": {"merged": True},
        "log": {"every": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def raw_tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> type, shape and bytes of every tensor, from the format's definition."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (start + offset for offset in entry["data_offsets"])
                tensors[name] = (entry["dtype"], tuple(entry["shape"]), content[begin:end])
    return tensors


def adapted_tensors(adapter: Path) -> set[str]:
    with safe_open(adapter / "adapter_model.safetensors", "np") as file:
        modules = {key.split(".lora_")[0] for key in file.keys()}  # noqa: SIM118
    return {module.removeprefix("base_model.model.") + ".weight" for module in modules}


@pytest.mark.parametrize("family", BASES)
def test_adapter_and_merged_folder_of_a_run(tmp_path, family):
    base = write_base(tmp_path / "base", family)
    _, extra, targets = BASES[family]
    result = lora_tune.train(str(write_recipe(tmp_path, base, targets)))
    losses = [row["loss"] for row in result.rows if "loss" in row]
    assert len(losses) == 3
    assert losses[-1] < losses[0]

    # Any other warning, as of missing or unexpected keys, is an error.
    wrapped = peft.PeftModel.from_pretrained(read_theirs(base), result.adapter).eval()
    model, _ = lora_tune.load_model(base, dtype="float32")
    lora_tune.load_adapter(model, result.adapter)
    tokens = random_tokens(2, 67)
    ours = our_logits(model, tokens)
    before = their_logits(read_theirs(base), tokens)
    assert np.abs(ours - before).max() > 0.1
    np.testing.assert_allclose(their_logits(wrapped, tokens), ours, atol=TOLERANCE, rtol=0)
    merged = their_logits(read_theirs(result.merged), tokens)
    np.testing.assert_allclose(merged, ours, atol=TOLERANCE, rtol=0)

    old, new = raw_tensors(base), raw_tensors(result.merged)
    assert set(new) == set(old) >= set(extra)
    changed = {name for name in old if new[name] != old[name]}
    assert changed == adapted_tensors(result.adapter)
    assert {name for name in old if new[name][:2] != old[name][:2]} == set()
