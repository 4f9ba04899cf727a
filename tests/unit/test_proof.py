# SPDX-License-Identifier: Apache-2.0
"""What the proof says of files, without torch."""

import dataclasses
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from hf_cases import (
    CONFIG,
    EVERYWHERE,
    FAMILY,
    deltas,
    leaves_of,
    random_adapters,
    random_tensors,
    tiny,
    write_folder,
)
from safetensors.numpy import save_file

from lora_tune.errors import InputError
from lora_tune.hf.files import open_checkpoint
from lora_tune.hf.fused import Pair
from lora_tune.hf.peft import adapter_pairs, read_pairs, save_adapter
from lora_tune.hf.save import save_merged
from lora_tune.hf.table import bind
from lora_tune.lora.config import LoraConfig
from lora_tune.models import FAMILIES
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.proof import certificate, merged, serving
from lora_tune.proof.command import prove
from lora_tune.proof.cut import cut_adapter
from lora_tune.proof.part import Prover, Rows
from lora_tune.proof.windows import Window, cut_config, measure, plan_windows

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


def test_a_merge_that_is_not_finite_or_has_another_configuration_is_named(case, tmp_path):
    folder, *_, pairs, _ = case
    other = shutil.copytree(folder / "merged", tmp_path / "other")
    tensors = {name: t.array() for name, t in open_checkpoint(other).tensors.items()}
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors[name].flat[3] = np.nan
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    found = merged.compare(folder / "base", other, FAMILY, pairs)
    assert [problem.split(":")[0] for problem in found.problems] == [name]
    assert np.isnan(found.max_rounding)
    (other / "config.json").write_text(json.dumps(CONFIG | {"rms_norm_eps": 1e-3}))
    said = merged.compare(folder / "base", other, FAMILY, pairs).problems
    assert "other/config.json: is not that of the base" in said


def test_a_nan_in_logits_is_the_largest_and_no_match():
    logits = np.zeros((2, 3, 4), np.float32)
    logits[0, 1, 2] = np.nan
    rows = Rows(np.zeros((2, 3), np.int32), [3, 3], 0)
    assert np.isnan(rows.largest(logits))
    assert rows.largest(logits[::-1, :1]) == 0
    prover = Prover(None, rows, 1e-4, exact=True)
    infinite = np.full_like(logits, np.inf)
    assert prover._check("X", logits, np.zeros_like(logits)) == [
        "X computes logits that are not finite"
    ]
    assert prover._check("X", np.zeros_like(logits), infinite)
    assert not prover._check("X", np.ones_like(logits), np.ones_like(logits))


@pytest.mark.parametrize("word", ["tolerance=nan", "tolerance=0", "limit_gb=-1", "limit_gb=inf"])
def test_numbers_that_bound_nothing_are_refused(word, tmp_path):
    with pytest.raises(InputError, match=rf"{word.split('=')[0]} must be a finite number above 0"):
        prove([("run", str(tmp_path)), tuple(word.split("="))])


def test_windows_count_what_they_carry_and_leave_its_names(tmp_path):
    leaves = leaves_of(tiny())
    extra = {"vision.encoder.layers.0.w": np.ones((5, 7), np.float16), "mtp.x": np.ones(9)}
    carried = open_checkpoint(write_folder(tmp_path / "base", extra)).tensors.values()
    sizes = measure(leaves, [*carried])
    assert sizes.outside - measure(leaves).outside == 4 * 5 * 7
    window = Window((4, 7))
    text = "base_model.model.model.layers.1.x and vision_model.layers.1.y"
    said = "base_model.model.model.layers.7.x and vision_model.layers.1.y"
    assert window.outside(text, FAMILY.layer_prefix) == said


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


def covered(windows, layers, experts):
    """(layer, expert) of all windows, and how many of them there are."""
    held = [
        (layer, expert)
        for window in windows
        for layer in window.layers
        for expert in (range(experts) if window.experts is None else window.experts)
    ]
    return set(held), len(held)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3, 0.2, 0.12])
def test_windows_hold_every_layer_and_expert_once(share):
    leaves, sizes = leaves_of(tiny()), measure(leaves_of(tiny()))
    whole = Window(tuple(range(9)))
    total = sum(4 * int(np.prod(leaf.shape)) for leaf in leaves)
    assert sizes.of(whole, 4) == total
    windows, largest = plan_windows(CONFIG, FAMILY, leaves, share * total)
    assert largest == max(sizes.of(window, 4) for window in windows) <= share * total
    every = {(layer, expert) for layer in range(9) for expert in range(4)}
    assert covered(windows, 9, 4) == (every, len(every))
    kinds = FAMILY.read_config(CONFIG).layer_kinds()
    for window in windows:
        cut = FAMILY.read_config(cut_config(CONFIG, FAMILY, window))
        assert cut.layer_kinds() == tuple(kinds[i] for i in window.layers)


