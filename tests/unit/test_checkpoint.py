# SPDX-License-Identifier: Apache-2.0
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from toy_problem import make_state, optimizer

from lora_tune.checkpoint import files
from lora_tune.checkpoint import folder as folders
from lora_tune.checkpoint.choice import comparable, measured_on, read_trained
from lora_tune.checkpoint.folder import Checkpoints, changed_since
from lora_tune.errors import InputError

COUNT = {"count": jnp.int32(0)}


def small_state(value=1.0):
    return {"kernel": jnp.full((2, 3), float(value))}, (optax.EmptyState(), [jnp.int32(value)])


def moved_state():
    """Adapters and AdamW state after a few steps, so that no array is what it was at the start."""
    opt, _ = optimizer(10)
    trainable, opt_state, _ = make_state(opt)
    for k in range(3):
        grads = jax.tree.map(lambda x, k=k: jnp.cos(x + k), trainable)
        updates, opt_state = opt.update(grads, opt_state, trainable)
        trainable = optax.apply_updates(trainable, updates)
    return opt, trainable, opt_state


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


class Waiting(Checkpoints):
    """For tests of what a checkpoint holds, not of when it is there."""

    def save(self, *args, **kwargs):
        path = super().save(*args, **kwargs)
        self.wait()
        return path


def open_folder(path, *, kind=Waiting, **changes):
    return kind(path, **({"keep": 3, "every": 1} | changes))


def test_moments_and_schedule_count_survive(tmp_path):
    opt, trainable, opt_state = moved_state()
    open_folder(tmp_path).save(3, (trainable, opt_state), position={"at": [1, 2]}, counts={"n": 5})
    found = open_folder(tmp_path).restore((abstract(trainable), abstract(opt_state)))
    assert_same_bits((found.trainable, found.opt_state), (trainable, opt_state))
    assert (found.meta.step, found.meta.position, found.meta.counts) == (
        3,
        {"at": [1, 2]},
        {"n": 5},
    )
    counts = [int(leaf) for leaf in jax.tree.leaves(found.opt_state) if leaf.ndim == 0]
    # Adam's own count and the schedule's.
    assert counts == [3, 3]
    moments = [leaf for leaf in jax.tree.leaves(found.opt_state) if leaf.ndim]
    assert len(moments) == 4
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in moments)
    grads = jax.tree.map(jnp.sin, trainable)
    assert_same_bits(
        opt.update(grads, found.opt_state, found.trainable), opt.update(grads, opt_state, trainable)
    )


def test_nnx_states_and_other_dtypes_survive(tmp_path):
    from flax import nnx

    trainable = nnx.state(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    odd = {
        "bf16": jnp.array([1.5, -0.0, jnp.nan], jnp.bfloat16),
        "flag": jnp.array([True, False]),
        "int8": jnp.array([-3, 4], jnp.int8),
    }
    open_folder(tmp_path).save(1, (trainable, odd), position={})
    found = open_folder(tmp_path).restore((trainable, odd))
    assert_same_bits((found.trainable, found.opt_state), (trainable, odd))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_restores_to_another_sharding(tmp_path, axis_type):
    devices = np.array(jax.devices())
    value = np.arange(64, dtype=np.float32).reshape(8, 8)

    def on(mesh, spec):
        return {"kernel": jax.device_put(value, NamedSharding(mesh, spec))}

    four = Mesh(devices[:4], ("fsdp",), axis_types=(axis_type,))
    eight = Mesh(devices.reshape(4, 2), ("fsdp", "tensor"), axis_types=(axis_type,) * 2)
    folder = open_folder(tmp_path)
    folder.save(1, (on(four, P("fsdp")), {"count": jnp.int32(1)}), position={})
    wanted = NamedSharding(eight, P("tensor", "fsdp"))
    target = {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=wanted)}
    found = folder.restore((target, {"count": jnp.int32(0)}))
    assert found.trainable["kernel"].sharding == wanted
    np.testing.assert_array_equal(found.trainable["kernel"], value)


def test_an_empty_folder_restores_nothing(tmp_path):
    folder = open_folder(tmp_path / "new" / "checkpoints")
    assert folder.latest() is None
    assert folder.restore(small_state()) is None


