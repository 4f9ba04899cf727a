# SPDX-License-Identifier: Apache-2.0
import dataclasses
import os
from pathlib import Path

import pytest

from lora_tune import recipe
from lora_tune.errors import InputError
from lora_tune.lora.config import DEFAULT_TARGETS, LoraConfig

SMALLEST = """\
output_dir: runs/a
model: {path: base}
data: {path: rows.jsonl}
train: {max_steps: 3}
"""


@pytest.fixture
def smallest(tmp_path: Path) -> str:
    path = tmp_path / "smallest.yaml"
    path.write_text(SMALLEST)
    return str(path)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "written.yaml"
    path.write_text(text)
    return str(path)


def complaint(name: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        recipe.load(name, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_recipe_says_only_what_differs_from_the_schema(smallest: str) -> None:
    loaded = recipe.load(smallest)

    assert loaded.output_dir == "runs/a"
    assert loaded.model == recipe.Model(path="base")
    assert loaded.lora == recipe.Lora()
    assert loaded.train.max_steps == 3
    assert loaded.mesh == recipe.Mesh(data=1, fsdp=1, tensor=1, expert=1)


def test_the_default_targets_are_those_of_the_lora_config(smallest: str) -> None:
    lora = recipe.load(smallest).lora

    assert lora is not None
    assert tuple(lora.config().target_modules) == DEFAULT_TARGETS


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("lora.r=4", lambda r: r.lora.r, 4),
        ("optim.learning_rate=2e-4", lambda r: r.optim.learning_rate, 0.0002),
        ("optim.learning_rate=1", lambda r: r.optim.learning_rate, 1.0),
        ("optim.max_grad_norm=null", lambda r: r.optim.max_grad_norm, None),
        ("data.path=s3://a?b=c=d", lambda r: r.data.path, "s3://a?b=c=d"),
        ("data.packing=false", lambda r: r.data.packing, False),
        ("lora.target_modules=[q_proj, v_proj]", lambda r: r.lora.target_modules, None),
        ("lora.target_modules=all-linear", lambda r: r.lora.target_modules, "all-linear"),
        ("lora.target_modules=.*q_proj", lambda r: r.lora.target_modules, ".*q_proj"),
        ("lora.layers_to_transform=[0, 3]", lambda r: r.lora.layers_to_transform, [0, 3]),
        ("lora.rank_pattern={'.*q_proj': 8}", lambda r: r.lora.rank_pattern, {".*q_proj": 8}),
        ("lora.rank_pattern.q_proj=8", lambda r: r.lora.rank_pattern, {"q_proj": 8}),
        ("lora=null", lambda r: r.lora, None),
        ("model.revision='123456'", lambda r: r.model.revision, "123456"),
        ("output_dir=${data.path}.run", lambda r: r.output_dir, "rows.jsonl.run"),
    ],
)
def test_overrides(smallest: str, override: str, read, expected) -> None:
    if expected is None and override.startswith("lora.target_modules"):
        expected = ["q_proj", "v_proj"]

    assert read(recipe.load(smallest, [override])) == expected


def test_the_last_override_of_a_key_wins(smallest: str) -> None:
    assert recipe.load(smallest, ["train.seed=1", "train.seed=2"]).train.seed == 2


def test_an_override_replaces_a_mapping_and_a_list_whole(tmp_path: Path) -> None:
    path = written(tmp_path, SMALLEST + "lora: {rank_pattern: {a: 1}, target_modules: [x, y]}")

    lora = recipe.load(path, ["lora.rank_pattern={b: 2}", "lora.target_modules=[z]"]).lora

    assert lora is not None
    assert lora.rank_pattern == {"b": 2}
    assert lora.target_modules == ["z"]


def test_adapters_can_be_turned_on_again_before_a_lora_key_is_set(tmp_path: Path) -> None:
    path = written(tmp_path, SMALLEST + "lora: null")

    assert "lora is null" in complaint(path, "lora.r=4")
    lora = recipe.load(path, ["lora={}", "lora.r=4"]).lora
    assert lora == recipe.Lora(r=4)


