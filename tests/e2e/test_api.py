# SPDX-License-Identifier: Apache-2.0
"""The Python interface as the README describes it, and what a whole run gives back."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from small_run import losses_of, rows_of, tree_of, write_chats, write_model, write_recipe

import lora_tune
from lora_tune import (
    LoraConfig,
    add_lora,
    build,
    build_data,
    build_evaluation,
    cli,
    load_adapter,
    load_model,
    save_adapter,
    save_merged,
)
from lora_tune import recipe as recipes
from lora_tune.api import load_run
from lora_tune.errors import InputError
from lora_tune.run import Result
from lora_tune.sharding import make_mesh
from lora_tune.training.state import split_model

pytestmark = pytest.mark.usefixtures("compile_fast")
IGNORED = "mtp.norm.weight"
LORA = LoraConfig(r=3, lora_alpha=6, target_modules=r".*\.(q_proj|in_proj_qkvz|up_proj)")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tensor that the model ignores and every export has to carry."""
    folder = write_model(tmp_path_factory.mktemp("api") / "model")
    tensors = load_file(folder / "model.safetensors") | {IGNORED: np.arange(3, dtype=np.float16)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 200, (4, 9)), jnp.int32)


@nnx.jit
def forward(model: Any, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def logits_of(model: Any, tokens: jax.Array) -> np.ndarray:
    return np.asarray(forward(model, tokens), np.float32)


def trained(model: Any, seed: int = 1) -> Any:
    """Gives every B, and so the adapter, something to say."""
    rng = np.random.default_rng(seed)
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.LoRAParam) and path[-1] == "kernel_lora_b":
            value = variable.get_value()
            variable.set_value(jnp.asarray(rng.normal(size=value.shape), value.dtype))
    return model


@pytest.fixture(scope="module")
def reference(model_folder: Path, tokens: jax.Array) -> np.ndarray:
    model, _ = load_model(model_folder, dtype="float32")
    logits = logits_of(model, tokens)
    assert logits.shape == (4, 9, model.config.vocab_size)
    assert np.std(logits) > 0.01
    return logits


def test_load_model_gives_model_and_tokenizer(
    model_folder: Path, tokens: jax.Array, reference: np.ndarray
) -> None:
    model, tokenizer = load_model(str(model_folder))
    arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {array.dtype for array in arrays} == {jnp.dtype("bfloat16")}, "the default type"
    assert tokenizer.decode(tokenizer("Hello")["input_ids"]) == "Hello"
    with pytest.raises(InputError, match="expected 'bfloat16' or 'float32'"):
        load_model(model_folder, dtype="float16")

    # Routing may differ for a token whose experts are nearly equal: a few tokens, not the many.
    differs = np.abs(logits_of(model, tokens) - reference).max(axis=-1) / np.abs(reference).max()
    assert 0 < np.median(differs) < 0.05


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"expert": 4, "fsdp": 2}])
def test_a_mesh_changes_where_weights_lie_not_what_they_say(
    model_folder: Path, tokens: jax.Array, reference: np.ndarray, sizes: dict[str, int]
) -> None:
    mesh = make_mesh(**sizes)
    model, _ = load_model(model_folder, dtype="float32", mesh=mesh)
    arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert all(len(array.sharding.device_set) == 8 for array in arrays)
    assert any(array.addressable_shards[0].data.size < array.size for array in arrays)
    np.testing.assert_allclose(logits_of(model, tokens), reference, rtol=0, atol=1e-4)


def test_add_lora_is_in_place_and_changes_nothing_yet(
    model_folder: Path, tokens: jax.Array, reference: np.ndarray
) -> None:
    model, _ = load_model(model_folder, dtype="float32")
    before = {id(array) for array in jax.tree.leaves(nnx.state(model))}
    adapted = add_lora(model, LORA, seed=4)
    assert adapted is model
    base = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    assert {id(array) for array in jax.tree.leaves(base)} == before, "the very same arrays"
    adapters = jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
    assert {array.dtype for array in adapters} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(logits_of(model, tokens), reference)
    with pytest.raises(InputError, match="already has adapters"):
        add_lora(model, LORA)


