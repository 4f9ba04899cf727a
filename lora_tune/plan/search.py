# SPDX-License-Identifier: Apache-2.0
"""The largest batch and length that fit a slice, and the mesh and remat policy of the least bound.

A compilation takes minutes, so few are made. Meshes whose arguments alone do not fit are left out
by arithmetic, which is exact; the others are tried in the order of the bytes that they would have
to move, which is an estimate and decides nothing else. Every figure that is reported comes from a
compiled program. The number of rows is found by the line through the last two programs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lora_tune import sharding
from lora_tune.models.decoder import Decoder
from lora_tune.models.fields import max_positions
from lora_tune.plan import abstract, planner
from lora_tune.plan.measure import memory_limit
from lora_tune.plan.topologies import Topology
from lora_tune.recipe import Mesh, Recipe

POLICIES = ("save_attention", "dots", "none")
"""What may be tried beside `full`, from the least kept to the most."""
BUDGET = 16
"""Programs that a search compiles at most."""
_MESHES = 3
_LENGTH_STEP = 256
"""Lengths are multiples of it: those of attention's blocks and the delta rule's chunks."""
_MOST_ROWS = 1024
_MOST_LENGTH = 2**20
_MARGIN = 0.02
_FINE = 0.03
_ROOM = 0.05


@dataclasses.dataclass(frozen=True)
class Trial:
    """What one compiled program needs, and its bound.

    Attributes:
      recipe: that was compiled.
      held: bytes of its arguments on a device.
      needed: bytes at its peak, None where the compiler refused without saying.
      limit: bytes that there are.
      fits: whether they suffice.
      seconds: bound on the time of a step, None where there is none.
    """

    recipe: Recipe
    held: int
    needed: int | None
    limit: int
    fits: bool
    seconds: float | None

    @property
    def per_token(self) -> float:
        """The bound of a step divided by its tokens; without one, fewer rows count as slower."""
        tokens = self.recipe.train.batch_size * self.recipe.data.max_length
        return (1.0 if self.seconds is None else self.seconds) / tokens


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search has found: the best trial, the longest rows, and all that was compiled."""

    best: Trial
    largest: Trial
    longest: Trial
    trials: tuple[Trial, ...]


class OutOfBudgetError(Exception):
    """The search has compiled as many programs as it may."""


