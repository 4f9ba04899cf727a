# SPDX-License-Identifier: Apache-2.0
"""Rope as `config.json` asks for it: `rope_parameters`, and what transformers 4 called it.

Types and their fields are those of `transformers.modeling_rope_utils`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_tune.layers import sequence
from lora_tune.layers.rope import (
    apply_rope,
    dynamic_frequencies,
    proportional_frequencies,
    rope_frequencies,
    scale_llama3,
    yarn_frequencies,
    yarn_magnitude,
)
from lora_tune.models.fields import positive
from lora_tune.models.inputs import LayerInputs

_ORIGINAL = "original_max_position_embeddings"
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
    "proportional": (),
}
"""Rope type -> the numbers it cannot do without."""

_OPTIONAL: Mapping[str, Mapping[str, Any]] = {
    "yarn": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
    },
    "proportional": {"factor": 1.0},
}
"""Rope type -> further fields, and what stands for null."""

_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL)


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of queries and keys in one kind of layer.

    Attributes:
      rope_type: `default`, `linear`, `dynamic`, `llama3`, `yarn` or `proportional`.
      theta: the base.
      rotary_dim: the leading dimensions of a head that turn.
      max_positions: `max_position_embeddings`.
      options: the further fields of the type, by name.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_positions: int
    options: tuple[tuple[str, Any], ...] = ()

    def frequencies(self, inputs: LayerInputs | None = None) -> np.ndarray | jax.Array:
        """Radians per position of each pair of dimensions, `[rotary_dim / 2]`.

        Of type `dynamic` with `inputs`: `[B, T, rotary_dim / 2]`, by the length of each text in
        this call. A text that grows beyond `max_position_embeddings` in a cache so turns its new
        tokens by other frequencies than its old ones, as in transformers.
        """
        options = dict(self.options)
        if self.rope_type == "yarn":
            taken = {"attention_factor", "mscale", "mscale_all_dim"}
            numbers = {name: value for name, value in options.items() if name not in taken}
            return yarn_frequencies(self.rotary_dim, self.theta, **numbers)
        if self.rope_type == "proportional":
            return proportional_frequencies(self.rotary_dim, self.theta, **options)
        plain = rope_frequencies(self.rotary_dim, self.theta)
        if self.rope_type == "linear":
            return plain / np.float32(options["factor"])
        if self.rope_type == "llama3":
            return scale_llama3(plain, **options)
        if self.rope_type == "dynamic" and inputs is not None:
            return dynamic_frequencies(
                self.rotary_dim,
                self.theta,
                _text_lengths(inputs),
                factor=options["factor"],
                max_position_embeddings=self.max_positions,
            )
        return plain

    @property
    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by."""
        options = dict(self.options)
        if self.rope_type != "yarn":
            return 1.0
        if options["attention_factor"] is not None:
            return float(options["attention_factor"])
        return yarn_magnitude(*(options[n] for n in ("factor", "mscale", "mscale_all_dim")))

    def turn(self, inputs: LayerInputs, *heads: jax.Array) -> tuple[jax.Array, ...]:
        """Rotates queries and keys `[B, T, N, H]` by their positions."""
        frequencies = self.frequencies(inputs)
        return tuple(apply_rope(x, inputs.positions, frequencies, self.magnitude) for x in heads)


def _text_lengths(inputs: LayerInputs) -> jax.Array:  # [B, T]
    """How long the text is that each token belongs to, as far as it has come in this call."""
    ids, positions = (sequence.whole_rows(x) for x in (inputs.segment_ids, inputs.positions))
    time = ids.shape[1]
    index = jnp.arange(time)[None, :]
    ends = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    end = jax.lax.cummin(jnp.where(ends, index, time), axis=1, reverse=True)
    return sequence.own_heads(jnp.take_along_axis(positions, end, axis=1) + 1, 1)


@dataclasses.dataclass(frozen=True)
class RopeFields:
    """Rope fields of one kind of layer.

    Attributes:
      objects: the objects of `config.json` that say them, by name; the first to speak counts.
      values: all of them, with what follows from elsewhere.
    """

    objects: Mapping[str, Mapping[str, Any]]
    values: Mapping[str, Any]

    @property
    def where(self) -> str:
        """Where a field that is missing would stand."""
        return next(iter(self.objects))

    def place(self, name: str) -> str:
        """Where a field stands: in one of the objects, or at the top of `config.json`."""
        return next((f"{w}.{name}" for w, fields in self.objects.items() if name in fields), name)


