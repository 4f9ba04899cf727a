# SPDX-License-Identifier: Apache-2.0
"""The texts of `--help`: of all commands together, and of each with its keys and examples."""

from collections.abc import Mapping

_HEAD = "Fine-tune Hugging Face models with LoRA in JAX.\n"
_LINES: Mapping[str, str] = {
    "train": """\
  lora-tune [train] recipe=NAME [key=value ...]   train as the recipe says (train is the default)
""",
    "plan": """\
  lora-tune plan recipe=NAME topology=v5p-8       what training it needs on a slice that is not here
""",
    "data": """\
  lora-tune data recipe=NAME                      what it will see, and checks of the rows
""",
    "generate": """\
  lora-tune generate run=DIR prompt=TEXT          answer a prompt with what a run has made
  lora-tune generate run=DIR prompts=FILE.jsonl   answer every row; prints rows with an answer
""",
    "chat": """\
  lora-tune chat run=DIR                          a conversation on the terminal; Ctrl-D ends it
""",
    "export": """\
  lora-tune export run=DIR to=OUT                 a run's checkpoint as an adapter or merged model
""",
    "convert-adapter": """\
  lora-tune convert-adapter from=DIR to=OUT layout=per-expert   or fused: PEFT's layouts of experts
""",
    "verify-resume": """\
  lora-tune verify-resume run=DIR                 trains its end again and compares the log
""",
    "prove": """\
  lora-tune prove run=DIR                         what PEFT and transformers make of a run
""",
    "report": """\
  lora-tune report run=DIR                        makes its report.html again, from the folder alone
""",
    "list": """\
  lora-tune list recipes                          the shipped recipes
  lora-tune list models                           the model types that can be trained
  lora-tune list targets model.path=PATH          every module of a model that can be adapted
""",
}
"""Command -> its lines of the summary."""

