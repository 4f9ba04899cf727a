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
from lora_tune.models.decoder import LayerInputs
from lora_tune.models.fields import positive

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


def rope_fields(hf: Mapping[str, Any]) -> Any:
    """transformers 5 calls `rope_parameters` what was `rope_scaling`, and reads both."""
    return hf.get("rope_scaling") or hf.get("rope_parameters") or {}


def completed(fields: Mapping[str, Any], hf: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Rope fields of one kind of layer with all that follows from elsewhere.

    Args:
      fields: an object of `config.json`.
      hf: `config.json`; the original context, where the object does not say it, stands at its top
        or is `max_position_embeddings`.
      defaults: for what neither says: `rope_theta`, `max_position_embeddings`.
    """
    most = hf.get("max_position_embeddings", defaults.pop("max_position_embeddings"))
    more = {
        "rope_type": fields.get("type") or "default",
        _ORIGINAL: hf.get(_ORIGINAL, most),
        **defaults,
    }
    return more | dict(fields)


def rope_problems(
    rope: Mapping[str, Any], where: str, *, partial: bool = False, ignored: Sequence[str] = ()
) -> Iterator[str]:
    """What is wrong with `completed` rope fields.

    Args:
      rope: the fields.
      where: their name in `config.json`.
      partial: whether the family can turn a part of each head.
      ignored: further fields that do not change what is computed.
    """
    kind = rope["rope_type"]
    yield from positive(rope, ("rope_theta",))
    factor = rope.get("partial_rotary_factor")
    if partial and factor is not None:
        yield from positive(rope, ("partial_rotary_factor",))
    elif factor not in (None, 1, 1.0):
        yield f"{where}.partial_rotary_factor={factor!r} is not supported (only 1)"
    if kind not in _NEEDED:
        yield f"{where}.rope_type={kind!r} is not supported (only {', '.join(_NEEDED)})"
        return
    needed, optional = _NEEDED[kind], _OPTIONAL.get(kind, {})
    for name, value in rope.items():
        if value is not None and name not in (*_ALWAYS, *needed, *optional, *ignored):
            yield f"{where}.{name}={value!r} is unknown to rope_type={kind!r}"
    wrong = [f"{where}.{n} is missing (rope_type is {kind!r})" for n in needed if n not in rope]
    wrong += positive(rope, [name for name in needed if name in rope])
    wrong += positive(rope, [n for n in optional if n != "truncate" and rope.get(n) is not None])
    if not isinstance(rope.get("truncate", True), bool):
        wrong.append(f"{where}.truncate is {rope['truncate']!r}, expected true or false")
    if kind == "llama3" and not wrong and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        wrong.append(f"{where}.high_freq_factor must be above low_freq_factor")
    if kind == "yarn" and not wrong and rope["rope_theta"] <= 1:
        wrong.append(f"{where}.rope_theta is {rope['rope_theta']}, expected more than 1")
    yield from wrong


def make_rope(rope: Mapping[str, Any], head_dim: int, max_positions: int) -> Rope:
    """The rotation that `completed` fields without problems describe."""
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