@pytest.mark.parametrize(
    ("override", "full_key", "suggested"),
    [
        ("data.max_lenght=4", "data.max_lenght", "data.max_length"),
        ("trian.max_steps=4", "trian.max_steps", "train.max_steps"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", "optim.learning_rate"),
        ("learning_rate=1", "learning_rate", "optim.learning_rate"),
        ("max_seq_length=4", "max_seq_length", "data.max_length"),
        ("data.cutoff_len=4", "data.cutoff_len", "data.max_length"),
        ("micro_batch_size=4", "micro_batch_size", "train.batch_size"),
        ("train.per_device_train_batch_size=4", "per_device_train_batch_size", "train.batch_size"),
        ("num_epochs=1", "num_epochs", "train.num_train_epochs"),
        ("lora.lora_rank=4", "lora.lora_rank", "lora.r"),
        ("lora.rank=4", "lora.rank", "lora.r"),
        ("Lora.R=4", "Lora.R", "lora.r"),
        ("lora.alpha=4", "lora.alpha", "lora.lora_alpha"),
        ("optim.lr=4", "optim.lr", "optim.learning_rate"),
        ("seed=4", "seed", "train.seed"),
        ("save_steps=4", "save_steps", "save.every"),
        ("train.resume_from_checkpoint=true", "resume_from_checkpoint", "train.resume"),
    ],
)
def test_an_unknown_key_names_ours(
    smallest: str, override: str, full_key: str, suggested: str
) -> None:
    said = complaint(smallest, override)

    assert f"{full_key}'" in said
    assert f"did you mean '{suggested}'?" in said


def test_every_suggested_key_exists() -> None:
    from lora_tune.recipe import names

    assert set(names._FOREIGN.values()) | set(names.MEANINGS) <= set(names.leaves())
    assert not set(names._FOREIGN) & {"r", "lora_alpha", "max_length", "batch_size"}


def test_a_key_like_nothing_lists_what_there_is(smallest: str) -> None:
    assert "expected one of mesh.data, mesh.fsdp, mesh.tensor, mesh.expert" in complaint(
        smallest, "mesh.zzzzzz=1"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lora.r=x", "lora.r must be an integer, got 'x'"),
        ("lora.r=1.5", "lora.r must be an integer, got 1.5"),
        ("lora.r=true", "lora.r must be an integer, got true"),
        ("lora.r=", "lora.r must be an integer, got null"),
        ("data.packing=1", "data.packing must be true or false, got 1"),
        ("optim.learning_rate=[1]", "optim.learning_rate must be a number, got [1]"),
        ("data.path=no", "data.path must be a list of texts or text, got false; put it in quotes"),
        ("data.path={a: b}", "data.path must be a list of texts or text, got {'a': 'b'}"),
        (
            "train.resume=yes",
            "must be text, got true; expected auto, never, or the folder of a run",
        ),
        ("model.revision=123", "model.revision must be text or null, got 123; put it in quotes"),
        ("train.max_steps=1e3", "must be an integer or null, got 1000.0; write 1000"),
        ("optim.learning_rate='2e-4'", "got '2e-4'; write 2e-4 without quotes"),
        ("optim.learning_rate=2,5", "write 2.5 without quotes"),
        ("lora=None", "lora is 'None'; write lora=null (null in a file), which trains every"),
        ("lora=none", "write lora=null"),
        ("lora=false", "lora is false; write lora=null"),
        ("model.revision=None", "write model.revision=null"),
        ("train.max_steps=none", "write train.max_steps=null"),
        ("data.path={a: b}", "put it in quotes"),
        ("data.path=''", "data.path is an empty text"),
        (
            "model.revision=''",
            "model.revision is an empty text; write model.revision=null for none",
        ),
        ('output_dir="a\\0b"', "output_dir holds a NUL character"),
        ("model.dtype=float23", "bfloat16 or float32, got 'float23'; did you mean float32?"),
        (
            "data.format=chat",
            "auto or messages or sharegpt or prompt_completion or alpaca or text, got 'chat'",
        ),
        ("lora.target_modules=[1]", "lora.target_modules must be a list of texts or text, got [1]"),
        ("lora.layers_to_transform=[a]", "lora.layers_to_transform must be a list of integers"),
        ("lora.rank_pattern={q: a}", "lora.rank_pattern must be a mapping to integers"),
        ("model=base", "model must be a section with the keys path, revision"),
        ("data=null", "data must be a section with the keys path,"),
    ],
)
def test_wrong_types(smallest: str, override: str, said: str) -> None:
    assert said in complaint(smallest, override)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["lora.r=0"], "lora.r must be at least 1, got 0"),
        (["lora.r=-3"], "lora.r must be at least 1, got -3"),
        (["lora.lora_alpha=0"], "lora.lora_alpha must be above 0"),
        (["lora.lora_dropout=1"], "lora.lora_dropout must be at least 0 and below 1"),
        (["lora.lora_dropout=-0.1"], "lora.lora_dropout must be at least 0 and below 1"),
        (["lora.rank_pattern={q: 0}"], "lora.rank_pattern[q] must be at least 1, got 0"),
        (["lora.layers_to_transform=[2, -1]"], "lora.layers_to_transform[1] must be at least 0"),
        (["lora.target_modules=[]"], "target_modules is empty"),
        (["lora.target_modules=(q"], "'(q' is no regular expression"),
        (["lora.target_modules=all_linear"], "'all_linear' is written all-linear"),
        (["lora.exclude_modules=all-linear"], "leaves no module to adapt"),
        (["lora.layers_to_transform=[]"], "layers_to_transform is empty"),
        (["lora=null", "save.adapter=true"], "save.adapter: true needs adapters"),
        (["lora=null", "save.merged=false"], "save.merged: false leaves nothing"),
        (["train.max_steps=2147483648"], "train.max_steps must be at least 1 and below 2**31"),
        (["train.max_steps=null", "train.num_train_epochs=1e9"], "above 0 and at most 10000, got"),
        (["model.param_scan_axis=7"], "model.param_scan_axis must be from 0 to 3, got 7"),
        (
            ["train.seed=4294967296"],
            "train.seed must be at least 0 and below 2**32, got",
        ),
        (["train.seed=-1"], "train.seed must be at least 0"),
        (["lora.seed=4294967296"], "lora.seed must be at least 0 and below 2**32"),
        (["optim.learning_rate=0"], "optim.learning_rate must be above 0, got 0.0"),
        (["optim.learning_rate=.nan"], "optim.learning_rate must be above 0, got nan"),
        (["optim.learning_rate=.inf"], "optim.learning_rate must be above 0, got inf"),
        (["optim.max_grad_norm=0"], "optim.max_grad_norm must be above 0"),
        (["optim.adam_beta2=1"], "optim.adam_beta2 must be at least 0 and below 1"),
        (["data.max_length=1"], "data.max_length must be at least 2"),
        (["mesh.fsdp=0"], "mesh.fsdp must be at least 1"),
        (["log.every=0"], "log.every must be at least 1"),
        (["train.max_steps=0"], "train.max_steps must be at least 1"),
        (["train.max_steps=null"], "train.max_steps and train.num_train_epochs are both null"),
        (["train.num_train_epochs=1"], "train.max_steps and train.num_train_epochs are both set"),
        (
            ["optim.warmup_ratio=0.1", "optim.warmup_steps=1"],
            "optim.warmup_ratio and optim.warmup_steps are both set",
        ),
        (["optim.warmup_steps=3"], "optim.warmup_steps (3) must be below train.max_steps (3)"),
        (
            ["optim.lr_scheduler_type=constant", "optim.warmup_steps=1"],
            "use constant_with_warmup",
        ),
        (
            ["train.batch_size=8", "train.gradient_accumulation_steps=3"],
            "train.batch_size (8) must be a multiple of train.gradient_accumulation_steps",
        ),
        (
            ["train.batch_size=8", "mesh.data=2", "mesh.fsdp=2", "mesh.expert=4"],
            "mesh.data x mesh.fsdp x mesh.expert (16)",
        ),
        (["eval.every=2"], "eval.every needs held-out rows; set data.eval_path"),
        (
            ["data.eval_path=a", "data.eval_sets=[{name: b, path: b}]"],
            "data.eval_path and data.eval_sets are both set; set data.eval_path to null",
        ),
        (
            ["data.eval_sets=[{name: a, path: b}, {name: c, path: c}, {name: a, path: d}]"],
            "data.eval_sets[2] is called 'a' as data.eval_sets[0] is; give it another name",
        ),
        (["data.eval_sets=[{path: b}]"], "data.eval_sets[0].name is required"),
        (["data.eval_sets=[{name: a/b, path: b}]"], "must be letters, digits, _, . and -"),
        (["data.eval_sets=[{name: '', path: b}]"], "data.eval_sets[0].name is an empty text"),
        (["data.eval_sets=[{name: x_token, path: b}]"], "must not end in token"),
        (["data.eval_sets=[{name: x, path: []}]"], "data.eval_sets[0].path is an empty list; name"),
        (["data.eval_sets=[{name: x, path: [a, b, a]}]"], "data.eval_sets[0].path names 'a' twice"),
        (["data.eval_path=[]"], "data.eval_path is an empty list; name a file"),
        (["data.eval_path=[a, a]"], "data.eval_path names 'a' twice; name it once"),
        (["data.eval_sets=[{name: x, path: a, max_samples: 0}]"], "max_samples must be at least 1"),
        (["data.eval_sets=[{name: x, path: a, weight: 2}]"], "expected one of name, path, split"),
        (
            ["data.path=[]", "data.sources=[{path: a, subset: x}, {path: a, subset: y}]"],
            "data.sources[1] is called 'a' as data.sources[0] is; give it another name",
        ),
        (
            ["eval.samples_every=5"],
            "eval.samples_every has no effect with eval.num_samples: 0; set eval.num_samples "
            "and data.eval_path",
        ),
        (["eval.max_new_tokens=0"], "eval.max_new_tokens must be at least 1, got 0"),
        (["eval.num_exact_match=2"], "eval.num_exact_match needs held-out rows; set data.eval"),
        (["eval.num_exact_match=-1"], "eval.num_exact_match must be at least 0, got -1"),
        (
            ["data.eval_path=a", "train.metric_for_best_model=eval_exact_match"],
            "must be a figure of evaluations (eval_loss, eval_token_accuracy, eval_accuracy)",
        ),
        (["eval.num_samples=2"], "eval.num_samples needs held-out rows; set data.eval_path"),
        (
            ["data.eval_path=x", "eval.batch_size=3", "mesh.data=2"],
            "eval.batch_size (3) must be a multiple of mesh.data",
        ),
        (
            ["train.metric_for_best_model=loss"],
            "must be a figure of evaluations (eval_loss, eval_token_accuracy, eval_accuracy), got "
            "'loss'; did you mean eval_loss?",
        ),
        (
            ["data.eval_sets=[{name: a, path: a}]", "train.metric_for_best_model=eval_b_loss"],
            "got 'eval_b_loss'; did you mean eval_a_loss?",
        ),
        (["train.early_stopping_patience=0"], "train.early_stopping_patience must be at least 1"),
        (
            ["train.early_stopping_patience=2"],
            "train.early_stopping_patience needs held-out rows; set data.eval_path or "
            "data.eval_sets, and eval.every",
        ),
        (
            ["train.early_stopping_patience=2", "data.eval_path=a"],
            "train.early_stopping_patience needs evaluations during training; set eval.every",
        ),
        (
            ["train.early_stopping_threshold=0.1"],
            "train.early_stopping_threshold has no effect without train.early_stopping_patience",
        ),
        (["train.early_stopping_threshold=-1"], "train.early_stopping_threshold must be at least"),
        (
            ["train.metric_for_best_model=eval_exact_match", "data.eval_path=a"],
            "got 'eval_exact_match'; set eval.num_exact_match for it",
        ),
        (["train.load_best_model_at_end=true"], "needs held-out rows; set data.eval_path"),
        (
            ["train.load_best_model_at_end=true", "data.eval_path=a", "save.adapter=false"],
            "chooses what is exported, and nothing is",
        ),
        (["train.greater_is_better=true"], "did you mean 'train.metric_for_best_model'?"),
        (["log.wandb_mode=online"], "no effect without log.report_to: wandb"),
        (["log.report_to=tensorbord"], "got 'tensorbord'; did you mean tensorboard?"),
        (["log.report_to=[wandb, all]"], "must be none or wandb or tensorboard, or a list"),
        (["data.cache=none"], "data.cache is 'none', a folder by that name; write true or false"),
        (["data.cache=3"], "data.cache must be true or false or text, got 3"),
        (["data.num_proc=0"], "data.num_proc must be at least 1, got 0"),
        (["log.report_to=[none, wandb]"], "has none beside others; remove it"),
        (["log.report_to=[wandb, wandb]"], "names the same place twice"),
        (
            ["model.scan_layers=false", "model.param_scan_axis=1"],
            "no effect with model.scan_layers",
        ),
    ],
)
def test_ranges_and_impossible_combinations(smallest: str, overrides: list[str], said: str) -> None:
    assert said in complaint(smallest, *overrides)


