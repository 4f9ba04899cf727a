# SPDX-License-Identifier: Apache-2.0
"""The recipe schema: every key, its type, its default and what it does, said once.

Names are those that PEFT, TRL and transformers users already know. A field without a default
here (`MISSING`) must be set by the recipe or on the command line.
"""

from dataclasses import dataclass, field, fields
from typing import Literal

from omegaconf import MISSING

from lora_tune.lora.config import DEFAULT_TARGETS, LoraConfig


@dataclass(frozen=True)
class Model:
    """The base model and how it runs."""

    path: str = MISSING
    """Local folder or hub id in Hugging Face format, or `lora_tune:NAME` for a shipped one."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; null takes the default branch."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` reads only the configuration and the tokenizer from `path`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the base weights and of the computation; adapters are always float32."""
    remat: Literal["full", "dots", "save_attention", "none", "offload"] = "full"
    """What each layer keeps for the backward pass, which recomputes the rest: `full` its input,
    `dots` also what projections put out, but for routed experts, and its mixer's heads and states,
    `save_attention` also what the heads of its mixer put out, `none` everything but weights,
    `offload` its input, in the host's memory; and all the choice of experts. See `docs/memory.md`;
    on a CPU, `dots` is fastest."""
    scan_layers: bool = True
    """Compile one cycle of layers and scan over it, rather than every layer on its own."""
    param_scan_axis: int = 0
    """Position of the stack axes in the weights of scanned layers."""
    chat_template: str | None = None
    """Jinja file, or its text, used instead of the tokenizer's own chat template."""


@dataclass(frozen=True)
class Lora:
    """Which modules get an adapter, and of what size."""

    r: int = 16
    """Rank of the adapters."""
    lora_alpha: float = 32.0
    """The adapter's output is scaled by `lora_alpha / r`."""
    lora_dropout: float = 0.0
    """Probability of dropping an input of an adapter in training."""
    target_modules: list[str] | str = field(default_factory=lambda: list(DEFAULT_TARGETS))
    """List of module name endings, one regular expression for whole names, or `all-linear`.

    Of the default list a model takes what it has; of any other, every entry must match."""
    exclude_modules: list[str] | str = field(default_factory=list)
    """The same forms; what it matches gets no adapter."""
    use_rslora: bool = False
    """Scale by `lora_alpha / sqrt(r)` instead."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Regular expression for the end of a module name -> its rank, where it differs from `r`."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """The same -> its alpha, where it differs from `lora_alpha`."""
    layers_to_transform: list[int] | None = None
    """Indices of the layers that get adapters; null means all."""
    seed: int | None = None
    """Seed of A's random values; null takes `train.seed`."""
    adapter_path: str | None = None
    """Folder of a PEFT adapter to start from, in place of a random A and a zero B."""

    def config(self) -> LoraConfig:
        """Return the part of this section that describes the adapter itself."""
        return LoraConfig(**{entry.name: getattr(self, entry.name) for entry in fields(LoraConfig)})


Format = Literal["auto", "messages", "sharegpt", "prompt_completion", "alpaca", "text"]


@dataclass(frozen=True)
class Source:
    """One of several sources of rows: an item of `data.sources`."""

    path: list[str] | str = MISSING
    """As `data.path`."""
    weight: float | None = None
    """Part of an epoch's examples, in proportion to the other sources; null, for all of them,
    takes every example once."""
    name: str | None = None
    """What reports call it; null takes the path."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset that has several."""
    max_samples: int | None = None
    """Use only the first rows; null means all."""
    format: Format | None = None
    """As `data.format`, which null takes."""
    columns: dict[str, str] | None = None
    """As `data.columns`, which null takes."""

    def called(self) -> str:
        """Return its name, or else its path."""
        path = self.path if isinstance(self.path, str) else ", ".join(self.path)
        return self.name or path


