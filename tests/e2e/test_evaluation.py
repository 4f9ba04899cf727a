# SPDX-License-Identifier: Apache-2.0
"""What a run says of held-out sets and of sources, against a plain loop over single documents."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_run import write_chats, write_model, write_recipe

from lora_tune import build, build_answers, build_data, build_evaluation, cli
from lora_tune import recipe as recipes
from lora_tune import trained as trained_of
from lora_tune.api import load_run
from lora_tune.export.notes import training_notes
from lora_tune.generation.prompts import stop_ids_of
from lora_tune.training.metrics import read_rows
from lora_tune.training.state import split_model

pytestmark = pytest.mark.usefixtures("compile_fast")
STEPS = 30
SMALL = {"num_hidden_layers": 2, "full_attention_interval": 2, "num_experts": 0}
SETS = {"near": ["near.jsonl"], "far": ["one.jsonl", "two.jsonl"]}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources to learn, one of them rare; two held-out sets, one of them of two files."""
    folder = tmp_path_factory.mktemp("evaluation")
    sizes = {"often": (30, 0), "rare": (3, 60), "near": (5, 100), "one": (4, 120), "two": (3, 140)}
    files = {
        name: str(write_chats(folder / f"{name}.jsonl", count, first=first))
        for name, (count, first) in sizes.items()
    }
    sets = [
        {"name": name, "path": [files[path.removesuffix(".jsonl")] for path in paths]}
        for name, paths in SETS.items()
    ]
    sets[0]["path"] = sets[0]["path"][0]
    return write_recipe(
        folder / "recipe.yaml",
        model=write_model(folder / "model", **SMALL),
        chats=folder,
        lora={"target_modules": ["q_proj"]},
        data={
            "path": [],
            "sources": [{"path": files[n], "name": n} for n in ("often", "rare")],
            "eval_sets": sets,
        },
    )