def test_numbers_go_to_one_place_or_several(smallest: str) -> None:
    reporters = [
        recipe.load(smallest, [f"log.report_to={value}"]).log.reporters()
        for value in ("none", "[]", "wandb", "[tensorboard, wandb]")
    ]
    assert reporters == [[], [], ["wandb"], ["tensorboard", "wandb"]]


def test_a_recipe_with_a_secret_is_refused_and_not_repeated(
    smallest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    token = "hf_" + "Ab1" * 9
    for override, place in (
        (f"model.path=https://x:{token}@huggingface.co/a/b", "model.path"),
        ("log.wandb_project=p-0123456789abcdef0123", "log.wandb_project"),
        (f"lora.target_modules=[q_proj, {token}]", "lora.target_modules[1]"),
        (f"lora.r={token}", "lora.r"),
        (f"data.columns={{{token}: x}}", "data.columns"),
    ):
        said = complaint(smallest, override)
        assert place in said
        assert token not in said
        assert "0123456789abcdef0123" not in said
    assert "data.columns holds an access token or a password" in said


def test_the_tensor_axis_does_not_split_the_batch(smallest: str) -> None:
    assert recipe.load(smallest, ["train.batch_size=1", "mesh.tensor=4"]).mesh.tensor == 4


def test_all_problems_are_reported_together(smallest: str) -> None:
    said = complaint(
        smallest, "lora.r=x", "lr=3", "oops", "mesh.data=0", "data.path=???", "lora.lora_alpha=1"
    )

    assert "has 4 problems" in said
    for part in ("lora.r must", "unknown key 'lr'", "override 'oops'", "data.path is required"):
        assert part in said
    said = complaint(smallest, "lr=3", "mesh.data=0", "log.every=0")
    assert "has 3 problems" in said


@pytest.mark.parametrize(
    "override",
    [
        "train.max_steps=1e3",
        "train.max_steps=many",
        "data.pth=other",
        "data.path=#rows.jsonl",
        "data=null",
        "dataset.path=other",
    ],
)
def test_what_follows_from_a_problem_is_not_another_one(tmp_path: Path, override: str) -> None:
    """A refused value leaves its key at the default, or without one: no problem of its own."""
    text = SMALLEST.replace("data: {path: rows.jsonl}\n", "").replace("train: {max_steps: 3}", "")
    given = ["data.path=rows.jsonl"] if override.startswith("train") else ["train.max_steps=1"]

    assert "problems" not in complaint(written(tmp_path, text), *given, override)


def test_without_adapters_the_whole_model_is_what_a_run_writes(
    tmp_path: Path, smallest: str
) -> None:
    loaded = recipe.load(smallest, ["lora=null"])

    assert (loaded.save.adapter, loaded.save.merged) == (False, True)
    recipe.save(loaded, tmp_path / "saved.yaml")
    assert recipe.load(str(tmp_path / "saved.yaml")) == loaded
    assert recipe.load(smallest).save == recipe.Save(adapter=True, merged=False)


def test_required_keys(tmp_path: Path) -> None:
    said = complaint(written(tmp_path, "train: {max_steps: 1}"))

    for key in ("output_dir", "model.path", "data.path"):
        assert f"{key} is required" in said


@pytest.mark.parametrize("override", ["lora.r", "--lora.r=4", "~lora", "=4", "a b=4", "+lora.r=3"])
def test_an_override_must_be_key_value(smallest: str, override: str) -> None:
    assert f"override {override!r} must be key=value" in complaint(smallest, override)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lora.target_modules=[q_proj", "is not valid YAML"),
        ("lora.target_modules=*proj", "the regular expression lora.target_modules=.*proj"),
        ("output_dir=*x", "quote it twice, for YAML and for the shell: output_dir=\"'*x'\""),
        ("lora.rank_pattern={a: 1, a: 2}", "found duplicate key a"),
        ("data.path=#x.jsonl", "what follows # for a comment; quote it twice"),
        ("data.path=a #b", "what follows # for a comment"),
        ("--lora.r=4", "must be key=value, without dashes: lora.r=4"),
        ("train.max_steps.x=3", "train.max_steps is no section but an integer or null"),
        ("output_dir.x=3", "output_dir is no section but text"),
    ],
)
def test_an_override_is_one_value_for_a_key(smallest: str, override: str, said: str) -> None:
    assert said in complaint(smallest, override)


