# SPDX-License-Identifier: Apache-2.0
"""Examples by workers, from files and from what was kept equal those of a plain loop."""

import dataclasses
import hashlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from chat_tokenizers import CHATML_TEMPLATE, qwen
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.data import flat, prepared, sources, store, workers
from lora_tune.data.encode import encode_rows
from lora_tune.data.examples import join
from lora_tune.data.messages import Encoded, Encoder, Example
from lora_tune.data.prepared import Means, Source
from lora_tune.data.store import Store
from lora_tune.errors import InputError

OPTIONS = {"max_length": 48, "truncation_strategy": "split"}
TOKENIZER = qwen(CHATML_TEMPLATE)
ROWS = 120


def chat(i: int) -> dict:
    turns = (("user", f"What is {i}?"), ("assistant", "It is " + f"{i} " * (i % 37 + 1)))
    return {"messages": [{"role": r, "content": c} for r, c in turns], "unread": i}


def written(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def plain(path: str):
    """Tokens, mask, lengths and rows of a JSONL file, by nothing but a loop."""
    encoder = Encoder(TOKENIZER, format="messages", **OPTIONS)
    found = [
        (number, example)
        for number, line in enumerate(Path(path).read_text().splitlines())
        for example in encoder(json.loads(line), where="row").examples
    ]
    tokens = np.concatenate([example.tokens for _, example in found])
    mask = np.concatenate([example.mask for _, example in found])
    return tokens, mask, [len(e.tokens) for _, e in found], [number for number, _ in found]


def hashed(*arrays) -> str:
    return hashlib.blake2b(b"".join(a.tobytes() for a in arrays), digest_size=16).hexdigest()


def assert_same(examples, expected) -> None:
    tokens, mask, lengths, rows = expected
    [part] = examples.parts
    np.testing.assert_array_equal(part.tokens, tokens)
    np.testing.assert_array_equal(part.mask, mask)
    assert (part.tokens.dtype, part.mask.dtype) == (np.int32, np.bool_)
    assert (examples.lengths.tolist(), examples.rows.tolist()) == (lengths, rows)
    offsets = np.cumsum([0, *lengths])
    targets = [int(mask[a + 1 : b].sum()) for a, b in itertools.pairwise(offsets)]
    assert examples.targets.tolist() == targets
    assert examples.fingerprint == hashed(tokens, mask, offsets)
    report = examples.report
    assert (report.tokens, report.trained_tokens) == (len(tokens), sum(targets))


def made(path: str, folder: Path | None = None, *, tokenizer=TOKENIZER, num_proc=1, **options):
    means = Means(num_proc, None if folder is None else Store(folder), worth=0)
    fields = {field.name for field in dataclasses.fields(Source)}
    source = Source(path, **{k: v for k, v in options.items() if k in fields})
    encoding = OPTIONS | {k: v for k, v in options.items() if k not in fields}
    return prepared.examples(source, tokenizer, encoding, means)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return written(tmp_path_factory.mktemp("rows") / "a.jsonl", map(chat, range(ROWS)))


@pytest.fixture
def counted(monkeypatch):
    """How many times rows were encoded rather than read from what was kept."""
    calls = []

    def encoding(*args, **kwargs):
        calls.append(1)
        return encode_rows(*args, **kwargs)

    monkeypatch.setattr(prepared, "encode_rows", encoding)
    return calls


@pytest.fixture
def mapped(monkeypatch):
    """Files as large as those of a test are mapped, and read in many pieces."""
    monkeypatch.setattr(flat, "SMALL", 0)
    monkeypatch.setattr(flat, "_PIECE", 4096)


def test_arrays_are_those_of_a_plain_loop(path):
    assert_same(made(path), plain(path))


def test_mapped_arrays_and_their_hash_are_the_same(path, mapped, tmp_path):
    examples = made(path, tmp_path / "kept")
    assert_same(examples, plain(path))
    for part in examples.parts:
        flat.release(part.tokens)
    assert_same(made(path, tmp_path / "kept"), plain(path))


@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=40),
    most=st.integers(1, 400),
    rows=st.integers(1, 9),
)
@settings(max_examples=25, deadline=None)
def test_where_pieces_end_changes_nothing(tmp_path_factory, lengths, most, rows):
    path = tmp_path_factory.mktemp("pieces") / "a.jsonl"
    turns = [("user", "q"), ("assistant", "")]
    written(
        path,
        (
            {"messages": [{"role": r, "content": c + "a" * n} for r, c in turns]}
            for n in (1, *lengths)
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lora_tune.data.encode._TOKENS", most)
        patch.setattr("lora_tune.data.encode._ROWS", rows)
        assert_same(made(str(path)), plain(str(path)))


def test_joined_sources_are_hashed_as_one(path, tmp_path, mapped):
    other = written(tmp_path / "b.jsonl", map(chat, range(1000, 1030)))
    whole = join([made(path, tmp_path / "kept"), made(other), made(path)])
    tokens, mask, lengths, rows = zip(plain(path), plain(other), plain(path), strict=True)
    offsets = np.cumsum([0, *itertools.chain(*lengths)])
    assert whole.fingerprint == hashed(np.concatenate(tokens), np.concatenate(mask), offsets)
    assert whole.rows.tolist() == list(itertools.chain(*rows))
    for i in (0, len(lengths[0]) - 1, len(lengths[0]), len(whole) - 1):
        expected = np.concatenate(tokens)[offsets[i] : offsets[i + 1]]
        np.testing.assert_array_equal(whole[i].tokens, expected)
    assert [whole[i].source for i in (0, len(lengths[0]), len(whole) - 1)] == [0, 1, 2]


def test_memory_holds_a_few_pieces_whatever_the_length(tmp_path, mapped):
    path = written(tmp_path / "a.jsonl", ({"text": str(i)} for i in range(4000)))
    tokens = np.arange(2000, dtype=np.int32)
    example = Example(tokens, tokens > 0)

    def encoder(fields, *, where):
        own = Example(example.tokens.copy(), example.mask.copy())
        return Encoded((own,), (), 0, 1999, 0, 0)

    tracemalloc.start()
    examples = encode_rows(sources.read(path), encoder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert examples.report.tokens == 8_000_000  # 40 MB of tokens and masks
    assert peak < 15e6


# Processes.


@pytest.fixture
def small_tasks(monkeypatch):
    monkeypatch.setattr(workers, "_TASK", 2000)


def test_processes_give_the_same_in_the_same_order(path, small_tasks):
    assert_same(made(path, num_proc=3), plain(path))
    assert made(path, num_proc=2).report == made(path).report


def test_processes_name_the_same_bad_rows(tmp_path, small_tasks):
    rows = [chat(i) for i in range(90)]
    for bad in (17, 40, 41, 60, 88, 89):
        rows[bad] = {"messages": [{"role": "user", "content": "only a question"}]}
    path = written(tmp_path / "a.jsonl", rows)
    said = []
    for num_proc in (1, 2):
        with pytest.raises(InputError) as caught:
            made(path, num_proc=num_proc)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert said[0].startswith("5 rows of ")
    assert f"{path}:18: " in said[0]
    dropped = [made(path, num_proc=n, drop_bad_rows=True) for n in (1, 2)]
    assert dropped[0].report == dropped[1].report
    assert dropped[0].report.drops == {"malformed row": 6}
    assert dropped[0].fingerprint == dropped[1].fingerprint


def test_rows_of_parquet_go_through_processes(tmp_path, path, small_tasks):
    table = pyarrow.Table.from_pylist([chat(i) for i in range(ROWS)])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    assert_same(made(str(tmp_path / "a.parquet"), num_proc=2), plain(path))


def test_how_many_processes_there_are_follows_from_the_size(monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: 6)
    megabytes = (0, 20, 40, 64, 10_000)
    assert [workers.worth(n << 20) for n in megabytes] == [1, 1, 2, 4, 6]


def test_a_process_that_is_killed_is_one_sentence(path, small_tasks, monkeypatch):
    started = []
    begin = workers._Worker.__init__

    def noted(self):
        begin(self)
        started.append(self.process)
        os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(workers._Worker, "__init__", noted)
    with pytest.raises(InputError, match=r"ended by SIGKILL, as the system does.*num_proc"):
        made(path, num_proc=2)
    assert all(process.poll() is not None for process in started)


def test_a_process_that_cannot_begin_says_why(path, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'no module here' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(InputError, match=r"ended with status 3: 'no module here'; set data\.num"):
        made(path, num_proc=2)


def test_an_error_ends_the_processes(path, small_tasks, monkeypatch):
    pools = []
    begin = workers._Pool.__init__
    monkeypatch.setattr(
        workers._Pool, "__init__", lambda self, *a: (begin(self, *a), pools.append(self))[0]
    )
    rows = sources.read(path)
    encoder = Encoder(TOKENIZER, format="messages", max_length=48)

    def interrupted(done, total):
        raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        encode_rows(rows, encoder, num_proc=2, progress=interrupted)
    assert time.monotonic() - begun < 60
    [pool] = pools
    assert pool._workers
    assert all(worker.process.returncode is not None for worker in pool._workers)
    assert not [t for t in threading.enumerate() if t.name.startswith("lora-tune-data")]


def test_a_script_without_a_guard_runs_once_and_workers_know_no_jax(path, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from chat_tokenizers import CHATML_TEMPLATE, qwen\n"
        "from lora_tune.data import encode, sources, workers\n"
        "from lora_tune.data.messages import Encoder\n"
        "print('once')\n"
        "workers._TASK = 2000\n"
        f"rows = sources.read({path!r})\n"
        "encoder = Encoder(qwen(CHATML_TEMPLATE), format='messages', max_length=48,"
        " truncation_strategy='split')\n"
        "print(len(encode.encode_rows(rows, encoder, num_proc=2)))\n"
    )
    (tmp_path / "json.py").write_text("raise SystemExit('not the json of Python')")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120
    )
    assert done.stdout.split() == ["once", str(len(plain(path)[3]))], done.stderr
    code = "import sys, lora_tune.data.worker, transformers; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# What is kept.


def test_what_is_kept_is_read_and_not_made_again(path, tmp_path, counted, capsys):
    first = made(path, tmp_path / "kept")
    assert len(counted) == 1
    again = made(path, tmp_path / "kept")
    assert len(counted) == 1
    assert_same(again, plain(path))
    assert (again.report, again.fingerprint) == (first.report, first.fingerprint)
    [entry] = (tmp_path / "kept").iterdir()
    assert {file.suffix for file in entry.iterdir()} == {".bin", ".json"}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 47},
        {"truncation_strategy": "left"},
        {"train_on_eos": "none"},
        {"assistant_only_loss": False},
        {"max_samples": ROWS - 1},
        {"name": "other"},
        {"format": "messages"},
        {"drop_bad_rows": True},
        {"columns": {"tools": "unread"}},
    ],
)
def test_every_option_has_an_entry_of_its_own(path, options):
    def key(**options):
        fields = {field.name for field in dataclasses.fields(Source)}
        source = Source(path, **{k: v for k, v in options.items() if k in fields})
        encoding = OPTIONS | {k: v for k, v in options.items() if k not in fields}
        return prepared.key_of((Path(path),), source, TOKENIZER, encoding)

    assert key() == key() != key(**options)