@pytest.fixture(scope="module")
def run_folder(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    words = [f"recipe={recipe}", f"output_dir={folder}", "lora=null", "log.every=1"]
    assert cli.main([*words, "optim.learning_rate=0.02", f"train.max_steps={STEPS}"]) == 0
    return folder


@pytest.fixture(scope="module")
def truth(recipe: Path, run_folder: Path) -> dict[str, float]:
    """Of the model that the run has written."""
    model, tokenizer = load_run(run_folder)
    loaded = recipes.load(str(recipe), ["output_dir=unused"])
    return by_loop(model, build_data.make_data(loaded, tokenizer), recipe.parent)


@nnx.jit
def forward(model: Any, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def scored(model: Any, data: build_data.Data) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Of each held-out document its source, losses and hits; what follows it is not seen."""
    assert data.held_out is not None
    for i in range(len(data.held_out)):
        document = data.held_out[i]
        tokens = np.zeros((1, 48), np.int32)
        tokens[0, : len(document.tokens)] = document.tokens
        logits = np.asarray(forward(model, jnp.asarray(tokens))[0], np.float64)
        targets = document.tokens[1:]
        rows = logits[: len(targets)]
        top = rows.max(-1)
        losses = top + np.log(np.exp(rows - top[:, None]).sum(-1)) - rows[range(len(rows)), targets]
        mask = document.mask[1:]
        source = int(np.searchsorted(np.cumsum(data.held_out.counts), i, side="right"))
        yield source, losses[mask], (rows.argmax(-1) == targets)[mask]


def by_loop(model: Any, data: build_data.Data, folder: Path) -> dict[str, float]:
    losses, hits = defaultdict[str, list](list), defaultdict[str, list](list)
    for source, loss, hit in scored(model, data):
        name, file = [("near", ""), ("far", "one"), ("far", "two")][source]
        parts = ["{}", f"{name}_{{}}"] + [f"{name}_{{}}/{folder}/{file}.jsonl"] * bool(file)
        for part in parts:
            losses[part].append(loss)
            hits[part].append(hit)
    return {
        f"eval_{part.format(kind)}": value
        for part in losses
        for kind, value in (
            ("loss", np.concatenate(losses[part]).mean()),
            ("token_accuracy", np.concatenate(hits[part]).mean()),
            ("accuracy", np.mean([hit.all() for hit in hits[part]])),
            ("examples", len(hits[part])),
        )
    }


def evaluated(recipe: Path, *overrides: str) -> dict[str, float]:
    """What a run finds before its first step."""
    loaded = recipes.load(str(recipe), ["output_dir=unused", *overrides])
    source = build.find_source(loaded.model.path)
    mesh = build.make_mesh(loaded.mesh)
    model = build.make_model(loaded, source, mesh)
    tokenizer = build_data.make_tokenizer(loaded, source, model.config.vocab_size)
    data, split = build_data.make_data(loaded, tokenizer), split_model(model)
    stop_ids = stop_ids_of(source.folder, tokenizer, chat=True)
    evaluate = build_evaluation.make_evaluation(loaded, split, data, mesh, stop_ids=stop_ids)
    assert evaluate is not None
    return evaluate(split.trainable, split.frozen)


def trained(run_folder: Path) -> list[str]:
    return ["lora=null", f"model.path={run_folder / 'merged'}"]


def assert_same(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_figures_are_those_of_documents_one_by_one(
    recipe: Path, run_folder: Path, truth: dict[str, float], rows: int, packing: bool
) -> None:
    words = [f"eval.batch_size={rows}", f"data.packing={str(packing).lower()}"]
    found = evaluated(recipe, *words, *trained(run_folder))
    assert len(truth) == 5 * 4
    assert 0 < truth["eval_accuracy"] < truth["eval_token_accuracy"] < 1
    assert len({value for name, value in truth.items() if "loss" in name}) == 5
    assert_same(found, truth)


def test_figures_do_not_depend_on_padding_or_devices(
    recipe: Path, run_folder: Path, truth: dict[str, float]
) -> None:
    words = trained(run_folder)
    assert_same(evaluated(recipe, *words, "data.max_length=100"), truth)
    sizes = ["mesh.fsdp=2", "mesh.sequence=2", "mesh.data=2"]
    assert_same(evaluated(recipe, *words, *sizes), truth)


def test_a_run_logs_and_draws_them(run_folder: Path, truth: dict[str, float]) -> None:
    last = [row for row in read_rows(run_folder / "metrics.jsonl") if "eval_loss" in row][-1]
    assert_same(last, {**truth, "step": STEPS})
    page = (run_folder / "report.html").read_text(encoding="utf-8")
    for title in ("Evaluation loss, far", "Evaluation loss, far/", "Training loss, rare"):
        assert title in page


def test_losses_of_sources_make_up_the_loss(recipe: Path, run_folder: Path) -> None:
    """With the trained tokens that the data has of each; a source that is not there has none."""
    loaded = recipes.load(str(run_folder / "recipe.yaml"), ["output_dir=unused"])
    source = build.find_source(loaded.model.path)
    tokenizer = build_data.make_tokenizer(loaded, source, None)
    dataset = build_data.make_data(loaded, tokenizer).train
    rows = [row for row in read_rows(run_folder / "metrics.jsonl") if "loss" in row]
    alone = 0
    for row in rows:
        ids = [i for ids in dataset.example_ids(row["step"] - 1) for i in ids]
        counts = {"often": 0, "rare": 0}
        for i in ids:
            counts["often" if i < 30 else "rare"] += dataset.examples[i].trained_tokens
        assert {n for n, count in counts.items() if count} == {
            key.removeprefix("loss/") for key in row if key.startswith("loss/")
        }
        total = sum(row.get(f"loss/{name}", 0) * count for name, count in counts.items())
        assert row["loss"] == pytest.approx(total / sum(counts.values()), rel=1e-6)
        alone += not counts["rare"]
    assert 0 < alone < len(rows), "some steps have a rare example, some have none"


def test_one_set_alone_has_no_other_figures(recipe: Path) -> None:
    path = json.dumps(str(recipe.parent / "near.jsonl"))
    found = evaluated(recipe, "data.eval_sets=[]", f"data.eval_path={path}")
    kinds = ("loss", "token_accuracy", "accuracy", "examples")
    assert set(found) == {f"eval_{kind}" for kind in kinds}


def written(model: Any, prompt: list[int], stop_id: int, most: int = 12) -> list[int]:
    """Greedy decoding without a cache, one whole forward pass a token."""
    answer: list[int] = []
    while len(answer) < most:
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(prompt) + len(answer)] = prompt + answer
        logits = forward(model, jnp.asarray(tokens))[0, len(prompt) + len(answer) - 1]
        answer.append(int(jnp.argmax(logits)))
        if answer[-1] == stop_id:
            break
    return answer


def test_exact_matches_are_those_of_greedy_decoding(recipe: Path, run_folder: Path) -> None:
    """Up to the token that ends the turn, over the first questions of each set."""
    model, tokenizer = load_run(run_folder)
    loaded = recipes.load(str(recipe), ["output_dir=unused"])
    data = build_data.make_data(loaded, tokenizer)
    assert data.held_out is not None
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    right: dict[str, list[bool]] = {"near": [], "far": []}
    for i in range(len(data.held_out)):
        example = data.held_out[i]
        tokens, first = example.tokens.tolist(), int(np.argmax(example.mask))
        expected = tokens[first : tokens.index(end, first) + 1]
        right["near" if i < 5 else "far"].append(written(model, tokens[:first], end) == expected)
    assert 0 < np.mean(right["near"] + right["far"]) < 1
    words = [*trained(run_folder), "eval.num_exact_match={}"]
    for most, rows in ((3, 2), (99, 3), (99, 8)):
        asked = [word.format(most) for word in words]
        found = evaluated(recipe, *asked, f"eval.batch_size={rows}")
        parts = {name: answers[:most] for name, answers in right.items()}
        parts[""] = parts["near"] + parts["far"]
        for name, answers in parts.items():
            assert found[f"eval_{name}_exact_match".replace("__", "_")] == np.mean(answers)


def test_few_questions_cost_few_examples_and_no_more_memory_than_a_batch(
    recipe: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_run(run_folder)[1]
    loaded = recipes.load(str(recipe), ["output_dir=unused", "eval.num_exact_match=3"])
    data = build_data.make_data(loaded, tokenizer)
    every = build_answers.matched_questions(loaded.eval, data)
    assert [question.eval_set for question in every] == ["near"] * 3 + ["far"] * 3
    taken: list[int] = []
    take = type(data.held_out).__getitem__
    monkeypatch.setattr(
        type(data.held_out), "__getitem__", lambda held, i: taken.append(i) or take(held, i)
    )
    assert build_answers.matched_questions(loaded.eval, data) == every
    assert taken == [0, 1, 2, 5, 6, 7]

    rooms: list[int] = []

    def give_up(graphdef: Any, weights: Any, prompts: list, **options: Any) -> Iterator[np.ndarray]:
        assert len(prompts) <= options["batch"]
        rooms.append(options["batch"] * options["cache_size"])
        return iter([])

    monkeypatch.setattr(build_answers.engine, "steps", give_up)
    for tokens, batches in ((10**6, 1), (128, 3), (1, 6)):
        rooms.clear()
        split: Any = SimpleNamespace(graphdef=None)
        options = {"rows": 8, "tokens": tokens, "stop_ids": [0]}
        build_answers.make_matching(loaded.eval, split, data, **options)({})
        assert len(rooms) == batches
        assert max(rooms) <= max(tokens, 64), "64 slots are what one row takes"


def test_an_answer_is_wrong_that_does_not_end_where_it_should() -> None:
    columns = [[5, 5, 5, 5, 7], [6, 6, 6, 8, -1], [-1, 6, -1, 9, -1], [-1, -1, -1, 9, -1]]
    wanted = [[5, 6, -1], [5, 6, -1], [5, 6], [5, 8], [5, 6, -1]]
    steps = iter(np.array(columns))
    assert build_answers._right(steps, wanted) == [True, False, True, True, False]
    assert len(list(steps)) == 1, "no more steps than the longest wanted"
    steps = iter(np.array([[1], [2]]))
    assert build_answers._right(steps, [[5, 6]]) == [False]
    assert len(list(steps)) == 1, "given up"
    assert build_answers._wanted([4, 5, 9, 3], [8, 9]) == [4, 5, -1]


def test_sets_without_a_question_are_refused(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "no question in here"}\n')
    words = [f"recipe={recipe}", f"output_dir={tmp_path / 'run'}", "eval.num_exact_match=2"]
    assert cli.main([*words, "data.eval_sets=[]", f"data.eval_path={path}"]) == 2
    assert not (tmp_path / "run").exists()


def test_what_is_exported_is_the_best_checkpoint(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """That of a run which ended there; scripted losses rise after step 2, and end the run at 6."""
    common = [f"recipe={recipe}", "optim.lr_scheduler_type=constant", "data.eval_sets=[]"]
    common.append(f"data.eval_path={recipe.parent / 'near.jsonl'}")
    assert cli.main([*common, f"output_dir={tmp_path / 'short'}", "train.max_steps=2"]) == 0
    told = iter([9.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr(
        build_evaluation, "make_evaluation", lambda *_, **__: lambda *_: {"eval_loss": next(told)}
    )
    best = ["train.load_best_model_at_end=true", "train.early_stopping_patience=2"]
    words = [*common, *best, f"output_dir={tmp_path / 'long'}", "train.max_steps=40"]
    capsys.readouterr()
    assert cli.main([*words, "eval.every=2", "save.keep=1"]) == 0
    said = "what is exported is of step 2, the best by eval_loss"
    out = capsys.readouterr().out
    assert said in out
    # Of the five held-out conversations four are short enough to be the same again.
    assert "warning: 4 of 5 held-out examples are training examples too" in out
    kept = {path.name for path in (tmp_path / "long" / "checkpoints").iterdir()}
    assert kept == {"2", "6"}
    page = (tmp_path / "long" / "report.html").read_text(encoding="utf-8")
    assert "Finished after step 6 of 40: 2 evaluations in a row were no better" in page
    assert said in page

    weights = "adapter/adapter_model.safetensors"
    expected = (tmp_path / "short" / weights).read_bytes()
    assert (tmp_path / "long" / weights).read_bytes() == expected
    card = (tmp_path / "long" / "adapter" / "README.md").read_text(encoding="utf-8")
    assert "Step 2, the best by `eval_loss`." in card
    assert "the best by" not in (tmp_path / "short" / "adapter" / "README.md").read_text()

    assert cli.main(["export", f"run={tmp_path / 'long'}", f"to={tmp_path / 'out'}"]) == 0
    assert "step 2 of" in capsys.readouterr().out
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == expected
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "2 steps with lora-tune, the best of its checkpoints by `eval_loss`" in card
    # By a figure that no checkpoint has, none is called the best.
    run = trained_of.read(tmp_path / "long", ["train.metric_for_best_model=eval_accuracy"])
    assert (run.step, run.best_by) == (6, None)
    assert "6 steps with lora-tune, its newest checkpoint: none was evaluated" in training_notes(
        run
    )
    # Started again, it trains no further and exports the same.
    (tmp_path / "long" / weights).unlink()
    assert cli.main([*words, "eval.every=2", "save.keep=1"]) == 0
    assert (tmp_path / "long" / weights).read_bytes() == expected


def test_the_best_of_another_folder_or_of_other_rows_does_not_count(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    told = iter([9.0, 3.0, 6.0, 4.5, 4.6, 7.0])
    monkeypatch.setattr(
        build_evaluation, "make_evaluation", lambda *_, **__: lambda *_: {"eval_loss": next(told)}
    )
    words = [f"recipe={recipe}", "optim.lr_scheduler_type=constant", "data.eval_sets=[]"]
    words += ["train.load_best_model_at_end=true", "eval.every=2", "save.keep=1"]
    near, one = (f"data.eval_path={recipe.parent / name}.jsonl" for name in ("near", "one"))
    first, then = tmp_path / "first", tmp_path / "then"
    assert cli.main([*words, near, f"output_dir={first}", "train.max_steps=4"]) == 0
    # 4.5 after step 6 is no better than 3.0 after step 2, which is not in this folder.
    words.append(f"output_dir={then}")
    assert cli.main([*words, near, f"train.resume={first}", "train.max_steps=8"]) == 0
    assert "what is exported is of step 6, the best by eval_loss" in capsys.readouterr().out
    assert {path.name for path in (then / "checkpoints").iterdir()} == {"6", "8"}
    assert cli.main([*words, one, "train.max_steps=10"]) == 0
    said = capsys.readouterr().out
    assert "evaluations up to step 8 were made on other held-out rows" in said
    assert "what is exported is of step" not in said
    assert "Step 10, the best by" in (then / "adapter" / "README.md").read_text(encoding="utf-8")