def test_a_hash_in_quotes_or_in_a_word_is_no_comment(smallest: str) -> None:
    assert recipe.load(smallest, ["data.path='#x.jsonl'"]).data.path == "#x.jsonl"
    assert recipe.load(smallest, ["data.path=a#b"]).data.path == "a#b"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SMALLEST + "lora: {r: 1\noptim: {}\n", "is not valid YAML in line"),
        (SMALLEST + "lora:\n\tr: 1\n", "in line 6: it is indented with a tab; use spaces"),
        (
            SMALLEST + "lora:\n  r: 1\n lora_alpha: 2\n",
            "in line 7: it is indented by 1, expected 0",
        ),
        (SMALLEST + "lora:\n  r: 1\n   lora_alpha: 2\n", "in line 7: it is indented deeper"),
        (SMALLEST + "lora: {r: 1\noptim: {}\n", "in line 6: the { of line 5 is not closed"),
        (SMALLEST + "lora: {target_modules: *q}\n", "in line 5: a text that begins with * must"),
        (SMALLEST + "lora: {target_modules: @q}\n", "in line 5: a text that begins with @ must"),
        ("model: [", "a bracket is not closed"),
        (SMALLEST + "lora: {target_modules: 'q}\n", "in line 6: the ' of line 5 is not closed"),
        (SMALLEST + "lora: r: 1\n", "in line 5: a text with a colon must be in quotes"),
        ("output_dir:runs\nmodel: {}\n", "in line 1: a space is missing after `output_dir:`"),
        (SMALLEST + "lora:\n  r: 1\n  r: 2\n", "in line 7: found duplicate key r"),
        (SMALLEST + "output_dir: again\n", "in line 5: found duplicate key output_dir"),
        (SMALLEST + "lora: !!python/object:os.system {}\n", "is not valid YAML in line 5"),
        ("", "holds no `key: value` lines"),
        ("42", "holds no `key: value` lines"),
        ("just text", "unknown key 'just text'"),
        ("output_dir: a${", "output_dir may use `${…}` only to name a key of this recipe"),
        ("- a\n- b\n", "holds no `key: value` lines"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, said: str) -> None:
    assert said in complaint(written(tmp_path, text))


