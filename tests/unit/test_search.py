# SPDX-License-Identifier: Apache-2.0
"""The search for batch, length, mesh and remat, on programs whose memory is a formula."""

import dataclasses
import itertools

import pytest

from lora_tune import recipe as recipes
from lora_tune.models import FAMILIES
from lora_tune.models.decoder import Decoder, DecoderOptions
from lora_tune.plan import planner, search

LIMIT = 1000
KEPT = {"full": 1.0, "save_attention": 1.5, "dots": 3.0, "none": 20.0}
WORK = {"full": 4.0, "save_attention": 3.8, "dots": 3.2, "none": 3.0}
MESHES = [recipes.Mesh(expert=4), recipes.Mesh(fsdp=4), recipes.Mesh(fsdp=2, expert=2)]


@pytest.fixture
def recipe():
    return recipes.Recipe(
        output_dir="runs/x",
        model=recipes.Model(path="x"),
        data=recipes.Data(path="x", max_length=1024),
        mesh=recipes.Mesh(fsdp=4),
        train=recipes.Train(max_steps=10, batch_size=4),
    )


def needed(recipe, *, each=40.0, waste=0.0):
    """Bytes: what the arguments take, what each row takes, and a little that bends the line."""
    rows, length = planner.rows_of(recipe), recipe.data.max_length / 1024
    taken = each * rows * length * KEPT[recipe.model.remat]
    return int(300 + 30 * (recipe.mesh.fsdp == 1) + taken + waste * (rows * length) ** 0.5)


def seconds(recipe):
    """A bound: weights are moved once a step, and experts are cheaper to reach than weights."""
    rows, length = planner.rows_of(recipe), recipe.data.max_length / 1024
    move = 10 if recipe.mesh.expert == 4 else 30
    return max(move, WORK[recipe.model.remat] * rows * length)


def measure(recipe, **shape):
    size = needed(recipe, **shape)
    return search.Trial(recipe, 300, size, LIMIT, size <= LIMIT, seconds(recipe))


@pytest.mark.parametrize("shape", [{}, {"each": 7.0}, {"waste": 50.0}, {"each": 300.0}])
def test_it_finds_what_trying_everything_finds(recipe, shape):
    found = search.find(recipe, MESHES, lambda asked: measure(asked, **shape), budget=40)

    def every(lengths, remats, meshes):
        for mesh, remat, rows, length in itertools.product(meshes, remats, range(1, 120), lengths):
            model = dataclasses.replace(recipe.model, remat=remat)
            data = dataclasses.replace(recipe.data, max_length=length)
            asked = dataclasses.replace(recipe, model=model, data=data)
            trial = measure(planner.with_mesh(asked, mesh, rows=rows), **shape)
            if trial.fits:
                yield trial

    most = max(planner.rows_of(t.recipe) for t in every([1024], ["full"], MESHES[:1]))
    # A size that is hardly larger is not worth a program.
    assert most / (1 + search._FINE) <= planner.rows_of(found.largest.recipe) <= most
    least = min(trial.per_token for trial in every([1024], KEPT, MESHES))
    assert found.best.per_token == pytest.approx(least, rel=0.1)
    lengths = range(256, 500 * 256, 256)
    longest = max(
        trial.recipe.data.max_length
        for trial in every(lengths, ["full"], [found.longest.recipe.mesh])
        if planner.rows_of(trial.recipe) == 1
    )
    assert longest / 1.05 <= found.longest.recipe.data.max_length <= longest


def test_it_compiles_little_and_nothing_twice(recipe):
    asked = []

    def once(recipe):
        asked.append(recipe)
        return measure(recipe)

    found = search.find(recipe, MESHES, once)
    assert len(asked) == len(set(map(str, asked))) == len(found.trials) <= search.BUDGET


def test_a_spent_budget_ends_it_with_what_was_found(recipe):
    found = search.find(recipe, MESHES, measure, budget=2)
    assert len(found.trials) == 2
    assert found.best.fits
    assert found.largest.fits


def test_nothing_that_fits_is_said(recipe):
    assert search.find(recipe, MESHES, lambda asked: measure(asked, each=2000.0)) is None


def test_a_refusal_without_numbers_is_halved_away(recipe):
    def silent(recipe):
        trial = measure(recipe)
        return trial if trial.fits else dataclasses.replace(trial, needed=None)

    found = search.find(recipe, MESHES[:1], silent, budget=40)
    assert planner.rows_of(found.largest.recipe) == (LIMIT - 330) // 40


CONFIG = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}


def test_meshes_whose_arguments_do_not_fit_are_left_out(recipe):
    family = FAMILIES["qwen3_next"]
    model = Decoder(family, family.read_config(CONFIG), DecoderOptions())
    recipe = dataclasses.replace(recipe, lora=None)
    every = list(planner.meshes(model, 8, 1))
    assert len(set(every)) == len(every) > 10
    assert all(planner.ways(mesh) == 8 for mesh in every)
    sizes = {}
    for mesh in every:
        asked = planner.with_mesh(recipe, mesh, rows=1)
        place = planner.abstract_mesh(mesh)
        sizes[mesh] = sum(search.abstract.inputs_of(asked, model, place).held().values())
    limit = sorted(sizes.values())[3] + 1
    tried = search.ranked(recipe, model, 8, slices=1, limit=limit)
    assert tried
    assert all(sizes[mesh] < limit for mesh in tried)
    nearest = search.ranked(recipe, model, 8, slices=1, limit=1)
    assert [sizes[mesh] for mesh in nearest] == [min(sizes.values())]


def test_several_slices_each_hold_the_model(recipe):
    family = FAMILIES["qwen3_next"]
    model = Decoder(family, family.read_config(CONFIG), DecoderOptions())
    assert all(mesh.data % 2 == 0 for mesh in planner.meshes(model, 8, 2))