def test_other_content_is_seen_whatever_its_date(tmp_path, counted):
    path = tmp_path / "a.jsonl"
    written(path, map(chat, range(100)))
    made(str(path), tmp_path / "kept")
    state, content = path.stat(), path.read_text()
    path.write_text(content.replace("What is 7?", "What is 8?"))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_size == state.st_size
    assert_same(made(str(path), tmp_path / "kept"), plain(str(path)))
    assert len(counted) == 2


def test_other_tokenizers_templates_code_and_days_are_seen(path, monkeypatch):
    def key(tokenizer):
        return prepared.key_of((Path(path),), Source(path), tokenizer, OPTIONS)

    found = [key(TOKENIZER), key(qwen(CHATML_TEMPLATE + " "))]
    found.append(key(qwen(CHATML_TEMPLATE, eos_token="<|endoftext|>")))
    more = qwen(CHATML_TEMPLATE)
    more.add_tokens(["What"])
    found.append(key(more))
    texts = qwen(CHATML_TEMPLATE)
    texts.split_special_tokens = True
    assert texts("<|im_end|>").input_ids != TOKENIZER("<|im_end|>").input_ids
    found.append(key(texts))
    dated = qwen(CHATML_TEMPLATE + "{# strftime_now #}")
    found.append(key(dated))

    class Tomorrow:
        @staticmethod
        def today():
            return type("Day", (), {"isoformat": lambda self: "2100-01-01"})()

    monkeypatch.setattr(prepared, "date", Tomorrow)
    assert key(TOKENIZER) == found[0]
    found.append(key(dated))
    monkeypatch.setattr(prepared, "_code", lambda: "other")
    found.append(key(TOKENIZER))
    assert len(set(found)) == len(found)