def test_a_recipe_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"output_dir: \xff\xfe")

    assert "is not UTF-8 text (byte 12)" in complaint(str(path))


@pytest.mark.parametrize(
    "value",
    ["${oc.env:HOME}", "${oc.env:NOPE,x}", "${${data.path}:HOME}", "a${", "x\\\\${oc.env:HOME}"],
)
def test_recipes_are_data(smallest: str, value: str) -> None:
    assert "output_dir may use `${…}` only to name a key" in complaint(
        smallest, f"output_dir='{value}'"
    )


@pytest.mark.parametrize("value", ["${nope}", "${output_dir}", "${data}", "${data.nope}"])
def test_a_reference_that_cannot_be_resolved(smallest: str, value: str) -> None:
    assert "output_dir cannot be resolved" in complaint(smallest, f"output_dir={value}")


def test_a_reference_to_a_value_of_another_type(smallest: str) -> None:
    assert "lora.r cannot be resolved" in complaint(smallest, "lora.r=${data.path}")


def test_a_missing_recipe_lists_the_shipped_ones() -> None:
    said = complaint("no_such_recipe.yaml")

    assert "'no_such_recipe.yaml'" in said
    assert "quickstart.yaml" in said


def test_a_misspelt_recipe_or_its_folder_names_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "did you mean 'quickstart'?" in complaint("quickstrat")
    assert "did you mean 'quickstart.yaml'?" in complaint("quickstart.yml")
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/first.yaml").write_text(SMALLEST)
    assert "did you mean 'mine/first.yaml'?" in complaint("mine/frist.yaml")
    assert "'mine' is a folder; name a recipe file, such as mine/first.yaml" in complaint("mine")