class Search:
    """Compiles programs, each once, and keeps count."""

    def __init__(self, measure: Callable[[Recipe], Trial], *, budget: int = BUDGET):
        self._measure, self._budget = measure, budget
        self._known: dict[Any, Trial] = {}

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All that was compiled, in order."""
        return tuple(self._known.values())

    def try_(self, recipe: Recipe) -> Trial:
        """The trial of a recipe, compiled now unless it is known."""
        key = (recipe.mesh, recipe.train.batch_size, recipe.data.max_length, recipe.model.remat)
        if key not in self._known:
            if len(self._known) >= self._budget:
                raise OutOfBudgetError
            self._known[key] = self._measure(recipe)
        return self._known[key]

    def most(self, sized: Callable[[int], Recipe], *, least: int, most: int) -> Trial | None:
        """The trial of the largest size that fits; None if `least` does not.

        Ends early where the line through two programs leaves the next size no room by far, or
        promises a size that is hardly larger.

        Args:
          sized: the recipe of a size; memory must not fall as it grows.
          least: the smallest size.
          most: the largest.
        """
        best, low, high, size = None, least, most, least
        line: list[tuple[int, Trial]] = []
        try:
            while low <= high:
                trial = self.try_(sized(size))
                line.append((size, trial))
                if trial.fits:
                    best, low = trial, size + 1
                else:
                    high = size - 1
                size = min(max(_meets(line, low, high), low), high)
                if best is not None and len(line) > 1:
                    little = high <= (low - 1) * (1 + _FINE) or size <= (low - 1) * (1 + _FINE)
                    if little or _far(line, low):
                        break
        except OutOfBudgetError:
            pass
        return best


def _slope(line: Sequence[tuple[int, Trial]]) -> float | None:
    """Bytes that one more unit takes by the last two programs, or at most by the last one alone."""
    (size, last), *before = [point for point in reversed(line) if point[1].needed is not None]
    if last.needed is None:
        return None
    other = next((point for point in before if point[0] != size), None)
    if other is None or other[1].needed is None:
        return (last.needed - last.held) / size
    return (last.needed - other[1].needed) / (size - other[0])


def _meets(line: Sequence[tuple[int, Trial]], low: int, high: int) -> int:
    """The size at which the line through the last two programs meets the memory."""
    size, trial = line[-1]
    slope = None if trial.needed is None else _slope(line)
    if slope is None or trial.needed is None:
        return (low + high) // 2
    return high if slope <= 0 else int(size + (trial.limit - trial.needed) // slope)


def _far(line: Sequence[tuple[int, Trial]], size: int) -> bool:
    """Whether a size is out of reach by more than the line may be wrong."""
    last, trial = line[-1]
    slope = None if trial.needed is None else _slope(line)
    if slope is None or trial.needed is None:
        return False
    return trial.needed + slope * (size - last) > (1 + _MARGIN) * trial.limit


def search(
    recipe: Recipe,
    topology: Topology,
    *,
    layers: int | None = None,
    keep_mesh: bool = False,
    budget: int = BUDGET,
    say: Callable[[Trial], None] = lambda trial: None,
) -> tuple[planner.Plan, Found | None]:
    """Searches what of a recipe fits a topology.

    Args:
      recipe: from `planner.load`.
      topology: from `lora_tune.plan.topologies.parse`.
      layers: a depth instead of the model's.
      keep_mesh: search on the recipe's mesh only.
      budget: programs that may be compiled.
      say: called with every program that was compiled.

    Returns:
      The plan of the least bound and what was found; where nothing fits, the last plan and None.

    Raises:
      InputError: what is asked for cannot be had; see `lora_tune.plan.abstract`.
    """
    config, _ = abstract.model_config(recipe, layers=layers)
    devices = abstract.devices_of(topology)
    limit = memory_limit(topology, devices[0])
    model = abstract.make_model(recipe, config)
    meshes = [recipe.mesh]
    if not keep_mesh:
        count = len(devices)
        meshes = ranked(recipe, model, count, slices=topology.slices, limit=limit)
    plans: dict[int, planner.Plan] = {}

    def measure(asked: Recipe) -> Trial:
        found = planner.plan(asked, topology, layers=layers, keep_mesh=True)
        memory, bound = found.compiled.memory, found.bound
        held = sum(found.program.held.values())
        seconds = None if bound is None else bound.seconds
        trial = Trial(asked, held, memory.needed, limit, found.fits, seconds)
        plans[id(trial)] = found.light()
        jax.clear_caches()
        say(trial)
        return trial

    positions = max_positions(config)
    found = find(recipe, meshes, measure, positions=positions, budget=budget)
    plan = next(reversed(plans.values())) if found is None else plans[id(found.best)]
    return plan, found


def find(
    recipe: Recipe,
    meshes: Sequence[Mesh],
    measure: Callable[[Recipe], Trial],
    *,
    positions: int | None = None,
    budget: int = BUDGET,
) -> Found | None:
    """Searches meshes, remat policies, rows and lengths; None if nothing fits.

    Args:
      recipe: what stays: model, adapters, optimizer, accumulation, and the length for the batch.
      meshes: in the order in which they are tried, from `ranked`.
      measure: compiles a recipe.
      positions: the longest row that the model has positions for.
      budget: programs that may be compiled.
    """
    search = Search(measure, budget=budget)

    def variant(mesh: Mesh, remat: str, rows: int, length: int | None = None) -> Recipe:
        model = dataclasses.replace(recipe.model, remat=remat)
        data = dataclasses.replace(recipe.data, max_length=length or recipe.data.max_length)
        return planner.with_mesh(
            dataclasses.replace(recipe, model=model, data=data), mesh, rows=rows
        )

    def largest_on(mesh: Mesh, remat: str, most: int = _MOST_ROWS) -> Trial | None:
        return search.most(lambda rows: variant(mesh, remat, rows), least=1, most=most)

    left = iter(meshes)
    largest = next(filter(None, (largest_on(mesh, "full") for mesh in left)), None)
    if largest is None:
        return None
    rows = planner.rows_of(largest.recipe)
    try:
        for mesh in left:
            one = search.try_(variant(mesh, "full", 1))
            # What its arguments leave holds as many rows as the same room held before.
            room = (one.limit - one.held) / max(1, largest.limit - largest.held)
            search.try_(variant(mesh, "full", max(1, int(rows * min(1.0, room)))))
    except OutOfBudgetError:
        pass
    mesh = _best(search.trials).recipe.mesh
    units = (positions or _MOST_LENGTH) // _LENGTH_STEP
    longest = search.most(
        lambda size: variant(mesh, "full", 1, size * _LENGTH_STEP),
        least=max(1, recipe.data.max_length // _LENGTH_STEP),
        most=units,
    )
    for remat in POLICIES:
        largest_on(mesh, remat, most=rows)
    at_length = [t for t in search.trials if t.recipe.data.max_length == recipe.data.max_length]
    return Found(_best(at_length), largest, longest or largest, search.trials)


def _best(trials: Sequence[Trial]) -> Trial:
    """The least bound for each token among what fits."""
    return min((trial for trial in trials if trial.fits), key=lambda trial: trial.per_token)


def ranked(
    recipe: Recipe, model: Decoder, devices: int, *, slices: int, limit: int, most: int = _MESHES
) -> list[Mesh]:
    """The meshes to try: the roomiest, then those that would move the fewest bytes.

    Those whose arguments do not fit are left out; where none fits, the roomiest is tried alone.
    """
    held: dict[Mesh, int] = {}
    for mesh in planner.meshes(model, devices, slices):
        shapes = planner.abstract_mesh(mesh)
        asked = planner.with_mesh(recipe, mesh, rows=1)
        held[mesh] = sum(abstract.inputs_of(asked, model, shapes).held().values())
    least = min(held.values())
    fitting = [mesh for mesh, size in held.items() if size < limit]
    if not fitting:
        return [min(held, key=held.__getitem__)]
    rows = planner.rows_of(recipe)
    moved = {mesh: moved_bytes(recipe, model, mesh, rows=rows) for mesh in fitting}
    by_moves = sorted(fitting, key=lambda mesh: moved[mesh])
    roomy = [mesh for mesh in by_moves if held[mesh] <= (1 + _ROOM) * least]
    # `tensor` divides weights, but not what layers keep of their rows.
    roomiest = min(roomy, key=lambda mesh: mesh.tensor)
    return [roomiest, *(mesh for mesh in by_moves if mesh != roomiest)][:most]


def moved_bytes(recipe: Recipe, model: Decoder, mesh: Mesh, *, rows: int) -> float:
    """Estimates the bytes that a device receives in a step, to decide what to compile first.

    Weights split over rows' devices are gathered forward and backward. Tokens go to the experts of
    their choice and come back, forward, recomputed and backward. The parts of a layer's width are
    summed twice a layer in each of these passes.
    """
    place = planner.abstract_mesh(mesh)
    inputs = abstract.inputs_of(planner.with_mesh(recipe, mesh, rows=rows), model, place)
    received = 0.0
    for name, leaf in {**inputs.frozen, **inputs.trainable}.items():
        axes = inputs.split.axes[name]
        split = set(jax.tree.leaves(tuple(sharding.named_sharding(place, axes).spec)))
        whole = leaf.size * leaf.dtype.itemsize
        whole //= mesh.expert if "expert" in axes else 1
        whole //= mesh.tensor if "tensor" in split else 1
        received += 2 * (whole - abstract.bytes_on_device(leaf))
    config: Any = model.config
    tokens = rows * recipe.data.max_length * config.hidden_size * 2.0
    chosen = getattr(config, "num_experts_per_tok", 0)
    layers = 3 * config.num_hidden_layers
    received += layers * tokens * 2 * chosen * (mesh.expert - 1) / mesh.expert
    received += layers * tokens * 2 * 2 * (mesh.tensor - 1) / mesh.tensor
    # A mesh with `tensor` takes more rows for as many devices: count by the token.
    return received / (rows * recipe.data.max_length) * mesh.tensor
