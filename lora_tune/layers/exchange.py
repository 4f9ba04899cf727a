# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism without dropped tokens: rows travel to the devices of their experts and back.

Arrays have static shapes, routing has not: one device may get any share of all rows. So an exchange
runs in rounds. In a round every device sends every other up to `capacity` rows by one `all_to_all`,
runs its experts on what came, and sends the results back. As many rounds follow as the fullest pair
of devices needs, one or two where routing is near even. However skewed it is, nothing is dropped
and memory stays that of a round.

The backward pass runs the rounds again: it sends the tokens once more with the gradients of their
results, recomputes the experts' hidden rows, and returns the gradients of the tokens. Between the
passes only the tokens themselves are kept, and where they go.

Shapes: n tokens here, k experts a token, D width; P devices of the axis, L experts on each, C
capacity.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lora_tune.layers.grouped import sort_by
from lora_tune.scan import ROUTED

ROUND_ROWS = 32_768
"""Most rows that a device sends in one round: what bounds the memory of an exchange."""
_SLACK = 1.5
"""Rows of one round as a multiple of the even share; a router is never quite even."""

Experts = Callable[[Any, Any, jax.Array, jax.Array, jax.Array], jax.Array]
"""`(parameters, constants, rows [m, D], group sizes [L], round) -> rows [m, D]`."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Which devices exchange rows, and how many at a time.

    Attributes:
      axis: the manual mesh axis that the experts are spread over.
      agree: all manual mesh axes: every device runs the same number of rounds.
      devices: P.
      local: L.
      capacity: C, rows that one device sends another in a round.
    """

    axis: str
    agree: tuple[str, ...]
    devices: int
    local: int
    capacity: int