def test_shipped_recipes_are_found_by_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert recipe.find("quickstart") == recipe.find("quickstart.yaml")
    (tmp_path / "quickstart.yaml").write_text(SMALLEST)
    assert recipe.load("quickstart.yaml").output_dir == "runs/a"


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "null",
        "~",
        "1e3",
        "0x10",
        "a: b",
        "# a",
        "é\t ",
        "'",
        '"',
        " lead",
        "*x",
        "a=b",
        "2020",
    ],
)
def test_saved_text_stays_the_same_text(tmp_path: Path, smallest: str, text: str) -> None:
    changed = dataclasses.replace(recipe.load(smallest), output_dir=text)
    recipe.save(changed, tmp_path / "recipe.yaml")

    assert recipe.load(str(tmp_path / "recipe.yaml")) == changed


def test_a_saved_recipe_holds_every_key_and_loads_equal(tmp_path: Path, smallest: str) -> None:
    from omegaconf import OmegaConf

    from lora_tune.recipe.names import leaves

    first = recipe.load(smallest, ["output_dir=${data.path}", "lora.alpha_pattern={a.b: 2}"])
    recipe.save(first, tmp_path / "recipe.yaml")

    saved = OmegaConf.load(tmp_path / "recipe.yaml")
    assert all(OmegaConf.select(saved, key, default="absent") != "absent" for key in leaves())
    assert saved["output_dir"] == "rows.jsonl"
    assert recipe.load(str(tmp_path / "recipe.yaml")) == first