@pytest.mark.parametrize(("metric", "best"), [("eval_loss", 3), ("eval_a_exact_match", 2)])
def test_the_newest_and_the_best_are_kept(tmp_path, metric, best):
    folder = open_folder(tmp_path, keep=2, metric=metric)
    for step, value in enumerate([None, 0.9, 0.4, 0.6, 0.9, 0.5, None], start=1):
        evaluation = None if value is None else {metric: value, "eval_other": -value}
        folder.save(step, small_state(step), position={}, evaluation=evaluation)
    folder.wait()
    assert folder.steps() == [best, 6, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(best), "6", "7"]
    assert folder.restore(small_state()).trainable["kernel"][0, 0] == 7
    wanted = small_state()[0]
    for by, step in ((None, 7), (metric, best), ("eval_unknown", 7)):
        found = read_trained(tmp_path, wanted, metric=by)
        assert found.step == found.weights["kernel"][0, 0] == step
        assert found.metric == (by if by == metric else None), "not the best by what none has"


def test_due(tmp_path):
    thirds = open_folder(tmp_path, every=3)
    assert [step for step in range(1, 7) if thirds.due(step)] == [3, 6]
    assert not open_folder(tmp_path, every=0).due(3)


def test_other_adapters_are_named(tmp_path):
    saved = {"q": {"a": jnp.ones((3, 2)), "b": jnp.ones((2, 3))}, "k": {"a": jnp.ones((3, 2))}}
    now = {"q": {"a": jnp.ones((3, 4)), "b": jnp.ones((2, 3))}, "v": {"a": jnp.ones((3, 2))}}
    folder = open_folder(tmp_path)
    folder.save(1, (saved, COUNT), position={})
    with pytest.raises(InputError) as caught:
        folder.restore((now, COUNT))
    message = str(caught.value)
    for words in (
        "q.a was float32[3, 2], is float32[3, 4]",
        "k.a is in the checkpoint only",
        "v.a is not in the checkpoint",
        "output_dir",
    ):
        assert words in message
    assert "q.b" not in message
    # A mistake of the user is no damage: the checkpoint stays.
    assert folder.steps() == [1]


def test_another_optimizer_is_named(tmp_path):
    folder = open_folder(tmp_path)
    folder.save(1, ({"a": jnp.ones(2)}, (jnp.ones(2), jnp.ones(2))), position={})
    with pytest.raises(InputError, match="1 is in the checkpoint only"):
        folder.restore(({"a": jnp.ones(2)}, (jnp.ones(2),)))


def test_another_run_is_told_by_its_fingerprint(tmp_path):
    open_folder(tmp_path, fingerprint={"seed": 1, "data": "x", "gone": None}).save(
        1, small_state(), position={}
    )
    same = open_folder(tmp_path, fingerprint={"data": "x", "seed": 1})
    assert same.restore(small_state()).meta.fingerprint["seed"] == 1
    other = open_folder(tmp_path, fingerprint={"seed": 2, "data": "x"})
    with pytest.raises(InputError, match=r"^set another output_dir.*in which seed was 1, is 2$"):
        other.restore(small_state())


def test_another_run_is_told_in_a_few_words(tmp_path):
    """However much has changed, and however long the values and the list of adapters are."""
    names = [f"lora.key{i}" for i in range(9)]
    open_folder(tmp_path, fingerprint=dict.fromkeys(names, 1)).save(1, small_state(), position={})
    now = dict.fromkeys(names, 2) | {"lora.key0": ["q_proj"] * 50, "lora.key1": None}
    with pytest.raises(InputError) as caught:
        open_folder(tmp_path, fingerprint=now).restore(({"other": jnp.ones(3)}, COUNT))
    _, changes = str(caught.value).split(" in which ")
    assert changes.startswith('lora.key0 was 1, is ["q_proj", "q_proj"')
    assert "…, lora.key1 was 1, is null, lora.key2 was 1, is 2, lora.key3" in changes
    assert changes.endswith("and 5 more")
    assert len(changes) < 200


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip_a_byte(folder: Path) -> None:
    file = largest_file(folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut_short(folder: Path) -> None:
    file = largest_file(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose_meta(folder: Path) -> None:
    (folder / "meta" / "metadata").unlink()


def lose_opt_state(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder / "opt_state")


def break_json(folder: Path) -> None:
    (folder / "meta" / "metadata").write_text('{"format": 1, "meta": {"st')


@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, lose_meta, lose_opt_state, break_json])
def test_a_damaged_newest_one_is_passed_over_loudly(tmp_path, damage):
    noise = {"kernel": jax.random.normal(jax.random.key(0), (64, 64))}
    said = []
    folder = open_folder(tmp_path, warn=said.append)
    for step in (1, 2):
        folder.save(step, (jax.tree.map(lambda x, s=step: x + s, noise), COUNT), position={})
    damage(tmp_path / "2" / ("trainable" if damage in (flip_a_byte, cut_short) else ""))
    found = folder.restore((noise, COUNT))
    assert found.meta.step == 1
    np.testing.assert_array_equal(found.trainable["kernel"], noise["kernel"] + 1)
    assert len(said) == 1
    assert str(tmp_path / "2") in said[0]
    assert "damaged" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.corrupt"]
    folder.save(2, (noise, COUNT), position={})
    assert folder.restore((noise, COUNT)).meta.step == 2