def capacity(rows: int, devices: int) -> int:
    """Rows of a pair of devices in a round, for `rows` (n k) assignments on each device."""
    even = -(-int(rows * _SLACK) // devices)
    most = max(ROUND_ROWS // devices, 8)
    return min(rows, -(-min(even, most) // 8) * 8)


class _Route(NamedTuple):
    """Where the rows of this device go and where those of the others come from."""

    order: jax.Array  # [n k], assignments by global expert, hence by device
    start: jax.Array  # [P], first of each device's rows in that order
    count: jax.Array  # [P], how many they are
    place: jax.Array  # [n k], the inverse of order
    ends: jax.Array  # [P, L + 1], running count over the experts here of what each device sends
    rounds: jax.Array  # scalar


def _route(chosen: jax.Array, exchange: Exchange) -> _Route:
    flat = chosen.reshape(-1)
    order, place = sort_by(flat, exchange.devices * exchange.local)
    counts = jnp.bincount(flat, length=exchange.devices * exchange.local).astype(jnp.int32)
    counts = counts.reshape(exchange.devices, exchange.local)
    count = jnp.sum(counts, axis=1)
    coming = jax.lax.all_to_all(counts, exchange.axis, 0, 0, tiled=True)
    ends = jnp.pad(jnp.cumsum(coming, axis=1), ((0, 0), (1, 0)))
    fullest = jax.lax.pmax(jnp.max(count), exchange.agree)
    rounds = -(-fullest // exchange.capacity)
    return _Route(order, jnp.cumsum(count) - count, count, place, ends, rounds)


def _sent(route: _Route, exchange: Exchange, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The assignment in each slot `[P C]` of a round, and whether the slot is used."""
    index = turn * exchange.capacity + jnp.arange(exchange.capacity)[None, :]
    used = index < route.count[:, None]
    place = jnp.minimum(route.start[:, None] + index, route.order.shape[0] - 1)
    return route.order[place.reshape(-1)], used.reshape(-1)


def _slot(route: _Route, exchange: Exchange, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The round of each assignment `[n k]` and its slot there."""
    device = chosen.reshape(-1) // exchange.local
    index = route.place - route.start[device]
    turn = index // exchange.capacity
    return turn, device * exchange.capacity + index - turn * exchange.capacity


class _Groups(NamedTuple):
    """How the rows of one round, by device, become rows by expert."""

    sizes: jax.Array  # [L]
    slot: jax.Array  # [P C], the slot of each grouped row
    place: jax.Array  # [P C], the grouped row of each slot
    used: jax.Array  # [P C], of each slot


def _groups(route: _Route, exchange: Exchange, turn: jax.Array) -> _Groups:
    """Every device sends its rows sorted by expert: merging them takes counting alone."""
    # Bounds of each expert's rows among a device's slots of this round.
    bounds = jnp.clip(route.ends - turn * exchange.capacity, 0, exchange.capacity)
    counts = jnp.diff(bounds, axis=1)  # [P, L]
    by_expert = counts.T.reshape(-1)
    first = (jnp.cumsum(by_expert) - by_expert).reshape(exchange.local, -1)  # [L, P]
    index = jnp.arange(exchange.capacity)
    expert = _passed(bounds[:, 1:], exchange.capacity)  # [P, C]; L where the slot is not used
    inside = jnp.minimum(expert, exchange.local - 1)
    device = jnp.arange(exchange.devices)[:, None]
    shift = first.T - bounds[:, :-1]  # [P, L], from a slot to its grouped row
    place = jnp.minimum(index[None, :] + shift[device, inside], counts.shape[0] * index.shape[0])
    rows = jnp.arange(exchange.devices * exchange.capacity)
    owner = _passed(jnp.cumsum(by_expert)[None, :], rows.shape[0])[0]
    owner = jnp.minimum(owner, by_expert.shape[0] - 1)
    source = owner % exchange.devices
    at = rows - shift[source, owner // exchange.devices]
    slot = source * exchange.capacity + jnp.clip(at, 0, exchange.capacity - 1)
    used = expert < exchange.local
    place = jnp.clip(place, 0, rows.shape[0] - 1)
    return _Groups(jnp.sum(counts, axis=0), slot, place.reshape(-1), used.reshape(-1))


def _passed(ends: jax.Array, size: int) -> jax.Array:
    """How many of the `ends [m, G]` are at or before each index: int32 `[m, size]`."""
    # Comparing all takes a TPU less than counting by scatter, which sorts first.
    index = jnp.arange(size, dtype=ends.dtype)[None, None, :]
    return jnp.sum(ends[:, :, None] <= index, axis=1, dtype=jnp.int32)


def _across(exchange: Exchange, rows: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(rows, exchange.axis, 0, 0, tiled=True)


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    # Indices are in range; saying so spares a masked copy of the result.
    return rows.at[index].get(mode="promise_in_bounds")


def _rows_by_token(
    rows: jax.Array, turn: jax.Array, at: tuple[jax.Array, jax.Array], tokens: int
) -> jax.Array:
    """Of rows `[P C, ...]` of a round those of each assignment, `[n, k, ...]`, zero in others."""
    turns, slots = at
    here = (turns == turn).reshape(-1, *[1] * (rows.ndim - 1))
    found = jnp.where(here, _take(rows, slots), 0)
    return found.reshape(tokens, -1, *rows.shape[1:])


def run_experts(
    experts: Experts,
    exchange: Exchange,
    parameters: Any,
    constants: Any,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
) -> jax.Array:
    """Sums over each token's experts, wherever they live: `[n, D]`.

    Args:
      experts: the experts of this device, a pure function; what it gives for rows past the last
        group does not matter.
      exchange: the devices.
      parameters: of the experts, differentiable.
      constants: other arrays of theirs, which get no gradient.
      x: tokens `[n, D]`.
      weights: `[n, k]`.
      chosen: global expert indices `[n, k]`.
    """
    program = _trace(experts, exchange, parameters, constants, x)

    @jax.custom_vjp
    def run(leaves: Any, constants: Any, x: Any, weights: Any, chosen: Any) -> jax.Array:
        call = partial(program, *leaves, *constants)
        return _forward(call, exchange, _route(chosen, exchange), x, weights, chosen)

    def forward(leaves: Any, *rest: Any) -> tuple:
        trained = [leaf.value if leaf.perturbed else None for leaf in leaves]
        frozen = [None if leaf.perturbed else leaf.value for leaf in leaves]
        constants, x, weights, chosen = jax.tree.map(lambda primal: primal.value, rest)
        call = partial(program, *(leaf.value for leaf in leaves), *constants)
        route = jax.tree.map(lambda part: checkpoint_name(part, ROUTED), _route(chosen, exchange))
        y = _forward(call, exchange, route, x, weights, chosen)
        return y, (trained, frozen, constants, route, x, weights, chosen)

    def backward(kept: tuple, dy: jax.Array) -> tuple:
        trained, frozen, constants, route, x, weights, chosen = kept

        def call(trained: Sequence[jax.Array | None], *rest: jax.Array) -> jax.Array:
            leaves = [a if b is None else b for a, b in zip(trained, frozen, strict=True)]
            return program(*leaves, *constants, *rest)

        return _backward(call, exchange, route, trained, x, weights, chosen, dy)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(jax.tree.leaves(parameters), jax.tree.leaves(constants), x, weights, chosen)


def _trace(
    experts: Experts, exchange: Exchange, parameters: Any, constants: Any, x: jax.Array
) -> Callable[..., jax.Array]:
    """The experts as a traced program of flat arguments.

    The backward pass runs them when the model's call is long over, and with it the interception by
    which their adapters act (`lora_tune.lora.provider`). What is traced now holds the adapters.
    """
    rows = jax.ShapeDtypeStruct((exchange.devices * exchange.capacity, x.shape[1]), x.dtype)
    sizes = jax.ShapeDtypeStruct((exchange.local,), jnp.int32)
    turn = jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.make_jaxpr(experts)(parameters, constants, rows, sizes, turn)
    run = jax.extend.core.jaxpr_as_fun(program)
    return lambda *arguments: run(*arguments)[0]


def _forward(
    call: Callable,
    exchange: Exchange,
    route: _Route,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
) -> jax.Array:
    at = _slot(route, exchange, chosen)
    tokens, top_k = chosen.shape

    def one(state: tuple) -> tuple:
        turn, y = state
        assignment, _ = _sent(route, exchange, turn)
        groups = _groups(route, exchange, turn)
        rows = _take(_across(exchange, _take(x, assignment // top_k)), groups.slot)
        out = _take(call(rows, groups.sizes, turn), groups.place)
        out = _across(exchange, jnp.where(groups.used[:, None], out, 0))
        out = _rows_by_token(out, turn, at, tokens)
        weighted = out.astype(jnp.float32) * weights.astype(jnp.float32)[..., None]
        return turn + 1, y + jnp.sum(weighted, axis=1)

    start = (jnp.int32(0), jnp.zeros(x.shape, jnp.float32))
    return jax.lax.while_loop(lambda state: state[0] < route.rounds, one, start)[1].astype(x.dtype)


def _backward(
    call: Callable,
    exchange: Exchange,
    route: _Route,
    trained: Sequence[jax.Array | None],
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    dy: jax.Array,
) -> tuple:
    at = _slot(route, exchange, chosen)
    tokens, top_k = chosen.shape

    def one(state: tuple) -> tuple:
        turn, dtrained, dx, dweights = state
        assignment, sent = _sent(route, exchange, turn)
        groups = _groups(route, exchange, turn)
        token = assignment // top_k
        rows = _take(_across(exchange, _take(x, token)), groups.slot)
        dout = _take(_across(exchange, _take(dy, token)), groups.slot)
        weight = jnp.where(sent, _take(weights.reshape(-1), assignment), 0)
        weight = _take(_across(exchange, weight), groups.slot)
        real = jnp.arange(rows.shape[0]) < jnp.sum(groups.sizes)
        # Rows past the last group hold anything; what they are given must be nothing.
        scaled = jnp.where(real[:, None], dout * weight[:, None], 0)
        out, pull = jax.vjp(lambda w, rows: call(w, rows, groups.sizes, turn), trained, rows)
        more, drows = pull(scaled)
        each = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
        used = groups.used
        drows = _across(exchange, jnp.where(used[:, None], _take(drows, groups.place), 0))
        each = _across(exchange, jnp.where(used, _take(each, groups.place), 0))
        dx += jnp.sum(_rows_by_token(drows, turn, at, tokens).astype(jnp.float32), axis=1)
        dweights += _rows_by_token(each, turn, at, tokens)
        dtrained = jax.tree.map(lambda total, part: total + part, dtrained, more)
        return turn + 1, dtrained, dx, dweights

    start = (
        jnp.int32(0),
        jax.tree.map(jnp.zeros_like, trained),
        jnp.zeros(x.shape, jnp.float32),
        jnp.zeros(weights.shape, jnp.float32),
    )
    _, dtrained, dx, dweights = jax.lax.while_loop(
        lambda state: state[0] < route.rounds, one, start
    )
    return dtrained, None, dx.astype(x.dtype), dweights.astype(weights.dtype), None