_RECIPE = """\
  recipe=NAME   a YAML file, or a shipped recipe from any folder (quickstart.yaml or quickstart)
  key=value     replaces a key of the recipe: lora.r=8  lora=null  'lora.target_modules=[q_proj]'
  locked=true   refuses to train unless all is as output_dir/lock.json or NAME.lock.json says
"""
_ANSWERS = """\
generate and chat:
  run=DIR             a run folder: its base model with adapter/, or else merged/
  model.path=PATH     the base model alone, or with run= its new place; also model.dtype,
                      model.revision, model.chat_template, mesh.fsdp, ...
  prompt=TEXT         put into the chat template as a user's message; raw=true takes it as it is
  prompts=FILE.jsonl  rows with messages or prompt (as above), and tools, or text (as it is);
                      the model does not see an answer that ends the messages
  system=TEXT         the system message of a chat
  max_new_tokens=256  temperature=0 (greedy)  top_k=0  top_p=1  min_p=0  repetition_penalty=1
  seed=0  stop_ids=[2] (default: those of the model)  batch_size=8 (rows at a time; generate only)
  cache_size=N        tokens to make room for, answer included: in a chat 4096, or as many as the
                      model has positions, which is then the longest conversation; else the power
                      of two that fits the longest prompt
"""
_PLAN = """\
plan:
  topology=NAMES      v4-8, v5e-8, v5p-256, v6e-8, tpu7x-8, 2xv5p-8 (two slices), or several with
                      commas between; cpu, gpu or tpu: this machine; needs jax[tpu], but no TPU
  slices=1            slices of every name    layers=N  a model of its first N layers
  search=true         the largest batch and length that fit, and the mesh and remat of the least
                      bound on time for each token; search=N compiles N programs at most (16)
  json=FILE           the figures             hlo=FILE  the compiled program
                      the data are not read; without mesh.* the mesh is made to use all devices
"""
_DATA = """\
data:
  rows=3              sequences to show, as they are packed    html=FILE  the same as a page
  max_overlap=0.01    the share of held-out examples that may be training examples too
                      needs the tokenizer and the rows, neither weights nor an accelerator
"""
_EXPORT = """\
export:
  run=DIR to=OUT      from the newest checkpoint of a run to a new folder, or the best one with
                      train.load_best_model_at_end; also model.path=PATH
  format=peft         an adapter for PEFT, or merged: the whole model
  max_shard_size=5GB  largest file of a merged model; default: the base's own files
  push=USER/NAME      then to the hub, with the token of HF_TOKEN or `hf auth login`; private=true
"""
_CONVERT = """\
convert-adapter:
  from=DIR to=OUT     an adapter for PEFT on routed experts, of any program, and a new folder
  layout=per-expert   what vLLM expects, or fused: what PEFT saves (target_parameters)
  model.path=PATH     the base, of which config.json alone is read; default: what the adapter names
"""
_PROVE = """\
prove:
  run=DIR             a run folder with adapter/ or merged/; needs torch and peft
  model.path=PATH     the new place of its base model; also model.revision
  tolerance=1e-4      of logits, times the largest one
  limit_gb=8          of a base in float32; a larger one is proved in windows of layers and experts
"""
_VERIFY = """\
verify-resume:
  run=DIR             a run folder with checkpoints; nothing in it is changed
  last=10             logged steps to compare at least, where checkpoints go back so far
"""
_REPORT = """\
report:
  run=DIR             a run folder; report.html in it is replaced
"""
_KEYS: Mapping[str, str] = {
    "train": _RECIPE,
    "plan": f"{_RECIPE}\n{_PLAN}",
    "data": f"{_RECIPE}\n{_DATA}",
    "generate": _ANSWERS,
    "chat": _ANSWERS,
    "export": _EXPORT,
    "convert-adapter": _CONVERT,
    "prove": _PROVE,
    "verify-resume": _VERIFY,
    "report": _REPORT,
    "list": """\
  model.path=PATH     a model folder, whose weights are checked as well, or a hub id
""",
}
_EXAMPLES: Mapping[str, str] = {
    "train": """\
  lora-tune recipe=quickstart.yaml
  lora-tune recipe=quickstart.yaml lora.r=4 optim.learning_rate=1e-3 output_dir=runs/rank4
  lora-tune recipe=qwen3next_sft.yaml data.path=chats.jsonl train.num_train_epochs=2
""",
    "plan": """\
  lora-tune plan recipe=qwen3next_sft.yaml topology=v5p-8 data.max_length=4096 json=plan.json
""",
    "data": """\
  lora-tune data recipe=quickstart.yaml rows=5 html=data.html
""",
    "generate": """\
  lora-tune generate run=runs/quickstart prompt='Translate into Tali: the stones see the star'
""",
    "chat": """\
  lora-tune chat run=runs/quickstart system='Answer in one sentence.' temperature=0.7
""",
    "export": """\
  lora-tune export run=runs/quickstart to=out/merged format=merged
""",
    "convert-adapter": """\
  lora-tune convert-adapter from=runs/moe/adapter to=out/fused layout=fused
""",
    "verify-resume": """\
  lora-tune verify-resume run=runs/quickstart last=20
""",
    "report": """\
  lora-tune report run=runs/quickstart
""",
    "prove": """\
  lora-tune prove run=runs/quickstart tolerance=1e-4
""",
    "list": """\
  lora-tune list targets model.path=models/SmolLM2-135M
""",
}
_TRAIN_AGAIN = "The same training command again goes on from its last checkpoint.\n"
_STATUS = """\
exit status: 0 done, 1 training went wrong and was stopped, a plan does not fit, a check of the data
             or a proof fails,
             2 bad input,
             130 or 143 stopped by Ctrl-C or SIGTERM after saving, 141 nobody read the output
"""
_OPTIONS = """\
options:
  -h, --help    this text, or that of one command: lora-tune COMMAND --help, lora-tune help COMMAND
  --version     the version
"""


def everything() -> str:
    """The text of all commands."""
    parts = [
        f"{_HEAD}\nusage:\n{''.join(_LINES.values())}",
        _RECIPE,
        *(_ANSWERS, _PLAN, _DATA, _EXPORT, _CONVERT, _PROVE, _VERIFY, _REPORT, _OPTIONS),
        "examples:\n" + "".join(_EXAMPLES[name] for name in ("train", "plan", "generate")),
        _TRAIN_AGAIN + _STATUS,
    ]
    return "\n".join(parts)


def of(command: str) -> str:
    """The text of one command: how it is called, what it takes, examples."""
    parts = [f"usage:\n{_LINES[command]}", _KEYS[command], f"examples:\n{_EXAMPLES[command]}"]
    if command == "train":
        parts.append(_TRAIN_AGAIN)
    return "\n".join([*parts, _STATUS])
