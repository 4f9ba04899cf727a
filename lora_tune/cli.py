# SPDX-License-Identifier: Apache-2.0
"""The command line: `lora-tune [VERB] key=value …`.

Nothing heavy is imported before it is known to be needed, so that help answers at once.
"""

import gc
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from lora_tune import __version__, machine, usage
from lora_tune.errors import InputError
from lora_tune.machine import COMPILER
from lora_tune.secrets import masked
from lora_tune.training.tripwires import TripwireError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 is success, 1 training that had gone wrong and was stopped, a plan that does not fit its
    topology, a check of the data or a proof that fails, 2 bad input, and 128 plus the
    number of a signal (130, 143) a run that the signal ended early: not 0, so that whatever
    started the run does not take it for finished. 141 is output that its reader closed (`| head`).

    A mistake of the user and a failure of the system (missing file, full disk, no permission)
    become one sentence on stderr. Everything else is a fault of the program and shows itself.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Imports and tracing make millions of objects that stay, which the collector by default goes
    # through again and again: a tenth of the time to the first step.
    gc.set_threshold(100_000, 20, 50)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer may be in any script
    try:
        status = _dispatch(arguments) or 0
        print(end="", flush=True)
        return status
    except TripwireError as error:
        return _end(error, _fail(str(error), status=1))
    except InputError as error:
        return _end(error, _fail(str(error)))
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return _end(error, 128 + signal.SIGPIPE)
        return _end(error, _fail(_sentence(error)))
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        print("lora-tune: interrupted", file=sys.stderr)
        return _end(stop, 128 + number)
    except Exception as error:
        said = _said_of_devices(error)
        if said is None:
            raise
        return _end(error, _fail(said[0], status=said[1]))


def _said_of_devices(error: Exception) -> tuple[str, int] | None:
    """A sentence and a status for what devices or the host may lack, None for other errors."""
    if _is_left_alone(error):
        return (
            "another process of this run has ended, and this one cannot go on without it "
            f"({str(error).splitlines()[0][:200]}); its own output says why; the same command on "
            "every host goes on from the last checkpoint"
        ), 1
    if _is_out_of_memory(error):
        first = str(error).splitlines()[0] if str(error) else "no more is said"
        return (
            f"not enough memory ({first}); lower batch_size or cache_size, or what the recipe asks "
            "for"
        ), 2
    return None


def _is_out_of_memory(error: Exception) -> bool:
    """Whether the host or a device has no more memory; jax, whose error it is, need not be here."""
    return isinstance(error, MemoryError) or (
        type(error).__name__ == "JaxRuntimeError"
        and any(word in str(error) for word in ("RESOURCE_EXHAUSTED", "Out of memory"))
    )


def _is_left_alone(error: Exception) -> bool:
    """Whether what devices did together failed because a process is gone."""
    distributed = sys.modules.get("lora_tune.distributed")
    return distributed is not None and distributed.is_left_alone(error)


def _reader_is_gone() -> bool:
    """Whether nobody reads the output any more; then what is left of it is dropped.

    Otherwise the interpreter would write it out at exit, and fail once more.
    """
    try:
        output = sys.stdout.fileno()
    except OSError:  # it is no file
        return False
    poll = select.poll()
    poll.register(output, 0)  # POLLERR comes without being asked for
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
    return True