def test_the_seed_decides_the_adapters(model_folder: Path) -> None:
    first, again, other = (
        nnx.state(add_lora(load_model(model_folder)[0], LORA, seed=seed), nnx.LoRAParam)
        for seed in (4, 4, 5)
    )
    same = jax.tree.map(lambda a, b: bool((a == b).all()), first, again)
    assert all(jax.tree.leaves(same))
    differ = jax.tree.map(lambda a, b: bool((a == b).all()), first, other)
    assert not all(jax.tree.leaves(differ))


def test_an_adapter_goes_out_and_comes_back(
    model_folder: Path, tokens: jax.Array, reference: np.ndarray, tmp_path: Path
) -> None:
    model = trained(add_lora(load_model(model_folder, dtype="float32")[0], LORA))
    logits = logits_of(model, tokens)
    assert np.abs(logits - reference).max() > 0.01
    config = save_adapter(model, tmp_path / "first")
    assert config == json.loads((tmp_path / "first" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_folder)

    fresh, _ = load_model(model_folder, dtype="float32")
    assert load_adapter(fresh, tmp_path / "first") is fresh
    np.testing.assert_array_equal(logits_of(fresh, tokens), logits)
    save_adapter(fresh, tmp_path / "second")
    weights = [tmp_path / name / "adapter_model.safetensors" for name in ("first", "second")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_an_adapter_is_merged(
    model_folder: Path, tokens: jax.Array, reference: np.ndarray, tmp_path: Path
) -> None:
    model = trained(add_lora(load_model(model_folder, dtype="float32")[0], LORA))
    report = save_merged(model, tmp_path / "merged")
    before, after = (
        load_file(f / "model.safetensors") for f in (model_folder, tmp_path / "merged")
    )
    changed = [name for name in before if before[name].tobytes() != after[name].tobytes()]
    assert list(before) == list(after)
    assert (report.merged, report.untouched) == (len(changed), len(before) - len(changed))
    assert 0 < len(changed) < len(before)
    merged, tokenizer = load_model(tmp_path / "merged", dtype="float32")
    assert tokenizer.chat_template
    np.testing.assert_allclose(
        logits_of(merged, tokens), logits_of(model, tokens), rtol=0, atol=1e-4
    )


def test_what_needs_adapters_says_so(model_folder: Path, tmp_path: Path) -> None:
    model, _ = load_model(model_folder)
    for save in (save_adapter, save_merged):
        with pytest.raises(InputError, match="the model has no adapters; add_lora or load_adapter"):
            save(model, tmp_path / "out")
    with pytest.raises(InputError, match="untrained"):
        save_adapter(add_lora(model, LORA), tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def recipe(model_folder: Path) -> Path:
    folder = model_folder.parent
    chats = write_chats(folder / "chats.jsonl", 40)
    held_out = write_chats(folder / "held_out.jsonl", 7, first=50)
    return write_recipe(
        folder / "recipe.yaml",
        model=model_folder,
        chats=chats,
        data={"eval_path": str(held_out)},
        eval={"num_samples": 3, "samples_every": 3, "max_new_tokens": 6},
    )


SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_ThisIsNoRealTokenButLooksLikeOne",
    "MY_SERVICE_PASSWORD": "correct-horse-battery-staple",
}


@pytest.fixture(scope="module")
def run(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One run with everything on, wandb and secrets in the environment included."""
    folder = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        return lora_tune.train(
            str(recipe),
            [
                f"output_dir={folder}",
                "log.report_to=[wandb, tensorboard]",
                "save.merged=true",
            ],
        )


def test_train_returns_what_the_run_left(run: Result) -> None:
    assert (run.steps, run.interrupted) == (4, None)
    assert (run.adapter, run.merged) == (run.output_dir / "adapter", run.output_dir / "merged")
    assert list(losses_of(run.rows)) == [1, 2, 3, 4]
    for row in run.rows:
        if "loss" in row:
            names = ("grad_norm", "learning_rate", "tokens", "trained_tokens", "tokens_per_second")
            assert all(row[name] > 0 for name in names)
    first, last = run.evaluations()
    assert (first["step"], last["step"]) == (0, 4)
    assert last["eval_loss"] < first["eval_loss"]
    assert {"eval_accuracy", "eval_token_accuracy", "eval_examples"} <= set(last)
    kept = {"adapter", "adapters.tsv", "checkpoints", "merged", "metrics.jsonl", "recipe.yaml"}
    kept |= {"lock.json", "report.html", "summary.json"}
    assert set(os.listdir(run.output_dir)) == kept | {"tensorboard", "wandb"}
    table = (run.output_dir / "adapters.tsv").read_text().splitlines()
    assert table[0].split("\t")[0] == "module"
    modules = {line.split("\t")[0] for line in table[1:]}
    keys = load_file(run.output_dir / "adapter" / "adapter_model.safetensors")
    assert {k.removeprefix("base_model.model.").split(".lora_")[0] for k in keys} == modules


def test_adapter_and_merged_folder_agree_with_the_evaluation(
    run: Result, model_folder: Path, tokens: jax.Array, reference: np.ndarray
) -> None:
    adapted = load_adapter(load_model(model_folder, dtype="float32")[0], run.adapter or "")
    merged, _ = load_model(run.merged or "", dtype="float32")
    logits = logits_of(adapted, tokens)
    assert np.abs(logits - reference).max() > 1e-3
    np.testing.assert_allclose(logits_of(merged, tokens), logits, rtol=0, atol=1e-4)


def test_samples_are_what_the_model_of_the_run_folder_answers(run: Result, recipe: Path) -> None:
    samples = {row["step"]: row["samples"] for row in run.rows if "samples" in row}
    assert list(samples) == [0, 3, 4]
    assert samples[0] != samples[4]
    held_out = (recipe.parent / "held_out.jsonl").read_text().splitlines()[:3]
    turns = [json.loads(line)["messages"] for line in held_out]
    for said, [question, expected, *_] in zip(samples[4], turns, strict=True):
        assert question["content"] in said["prompt"]
        assert said["expected"] == expected["content"]

    model, tokenizer = load_run(run.output_dir)
    answers = lora_tune.generate(model, tokenizer, [t[:1] for t in turns], max_new_tokens=6)
    assert [said["answer"] for said in samples[4]] == [answer.strip() for answer in answers]


def test_a_run_folder_is_loaded_with_what_it_holds(
    run: Result, tokens: jax.Array, tmp_path: Path
) -> None:
    adapted = logits_of(load_run(run.output_dir)[0], tokens)
    for name in ("recipe.yaml", "merged"):
        copy = shutil.copytree if name == "merged" else shutil.copyfile
        copy(run.output_dir / name, tmp_path / name)
    merged, _ = load_run(tmp_path)
    assert not hasattr(merged, "adapter")
    np.testing.assert_allclose(logits_of(merged, tokens), adapted, rtol=0, atol=1e-4)
    assert load_run(tmp_path, ["model.dtype=bfloat16"])[0].options.dtype == jnp.bfloat16

    shutil.rmtree(tmp_path / "merged")
    with pytest.raises(InputError, match="has neither adapter/ nor merged/, which a run writes at"):
        load_run(tmp_path)
    (tmp_path / "recipe.yaml").unlink()
    with pytest.raises(InputError, match=r"is no run folder: there is no recipe\.yaml in it"):
        load_run(tmp_path)


def test_no_file_of_a_run_learns_a_secret(run: Result) -> None:
    files = [path for path in run.output_dir.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert any(path.name.startswith("events.out.tfevents") for path in files)
    for path in files:
        content = path.read_bytes()
        for secret in SECRETS.values():
            assert secret.encode() not in content, path
    assert any(b"learning_rate" in path.read_bytes() for path in files), "the recipe is in it"


def test_the_report_says_how_it_ended_and_what_came_of_it(run: Result) -> None:
    page = (run.output_dir / "report.html").read_text(encoding="utf-8")
    assert "Finished after step 4 of 4" in page
    assert page.count("<svg") >= 6
    for words in ("Answers before and after", "vllm serve", "PeftModel", "q_proj", "jaxlib"):
        assert words in page
    [figure] = [row["host_rss_bytes"] for row in run.rows if "loss" in row and row["step"] == 4]
    assert figure > 100e6


def test_a_lock_holds_another_run_to_what_it_says(
    run: Result, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Path(shutil.copyfile(recipe, tmp_path / "own.yaml"))
    words = [f"recipe={own}", f"output_dir={tmp_path / 'run'}", "save.merged=true", "locked=true"]
    assert cli.main(words) == 2
    assert "locked=true needs a lock file, and there is neither" in capsys.readouterr().err
    shutil.copyfile(run.output_dir / "lock.json", tmp_path / "own.lock.json")
    assert cli.main([*words, "train.seed=9", "data.max_samples=20"]) == 2
    err = capsys.readouterr().err
    for said in ("data.train.fingerprint was", "data.train.seed was 3, is 9", "recipe.data.max_s"):
        assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert cli.main(words) == 0
    assert rows_of(tmp_path / "run") == rows_of(run.output_dir)


def test_the_saved_recipe_runs_again_as_it_is(run: Result, tmp_path: Path) -> None:
    saved = shutil.copyfile(run.output_dir / "recipe.yaml", tmp_path / "recipe.yaml")
    override = [f"output_dir={tmp_path / 'again'}", "log.report_to=none"]
    again = lora_tune.train(str(saved), override)
    assert rows_of(again.output_dir) == rows_of(run.output_dir)
    assert tree_of(again.output_dir / "adapter") == tree_of(run.output_dir / "adapter")


def evaluation_of(recipe: Path, *overrides: str) -> dict[str, float]:
    """What a run would find before its first step."""
    loaded = recipes.load(str(recipe), ["output_dir=unused", *overrides])
    source = build.find_source(loaded.model.path)
    model = build.make_model(loaded, source, None)
    tokenizer = build_data.make_tokenizer(loaded, source, model.config.vocab_size)
    data, split = build_data.make_data(loaded, tokenizer), split_model(model)
    evaluate = build_evaluation.make_evaluation(loaded, split, data, None)
    assert evaluate is not None
    return evaluate(split.trainable, split.frozen)


def assert_same_evaluation(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found["eval_examples"] == expected["eval_examples"] == 7
    for name in ("eval_loss", "eval_accuracy", "eval_token_accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


def test_evaluation_does_not_depend_on_batches_or_padding(recipe: Path, run: Result) -> None:
    for override in ("eval.batch_size=1", "eval.batch_size=16", "data.max_length=100"):
        assert_same_evaluation(evaluation_of(recipe, override), run.evaluations()[0])


def test_a_run_starts_from_the_adapter_of_another(recipe: Path, run: Result) -> None:
    """With a dropout of its own, which evaluation knows nothing of."""
    start = [f"lora.adapter_path={run.adapter}", "lora.lora_dropout=0.25"]
    loaded = recipes.load(str(recipe), ["output_dir=unused", *start])
    model = build.make_model(loaded, build.find_source(loaded.model.path), None)
    assert model.adapter.config.lora_dropout == 0.25
    assert_same_evaluation(evaluation_of(recipe, *start), run.evaluations()[-1])


def test_lora_null_trains_and_writes_every_parameter(
    recipe: Path, model_folder: Path, tmp_path: Path
) -> None:
    result = lora_tune.train(str(recipe), [f"output_dir={tmp_path}", "lora=null"])
    assert (result.adapter, result.merged) == (None, tmp_path / "merged")
    assert not (tmp_path / "adapters.tsv").exists()
    before, after = (
        load_file(f / "model.safetensors") for f in (model_folder, tmp_path / "merged")
    )
    assert set(before) == set(after)
    assert before.pop(IGNORED).tobytes() == after[IGNORED].tobytes()
    same = [name for name in before if np.array_equal(before[name], after[name])]
    # An expert that no token was sent to stays as it was.
    assert all(".mlp.experts." in name for name in same)
    assert len(same) < len(before) / 4
    load_model(tmp_path / "merged")
