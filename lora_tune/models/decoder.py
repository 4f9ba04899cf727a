# SPDX-License-Identifier: Apache-2.0
"""The decoder: embedding, layers through the scan engine, final norm and head.

A family supplies its configuration, its layer module and its table of tensors; everything about
stacking, remat and caches is here, once; the loss by parts is `layers.cross_entropy`.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lora_tune import scan
from lora_tune.cache import Cache, Entry, LayerCache
from lora_tune.errors import InputError
from lora_tune.layers.cross_entropy import cross_entropy
from lora_tune.layers.linear import Embed, Linear
from lora_tune.models.family import Config, Family, Origin
from lora_tune.models.inputs import LayerInputs, fill_slots, segment_positions


class Block(nnx.Module):
    """One repetition of the layer cycle: runs of equal layers, each its own stack."""

    def __init__(self, runs: Sequence[nnx.Module]):
        self.runs = nnx.List(runs)


@dataclasses.dataclass(frozen=True)
class DecoderOptions:
    """How a decoder is laid out and run; none of it changes the function it computes.

    Attributes:
      dtype: dtype of activations.
      param_dtype: dtype of the weights.
      scan_layers: run repeated layers as stacks under `jax.lax.scan`; False unrolls them.
      param_scan_axis: position of the stack axes in each weight.
      remat: what is kept of each layer for the backward pass, see `scan.REMAT`.
      loss_chunk: vocabulary entries whose logits exist at a time when targets are given.
    """

    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    scan_layers: bool = True
    param_scan_axis: int = 0
    remat: str = "full"
    loss_chunk: int = 8192

    def __post_init__(self) -> None:
        if self.remat not in scan.REMAT:
            raise InputError(f"remat is {self.remat!r}, expected one of {', '.join(scan.REMAT)}")
        # The largest weights of one layer, routed experts, have three axes.
        most = 3 if self.scan_layers else 0
        if not 0 <= self.param_scan_axis <= most:
            raise InputError(
                f"param_scan_axis is {self.param_scan_axis}, expected 0 to 3, and 0 where "
                "scan_layers is False"
            )
        if self.loss_chunk < 1:
            raise InputError(f"loss_chunk is {self.loss_chunk}, expected at least 1")


class Decoder(nnx.Module):
    """A causal language model of any family, built abstract (shapes only).

    Weights come from `lora_tune.hf.load` or `lora_tune.models.initial`. Shapes: B batch, T time,
    V vocabulary.
    """

    def __init__(self, family: Family, config: Config, options: DecoderOptions):
        self.family = dataclasses.replace(family, ignored=(*family.ignored, *family.unused(config)))
        self.origin: Origin | None = None
        self.config = config
        self.options = options
        self.plan = scan.plan_layers(config.layer_kinds(), scan=options.scan_layers)
        dtype = options.param_dtype
        self.embed_tokens = Embed(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layer_inputs = family.make_layer_inputs(config, dtype=dtype)
        make = functools.partial(family.make_layer, config, dtype=dtype)
        if options.scan_layers:
            self._create_stacks(make)
        else:
            self.layers = nnx.List([make(run.kind) for run in self.plan.prefix])
        self.norm = family.make_norm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config.hidden_size,
                config.vocab_size,
                axes=("embed", "vocab"),
                dtype=dtype,
            )

    def _create_stacks(self, make: Callable[..., nnx.Module]) -> None:
        scan_axis = self.options.param_scan_axis

        def stack_run(run: scan.Run) -> nnx.Module:
            layer = make(run.kind)
            return scan.create_stack(layer, length=run.length, axis=scan.LAYER, scan_axis=scan_axis)

        plan = self.plan
        self.prefix = nnx.List([stack_run(run) for run in plan.prefix])
        if plan.blocks:
            self.blocks = scan.create_stack(
                Block([stack_run(run) for run in plan.cycle]),
                length=plan.blocks,
                axis=scan.BLOCK,
                scan_axis=scan_axis,
            )
        self.suffix = nnx.List([stack_run(run) for run in plan.suffix])

    def create_cache(self, batch: int, size: int) -> Cache:
        """An empty cache for `batch` rows of at most `size` tokens each, padding included."""

        def empty(kind: Hashable, stack: Sequence[int]) -> LayerCache:
            one = functools.partial(
                self.family.make_cache,
                self.config,
                kind,
                batch=batch,
                size=size,
                dtype=self.options.dtype,
            )
            return jax.tree.map(
                lambda leaf: jnp.zeros((*stack, *leaf.shape), leaf.dtype), jax.eval_shape(one)
            )

        kinds = self.config.layer_kinds()
        stacks = self.plan.stacks().values()
        return Cache(
            layers=tuple(empty(kinds[int(ids.flat[0])], ids.shape) for ids in stacks),
            segment_ids=jnp.zeros((batch, size), jnp.int32),
            index=jnp.zeros((), jnp.int32),
        )

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        targets: jax.Array | None = None,
        last: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> Any:
        """Scores the next token, or the given targets.

        Args:
          tokens: int32 `[B, T]`.
          segment_ids: int32 `[B, T]`; 0 is padding, and tokens of different ids never see each
            other, in attention, convolution or recurrent state. Default: one document a row.
          positions: int32 `[B, T]`; default: restarting at 0 wherever the segment id changes.
          targets: int32 `[B, T]`, the token to score at each place.
          last: int32 `[B]`, the one place of each row whose logits are wanted.
          cache: from `create_cache` or an earlier call. The tokens take its next T slots and see
            what it holds: a row goes on with its last document, unless the segment id changes.
            Positions then go on as well. The caller sees to it that the slots suffice; past the
            end the last ones are overwritten.

        Returns:
          Logits `[B, T, V]` in the dtype of the activations, `[B, V]` with `last`. Or, with
          `targets`, the pair of negative log-likelihoods (float32 `[B, T]`) and whether the target
          is the most likely token (bool `[B, T]`), computed without ever holding all logits.
          With a cache, the pair of that and the cache after the call.
        """
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        slots = None
        if cache is not None:
            slots, following = fill_slots(cache, segment_ids)
        else:
            following = segment_positions(segment_ids)
        inputs = LayerInputs(segment_ids, following if positions is None else positions, slots)
        # float32 means float32 on every backend: elsewhere than on CPU the default is less.
        exact = jnp.dtype(self.options.dtype) == jnp.float32
        with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
            h = self._embed(tokens)
            own = None if self.layer_inputs is None else self.layer_inputs(tokens, h)
            h, layers = self._run_layers(h, inputs, own, cache and cache.layers)
            scored = self._head_outputs(self.norm(h), targets, last)
        if slots is None:
            return scored
        return scored, Cache(layers, slots.segment_ids, slots.index + tokens.shape[1])

    def _embed(self, tokens: jax.Array) -> jax.Array:  # [B, T] -> [B, T, D]
        h = self.embed_tokens(tokens, self.options.dtype)
        scale = self.family.embedding_scale(self.config)
        return h if scale == 1.0 else h * jnp.asarray(scale, h.dtype)

    def _head_outputs(
        self, h: jax.Array, targets: jax.Array | None, last: jax.Array | None
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        if targets is not None:
            return self._score(h, targets)
        if last is not None:
            h = jnp.take_along_axis(h, last[:, None, None], axis=1)[:, 0]

        def score_all(head: Any, _: None, h: jax.Array) -> tuple[None, jax.Array]:
            return None, self._project(head, h)

        _, logits = scan.apply_stack(self._head(), None, score_all, axis=None, xs=h, unshard=True)
        return logits

    def _run_layers(
        self,
        h: jax.Array,
        inputs: LayerInputs,
        own: jax.Array | None,
        caches: Sequence[LayerCache] | None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Runs every layer in order.

        Args:
          h: `[B, T, D]`.
          inputs: what every layer sees.
          own: `[L, B, T, P]`, what there is for each layer alone.
          caches: those of the stacks, in the order of `LayerPlan.stacks`; None for none.

        Returns:
          `[B, T, D]`, and the caches after the call (None for each stack without).
        """
        options, plan = self.options, self.plan
        adapted = bool(jax.tree.leaves(nnx.state(self, nnx.LoRAParam)))
        stacked = {"frozen": adapted or caches is not None, "scan_axis": options.param_scan_axis}
        common = {"remat": options.remat, "unshard": True, **stacked}

        kept: dict[str, Any] = {}
        first = functools.partial(jax.tree.map, lambda x: x[0])

        def run_stack(run: scan.Run, stack: Any, carry: Any, own: Any, *at: Any) -> Any:
            def run_layer(layer: Any, carry: Any, x: Any) -> tuple[Any, Any]:
                (h, cache), (i, own) = carry, x
                entry = None if cache is None else Entry(cache, at if i is None else (*at, i))
                h, entry, *more = layer(h, dataclasses.replace(inputs, own=own, kept=kept), entry)
                return (h, entry and entry.stack), more

            axis = scan.LAYER if options.scan_layers else None
            indexed = options.scan_layers and carry[1] is not None
            xs = (jnp.arange(run.length) if indexed else None, own)
            xs = xs if options.scan_layers else (None, first(own))
            carry, more = scan.apply_stack(stack, carry, run_layer, axis=axis, xs=xs, **common)
            if name := self.family.keeps(self.config, run.kind):
                (kept[name],) = first(more) if options.scan_layers else more
            return carry

        def run_stacks(
            runs: Sequence[scan.Run], stacks: Any, h: jax.Array, caches: Any, own: Any, *at: Any
        ) -> Any:
            after = []
            for run, stack, cache in zip(runs, stacks, caches, strict=True):
                start = run.start - runs[0].start
                mine = None if own is None else own[start : start + run.length]
                h, cache = run_stack(run, stack, (h, cache), mine, *at)
                after.append(cache)
            return h, tuple(after)

        def run_block(block: Any, carry: Any, x: Any) -> tuple[Any, None]:
            b, own = x
            at = () if b is None else (b,)
            return run_stacks(plan.cycle, block.runs, *carry, own, *at), None

        left = iter(caches or [None] * len(plan.stacks()))

        def take(runs: Sequence[scan.Run]) -> tuple[LayerCache | None, ...]:
            return tuple(itertools.islice(left, len(runs)))

        def since(runs: Sequence[scan.Run]) -> jax.Array | None:
            return own if own is None or not runs else own[runs[0].start :]

        if not options.scan_layers:
            return run_stacks(plan.prefix, self.layers, h, tuple(left), own)
        h, prefix = run_stacks(plan.prefix, self.prefix, h, take(plan.prefix), own)
        inside = take(plan.cycle)
        if plan.blocks:
            mine, size = since(plan.cycle), plan.blocks * plan.cycle_length
            if mine is not None:
                mine = mine[:size].reshape(plan.blocks, plan.cycle_length, *mine.shape[1:])
            # The block is not rematerialised: each of its layers is.
            (h, inside), _ = scan.apply_stack(
                self.blocks,
                (h, inside),
                run_block,
                axis=scan.BLOCK,
                xs=(None if caches is None else jnp.arange(plan.blocks), mine),
                **stacked,
            )
        h, suffix = run_stacks(plan.suffix, self.suffix, h, tuple(left), since(plan.suffix))
        return h, (*prefix, *inside, *suffix)

    def _head(self) -> Any:
        return self.embed_tokens if self.config.tie_word_embeddings else self.lm_head

    def _score(self, h: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scores targets `[B, T]`."""
        nll, correct = cross_entropy(
            self._head(),
            self._project,
            h.reshape(targets.size, -1),
            targets.reshape(-1),
            vocab_size=self.config.vocab_size,
            chunk_size=self.options.loss_chunk,
        )
        return nll.reshape(targets.shape), correct.reshape(targets.shape)

    def _project(self, head: Linear | Embed, h: jax.Array) -> jax.Array:
        logits = head.attend(h) if isinstance(head, Embed) else head(h)
        cap = self.family.logit_cap(self.config)
        return logits if cap is None else jnp.tanh(logits / cap) * cap
