# SPDX-License-Identifier: Apache-2.0
"""`lora-tune plan`: a recipe's step, compiled for devices and reported."""

import io
import json

import pytest

from lora_tune import cli
from lora_tune import recipe as recipes
from lora_tune.plan import abstract, planner
from lora_tune.training.state import split_model

TINY = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
WORDS = ["recipe=qwen3next_sft", "topology=cpu", "model.dtype=float32", "data.max_length=32"]
WORDS += ["lora.target_modules=[q_proj,down_proj]"]
SHARED = [*WORDS, "mesh.fsdp=2", "mesh.expert=1", "train.batch_size=2"]
ALONE = [*WORDS, "mesh.expert=1", "train.batch_size=1"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model folder that holds a configuration only."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def run(capsys, *words):
    """Exit status, output and complaint of `lora-tune plan`."""
    status = cli.main(["plan", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected one recipe=NAME"),
        (["recipe=quickstart"], "expected one topology=NAME"),
        (["recipe=quickstart", "topology=v5p-8", "topology=cpu"], "expected one topology=NAME"),
        (["recipe=quickstart", "topology=v5p8"], "did you mean v5p-8"),
        (["recipe=quickstart", "topology=cpu", "layers=0"], "layers must be an integer"),
        (["recipe=quickstart", "topology=cpu", "serch=2"], "'serch': did you mean 'search'?"),
        (["recipe=quickstart", "topology=cpu", "search=much"], "search must be true, false"),
        (["recipe=quickstart", "topology=cpu", "layers=99"], "layers=99: the model has"),
        (["recipe=quickstart", "topology=cpu", "slices=two"], "slices must be an integer"),
        (["recipe=quickstart", "topology=cpu", "lora.rank=8"], "lora.rank"),
        (["recipe=quickstart", "topology=cpu", "mesh.fsdp=99"], "train.batch_size"),
        (["recipe=quickstart", "topology=cpu", "data.max_length=999999"], "max_position"),
        (["recipe=quickstart", "topology=cpu", "model.remat=offload"], "which has no other"),
        (["recipe=quickstart", "topology=gpu"], "no such device here"),
        (["recipe=quickstart", "topology=cpu", "json=/no/such/folder/p.json"], "make it first"),
        (["recipe=quickstart", "topology=v5p-8,v6e-8", "hlo=a.txt"], "name one"),
        (["recipe=qwen3next_sft", "topology=cpu", "model.path=no/such/model"], "model.path"),
        (["recipe=quickstart", "topology=cpu", "lora.target_modules=[nothing]"], "nothing"),
    ],
)
def test_bad_input_is_one_sentence(capsys, words, said):
    status, _, complaint = run(capsys, *words)
    assert status == 2
    assert said in complaint
    assert complaint.count("\n") == 1


@pytest.fixture(scope="module")
def planned(tiny, tmp_path_factory):
    """What a plan for two fake devices writes, and what it prints."""
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        said = io.StringIO()
        patch.setattr("sys.stdout", said)
        status = cli.main(["plan", *SHARED, f"model.path={tiny}", f"json={file}"])
    return status, json.loads(file.read_text()), said.getvalue()


def test_a_plan_writes_its_figures(planned):
    status, values, _ = planned
    assert status == 0
    assert values["fits"] is True
    assert values["devices"] == 2
    assert values["mesh"] == {"data": 1, "fsdp": 2, "tensor": 1, "expert": 1, "sequence": 1}
    parts = ("argument", "output", "temp", "code")
    total = sum(values[f"{part}_bytes"] for part in parts) - values["alias_bytes"]
    assert values["total_bytes"] == values["needed_bytes"] == total
    assert values["hbm_bytes"] > total
    assert values["compile_seconds"] > 0


def test_arguments_are_base_adapters_optimizer_and_batch(planned):
    _, values, _ = planned
    held = sum(values[f"{name}_bytes"] for name in ("base", "adapter", "optimizer", "batch"))
    # XLA gives each of some hundred small arrays 64 bytes; the key is beside them.
    assert held <= values["argument_bytes"] <= held * 1.02 + 200 * 64
    # Five arrays of 32 bits a token, one row of 32 tokens a device.
    assert values["batch_bytes"] == 5 * 4 * 32
    # Two moments in float32, and three counters.
    assert 0 <= values["optimizer_bytes"] - 2 * values["adapter_bytes"] <= 64


def test_a_plan_is_printed(planned):
    _, values, said = planned
    assert "base" in said
    assert "fits: " in said
    assert "no rates are published for 'cpu'" in said
    assert f"to run this: {' '.join(values['overrides'])}" in said


def test_the_printed_words_give_the_planned_recipe(planned, tiny):
    _, values, _ = planned
    words = [f"model.path={tiny}", "data.path=x", *values["overrides"]]
    loaded = recipes.load("qwen3next_sft", words)
    assert loaded.mesh == recipes.Mesh(fsdp=2)
    assert (loaded.train.batch_size, loaded.data.max_length) == (2, 32)


def test_a_plan_that_does_not_fit_gives_status_1(capsys, tiny, monkeypatch):
    monkeypatch.setattr("lora_tune.plan.measure.memory_limit", lambda *_: 1000)
    status, said, _ = run(capsys, "recipe=qwen3next_sft", f"model.path={tiny}", *ALONE)
    monkeypatch.setattr("lora_tune.plan.measure.memory_limit", lambda *_: 1000)
    status, said, _ = run(capsys, *ALONE, f"model.path={tiny}")
    assert status == 1
    assert "does not fit: needs" in said


def test_a_mesh_that_leaves_devices_idle_is_widened(tiny):
    words = [f"model.path={tiny}", "mesh.fsdp=4", "mesh.expert=1", "lora.target_modules=all-linear"]
    recipe = planner.load("qwen3next_sft", words)
    config, _ = abstract.model_config(recipe)
    model = abstract.make_model(recipe, config)
    wide = planner.over_all(recipe, model, 8, 1)
    assert planner.ways(wide.mesh) == 8
    assert planner.rows_of(wide) == planner.rows_of(recipe) == 4
    two = planner.over_all(recipe, model, 8, 2)
    assert two.mesh.data == 2


def test_the_shapes_of_a_known_model_are_there_without_the_hub():
    recipe = planner.load("qwen3next_sft")
    config, note = abstract.model_config(recipe)
    assert "hub cannot be reached" in note
    model = abstract.make_model(recipe, config)
    split = split_model(model)
    # The census of the published checkpoint: 79.67 B parameters, 77.31 B in routed experts; LoRA
    # of rank 16 on what is not routed adds 23.0 M.
    sizes = {name: leaf.size for name, leaf in split.frozen.items() if "lora" not in name}
    assert sum(sizes.values()) / 1e9 == pytest.approx(79.67, abs=0.01)
    routed = sum(n for name, n in sizes.items() if "expert" in split.axes[name])
    assert routed / 1e9 == pytest.approx(77.31, abs=0.01)
    assert sum(leaf.size for leaf in split.trainable.values()) / 1e6 == pytest.approx(23.0, abs=0.1)


def test_a_search_prints_what_it_found(capsys, tiny, tmp_path):
    file = tmp_path / "plan.json"
    words = ["search=2", f"json={file}"]
    status, said, progress = run(capsys, *ALONE, f"model.path={tiny}", *words)
    assert status == 0
    assert progress.count("compiled ") == 2
    found = json.loads(file.read_text())["search"]
    rows = [trial["rows"] for trial in found["trials"]]
    assert found["largest_batch"]["rows"] == max(rows) > 1
    assert "largest batch that fits" in said


def test_a_plan_for_two_slices_that_are_not_here(capsys, tiny, tmp_path):
    pytest.importorskip("libtpu")
    file = tmp_path / "plan.json"
    words = [word for word in WORDS if not word.startswith(("topology=", "model.dtype="))]
    words += ["topology=2xv5p-8", f"model.path={tiny}", f"json={file}"]
    status, said, _ = run(capsys, *words)
    values = json.loads(file.read_text())
    assert status == 0
    assert (values["chips"], values["devices"], values["slices"]) == (8, 8, 2)
    assert values["mesh"] == {"data": 2, "fsdp": 4, "tensor": 1, "expert": 1, "sequence": 1}
    assert values["rows"] == 2  # as in the recipe: 16 rows on 8 devices
    assert values["hbm_bytes"] == 95 * 2**30
    assert values["needed_bytes"] == values["peak_bytes"] + values["code_bytes"]
    # Gradients of adapters are summed between the slices, and weights gathered within them.
    assert values["collectives"]["slices-all-reduce"]["between"] > 0
    assert values["collectives"]["all-gather"]["wire"] > 0
    assert values["bound_seconds"] == max(
        seconds for name, seconds in values["bound_by"].items() if name != "limit"
    )
    assert "has 2 hosts, and a run uses the devices of one" in said
    assert "bound, not an estimate" in said
