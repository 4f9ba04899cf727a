# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-Next, its checkpoint on disk, and random adapters, for the tests of lora_tune.hf."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from lora_tune.hf.adapters import factor_shapes
from lora_tune.hf.table import Leaf, base_params, bind
from lora_tune.lora.config import LoraConfig
from lora_tune.lora.targets import adaptable_modules, resolve, stack_targets
from lora_tune.models import FAMILIES
from lora_tune.models.decoder import Decoder, DecoderOptions

FAMILY = FAMILIES["qwen3_next"]
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 9,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "mlp_only_layers": [8],
    "tie_word_embeddings": False,
}
# Every kind of projection: attention, linear attention, shared and routed experts, dense.
EVERYWHERE = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
    *("gate_proj", "up_proj", "down_proj", "shared_expert_gate"),
)


def tiny(*, psa: int = 0, scan: bool = True, **changes: Any) -> Any:
    """An abstract model; `changes` go to the configuration."""
    options = DecoderOptions(param_scan_axis=psa, scan_layers=scan)
    return Decoder(FAMILY, FAMILY.read_config(CONFIG | changes), options)


def leaves_of(model: Any) -> tuple[Leaf, ...]:
    return bind(FAMILY, model)


def random_tensors(model: Any, dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """A Hugging Face state dict with a distinct value everywhere."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(leaf.hf_shape).astype(dtype)
        for leaf in leaves_of(model)
        for name in leaf.names.ravel()
    }


def write_folder(folder: Path, tensors: dict[str, np.ndarray], *, shards: int = 1) -> Path:
    """A model folder as the hub has it: configuration, tokenizer file, weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = sorted(tensors)
    weights = {}
    for k in range(shards):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in names[k::shards]}, folder / file, {"format": "pt"})
        weights |= dict.fromkeys(names[k::shards], file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def random_adapters(leaves: tuple[Leaf, ...], lora: LoraConfig, seed: int = 1) -> dict[Any, Any]:
    """Adapters as a trained model would hold them: padded ranks and untargeted layers are zero."""
    rng = np.random.default_rng(seed)
    by_path = {leaf.path: leaf for leaf in leaves}
    arrays = {}
    for path, stack in stack_targets(leaves, resolve(lora, adaptable_modules(leaves))).items():
        leaf = by_path[path]
        a, b = (rng.standard_normal(s).astype(np.float32) for s in factor_shapes(leaf, stack.r))
        for cell in np.ndindex(leaf.names.shape):
            r, place = stack.ranks[cell[: stack.ranks.ndim]], leaf.place(cell)
            a[place][:, r:] = 0
            b[place][r:] = 0
        named = {"kernel_lora_a": a, "kernel_lora_b": b, "kernel_lora_scale": stack.scales}
        arrays |= {(*path[:-1], name): array for name, array in named.items()}
    return arrays


def deltas(leaves: tuple[Leaf, ...], arrays: dict[Any, Any]) -> dict[str, np.ndarray]:
    """Hugging Face name -> update of the weight, by a plain loop in float64."""
    found = {}
    for leaf in leaves:
        base = leaf.path[:-1]
        if (*base, "kernel_lora_a") not in arrays:
            continue
        a, b, scale = (arrays[(*base, f"kernel_lora_{n}")] for n in ("a", "b", "scale"))
        for cell in np.ndindex(leaf.names.shape):
            place = leaf.place(cell)
            update = a[place].astype(np.float64) @ b[place].astype(np.float64)
            factor = scale[cell[: scale.ndim]]
            if factor:
                found[leaf.names[cell]] = (factor * update).T
    return found


def values(model: nnx.Module) -> dict[Any, Any]:
    return {path: variable.get_value() for path, variable in base_params(model).items()}