def test_a_failed_save_leaves_the_old_file(
    tmp_path: Path, smallest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "recipe.yaml"
    target.write_text("old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        recipe.save(recipe.load(smallest), target)

    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "smallest.yaml"]


def test_the_lora_section_covers_the_lora_config() -> None:
    ours = {entry.name for entry in dataclasses.fields(recipe.Lora)}
    adapter = {entry.name for entry in dataclasses.fields(LoraConfig)}

    assert ours - adapter == {"seed", "adapter_path"}
    assert adapter <= ours
    assert recipe.Lora(r=3, use_rslora=True).config().r == 3


SOURCES = "data.sources=[{path: a.jsonl, weight: 2}, {path: [b.csv, c.csv], name: b, weight: 1}]"


def test_sources_stand_in_place_of_a_path(smallest: str) -> None:
    loaded = recipe.load(smallest, ["data.path=[]", SOURCES]).data
    first, second = loaded.all_sources()
    assert (first.path, first.weight, second.path, second.name) == (
        "a.jsonl",
        2,
        ["b.csv", "c.csv"],
        "b",
    )
    short = recipe.load(smallest, ["data.split=test", "data.max_samples=3"]).data.all_sources()
    assert short == [recipe.schema.Source("rows.jsonl", split="test", max_samples=3)]
    assert recipe.load(smallest, ["data.path=???", SOURCES]).data == loaded
    saved = Path(smallest).with_name("saved.yaml")
    recipe.save(recipe.load(smallest, ["data.path=[]", SOURCES]), saved)
    assert recipe.load(saved).data == loaded


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([SOURCES], "data.path and data.sources are both set"),
        (["data.path=[]"], "data.path and data.sources are both empty"),
        (["data.path=[]", SOURCES, "data.max_samples=3"], "data.max_samples has no effect with"),
        (["data.path=[]", "data.sources=[a]"], "data.sources[0] must be a mapping with the keys"),
        (["data.path=[]", "data.sources={path: a}"], "data.sources must be a list of mappings"),
        (["data.path=[]", "data.sources=[{path: 3}]"], "data.sources[0].path must be a list of"),
        (["data.path=[]", "data.sources=[{weight: 3}]"], "data.sources[0].path is required"),
        (
            ["data.path=[]", "data.sources=[{path: a, limit: 3}]"],
            "unknown key 'data.sources[0].limit': did you mean 'max_samples'?",
        ),
        (
            ["data.path=[]", "data.sources=[{path: a, weight: 0}]"],
            "data.sources[0].weight must be above 0, got 0",
        ),
        (
            ["data.path=[]", "data.sources=[{path: a, weight: 1}, {path: b}]"],
            "some have a weight and some have none",
        ),
        (["datasets=[{path: a}]"], "did you mean 'data.sources'? (a list of {path: …, weight: …}"),
        (["dataset_name=a"], "did you mean 'data.path'?"),
        (
            ["data.assistant_only_loss=false", "data.reasoning=keep"],
            "data.reasoning has no effect with data.assistant_only_loss: false",
        ),
    ],
)
def test_sources_that_cannot_be(smallest: str, overrides: list[str], said: str) -> None:
    assert said in complaint(smallest, *overrides)
