# SPDX-License-Identifier: Apache-2.0
"""The configuration of attention-and-MLP models: one reader, and what differs between families.

A `Dialect` says how the `config.json` of one `model_type` is to be read and how its layers differ
from Llama's. The dialects themselves are in `lora_tune.models.dialects`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lora_tune.errors import InputError
from lora_tune.models.fields import (
    list_problems,
    sparse_layers,
    text_fields,
    unknown_fields,
    unsupported,
    value_problems,
)
from lora_tune.models.global_heads import global_heads
from lora_tune.models.kinds import FULL, SLIDING, Kind, key_sharing, sharing_problems
from lora_tune.models.rope import (
    Rope,
    RopeFields,
    completed,
    make_rope,
    no_objects,
    rope_fields,
    rope_problems,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Dialect:
    """One family: its fields of `config.json`, and its layers where they are not Llama's.

    Attributes:
      model_type: of the configuration.
      defaults: what transformers assumes for a field that `config.json` leaves out. Null heads and
        head sizes follow from the other sizes.
      only: fields that may ask for something the layers do not do -> the values that do not.
      ignored: further fields that do not change what is computed.
      synonyms: fields that go by another name as well -> the one in `defaults`.
      biases: the fields that decide over biases, `attention_bias` and `mlp_bias`, of those there
        are.
      qkv_bias: queries, keys and values always have a bias.
      qk_norm: queries and keys are normalised head by head before they are turned.
      windows: which layers see a window of tokens: `none`; `all`, unless `sliding_window` is null;
        `switched`, all with `use_sliding_window`; `late`, with that those from
        `max_window_layers` on; `cycle`, all but every `sliding_window_pattern`-th, which is every
        sixth where that is no field of the family.
      local_theta: the base of rope in layers with a window, where those have a rope of their own;
        `theta` is that of the others.
      activation: of the MLP, one of `lora_tune.layers.activations.ACTIVATIONS`.
      zero_centred: norms scale by 1 + weight.
      sandwiched: attention and feed-forward have a norm behind them as well.
      scaled_embeddings: embeddings are multiplied by the root of their width.
      unscaled: products of queries and keys are not scaled.
      global_rope: rope fields of layers without a window, where `rope_parameters` is missing.
      global_heads: layers without a window may have heads of their own, see
        `lora_tune.models.global_heads`; with `attention_k_eq_v` their keys are the values. The last
        layer is one of them.
      older_rope: rope fields of transformers 4 are read: `rope_theta` and `rope_scaling`.
      value_norm: values are normalised, without a weight.
      exact_norms: norms are float32 throughout, see `PlainRMSNorm`.
      scaled_layers: each layer's output is multiplied by a number of its own, which is not trained.
      multimodal: the fields are those of `text_config`.
      prefix: how the names of tensors of the text model begin.
      renamed, passed_by: see `renamed` and `ignored` of `lora_tune.hf.table`.
    """

    model_type: str
    defaults: Mapping[str, Any]
    only: Mapping[str, Sequence[Any]]
    ignored: Sequence[str] = ()
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    biases: Sequence[Literal["attention_bias", "mlp_bias"]] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: Literal["none", "all", "switched", "late", "cycle"] = "none"
    theta: float = 10000.0
    local_theta: float | None = None
    activation: str = "silu"
    zero_centred: bool = False
    sandwiched: bool = False
    scaled_embeddings: bool = False
    unscaled: bool = False
    global_rope: Sequence[tuple[str, Any]] = ()
    global_heads: bool = False
    older_rope: bool = True
    value_norm: bool = False
    exact_norms: bool = False
    scaled_layers: bool = False
    multimodal: bool = False
    prefix: str = "model."
    renamed: Sequence[tuple[str, str]] = ()
    passed_by: Sequence[tuple[str, str]] = ()

    @property
    def routes(self) -> bool:
        """Whether feed-forwards may be mixtures of experts."""
        return "num_experts" in self.defaults


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The fields of `config.json` that shape the model, under their own names.

    `layer_types` says what attention of every layer sees, `ropes` holds the rotation of each type,
    `sparse_layers` says which layers have experts; sizes of experts are 0 where there are none.
    """

    dialect: Dialect
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    layer_types: tuple[str, ...]
    sparse_layers: tuple[bool, ...]
    ropes: tuple[tuple[str, Rope], ...]
    query_pre_attn_scalar: int | None = None
    final_logit_softcapping: float | None = None
    global_head_dim: int | None = None
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False

    def layer_kinds(self) -> tuple[Kind, ...]:
        """The kind of every layer; equal kinds have equal parameter trees."""
        keys = key_sharing(self.layer_types, self.num_kv_shared_layers)
        return tuple(map(Kind, self.layer_types, self.sparse_layers, keys))

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have a bias."""
        return self.attention_bias or self.dialect.qkv_bias

    @property
    def attention_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        if self.dialect.unscaled:
            return 1.0
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def values_are_keys(self, layer_type: str) -> bool:
        """Whether layers of a type have no projection to values."""
        return self.attention_k_eq_v and layer_type == FULL

    def heads(self, layer_type: str) -> tuple[int, int]:
        """Key/value heads, and the width of every head, in layers of a type."""
        count, width = self.num_key_value_heads, self.head_dim
        if layer_type == FULL and self.dialect.global_heads:
            count = self.num_global_key_value_heads or count
            width = self.global_head_dim or width
        return count, width

    def rope(self, layer_type: str) -> Rope:
        """The rotation in layers of a type."""
        return dict(self.ropes)[layer_type]


_NO_EXPERTS: Mapping[str, Any] = {"num_experts": 0, "decoder_sparse_step": 1}
_FOLLOW = ("num_key_value_heads", "head_dim")
_NULLABLE: Mapping[str, Any] = {
    "global_head_dim": 1,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 1.0,
    "sliding_window": 1,
}
"""Fields that may be null -> an example of their type."""
_OLDER_ROPE = ("rope_theta", "rope_scaling")
_ROUTING = ("mlp_only_layers", "output_router_logits", "router_aux_loss_coef")


def read_config(dialect: Dialect, hf: Mapping[str, Any]) -> TransformerConfig:
    """Reads a Hugging Face `config.json`.

    Raises:
      InputError: naming every field that is unknown, of the wrong type, contradictory, or asks for
        a feature that the layers lack.
    """
    hf, around = text_fields(hf) if dialect.multimodal else (hf, [])
    hf, twice = _under_one_name(dialect, hf)
    values = {name: hf.get(name, default) for name, default in dialect.defaults.items()}
    null = {name for name in _NULLABLE if values.get(name) is None}
    checked = values.keys() - null - set(_FOLLOW)
    sizes = {n: v for n, v in {**dialect.defaults, **_NULLABLE}.items() if n in checked}
    problems = [
        *around,
        *twice,
        *value_problems(values, sizes),
        *unsupported(hf, dialect.only),
        *unknown_fields(hf, _known(dialect)),
    ]
    if not problems:
        # Both follow from the number of heads, also where the file says null.
        heads = values["num_attention_heads"]
        follow = {"num_key_value_heads": heads, "head_dim": values["hidden_size"] // heads}
        values |= {name: n for name, n in follow.items() if values[name] is None}
        problems = [
            *value_problems(values, follow),
            *_window_problems(dialect, hf, values),
            *_rope_problems(dialect, hf, values),
            *_bias_problems(dialect, hf),
            *list_problems(hf, "mlp_only_layers", int),
        ]
    if not problems and dialect.global_heads:
        heads, problems = global_heads(hf, values, _types_and_window(dialect, hf, values)[0])
        values |= heads
    problems = problems or list(_size_problems(dialect, hf, values))
    if problems:
        raise InputError(f"config.json ({dialect.model_type}): " + "; ".join(problems))
    return _make_config(dialect, hf, values)


def _make_config(
    dialect: Dialect, hf: Mapping[str, Any], values: dict[str, Any]
) -> TransformerConfig:
    types, window = _types_and_window(dialect, hf, values)
    most = values["max_position_embeddings"]
    widths = {SLIDING: values["head_dim"], FULL: values["head_dim"]}
    widths[FULL] = values.get("global_head_dim") or widths[FULL]
    ropes = {
        kind: make_rope(rope, widths[kind], most)
        for kind, rope in _ropes(dialect, hf, values).items()
    }
    sparse = sparse_layers({**_NO_EXPERTS, **values}, hf.get("mlp_only_layers"))
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    return TransformerConfig(
        dialect=dialect,
        **{name: value for name, value in values.items() if name in fields - {"sliding_window"}},
        attention_bias=bool(hf.get("attention_bias")),
        mlp_bias=bool(hf.get("mlp_bias")),
        sliding_window=window,
        layer_types=types,
        sparse_layers=sparse,
        ropes=tuple((kind, ropes[kind]) for kind in sorted(set(types))),
    )


def _known(dialect: Dialect) -> set[str]:
    """The fields that this dialect reads, checks, or knows to change nothing."""
    known = {*dialect.defaults, *dialect.only, *dialect.ignored, *dialect.biases}
    known |= {"rope_parameters", "original_max_position_embeddings"}
    if dialect.older_rope:
        known |= {*_OLDER_ROPE, *(("rope_local_base_freq",) if dialect.local_theta else ())}
    known |= {"layer_types"} if dialect.windows in ("late", "cycle") else set()
    known |= {"per_layer_config"} if dialect.global_heads else set()
    return known | ({*_ROUTING} if dialect.routes else set())


def _types_and_window(
    dialect: Dialect, hf: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[tuple[str, ...], int | None]:
    """The type of every layer, and how many tokens a query sees in those with a window."""
    layers, window = values["num_hidden_layers"], None
    if dialect.windows != "none" and values.get("use_sliding_window", True):
        window = values["sliding_window"]
    if hf.get("layer_types") is not None:
        return tuple(hf["layer_types"]), window
    if dialect.windows == "cycle":
        cycle = values.get("sliding_window_pattern", 6)
        types = [SLIDING if (i + 1) % cycle else FULL for i in range(layers)]
        if dialect.global_heads:
            types[-1] = FULL
        return tuple(types), window
    first = values["max_window_layers"] if dialect.windows == "late" else 0
    first = layers if window is None else first
    return tuple(SLIDING if i >= first else FULL for i in range(layers)), window


def _window_problems(
    dialect: Dialect, hf: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[str]:
    listed, count = hf.get("layer_types"), values["num_hidden_layers"]
    is_list = isinstance(listed, (list, tuple)) and all(t in (SLIDING, FULL) for t in listed)
    if listed is not None and not is_list:
        yield f"layer_types is {listed!r}, expected a list of {SLIDING!r} and {FULL!r}"
        return
    types, window = _types_and_window(dialect, hf, values)
    if len(types) != count:
        yield f"layer_types lists {len(types)} layers, num_hidden_layers is {count}"
    elif dialect.global_heads and types[-1] != FULL:
        yield f"layer_types ends in {SLIDING!r}, but the last layer of this family is {FULL!r}"
    if SLIDING in types and window is None:
        off = "sliding_window is null"
        if "use_sliding_window" in values:
            off = "there is no sliding_window (use_sliding_window)"
        yield f"layers are of type {SLIDING!r}, but {off}"


def _ropes(
    dialect: Dialect, hf: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, RopeFields]:
    """Layer type -> its rope fields.

    `rope_theta` used to stand at the top, `rope_type` to be called `type`.
    """
    most = {"max_position_embeddings": values["max_position_embeddings"]}
    theta = hf.get("rope_theta", dialect.theta) if dialect.older_rope else dialect.theta
    if dialect.local_theta is None:
        one = completed(rope_fields(hf), hf, rope_theta=theta, **most)
        return dict.fromkeys((FULL, SLIDING), one)
    fields = hf.get("rope_parameters") or {}
    full = fields.get(FULL) or ({} if fields else dict(dialect.global_rope))
    older = {"rope_scaling": scaling} if (scaling := hf.get("rope_scaling")) else {}
    local = hf.get("rope_local_base_freq", dialect.local_theta)
    objects = {
        FULL: {**older, f"rope_parameters.{FULL}": full},
        SLIDING: {f"rope_parameters.{SLIDING}": fields.get(SLIDING) or {}},
    }
    return {
        kind: completed(objects[kind], hf, rope_theta=base, **most)
        for kind, base in ((FULL, theta), (SLIDING, local))
    }


def _rope_problems(
    dialect: Dialect, hf: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[str]:
    nested, fields = dialect.local_theta is not None, hf.get("rope_parameters") or {}
    objects = {name: hf.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    if nested and isinstance(fields, Mapping):
        objects |= {f"rope_parameters.{kind}": fields.get(kind) or {} for kind in (FULL, SLIDING)}
        odd = {name: value for name, value in fields.items() if name not in (FULL, SLIDING)}
        yield from (f"rope_parameters.{n}={v!r} is unknown to this family" for n, v in odd.items())
    wrong = list(no_objects(objects))
    yield from wrong
    if wrong:
        return
    ropes = _ropes(dialect, hf, values)
    for rope in {rope.where: rope for rope in ropes.values()}.values():
        yield from rope_problems(rope, partial=rope.values["rope_type"] == "proportional")
        if nested and rope.values.get("truncate") is False:
            # transformers looks for it beside the layer types, where its own checks refuse it.
            yield f"{rope.place('truncate')}=False is not supported (only True)"
    older = objects["rope_scaling"]
    if nested and "rope_type" not in older and older.get("type", "default") != "default":
        yield (
            f"rope_scaling.type={older['type']!r} is not read in this family; write rope_type in "
            "its place"
        )


def _bias_problems(dialect: Dialect, hf: Mapping[str, Any]) -> Iterator[str]:
    for name in dialect.biases:
        if not isinstance(hf.get(name), (bool, type(None))):
            yield f"{name} is {hf[name]!r}, expected true or false"


def _under_one_name(dialect: Dialect, hf: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields under the names of `defaults`, and what is wrong with those of two names."""
    named = {dialect.synonyms.get(name, name): value for name, value in hf.items()}
    problems = [
        f"{name} is {hf[name]!r}, but {other} is {hf[other]!r}; leave out one of them"
        for name, other in dialect.synonyms.items()
        if name in hf and other in hf and hf[name] != hf[other]
    ]
    return named, problems


def _size_problems(
    dialect: Dialect, hf: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[str]:
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        if values["num_attention_heads"] % (values.get(name) or 1):
            yield f"num_attention_heads must be a multiple of {name}"
    for name in ("head_dim", "global_head_dim"):
        width = values.get(name) or 4
        if width % 2 or width < 4:
            yield f"{name} is {width}, expected an even number of at least 4"
    rows, name = values["vocab_size"], "vocab_size_per_layer_input"
    if values.get("hidden_size_per_layer_input") and values[name] < rows:
        yield f"{name} is {values[name]}, expected at least vocab_size ({rows})"
    types = _types_and_window(dialect, hf, values)[0]
    yield from sharing_problems(types, values.get("num_kv_shared_layers", 0))
    if dialect.routes and not 0 < values["num_experts_per_tok"] <= values["num_experts"]:
        yield "num_experts_per_tok must be between 1 and num_experts"
