# SPDX-License-Identifier: Apache-2.0
import os
import resource
import signal
import subprocess
import sys
import types

import pytest

import lora_tune
from lora_tune import cli
from lora_tune.errors import InputError
from lora_tune.training.tripwires import TripwireError


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for `lora_tune.api` that records how it was called."""
    module = types.ModuleType("lora_tune.api")
    module.calls = []

    def train(name: str, overrides: list[str]) -> types.SimpleNamespace:
        module.calls.append((name, overrides))
        return types.SimpleNamespace(interrupted=None)

    module.train = train
    monkeypatch.setitem(sys.modules, "lora_tune.api", module)
    return module


def _seconds_of_children() -> float:
    """Time on processors, which does not depend on what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.smoke
@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["train", "--help"], ["help", "plan"], ["--version"]]
)
def test_help_answers_in_a_second_without_jax(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from lora_tune.cli import main\n"
        f"status = main({arguments!r})\n"
        "heavy = {'jax', 'flax', 'numpy', 'omegaconf', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'{status} {heavy}' if status or heavy else 0)\n"
    )
    before = _seconds_of_children()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    seconds = _seconds_of_children() - before

    assert done.returncode == 0, done.stderr
    assert lora_tune.__version__ in done.stdout or "recipe=NAME" in done.stdout
    assert seconds < 1


@pytest.mark.parametrize("command", cli._VERBS)
def test_every_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for arguments in (["help", command], [command, "--help"], [command, "x=1", "-h"]):
        assert cli.main(arguments) == 0
        texts.append(capsys.readouterr().out)
    assert len({*texts}) == 1
    usage, examples = texts[0].split("examples:")
    assert command in usage
    assert f"lora-tune {'recipe=' if command == 'train' else command}" in examples
    others = {*cli._VERBS} - {command, "train"}
    assert not [other for other in others if f"lora-tune {other}" in texts[0]]
    assert cli.main(["--help"]) == 0
    everything = capsys.readouterr().out
    assert all(line in everything for line in usage.partition("usage:")[2].splitlines()[:2])


def test_help_for_a_command_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "generat"]) == 2
    assert "did you mean 'generate'?" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("flushed", [False, True])
def test_output_that_nobody_reads_ends_quietly(flushed: bool, unbuffered: str) -> None:
    code = (
        "import sys\n"
        "from lora_tune import cli\n"
        f"cli._VERBS['list'] = lambda _: [print('a', flush={flushed}) for _ in range(9)] and 0\n"
        "sys.exit(cli.main(['list']))\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        timeout=60,
    )
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 128 + signal.SIGPIPE