@dataclass(frozen=True)
class EvalSet:
    """One of several held-out sets: an item of `data.eval_sets`."""

    name: str = MISSING
    """`eval_NAME_loss` and the like are its figures in the log."""
    path: list[str] | str = MISSING
    """As `data.path`; of a list, each entry also has figures of its own."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: str | None = None
    """Configuration of a hub dataset that has several."""
    max_samples: int | None = None
    """Use only the first rows of each entry; null means all."""
    format: Format | None = None
    """As `data.format`, which null takes."""
    columns: dict[str, str] | None = None
    """As `data.columns`, which null takes."""

    def sources(self) -> list[Source]:
        """Return a source for every entry of `path`."""
        paths = [self.path] if isinstance(self.path, str) else self.path
        options = {entry.name: getattr(self, entry.name) for entry in fields(EvalSet)}
        own = {"name": None if len(paths) > 1 else self.name or None}
        return [Source(**{**options, **own, "path": path}) for path in paths]


@dataclass(frozen=True)
class Data:
    """The rows to learn from, and how they become token sequences."""

    path: list[str] | str = MISSING
    """JSONL, JSON, CSV or Parquet file, a pattern, a list of these, a hub dataset id, or
    `lora_tune:FILE` for a shipped one. Short for one source without options."""
    sources: list[Source] = field(default_factory=list)
    """Several sources in place of `path` (which is [] then), each with its options."""
    split: str = "train"
    """Split of a hub dataset to train on."""
    subset: str | None = None
    """Configuration of a hub dataset that has several."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our column name -> the file's, where it differs, as in `{messages: talk}`."""
    eval_path: list[str] | str | None = None
    """Held-out rows, in the forms of `path`. Short for one set without options."""
    eval_sets: list[EvalSet] = field(default_factory=list)
    """Several held-out sets in place of `eval_path`, each with a name and its options."""
    eval_split: str = "train"
    """Split of `eval_path` when that is a hub dataset."""
    format: Format = "auto"
    """Columns to read; `auto` decides by the columns that are there. See `docs/data.md`."""
    on_bad_row: Literal["stop", "drop"] = "stop"
    """`drop` leaves malformed rows out and counts them, in place of ending the run."""
    max_length: int = 2048
    """Tokens in a training sequence; with packing also the length every sequence is filled to."""
    packing: bool = True
    """Put several conversations into one sequence; they do not see each other."""
    truncation_strategy: Literal["right", "left", "delete", "split"] = "right"
    """Of longer rows drop the end, the beginning or all, or cut them into pieces; counted."""
    assistant_only_loss: bool = True
    """In `messages` rows, learn only what the assistant says."""
    completion_only_loss: bool = True
    """In `prompt`/`completion` rows, learn only the completion."""
    mask_history: bool = False
    """Learn only what the assistant says after the user's last message."""
    train_on_eos: Literal["turn", "last", "all", "none"] = "turn"
    """End-of-turn tokens to learn, so that the model stops: those of learned turns, only the last
    of them, also those of other roles, or none."""
    reasoning: Literal["keep", "drop", "last"] | None = None
    """What to do if the chat template writes earlier turns differently once a conversation goes on,
    as those do that remove reasoning: `keep` every turn as it is served, in as many sequences as
    that takes, `drop` reasoning and do the same, or learn only the `last` ones. Null stops."""
    shuffle: bool = True
    """New order every epoch, decided by `train.seed`."""
    max_samples: int | None = None
    """Use only the first rows of `path`; null means all."""
    num_proc: int | None = None
    """Processes that tokenise rows, in the order of the data whatever their number; null takes one
    for every core if there is much to do, and none but its own if there is little."""
    cache: bool | str = True
    """Keep tokenised rows of 1 MB and more for the next run, in `~/.cache/lora_tune` or the folder
    named here; false keeps nothing."""

    def all_sources(self) -> list[Source]:
        """Return the sources, with `path` as the one there is otherwise."""
        if self.sources:
            return self.sources
        return [
            Source(self.path, split=self.split, subset=self.subset, max_samples=self.max_samples)
        ]

    def source_names(self) -> list[str]:
        """Return what each source is called."""
        return [source.called() for source in self.all_sources()]

    def all_eval_sets(self) -> list[EvalSet]:
        """Return the held-out sets, with `eval_path` as one without a name, or none."""
        if self.eval_path is None:
            return self.eval_sets
        return [EvalSet("", self.eval_path, split=self.eval_split, subset=self.subset)]


@dataclass(frozen=True)
class Mesh:
    """How many devices share each kind of work; the product is the number of devices used."""

    data: int = 1
    """Groups of devices that each take a part of the batch."""
    fsdp: int = 1
    """Devices that take a part of the batch and of the weights, gathered layer by layer."""
    tensor: int = 1
    """Devices that split the width of every layer."""
    expert: int = 1
    """Devices that take a part of the batch, of the routed experts and of all other weights."""
    sequence: int = 1
    """Devices that each take a part of every sequence, and of the weights: for long sequences."""


@dataclass(frozen=True)
class Distributed:
    """How the processes of several hosts, each with the same command, become one run."""

    coordinator_address: str | None = None
    """`HOST:PORT` of process 0; or leave these three to the environment."""
    num_processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """The number of this one, from 0."""
    detect: bool | None = None
    """Find the others by the environment (TPU slice, Slurm, Open MPI); null does so where its
    variables speak of several processes, false never."""
    timeout: int = 300
    """Seconds to wait for the others to come."""


