# SPDX-License-Identifier: Apache-2.0
"""What is refused before any weight is read, by the recipe key that it is about."""

import json

import numpy as np
import pytest
from hf_cases import CONFIG, write_folder

from lora_tune import build, build_data, recipe
from lora_tune.errors import InputError
from lora_tune.models.decoder import DecoderOptions


def loaded(folder, *overrides):
    path = folder / "recipe.yaml"
    path.write_text(
        f"output_dir: {folder}/run\nmodel: {{path: {folder}}}\ndata: {{path: a.jsonl}}\n"
        "train: {max_steps: 1}\n"
    )
    return recipe.load(str(path), overrides)


def check(folder, *overrides, **changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    source = build.find_source(str(folder), weights=False)
    model = build.abstract_model(source, DecoderOptions())
    build.check_size(loaded(folder, *overrides), model, None)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.max_length=100000000", r"data\.max_length \(100000000\) and train\.batch_size need"),
        ("train.batch_size=1000000000", r"data\.max_length \(2048\) and train\.batch_size need"),
        ("eval.batch_size=1000000000", r"data\.max_length \(2048\) and eval\.batch_size need"),
    ],
)
def test_what_no_memory_can_hold_is_refused(tmp_path, monkeypatch, override, said):
    gigabyte = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 10**9}
    monkeypatch.setattr("os.sysconf", gigabyte.__getitem__)
    check(tmp_path)
    with pytest.raises(InputError, match=said):
        check(tmp_path, "data.eval_path=b.jsonl", override)


def test_the_estimate_is_that_of_the_layers_inputs(tmp_path, monkeypatch):
    """9 layers of width 16 in bfloat16, 8 rows of 1,000 tokens: 2,304,000 bytes."""
    sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 9 * 16 * 2 * 8 * 1000}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    check(tmp_path, "data.max_length=1000")
    with pytest.raises(InputError, match="need at least"):
        check(tmp_path, "data.max_length=1001")
    check(tmp_path, "data.max_length=1001", "train.gradient_accumulation_steps=2")


def test_a_sequence_has_no_more_tokens_than_the_model_has_positions(tmp_path):
    check(tmp_path, "data.max_length=64", max_position_embeddings=64)
    with pytest.raises(InputError, match=r"\(65\) is more than the .*max_position_embeddings \(64"):
        check(tmp_path, "data.max_length=65", max_position_embeddings=64)


def remove(folder, *names):
    for name in names:
        (folder / name).unlink()


def test_a_folder_that_is_not_complete_names_all_that_is_missing(tmp_path):
    folder = write_folder(tmp_path / "model", {"x": np.zeros(1, np.float32)})
    build.find_source(str(folder))
    remove(folder, "tokenizer.json")
    with pytest.raises(InputError, match=r"model lacks a tokenizer \(tokenizer\.json\); exp"):
        build.find_source(str(folder))
    remove(folder, "config.json", "model.safetensors")
    said = r"lacks a configuration \(config\.json\), weights \(model\.safetensors .*, a tokenizer"
    with pytest.raises(InputError, match=said):
        build.find_source(str(folder))
    assert build.find_source(str(folder), weights=False).folder == folder


def test_what_a_folder_is_instead_of_a_model(tmp_path):
    (tmp_path / "run" / "merged").mkdir(parents=True)
    (tmp_path / "run" / "merged" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"did you mean .*/run/merged\?"):
        build.find_source(str(tmp_path / "run"))
    (tmp_path / "run" / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="it holds an adapter: give its base model"):
        build.find_source(str(tmp_path / "run"))
    folder = write_folder(tmp_path / "old", {"x": np.zeros(1, np.float32)})
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"only safetensors .*, not pytorch_model\.bin"):
        build.find_source(str(folder))
    with pytest.raises(InputError, match=r"it is a file, name its folder .*/old"):
        build.find_source(str(folder / "config.json"))
    with pytest.raises(InputError, match=r"write Qwen/Qwen3-Next"):
        build.find_source("https://huggingface.co/Qwen/Qwen3-Next/tree/main")


def test_a_tokenizer_and_a_template_are_named_by_their_keys(tmp_path):
    folder = write_folder(tmp_path / "model", {"x": np.zeros(1, np.float32)})
    source = build.find_source(str(folder))
    with pytest.raises(InputError, match=r"^model\.path: no tokenizer can be loaded"):
        build_data.make_tokenizer(loaded(folder), source, 40)
    shipped = build.find_source("lora_tune:tiny-qwen3-next")
    with pytest.raises(InputError, match=r"^model\.chat_template: .*absent\.jinja"):
        build_data.make_tokenizer(loaded(folder, "model.chat_template=absent.jinja"), shipped, 1024)


def test_the_fingerprint_has_the_keys_of_the_recipe(tmp_path):
    source = build.find_source(str(write_folder(tmp_path, {"x": np.zeros(1, np.float32)})))
    first = build.fingerprint(loaded(tmp_path), source)
    for override in ("lora.r=3", "optim.adam_beta2=0.5", "train.seed=7", "model.dtype=float32"):
        other = build.fingerprint(loaded(tmp_path, override), source)
        key, _ = override.split("=")
        assert {k for k in first | other if first.get(k) != other.get(k)} == {key}
    assert build.fingerprint(loaded(tmp_path, "lora=null"), source)["lora"] == "null"


def test_an_answer_has_no_more_tokens_than_the_model_has_positions(tmp_path):
    fits = "data.max_length=64", "data.eval_path=b.jsonl", "eval.max_new_tokens=65"
    check(tmp_path, *fits, max_position_embeddings=64)  # no answers are asked for
    with pytest.raises(InputError, match=r"eval\.max_new_tokens \(65\) is more than the model's"):
        check(tmp_path, *fits, "eval.num_samples=1", max_position_embeddings=64)