def test_another_pipe_that_breaks_is_an_error(
    api: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    api.train = train
    assert cli.main(["recipe=a"]) == 2
    assert capsys.readouterr().err == "lora-tune: error: Broken pipe\n"


@pytest.mark.parametrize("verb", [[], ["train"]])
def test_train_passes_the_recipe_and_its_overrides_on(
    api: types.ModuleType, verb: list[str]
) -> None:
    assert cli.main([*verb, "lora.r=4", "recipe=quickstart.yaml", "data.path=a=b"]) == 0
    assert api.calls == [("quickstart.yaml", ["lora.r=4", "data.path=a=b"])]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected recipe=NAME"),
        (["tarin", "recipe=a"], "'tarin' is no command, did you mean 'train'?"),
        (
            ["zzz"],
            "'zzz' is no command, expected one of train, plan, data, generate, chat, export,",
        ),
        (["train"], "expected one recipe=NAME, a file or one of"),
        (["lora.r=4"], "expected one recipe=NAME, a file or one of"),
        (["recipe="], "expected one recipe=NAME"),
        (["recipe=a", "recipe=b"], "got 'a', 'b'"),
        (["recipe=a", "quick", "--x"], "expected key=value, got 'quick', '--x'"),
        (
            ["--recipe=a", "--lora.r=4"],
            "got '--recipe=a', '--lora.r=4'; did you mean recipe=a lora",
        ),
        (["--lora.r", "4"], "expected key=value, got '--lora.r', '4'"),
        (["quickstart.yaml"], "is no command, did you mean recipe=quickstart.yaml?"),
        (["quickstart", "lora.r=4"], "is no command, did you mean recipe=quickstart?"),
        (["train", "mine.yaml"], "got 'mine.yaml'; did you mean recipe=mine.yaml?"),
        (["Recipe=mine.yaml"], "got none; did you mean recipe=mine.yaml?"),
        (["receipe=quickstart"], "got none; did you mean recipe=quickstart?"),
        (["config=mine.yaml"], "got none; did you mean recipe=mine.yaml?"),
        (["list"], "list takes one of recipes, models, targets"),
        (["list", "recipe"], "list takes one of recipes, models, targets"),
        (["list", "recipes", "x"], "unexpected 'x'"),
        (["list", "targets"], "expected lora-tune list targets model.path=PATH"),
        (["list", "targets", "model.pth=x"], "expected lora-tune list targets model.path=PATH"),
    ],
)
def test_bad_usage_is_one_sentence(
    api: types.ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lora-tune: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert api.calls == []


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (InputError("data.path: no such file"), "data.path: no such file"),
        (OSError(28, "No space left on device", "run/a"), "run/a: No space left on device"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (ConnectionError("the hub\ndid not answer"), "the hub did not answer"),
        (TimeoutError(), "TimeoutError"),
        (
            MemoryError("9 GB"),
            "not enough memory (9 GB); lower batch_size or cache_size, or what the recipe asks for",
        ),
        (
            type("JaxRuntimeError", (RuntimeError,), {})("RESOURCE_EXHAUSTED: 9 bytes.\nmore"),
            "not enough memory (RESOURCE_EXHAUSTED: 9 bytes.); lower batch_size or cache_size, or "
            "what the recipe asks for",
        ),
    ],
)
def test_what_the_user_can_mend_is_one_sentence(
    api: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    sentence: str,
) -> None:
    def fails(*_: object) -> None:
        raise error

    api.train = fails
    assert cli.main(["recipe=a"]) == 2
    assert capsys.readouterr().err == f"lora-tune: error: {sentence}\n"


def test_an_interrupt_has_its_own_status(
    api: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    api.train = interrupted
    assert cli.main(["recipe=a"]) == 130
    assert capsys.readouterr().err == "lora-tune: interrupted\n"


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_run_that_a_signal_ended_is_not_a_success(
    api: types.ModuleType, name: str, status: int
) -> None:
    api.train = lambda *_: types.SimpleNamespace(interrupted=name)
    assert cli.main(["recipe=a"]) == status


def test_training_gone_wrong_is_one_sentence(
    api: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise TripwireError("the loss of step 3 is nan")

    api.train = stopped
    assert cli.main(["recipe=a"]) == 1
    assert capsys.readouterr().err == "lora-tune: error: the loss of step 3 is nan\n"


@pytest.mark.parametrize(
    "fault", [ZeroDivisionError(), type("JaxRuntimeError", (RuntimeError,), {})("INTERNAL: a")]
)
def test_a_fault_of_the_program_is_not_hidden(api: types.ModuleType, fault: Exception) -> None:
    def broken(*_: object) -> None:
        raise fault

    api.train = broken
    with pytest.raises(type(fault)):
        cli.main(["recipe=a"])


def test_list_recipes_shows_name_and_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()

    assert [line.split()[0] for line in lines] == sorted(line.split()[0] for line in lines)
    assert any(line.startswith("quickstart.yaml ") and "LoRA" in line for line in lines)


def test_list_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "models"]) == 0
    assert "qwen3_next" in capsys.readouterr().out.splitlines()


def test_list_targets_is_a_table(api: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def list_targets(path: str) -> list[tuple[str, tuple[int, ...], int]]:
        assert path == "some/model"
        return [("self_attn.q_proj", (64, 128), 2), ("mlp.gate", (8, 64), 8)]

    api.list_targets = list_targets
    assert cli.main(["list", "targets", "model.path=some/model"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["module", "shape", "count"],
        ["self_attn.q_proj", "64x128", "2"],
        ["mlp.gate", "8x64", "8"],
    ]