@dataclass(frozen=True)
class Optim:
    """AdamW and its learning rate schedule."""

    learning_rate: float = 2e-4
    """Peak learning rate."""
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    """Shape of the schedule after warm-up."""
    warmup_ratio: float = 0.0
    """Part of all steps over which the rate rises from zero; or give `warmup_steps`."""
    warmup_steps: int = 0
    """Number of steps over which the rate rises from zero; or give `warmup_ratio`."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_beta1: float = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: float = 0.999
    """Decay of the mean of squared gradients."""
    adam_epsilon: float = 1e-8
    """Added to the root of the mean of squared gradients."""
    max_grad_norm: float | None = 1.0
    """Gradients of a larger global norm are scaled down to it; null never scales."""


@dataclass(frozen=True)
class Train:
    """Length of the run, batches and memory."""

    max_steps: int | None = None
    """Optimizer steps to take; or give `num_train_epochs`."""
    num_train_epochs: float | None = None
    """Passes over the data; or give `max_steps`."""
    batch_size: int = 8
    """Sequences an optimizer step, over all devices and all accumulation steps."""
    gradient_accumulation_steps: int = 1
    """Parts a batch is computed in, one after the other; more needs less memory."""
    seed: int = 0
    """Decides adapters, data order and dropout."""
    resume: str = "auto"
    """`auto` goes on from the last checkpoint in `output_dir`; `never` refuses if there is one. A
    path, of a run folder or of one checkpoint in it, is where a run begins that has none yet."""
    early_stopping_patience: int | None = None
    """End the run after so many evaluations in a row without a better one; null never does."""
    early_stopping_threshold: float = 0.0
    """By how much an evaluation has to be better to count as such."""
    metric_for_best_model: str = "eval_loss"
    """The figure of evaluations by which one is better: a loss if lower, any other if higher."""
    load_best_model_at_end: bool = False
    """Export the checkpoint with the best evaluation, not the last. A checkpoint is then written
    after every evaluation that is the best so far."""
    loss_chunk_size: int = 8192
    """Entries of the vocabulary whose logits exist at one time; fewer needs less memory."""

    def exported_by(self) -> str | None:
        """Return the figure by which the checkpoint to export is the best; None for the last."""
        return self.metric_for_best_model if self.load_best_model_at_end else None


@dataclass(frozen=True)
class Save:
    """What is written to `output_dir`."""

    every: int = 100
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    adapter: bool = True
    """Write `adapter/` in PEFT format at the end (with `lora: null` there is none)."""
    merged: bool = False
    """Write `merged/`, the whole model in Hugging Face format, at the end; always with
    `lora: null`."""
    max_shard_size: str | None = None
    """Largest file of `merged/`, as `5GB`; null keeps the base's own files (5GB with
    `lora: null`)."""


@dataclass(frozen=True)
class Log:
    """Where numbers go besides the terminal, `metrics.jsonl` and `report.html`."""

    every: int = 10
    """Steps between logged steps."""
    report_to: list[str] | str = "none"
    """`wandb`, for a Weights & Biases run, `tensorboard`, for event files, a list of these, or
    `none`."""
    wandb_project: str = "lora_tune"
    """Project of the wandb run."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """`online` sends the run to the server."""

    def reporters(self) -> list[str]:
        """Return the names in `report_to` as a list, without `none`."""
        names = [self.report_to] if isinstance(self.report_to, str) else self.report_to
        return [name for name in names if name != "none"]


@dataclass(frozen=True)
class Eval:
    """Evaluation on held-out rows, always before the first step and after the last."""

    every: int = 0
    """Steps between evaluations in between; 0 means none."""
    batch_size: int | None = None
    """Sequences an evaluation batch; null takes that of one accumulation step."""
    num_exact_match: int = 0
    """Held-out prompts of every set answered greedily at each evaluation, for `eval_exact_match`,
    the share answered as expected, token for token; 0 for none."""
    num_samples: int = 0
    """Held-out prompts answered before and after training, greedily; printed and logged."""
    samples_every: int = 0
    """Steps between answers to them in between; 0 means none."""
    max_new_tokens: int = 64
    """Length limit of these answers in tokens."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run."""

    output_dir: str = MISSING
    """The run folder."""
    locked: bool = False
    """Refuse to train unless model, tokenizer, data, packages and recipe are those of a lock file:
    of `lock.json` in `output_dir`, or else of `NAME.lock.json` beside the recipe `NAME.yaml`."""
    model: Model = field(default_factory=Model)
    lora: Lora | None = field(default_factory=Lora)
    """`lora: null` trains every parameter of the model."""
    data: Data = field(default_factory=Data)
    mesh: Mesh = field(default_factory=Mesh)
    distributed: Distributed = field(default_factory=Distributed)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    save: Save = field(default_factory=Save)
    log: Log = field(default_factory=Log)
    eval: Eval = field(default_factory=Eval)