def test_calling_a_tokenizer_changes_no_key(path):
    tokenizer = qwen(CHATML_TEMPLATE)
    before = prepared.key_of((Path(path),), Source(path), tokenizer, OPTIONS)
    tokenizer("some text", truncation=True, max_length=3, padding="max_length")
    assert prepared.key_of((Path(path),), Source(path), tokenizer, OPTIONS) == before


def _cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + bytes(8))


@pytest.mark.parametrize("damage", [_cut, _flip, _longer, Path.unlink])
@pytest.mark.parametrize(
    "name", ["tokens.bin", "mask.bin", "lengths.bin", "rows.bin", "targets.bin", "entry.json"]
)
def test_damage_is_told_and_mended(path, tmp_path, counted, capsys, damage, name):
    made(path, tmp_path / "kept")
    [entry] = (tmp_path / "kept").iterdir()
    damage(entry / name)
    assert_same(made(path, tmp_path / "kept"), plain(path))
    assert len(counted) == 2
    [note] = capsys.readouterr().err.splitlines()
    assert note.startswith("lora-tune: note: tokenised rows in ")
    assert "made anew" in note
    assert_same(made(path, tmp_path / "kept"), plain(path))
    assert len(counted) == 2
    assert [each.name for each in (tmp_path / "kept").iterdir()] == [entry.name]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"examples": 1}', b"[" * 9000, b'{"report": {"a": 1}}']
)
def test_an_entry_that_says_nothing_is_damaged(path, tmp_path, counted, capsys, content):
    made(path, tmp_path / "kept")
    [entry] = (tmp_path / "kept").iterdir()
    (entry / "entry.json").write_bytes(content)
    made(path, tmp_path / "kept")
    assert len(counted) == 2
    assert "are damaged" in capsys.readouterr().err