def test_late_words_of_a_failed_read_are_not_shown(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    folder = open_folder(tmp_path, warn=lambda _: None)
    for step in (1, 2, 3):
        folder.save(step, small_state(), position={})
    folder.wait()
    for step in (2, 3):
        flip_a_byte(tmp_path / str(step) / "trainable")
    assert folder.restore(small_state()).meta.step == 1
    code = types.SimpleNamespace(co_filename="site-packages/orbax/checkpoint/serialization.py")
    for said, of in (("Event loop is closed", None), ("lost", code), ("another", None)):
        error, coroutine = RuntimeError(said), types.SimpleNamespace(cr_code=of)
        sys.unraisablehook(types.SimpleNamespace(exc_value=error, object=coroutine))
    assert [str(each.exc_value) for each in told] == ["another"]


@pytest.mark.parametrize("reason", ["Permission denied [OS error 13]", "Input/output error"])
def test_what_the_storage_says_below_orbax_counts(tmp_path, reason):
    error = Exception("Encountered error while reading array index: (slice(0, 2, 1),)")
    error.__cause__ = ValueError(f"FAILED: {reason}\nmore")
    with pytest.raises(InputError, match=rf"cannot be read now \(FAILED: {re.escape(reason)}\)"):
        files._raise_unread(tmp_path, error)
    error.__cause__ = ValueError("DATA_LOSS: too short")
    with pytest.raises(files.Damaged, match=r"^DATA_LOSS: too short$"):
        files._raise_unread(tmp_path, error)


def test_a_checkpoint_knows_since_when_the_run_has_so_many_steps(tmp_path):
    def of(total: int) -> Checkpoints:
        return open_folder(tmp_path, total_steps=total)

    def since(folder: Checkpoints, step: int) -> int:
        folder.save(step, small_state(), position={})
        folder.wait()
        return files.read_meta(tmp_path / str(step)).since

    assert since(of(9), 8) == 0
    longer = of(12)
    longer.restore(small_state())
    assert since(longer, 10) == 8
    again = of(12)
    again.restore(small_state())
    assert since(again, 11) == 8
    assert changed_since(files.read_meta(tmp_path / "11"), 12) == 8
    assert changed_since(files.read_meta(tmp_path / "11"), 15) == 11


def test_wrong_values_are_found_even_if_the_storage_does_not_notice(tmp_path, monkeypatch):
    folder = open_folder(tmp_path, warn=lambda _: None)
    folder.save(1, small_state(), position={})
    real = files._checksum
    monkeypatch.setattr(files, "_checksum", lambda x: real(x) + 1)
    with pytest.raises(InputError, match=r"no checkpoint in .* can be read"):
        folder.restore(small_state())


def test_checksum_sees_position_sign_and_every_bit():
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    seen = {int(files._checksum(jnp.array(x)))}
    changed = [x[::-1], x[:, ::-1], -x, np.nextafter(x, np.float32(9))]
    for bit in range(32):
        y = x.copy()
        y.view(np.uint32)[1, 2] ^= np.uint32(1 << bit)
        changed.append(y)
    seen |= {int(files._checksum(jnp.array(y))) for y in changed}
    assert len(seen) == 1 + len(changed)


def test_all_damaged_is_an_error_not_a_new_start(tmp_path):
    folder = open_folder(tmp_path, warn=lambda _: None)
    folder.save(4, small_state(), position={})
    break_json(tmp_path / "4")
    with pytest.raises(InputError, match=r"4 is damaged .* no other: train again, into another"):
        read_trained(tmp_path, small_state()[0])
    with pytest.raises(
        InputError, match=r"steps \[4\], now named STEP.corrupt.*another output_dir to start from"
    ):
        folder.restore(small_state())


@pytest.mark.parametrize("damage", [flip_a_byte, break_json])
def test_of_a_damaged_best_one_the_next_best_is_taken(tmp_path, damage, capsys):
    said = []
    folder = open_folder(tmp_path, warn=said.append)
    noise = {"kernel": jax.random.normal(jax.random.key(0), (64, 64))}
    for step, value in ((1, 0.5), (2, 0.3), (3, 0.9)):
        state = jax.tree.map(lambda x, s=step: x + s, noise), COUNT
        folder.save(step, state, position={}, evaluation={"eval_loss": value})
    folder.wait()
    damage(tmp_path / "2" / ("trainable" if damage is flip_a_byte else ""))
    # Who only reads changes nothing.
    found = read_trained(tmp_path, noise, metric="eval_loss")
    assert (found.step, found.metric, folder.steps()) == (1, "eval_loss", [1, 2, 3])
    assert f"{tmp_path / '2'} is damaged" in capsys.readouterr().err
    found = folder.read_best(noise)
    assert (found.step, found.metric, folder.steps()) == (1, "eval_loss", [1, 3])
    assert "renamed to 2.corrupt" in said[0]
    break_json(tmp_path / "1")
    break_json(tmp_path / "3")
    with pytest.raises(InputError, match="no checkpoint in"):
        read_trained(tmp_path, noise, metric="eval_loss")


def test_evaluations_on_other_rows_are_not_compared(tmp_path):
    before, now = (measured_on(rows, ("",), 5) for rows in ("aa", "bb"))
    open_folder(tmp_path, measured=before).save(
        1, small_state(1), position={}, evaluation={"eval_loss": 0.1, "eval_exact_match": 0.9}
    )
    assert open_folder(tmp_path, measured=before).best_value() == 0.1
    folder = open_folder(tmp_path, measured=now, keep=2)
    assert folder.best_value() is None
    for step in (2, 3, 4):
        folder.save(step, small_state(step), position={}, evaluation={"eval_loss": step / 10})
    folder.wait()
    assert folder.steps() == [2, 3, 4]
    assert read_trained(tmp_path, small_state()[0], metric="eval_loss").step == 2
    # Only answers depend on how many are asked.
    assert comparable("eval_loss", now, measured_on("bb", ("",), 9))
    assert not comparable("eval_exact_match", now, measured_on("bb", ("",), 9))
    assert not comparable("eval_loss", now, measured_on("bb", ("a",), 5))


def test_leftovers_of_killed_saves_and_removals_are_cleaned(tmp_path):
    for name in ("7.orbax-checkpoint-tmp", "7.orbax-checkpoint-tmp-123", "3.removed"):
        (tmp_path / name / "trainable").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    folder = open_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    assert folder.latest() is None


def test_a_removal_cut_short_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    def die(path):
        raise KeyboardInterrupt

    folder = open_folder(tmp_path, keep=1)
    folder.save(1, small_state(1), position={})
    monkeypatch.setattr(folders.shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        folder.save(2, small_state(2), position={})
    monkeypatch.undo()
    assert folder.steps() == [2]
    assert open_folder(tmp_path).steps() == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


CHILD = """
    import os, resource, signal, sys
    import jax.numpy as jnp
    from lora_tune.checkpoint.folder import Checkpoints
    from lora_tune.errors import InputError

    folder = Checkpoints(sys.argv[1], keep=3, every=1)
    state = {"kernel": jnp.arange(65536.0) ** 0.5}, {"count": jnp.int32(3)}
    folder.save(1, state, position={})
    folder.wait()
    {interfere}
    try:
        folder.save(2, state, position={})
        folder.wait()
    except InputError as error:
        print(error)
    print(sorted(os.listdir(sys.argv[1])))
"""
KILL_AT_RENAME = """
    def hook(event, args):
        if event == "os.rename" and str(args[1]).endswith("/2"):
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
"""
SMALL_DISK = "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"


def run_child(tmp_path, interfere):
    code = textwrap.dedent(CHILD).replace("{interfere}", textwrap.dedent(interfere).strip())
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
    )


def test_killed_just_before_the_last_rename_the_new_one_is_invisible(tmp_path):
    done = run_child(tmp_path, KILL_AT_RENAME)
    assert done.returncode == -9, done.stderr
    assert len(list(tmp_path.iterdir())) == 2
    folder = open_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert folder.restore(({"kernel": jnp.zeros(65536)}, {"count": jnp.int32(0)})).meta.step == 1


@pytest.mark.parametrize("fills_up", ["before", "during"])
def test_a_full_disk_is_one_sentence_and_leaves_the_earlier_one(tmp_path, fills_up):
    taken = "import lora_tune.checkpoint.files as c; c._reserve = lambda *_: None; "
    done = run_child(tmp_path, (taken if fills_up == "during" else "") + SMALL_DISK)
    assert done.returncode == 0, done.stderr
    if fills_up == "before":
        assert done.stderr == ""
    message, listing = done.stdout.splitlines()
    assert "checkpoint of step 2 could not be written" in message
    assert "/2: File too large; free space" in message
    assert "output_dir" in message
    assert listing == "['1']"


def test_the_state_may_be_donated_while_it_is_written(tmp_path):
    donate = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    noise = {"kernel": jax.random.normal(jax.random.key(0), (512, 512))}
    want = np.asarray(noise["kernel"])
    with open_folder(tmp_path, kind=Checkpoints) as folder:
        folder.save(1, (noise, COUNT), position={})
        noise = donate(noise)
    found = folder.restore((noise, COUNT))
    np.testing.assert_array_equal(found.trainable["kernel"], want)


def test_leaving_the_folder_waits_and_prunes(tmp_path):
    with open_folder(tmp_path, kind=Checkpoints, keep=1) as folder:
        for step in (1, 2, 3):
            folder.save(step, small_state(step), position={})
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_a_write_that_fails_late_is_told_by_the_next_save_or_at_the_end(tmp_path, monkeypatch):
    class Failing:
        def wait_until_finished(self):
            raise ValueError("OS error: No space left on device [os_error_code='28']")

        def close(self):
            pass

    said = []
    monkeypatch.setattr(folders.files, "start_writing", lambda *_: Failing())
    folder = open_folder(tmp_path, kind=Checkpoints, warn=said.append)
    words = r"checkpoint of step 1 could not be written to .*/1: No space left on device; free"
    folder.save(1, small_state(), position={})
    with pytest.raises(InputError, match=words):
        folder.save(2, small_state(), position={})
    with pytest.raises(InputError, match=words), folder:
        folder.save(1, small_state(), position={})
    folder.save(1, small_state(), position={})
    # What went wrong first is what the run ends with.
    with pytest.raises(RuntimeError, match="the loss is nan"), folder:
        raise RuntimeError("the loss is nan")
    assert len(said) == 1
    assert "checkpoint of step 1 could not be written" in said[0]


def test_reading_one_checkpoint_changes_nothing(tmp_path):
    folder = open_folder(tmp_path)
    for step in (1, 2):
        folder.save(step, small_state(step), position={})
    break_json(tmp_path / "2")
    assert folders.read_one(tmp_path / "1", small_state()).meta.step == 1
    with pytest.raises(InputError, match=r"checkpoint .*/2 is damaged"):
        folders.read_one(tmp_path / "2", small_state())
    assert folder.steps() == [1, 2]


def test_a_relative_folder_is_one_of_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = open_folder("run/checkpoints").save(1, small_state(2.0), position={})
    assert written.is_relative_to(tmp_path)
    relative = Path("run/checkpoints")
    assert_same_bits(folders.read_one(relative / "1", small_state()).trainable, small_state(2.0)[0])
    found = read_trained(relative, small_state()[0])
    assert found.step == 1
    assert_same_bits(found.weights, small_state(2.0)[0])


@pytest.mark.parametrize("reason", ["Permission denied", "Too many open files"])
def test_a_checkpoint_that_cannot_be_had_now_is_not_taken_for_damaged(
    tmp_path, monkeypatch, reason
):
    import orbax.checkpoint as ocp

    def refuse(*args, **kwargs):
        raise ValueError(f"Error opening file: {reason}")

    folder = open_folder(tmp_path)
    folder.save(1, small_state(), position={})
    monkeypatch.setattr(ocp.Checkpointer, "restore", refuse)
    with pytest.raises(InputError, match=rf"/1 cannot be read now \(.*{reason}\)"):
        folder.restore(small_state())
    assert folder.steps() == [1]


def test_impossible_settings_are_refused(tmp_path):
    with pytest.raises(InputError, match="keep = 0"):
        Checkpoints(tmp_path, keep=0, every=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used"):
        Checkpoints(tmp_path / "file", keep=1, every=1)