def _end(error: BaseException, status: int) -> int:
    """The status; where something would wait for what cannot come, the program ends at once.

    The interpreter cannot stop a thread that compiles, and would fall with it when it takes jax
    down. Where other processes do not know of the error, jax would wait for them at exit, and they
    for this one.
    """
    distributed = sys.modules.get("lora_tune.distributed")
    alone = distributed is not None and distributed.fails_alone(error)
    if alone or any(thread.name == COMPILER for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _fail(sentence: str, *, status: int = 2) -> int:
    line = masked(" ".join(sentence.split()))
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    print(f"lora-tune: error: {shown}", file=sys.stderr)
    return status


def _sentence(error: OSError) -> str:
    if error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return error.strerror or str(error) or type(error).__name__


def _dispatch(arguments: list[str]) -> int | None:
    asked = [text for text in arguments if text not in ("-h", "--help")]
    if asked[:1] == ["help"] or len(asked) < len(arguments):
        return _help([text for text in asked if text != "help"])
    if arguments == ["--version"]:
        print(f"lora-tune {__version__}")
        return 0
    if not arguments:
        raise InputError("expected recipe=NAME; see lora-tune --help")
    verb = "train"
    if _is_word(arguments[0]):
        verb = arguments.pop(0)
    _check_verb(verb)
    machine.leave_out_libtpu()
    return _VERBS[verb](arguments)


def _is_word(text: str) -> bool:
    return "=" not in text and not text.startswith("-")


def _check_verb(verb: str) -> None:
    if verb not in _VERBS:
        meant = _meant(verb)
        near = f", did you mean {meant}?" if meant else _near(verb, _VERBS)
        raise InputError(f"{verb!r} is no command{near}; see lora-tune --help")


def _help(asked: Sequence[str]) -> int:
    """The text of the command that the words begin with, or of all."""
    if not asked or not _is_word(asked[0]):
        print(usage.everything(), end="")
        return 0
    _check_verb(asked[0])
    print(usage.of(asked[0]), end="")
    return 0


def _near(word: str, words: Mapping[str, object]) -> str:
    close = get_close_matches(word, words, n=1)
    return f", did you mean {close[0]!r}?" if close else f", expected one of {', '.join(words)}"


def _settings(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Split `key=value` arguments at the first `=`."""
    wrong = [text for text in arguments if "=" not in text or text.startswith("-")]
    if wrong:
        meant = " ".join(filter(None, map(_meant, wrong)))
        hint = f"; did you mean {meant}?" if meant else ""
        raise InputError(f"expected key=value, got {', '.join(map(repr, wrong))}{hint}")
    return [(key, value) for key, _, value in (text.partition("=") for text in arguments)]


def _meant(text: str) -> str | None:
    """The `key=value` that was meant by an option with dashes or a bare recipe, or None."""
    from lora_tune.recipe import shipped

    bare = text.lstrip("-")
    if "=" in bare:
        return bare
    is_recipe = bare.endswith((".yaml", ".yml")) or f"{bare}.yaml" in shipped()
    return f"recipe={bare}" if is_recipe else None


def _is_recipe_key(key: str) -> bool:
    return bool(get_close_matches(key.lower(), ("recipe", "config", "config_file"), cutoff=0.75))


def _recipe_of(settings: Sequence[tuple[str, str]]) -> str:
    """The one recipe that is named."""
    from lora_tune.recipe import shipped

    recipes = [value for key, value in settings if key == "recipe"]
    if len(recipes) != 1 or not recipes[0]:
        got = ", ".join(map(repr, recipes)) or "none"
        near = [v for k, v in settings if k != "recipe" and _is_recipe_key(k)]
        hint = f"; did you mean recipe={near[0]}?" if near and not recipes else ""
        raise InputError(
            f"expected one recipe=NAME, a file or one of {', '.join(shipped())}; got {got}{hint}"
        )
    return recipes[0]


def _train(arguments: Sequence[str]) -> int:
    settings = _settings(arguments)
    recipe = _recipe_of(settings)
    from lora_tune import compiled
    from lora_tune.api import train

    compiled.keep()
    result = train(recipe, [f"{key}={value}" for key, value in settings if key != "recipe"])
    return 0 if result.interrupted is None else 128 + signal.Signals[result.interrupted]


def _plan(arguments: Sequence[str]) -> int:
    settings = _settings(arguments)
    _recipe_of(settings)
    topologies = [value for key, value in settings if key == "topology"]
    if len(topologies) != 1:
        raise InputError(
            "expected one topology=NAME, such as v5p-8, several with commas between, or cpu; got "
            f"{', '.join(map(repr, topologies)) or 'none'}"
        )
    from lora_tune.plan import environment
    from lora_tune.plan.topologies import parse

    # What these set must stand before jax is imported.
    named = parse(topologies[0])
    environment.prepare(attached=any(each.generation is None for each in named))
    from lora_tune.plan.command import plan

    return plan(settings)


def _data(arguments: Sequence[str]) -> int:
    settings = _settings(arguments)
    _recipe_of(settings)
    from lora_tune.review.command import review

    return _failed(review(settings))


def _generate(arguments: Sequence[str]) -> None:
    settings = _settings(arguments)
    from lora_tune import compiled
    from lora_tune.commands import generate

    compiled.keep()
    generate(settings)


def _chat(arguments: Sequence[str]) -> None:
    settings = _settings(arguments)
    from lora_tune import compiled
    from lora_tune.commands import chat

    compiled.keep()
    chat(settings)


def _export(arguments: Sequence[str]) -> None:
    settings = _settings(arguments)
    from lora_tune.export.command import export

    export(settings)


def _convert(arguments: Sequence[str]) -> None:
    settings = _settings(arguments)
    from lora_tune.export.convert import convert

    convert(settings)


def _prove(arguments: Sequence[str]) -> int:
    settings = _settings(arguments)
    from lora_tune import compiled
    from lora_tune.proof.command import prove

    compiled.keep()
    return _failed(prove(settings))


def _failed(problems: Sequence[str]) -> int:
    more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
    return _fail(f"{problems[0]}{more}", status=1) if problems else 0


def _verify(arguments: Sequence[str]) -> int:
    settings = _settings(arguments)
    from lora_tune import compiled
    from lora_tune.verify import verify_resume

    compiled.keep()
    problem = verify_resume(settings)
    return _fail(problem, status=1) if problem else 0


def _report(arguments: Sequence[str]) -> None:
    settings = _settings(arguments)
    from lora_tune.report.folder import report

    report(settings)


def _list(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] not in _LISTS:
        raise InputError(f"list takes one of {', '.join(_LISTS)}; see lora-tune --help")
    _LISTS[arguments[0]](arguments[1:])


def _nothing_more(arguments: Sequence[str]) -> None:
    if arguments:
        raise InputError(f"unexpected {' '.join(arguments)!r}; see lora-tune --help")


def _list_recipes(arguments: Sequence[str]) -> None:
    from lora_tune.recipe import shipped

    _nothing_more(arguments)
    for name, path in shipped().items():
        with path.open(encoding="utf-8") as lines:
            print(f"{name:24} {lines.readline().lstrip('# ').rstrip()}")


def _list_models(arguments: Sequence[str]) -> None:
    from lora_tune.models import FAMILIES

    _nothing_more(arguments)
    print("\n".join(FAMILIES))


def _list_targets(arguments: Sequence[str]) -> None:
    settings = dict(_settings(arguments))
    if set(settings) != {"model.path"}:
        raise InputError("expected lora-tune list targets model.path=PATH and nothing else")
    from lora_tune.api import list_targets

    rows = [
        (name, "x".join(map(str, shape)), str(count))
        for name, shape, count in list_targets(settings["model.path"])
    ]
    rows.insert(0, ("module", "shape", "count"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, shape, count in rows:
        print(f"{name:{widths[0]}}  {shape:>{widths[1]}}  {count:>{widths[2]}}")


_VERBS: Mapping[str, Callable[[Sequence[str]], int | None]] = {
    "train": _train,
    "plan": _plan,
    "data": _data,
    "generate": _generate,
    "chat": _chat,
    "export": _export,
    "convert-adapter": _convert,
    "prove": _prove,
    "verify-resume": _verify,
    "report": _report,
    "list": _list,
}
_LISTS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "recipes": _list_recipes,
    "models": _list_models,
    "targets": _list_targets,
}

if __name__ == "__main__":
    sys.exit(main())