def test_whole_cycles_go_first_then_parts_of_experts():
    leaves, sizes = leaves_of(tiny()), measure(leaves_of(tiny()))

    def shapes(*windows):
        limit = max(sizes.of(window, 4) for window in windows)
        found, _ = plan_windows(CONFIG, FAMILY, leaves, limit)
        return [(len(window.layers), window.experts) for window in found]

    assert shapes(Window(tuple(range(8)))) == [(8, None), (1, None)]
    assert shapes(Window((0, 1, 2, 3))) == [(4, None), (4, None), (1, None)]
    half = [(4, range(0, 2)), (4, range(2, 4))]
    assert shapes(Window((0, 1, 2, 3), range(0, 2))) == [*half, *half, (1, None)]
    assert {layers for layers, _ in shapes(Window((0,)), Window((3,)))} == {1}
    with pytest.raises(InputError, match=r"the smallest models .* raise limit_gb"):
        plan_windows(CONFIG, FAMILY, leaves, 1000)


def test_layers_that_are_all_alike_are_cut_anywhere():
    family = FAMILIES["llama"]
    config = {"model_type": "llama", "num_hidden_layers": 7, "hidden_size": 128}
    model = Decoder(family, family.read_config(config), DecoderOptions())
    leaves = bind(family, model)
    limit = measure(leaves).of(Window((0, 1, 2)), 0)
    windows, _ = plan_windows(config, family, leaves, limit)
    assert [window.layers for window in windows] == [(0, 1, 2), (3, 4, 5), (6,)]


@pytest.mark.parametrize(
    ("model_type", "layers", "expected"),
    [
        ("gemma4_text", 7, [(0, 6), (1, 6), (2, 6), (3, 6), (4, 6), (5,), (6,)]),
        ("olmo_hybrid", 5, [(0, 3), (1, 3), (2, 3), (3, 4), (3, 4)]),
    ],
)
def test_a_layer_that_is_no_model_alone_has_company(model_type, layers, expected):
    family = FAMILIES[model_type]
    config = {"model_type": model_type, "num_hidden_layers": layers}
    config |= {"hidden_size_per_layer_input": 0} if model_type == "gemma4_text" else {}
    model = Decoder(family, family.read_config(config), DecoderOptions())
    leaves = bind(family, model)
    limit = max(measure(leaves).of(Window(pair), 0) for pair in expected)
    windows, _ = plan_windows(config, family, leaves, limit)
    assert [window.layers for window in windows] == expected


@pytest.mark.parametrize("fused", [False, True])
def test_an_adapter_is_cut_with_its_layers_and_experts(tmp_path, fused):
    lora = LoraConfig(r=2, target_modules=EVERYWHERE, rank_pattern={r"layers\.7\..*": 4})
    leaves = leaves_of(tiny())
    arrays = random_adapters(leaves, lora)
    save_adapter(
        arrays, leaves, lora, tmp_path / "a", model_type="qwen3_next", base="a/b", fused=fused
    )
    pairs = adapter_pairs(arrays, leaves, lora, model_type="qwen3_next")
    window = Window((4, 7), range(1, 4))
    assert cut_adapter(tmp_path / "a", tmp_path / "b", window, 4)
    config = cut_config(CONFIG, FAMILY, window)
    smaller = leaves_of(tiny(**config))
    found = read_pairs(tmp_path / "b", smaller, model_type="qwen3_next")
    for new, old in (
        ("0.mlp.experts.0.up_proj", "4.mlp.experts.1.up_proj"),
        ("1.mlp.experts.2.down_proj", "7.mlp.experts.3.down_proj"),
        ("1.self_attn.q_proj", "7.self_attn.q_proj"),
    ):
        cut, whole = found[f"model.layers.{new}"], pairs[f"model.layers.{old}"]
        assert np.array_equal(cut.a, whole.a)
        assert np.array_equal(cut.b, whole.b)
        assert cut.scale == whole.scale
    inside = [name for name in pairs if window.inside(name)]
    assert {window.inside(name) for name in inside} == set(found)
    assert {window.outside(name, FAMILY.layer_prefix) for name in found} == set(inside)
    few = LoraConfig(target_modules=("q_proj",), layers_to_transform=(3,))
    save_adapter(
        random_adapters(leaves, few), leaves, few, tmp_path / "f", model_type="qwen3_next", base="b"
    )
    path = tmp_path / "a" / "adapter_config.json"
    edited = json.loads(path.read_text()) | {"rank_pattern": None}
    del edited["alpha_pattern"]
    path.write_text(json.dumps(edited))
    assert cut_adapter(tmp_path / "a", tmp_path / "c", window, 4)
    assert not cut_adapter(tmp_path / "f", tmp_path / "none", window, 4)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "fields", [{"hidden_size_per_layer_input": 8}, {"num_kv_shared_layers": 2}], ids=list
)
def test_layers_that_share_are_not_taken_apart(fields):
    family = FAMILIES["gemma4_text"]
    config = {"model_type": "gemma4_text", "num_hidden_layers": 12}
    config |= {"hidden_size_per_layer_input": 0, **fields}
    model = Decoder(family, family.read_config(config), DecoderOptions())
    with pytest.raises(InputError, match=rf"cannot be proved apart \({next(iter(fields))}\)"):
        plan_windows(config, family, bind(family, model), 1e9)


def test_a_certificate_is_strict_json_whatever_was_found():
    found = {"worst": float("nan"), "rows": [1.5, float("inf")], "problems": ["x"]}
    assert json.loads(certificate._json(found)) == {
        "worst": "nan",
        "rows": [1.5, "inf"],
        "problems": ["x"],
    }