def rope_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The object with rope fields, by its name.

    transformers 5 calls `rope_parameters` what was `rope_scaling`, and reads both.
    """
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    return {name: hf.get(name) or {}}


def no_objects(objects: Mapping[str, Any]) -> Iterator[str]:
    """What stands, by name, where `config.json` must have an object, and is none."""
    for name, value in objects.items():
        if not isinstance(value, Mapping):
            yield f"{name} is {value!r}, expected an object"


def completed(
    objects: Mapping[str, Mapping[str, Any]], hf: Mapping[str, Any], **defaults: Any
) -> RopeFields:
    """Rope fields of one kind of layer with all that follows from elsewhere.

    Args:
      objects: see `RopeFields`.
      hf: `config.json`; the original context, where the object does not say it, stands at its top
        or is `max_position_embeddings`.
      defaults: for what neither says: `rope_theta`, `max_position_embeddings`.
    """
    most = hf.get("max_position_embeddings", defaults.pop("max_position_embeddings"))
    fields = {n: v for one in reversed([*objects.values()]) for n, v in one.items()}
    more = {
        "rope_type": fields.get("type") or "default",
        _ORIGINAL: hf.get(_ORIGINAL, most),
        **defaults,
    }
    return RopeFields(objects, more | fields)


def rope_problems(
    fields: RopeFields, *, partial: bool = False, ignored: Sequence[str] = ()
) -> Iterator[str]:
    """What is wrong with `completed` rope fields.

    Args:
      fields: the fields.
      partial: whether the family can turn a part of each head.
      ignored: further fields that do not change what is computed.
    """
    rope, place, kind = fields.values, fields.place, fields.values["rope_type"]
    yield from positive(rope, ("rope_theta",), place)
    factor = rope.get("partial_rotary_factor")
    if partial and factor is not None:
        wrong = list(positive(rope, ("partial_rotary_factor",), place))
        yield from wrong
        if not wrong and factor > 1:
            yield f"{place('partial_rotary_factor')} is {factor}, expected at most 1"
    elif factor not in (None, 1, 1.0):
        yield f"{place('partial_rotary_factor')}={factor!r} is not supported (only 1)"
    if not isinstance(kind, str) or kind not in _NEEDED:
        name = place("rope_type")
        name = place("type") if name == "rope_type" else name
        yield f"{name}={kind!r} is not supported (only {', '.join(_NEEDED)})"
        return
    needed, optional = _NEEDED[kind], _OPTIONAL.get(kind, {})
    for name, value in rope.items():
        if value is not None and name not in (*_ALWAYS, *needed, *optional, *ignored):
            yield f"{place(name)}={value!r} is unknown to rope_type={kind!r}"
    yield from _type_problems(fields, kind)


def _type_problems(fields: RopeFields, kind: str) -> Iterator[str]:
    """What is wrong with the numbers of one rope type."""
    rope, place = fields.values, fields.place
    needed, optional = _NEEDED[kind], _OPTIONAL.get(kind, {})
    missing = [name for name in needed if name not in rope]
    wrong = [f"{fields.where}.{name} is missing (rope_type is {kind!r})" for name in missing]
    numbers = [name for name in needed if name in rope]
    numbers += [n for n in optional if n != "truncate" and rope.get(n) is not None]
    wrong += positive(rope, numbers, place)
    if not isinstance(rope.get("truncate", True), bool):
        wrong.append(f"{place('truncate')} is {rope['truncate']!r}, expected true or false")
    if kind == "llama3" and not wrong and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        wrong.append(f"{place('high_freq_factor')} must be above low_freq_factor")
    theta = rope["rope_theta"]
    if kind == "yarn" and not wrong and not list(positive(rope, ("rope_theta",))) and theta <= 1:
        wrong.append(f"{place('rope_theta')} is {theta}, expected more than 1")
    yield from wrong


def make_rope(fields: RopeFields, head_dim: int, max_positions: int) -> Rope:
    """The rotation that `completed` fields without problems describe."""
    rope = fields.values
    kind = rope["rope_type"]
    optional = _OPTIONAL.get(kind, {})
    given = {name: rope.get(name) for name in optional}
    filled = {name: optional[name] if v is None else v for name, v in given.items()}
    part = rope.get("partial_rotary_factor") or 1.0
    if kind == "proportional":  # whole heads turn, though most of their dimensions by nothing
        filled["proportion"], part = float(part), 1.0
    return Rope(
        rope_type=kind,
        theta=float(rope["rope_theta"]),
        rotary_dim=int(head_dim * part),
        max_positions=max_positions,
        options=(*((name, rope[name]) for name in _NEEDED[kind]), *filled.items()),
    )
