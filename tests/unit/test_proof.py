# SPDX-License-Identifier: Apache-2.0
"""What the proof says of files, without torch."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hf_cases import (
    EVERYWHERE,
    FAMILY,
    deltas,
    leaves_of,
    random_adapters,
    random_tensors,
    tiny,
    write_folder,
)

from lora_tune.hf.fused import Pair
from lora_tune.hf.peft import adapter_pairs, save_adapter
from lora_tune.hf.save import save_merged
from lora_tune.lora.config import LoraConfig
from lora_tune.proof import merged, serving

LAYERS = {"num_hidden_layers": 2, "full_attention_interval": 2, "mlp_only_layers": []}
LORA = LoraConfig(r=2, lora_alpha=3, target_modules=EVERYWHERE)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A bfloat16 base, adapters on all of it, and the two merged."""
    folder = tmp_path_factory.mktemp("proof")
    leaves = leaves_of(tiny(**LAYERS))
    tensors = random_tensors(tiny(**LAYERS), ml_dtypes.bfloat16)
    tensors["mtp.norm.weight"] = np.ones(3, np.float32)
    base = write_folder(folder / "base", tensors)
    arrays = random_adapters(leaves, LORA)
    report = save_merged(arrays, leaves, FAMILY, base, folder / "merged")
    pairs = adapter_pairs(arrays, leaves, LORA, model_type="qwen3_next")
    return folder, tensors, arrays, pairs, report


def test_rounding_and_changes_of_a_merge(case):
    folder, tensors, arrays, pairs, report = case
    found = merged.compare(folder / "base", folder / "merged", FAMILY, pairs)
    assert found.problems == []
    assert (found.changed, found.unchanged) == (report.merged, report.untouched)
    updates = deltas(leaves_of(tiny(**LAYERS)), arrays)
    exact = {name: tensors[name].astype(np.float64) + update for name, update in updates.items()}
    off = {n: e - e.astype(np.float32).astype(ml_dtypes.bfloat16) for n, e in exact.items()}
    largest = max(np.abs(each.astype(np.float64)).max() for each in off.values())
    norms = [
        np.sqrt(sum(np.square(each.astype(np.float64)).sum() for each in group.values()))
        for group in (off, updates)
    ]
    assert found.max_rounding == pytest.approx(largest, rel=1e-3)
    assert found.update_lost == pytest.approx(norms[0] / norms[1], rel=1e-3)
    planned = merged.compare(folder / "base", None, FAMILY, pairs)
    assert (planned.max_rounding, planned.changed) == (found.max_rounding, 0)


def test_each_wrong_tensor_of_a_merge_is_named(case, tmp_path):
    folder, tensors, *_, pairs, _ = case
    module = "model.layers.0.mlp.experts.1.up_proj"
    wrong = dict(tensors)  # nothing is merged here
    wrong["model.norm.weight"] = tensors["model.norm.weight"] * 2
    del wrong["mtp.norm.weight"]
    other = write_folder(tmp_path / "other", wrong)
    problems = merged.compare(folder / "base", other, FAMILY, pairs).problems
    assert len(problems) == len(pairs) + 2
    said = {problem.split(": ")[0]: problem for problem in problems}
    assert "not in other/" in said["mtp.norm.weight"]
    assert "was not trained" in said["model.norm.weight"]
    assert "more than one rounding of BF16" in said[f"{module}.weight"]


def test_servers_and_their_reasons(case, tmp_path):
    _, _, arrays, pairs, _ = case
    leaves = leaves_of(tiny(**LAYERS))
    where = {"model_type": "qwen3_next", "base": "owner/name"}
    config = save_adapter(arrays, leaves, LORA, tmp_path / "adapter", **where)
    assert serving.reasons_against(config, pairs, "qwen3_next") == {"vllm": [], "sglang": []}
    command = serving.vllm_command(config, tmp_path, None, takes=True)
    assert command is not None
    assert "serve owner/name --enable-lora --max-lora-rank 8" in command

    def reasons(pairs, config=config, model_type="qwen3_next"):
        return serving.reasons_against(config, pairs, model_type)

    one = next(iter(pairs))
    scaled = {**pairs, one: dataclasses.replace(pairs[one], scale=9.0)}
    for said in reasons(scaled).values():
        assert f"{one} has a scale of its own" in said[0]
    with_head = {**pairs, "lm_head": Pair(pairs[one].a, pairs[one].b, 1.5)}
    assert "lm_head is adapted" in reasons(with_head)["vllm"][0]
    assert (
        "above its largest, 512"
        in reasons(pairs, {**config, "rank_pattern": {"x": 600}})["vllm"][0]
    )
    assert "no layout" in reasons(pairs, model_type="llama")["vllm"][0]
    assert "fused experts" in reasons(pairs, model_type="qwen3_5_moe")["sglang"][0]
    assert serving.vllm_command(config, tmp_path, tmp_path / "m", takes=False) == (
        f"vllm serve {tmp_path / 'm'}"
    )