def test_a_folder_that_cannot_be_used_is_a_note(path, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert_same(made(path, tmp_path / "file" / "kept"), plain(path))
    [note] = capsys.readouterr().err.splitlines()
    assert note.startswith("lora-tune: note: tokenised rows are not kept")
    assert "data.cache" in note


class Full(io.BytesIO):
    def write(self, content):
        raise OSError(28, "No space left on device")


class FullAtTheEnd(io.BytesIO):
    def flush(self):
        raise OSError(28, "No space left on device")


def test_a_full_disk_keeps_nothing_and_ends_nothing(path, tmp_path, capsys, monkeypatch):
    create = flat._create

    def full(folder, name):
        return Full() if folder is not None and name == "mask" else create(folder, name)

    monkeypatch.setattr(flat, "_create", full)
    assert_same(made(path, tmp_path / "kept"), plain(path))
    assert "No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "kept").iterdir())


def refuse(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("kind", [Full, FullAtTheEnd, refuse])
def test_no_room_for_what_is_not_kept_is_one_sentence(path, monkeypatch, kind):
    monkeypatch.setattr(flat.tempfile, "TemporaryFile", kind)
    with pytest.raises(InputError, match=r"No space left on device.*TMPDIR"):
        made(path)


def test_a_process_that_does_not_start_is_no_fault_of_the_folder(
    path, tmp_path, small_tasks, monkeypatch, capsys
):
    monkeypatch.setattr(workers.subprocess, "Popen", refuse)
    with pytest.raises(InputError, match=r"does not start \(No space.*data.num_proc"):
        made(path, tmp_path / "kept", num_proc=2)
    assert capsys.readouterr().err == ""


def test_half_an_entry_that_grows_belongs_to_a_run_that_lives(path, tmp_path):
    made(path, tmp_path)
    [entry] = [found for found in tmp_path.iterdir() if (found / "entry.json").is_file()]
    half = tmp_path / "0123.partial"
    half.mkdir()
    (half / "tokens.bin").write_bytes(b"1234")
    os.utime(half, (0, 0))
    Store(tmp_path)._make_room(entry)
    assert half.is_dir()
    os.utime(half / "tokens.bin", (0, 0))
    os.utime(half, (0, 0))
    Store(tmp_path)._make_room(entry)
    assert not half.exists()


def test_a_file_that_changes_meanwhile_is_not_kept(tmp_path, monkeypatch, counted):
    path = written(tmp_path / "a.jsonl", map(chat, range(30)))
    encode = prepared.encode_rows

    def changing(*args, **kwargs):
        found = encode(*args, **kwargs)
        os.utime(path, ns=(1, 1))
        return found

    monkeypatch.setattr(prepared, "encode_rows", changing)
    made(path, tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def test_rows_that_are_refused_leave_nothing(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "?"}]}])
    with pytest.raises(InputError, match="no assistant message"):
        made(path, tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def test_of_several_runs_at_once_one_makes_what_all_read(path, tmp_path, counted):
    found, barrier = [], threading.Barrier(4)

    def run():
        barrier.wait()
        found.append(made(path, tmp_path / "kept"))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for examples in found:
        assert_same(examples, plain(path))
    assert len(counted) == 1
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_without_locks_several_runs_at_once_agree(path, tmp_path, monkeypatch):
    def none(*_, **__):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(store.filelock.FileLock, "acquire", none)
    test_of_several_runs_at_once_one_makes_what_all_read(path, tmp_path, counted=[1])


def test_old_entries_make_room(path, tmp_path, monkeypatch):
    def keep(length, room=1 << 40):
        means = Means(1, Store(tmp_path, room=room), worth=0)
        prepared.examples(Source(path), TOKENIZER, OPTIONS | {"max_length": length}, means)

    for i, length in enumerate((40, 41, 42)):
        keep(length)
        newest = max(tmp_path.iterdir(), key=lambda entry: (entry / "entry.json").stat().st_mtime)
        os.utime(newest / "entry.json", (i + 1, i + 1))
    entries = sorted(tmp_path.iterdir(), key=lambda entry: (entry / "entry.json").stat().st_mtime)
    keep(40)  # used again, so that 41 is now the one not used for longest
    size = sum(file.stat().st_size for file in entries[0].iterdir())
    abandoned = tmp_path / "abc.partial"
    abandoned.mkdir()
    os.utime(abandoned, (1, 1))
    keep(43, room=3 * size + size // 2)
    left = set(tmp_path.iterdir())
    assert len(left) == 3
    assert left & set(entries) == {entries[0], entries[2]}


def test_small_data_and_first_rows_of_large_files_are_not_kept(path, tmp_path, monkeypatch):
    folder = tmp_path / "kept"
    size = Path(path).stat().st_size
    prepared.examples(Source(path), TOKENIZER, OPTIONS, Means(1, Store(folder), worth=size + 1))
    monkeypatch.setattr(prepared, "_HASHED", size - 1)
    made(path, folder, max_samples=5)
    assert not folder.exists()
    made(path, folder)
    assert len(list(folder.iterdir())) == 1


def test_hub_data_is_known_by_the_content_of_its_files(tmp_path, monkeypatch, counted):
    import datasets

    for name in ("one", "two"):
        rows = [chat(i) for i in range(20 if name == "one" else 21)]
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / name))
    at = ["one"]
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: datasets.load_from_disk(str(tmp_path / at[0]))
    )
    one = made("owner/name", tmp_path / "kept")
    made("owner/name", tmp_path / "kept")
    assert len(counted) == 1
    at[0] = "two"
    two = made("owner/name", tmp_path / "kept")
    assert (len(counted), len(one.rows), two.report.rows) == (2, len(one), 21)
    made("owner/name", tmp_path / "kept", max_samples=3)
    made("owner/name", tmp_path / "kept", max_samples=3)
    assert len(counted) == 4  # streamed: nobody knows its content before it is read
    shutil.rmtree(tmp_path / "kept")
