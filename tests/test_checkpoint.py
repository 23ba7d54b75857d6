import contextlib
import dataclasses
import errno
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from fgrpo_jax import StorageError, UserError, checkpoint, config, manifest, sharding
from fgrpo_jax.checkpoint import Checkpoints
from fgrpo_jax.manifest import checksums
from fgrpo_jax.structs import TrainState


def state(seed=0, mesh=(1, 8, 1)):
    mesh = sharding.make_mesh(*mesh)
    tree = TrainState(
        {"embed_tokens": {"weight": jax.random.normal(jax.random.key(seed), (16, 8))}},
        {"count": jnp.int32(seed)},
        jnp.int32(seed),
        jnp.int32(seed),
        jnp.float32(seed),
        jnp.float32(seed),
    )
    return jax.device_put(tree, sharding.state_shardings(mesh, tree))


def abstract(mesh=(1, 8, 1)):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0, mesh)
    )


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def saved(folder, steps=(3, 6), keep=5, **settings):
    checkpoints = Checkpoints(str(folder), keep, **settings)
    for step in steps:
        checkpoints.save(state(step), step)
    return checkpoints


def restored(folder, **settings):
    return Checkpoints(str(folder), 5, **settings).restore(abstract())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_nothing_to_restore(tmp_path):
    assert restored(tmp_path / "c") is None


def test_the_newest_is_restored_and_old_ones_go(tmp_path):
    saved(tmp_path / "c", [3, 6, 9], keep=2)
    equal(restored(tmp_path / "c"), state(9))
    assert names(tmp_path / "c") == ["6", "9"]


def test_the_best_stays_until_a_better_one_is_whole(tmp_path):
    checkpoints = saved(tmp_path / "c", [3], keep=1)
    checkpoints.best = 3
    for step in (6, 9):
        checkpoints.save(state(step), step)
    assert names(tmp_path / "c") == ["3", "9"]
    again = Checkpoints(str(tmp_path / "c"), 1)
    again.restore(abstract())
    again.best = 9
    again.save(state(9), 9)
    assert names(tmp_path / "c") == ["9"]


def test_on_another_mesh(tmp_path):
    saved(tmp_path / "c", [5])
    template = abstract((1, 2, 4))
    out = Checkpoints(str(tmp_path / "c"), 2).restore(template)
    equal(out, state(5))
    weight = out.params["embed_tokens"]["weight"]
    assert weight.sharding == template.params["embed_tokens"]["weight"].sharding


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, truncate, pathlib.Path.unlink])
def test_damage_of_any_file_is_noticed_and_set_aside(tmp_path, damage, capsys):
    saved(tmp_path / "c")
    files = [p.relative_to(tmp_path / "c/6") for p in (tmp_path / "c/6").rglob("*") if p.is_file()]
    assert len(files) > 8
    for i, file in enumerate(files):
        copy = pathlib.Path(shutil.copytree(tmp_path / "c", tmp_path / str(i)))
        if damage is not pathlib.Path.unlink and not (copy / "6" / file).stat().st_size:
            continue
        damage(copy / "6" / file)
        equal(restored(copy), state(3))
        assert names(copy) == ["3", "6.bad"]
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1 and file.name in said
        assert f"checkpoint {copy}/6 is damaged and set aside as 6.bad: " in said


def test_a_flipped_bit_in_a_large_file_is_noticed_by_the_checksums(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(manifest, "SMALL", 0)  # as if every file were large
    for i in range(40):
        saved(tmp_path / str(i))
        for file in (tmp_path / str(i) / "6/state/d").iterdir():
            data = bytearray(file.read_bytes())
            data[len(data) * i // 40] ^= 1 << i % 8
            file.write_bytes(data)
        equal(restored(tmp_path / str(i)), state(3))
        assert "6 is damaged and set aside as 6.bad: " in capsys.readouterr().err


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def half_written(folder):
    """As a copy that was broken off."""
    for path in sorted(folder.rglob("*"))[::2]:
        if path.is_file():
            path.unlink()


@pytest.mark.parametrize("damage", [empty, half_written])
def test_damaged_folders_are_set_aside_again_and_again(tmp_path, damage, capsys):
    saved(tmp_path / "c")
    damage(tmp_path / "c/6")
    equal(restored(tmp_path / "c"), state(3))
    checkpoints = Checkpoints(str(tmp_path / "c"), 5)
    checkpoints.restore(abstract())
    checkpoints.save(state(6), 6)
    equal(restored(tmp_path / "c"), state(6))
    damage(tmp_path / "c/6")
    equal(restored(tmp_path / "c"), state(3))
    assert names(tmp_path / "c") == ["3", "6.bad", "6.bad-2"]
    assert "set aside as 6.bad-2: its manifest.json is missing" in capsys.readouterr().err


def test_only_damaged_ones_are_no_new_beginning(tmp_path):
    saved(tmp_path / "c", [3])
    empty(tmp_path / "c/3")
    for _ in range(2):  # and none is left to be looked at
        with pytest.raises(UserError, match=r"c holds only damaged checkpoints \(\*.bad\): put a"):
            restored(tmp_path / "c")
        assert names(tmp_path / "c") == ["3.bad"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_of_it_is_on_the_disk_itself_before_it_has_its_name(tmp_path, monkeypatch):
    settled, sync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda n: (settled.append(os.readlink(f"/proc/self/fd/{n}")), sync(n))
    )
    saved(tmp_path / "c", [3])
    there = [path.relative_to(tmp_path / "c/3") for path in (tmp_path / "c/3").rglob("*")]
    assert len(there) > 10
    assert {str(tmp_path / "c/3.partial" / path) for path in there} <= set(settled[:-1])
    assert settled[-1] == str(tmp_path / "c")


CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
WATCHED: dict[str, pathlib.Path] = {}  # the folder, and the one that gets copies of it
COPYING = threading.Lock()  # orbax writes in threads of its own
HERE = threading.local()


def copy_before(event, arguments):
    """Keeps what a kill would leave before each change of the folder."""
    if not WATCHED or event not in CHANGES or getattr(HERE, "copies", False):
        return
    if event == "open" and arguments[1] in ("r", None):  # None: a folder's
        return
    with COPYING, contextlib.suppress(shutil.Error):  # tensorstore renames meanwhile
        HERE.copies = True
        copy = WATCHED["copies"] / f"{len(names(WATCHED['copies'])):03}"
        shutil.copytree(WATCHED["folder"], copy)
    HERE.copies = False


def test_a_kill_before_any_change_of_a_save_or_removal_leaves_whole_ones(tmp_path, capsys):
    """The one before stays until the new one is whole, and the best until a better one is."""
    checkpoints = saved(tmp_path / "c", [3], keep=1)
    checkpoints.best = 3
    checkpoints.save(state(6), 6)
    (tmp_path / "copies").mkdir()
    sys.addaudithook(copy_before)  # for good: there is no taking it away
    WATCHED.update(folder=tmp_path / "c", copies=tmp_path / "copies")
    try:
        checkpoints.save(state(9), 9)
        better = len(names(tmp_path / "copies"))
        checkpoints.best = 9
        checkpoints.save(state(9), 9)
    finally:
        WATCHED.clear()
    newest = []
    for i, name in enumerate(names(tmp_path / "copies")):
        again = Checkpoints(str(tmp_path / "copies" / name), 1)
        found = again.restore(abstract())
        assert found is not None and not capsys.readouterr().err
        equal(found, state(again.newest))
        assert names(again.folder) == [str(step) for step in again.steps]
        for path in again.folder.iterdir():  # the older ones are whole too
            manifest.check_files(path, manifest.read(path)["files"])
        assert i > better or again.steps[0] == 3
        newest.append(again.newest)
    assert newest == sorted(newest) and set(newest) == {6, 9}
    assert 10 < better < len(newest) - 10


def test_what_a_killed_save_or_removal_left_is_cleared_away(tmp_path, capsys):
    saved(tmp_path / "c", [3])
    for name in ("6.partial", "6.partial.orbax-checkpoint-tmp"):
        (tmp_path / "c" / name).mkdir()
    equal(restored(tmp_path / "c"), state(3))
    assert names(tmp_path / "c") == ["3"] and not capsys.readouterr().err


def refusing(monkeypatch, name, error, times=100):
    """orbax's function raises so many times before it works."""
    real, left = getattr(ocp, name), [times]

    def function(path, *args, **kwargs):
        if left[0]:
            left[0] -= 1
            (pathlib.Path(path) / "half").mkdir(parents=True, exist_ok=True)
            raise error
        return real(path, *args, **kwargs)

    monkeypatch.setattr(ocp, name, function)
    monkeypatch.setattr(checkpoint, "PAUSES", (0.01, 0.01))


REFUSALS = [
    OSError(errno.EIO, "Input/output error"),
    PermissionError(errno.EACCES, "Permission denied"),
    ValueError("UNAVAILABLE: Error reading gs://b/d: CURL error Could not resolve host"),
    ValueError("Error writing local file: [OS error 28: No space left on device] and more"),
]


@pytest.mark.parametrize("error", REFUSALS)
def test_a_storage_that_refuses_is_no_damage(tmp_path, monkeypatch, error):
    saved(tmp_path / "c")
    refusing(monkeypatch, "load_checkpointables", error)
    with pytest.raises(StorageError, match="c/6: .*(error|denied|UNAVAILABLE|No space)"):
        restored(tmp_path / "c")
    assert names(tmp_path / "c") == ["3", "6"]
    refusing(monkeypatch, "load_checkpointables", error, times=0)


@pytest.mark.parametrize("error", REFUSALS)
def test_a_storage_that_refuses_for_a_while_is_waited_for(tmp_path, monkeypatch, error):
    refusing(monkeypatch, "save_checkpointables", error, times=2)
    saved(tmp_path / "c")
    refusing(monkeypatch, "load_checkpointables", error, times=2)
    equal(restored(tmp_path / "c"), state(6))


@pytest.mark.parametrize("error", REFUSALS)
def test_old_ones_outlive_a_save_that_fails(tmp_path, monkeypatch, error):
    checkpoints = saved(tmp_path / "c", [3], keep=1)
    refusing(monkeypatch, "save_checkpointables", error)
    with pytest.raises(StorageError) as raised:
        checkpoints.save(state(6), 6)
    said = str(raised.value)
    assert said.startswith(f"checkpoint {tmp_path}/c/6: ") and "\n" not in said
    assert f"; the last whole one is {tmp_path}/c/3: make room or mend it, and the same" in said
    assert names(tmp_path / "c") == ["3"] and checkpoints.newest == 3
    equal(restored(tmp_path / "c"), state(3))


def test_a_folder_that_cannot_be_listed_is_no_new_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PAUSES", ())
    (tmp_path / "c").write_text("")
    with pytest.raises(StorageError, match="c: (Not a directory|File exists); once that is mended"):
        restored(tmp_path / "c")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_place_that_takes_no_files_is_found_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PAUSES", ())
    (tmp_path / "probe.partial").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=": No space left on device; once that is mended"):
        restored(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permissions(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PAUSES", ())
    saved(tmp_path / "c")
    (tmp_path / "c/6/state").chmod(0)
    with pytest.raises(StorageError, match="c/6: Permission denied"):
        restored(tmp_path / "c")
    (tmp_path / "c/6/state").chmod(0o755)
    equal(restored(tmp_path / "c"), state(6))


def test_memory_that_is_lacking_is_no_damage(tmp_path, monkeypatch):
    saved(tmp_path / "c")
    refusing(monkeypatch, "load_checkpointables", jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"))
    with pytest.raises(jax.errors.JaxRuntimeError):
        restored(tmp_path / "c")
    assert names(tmp_path / "c") == ["3", "6"]


def test_a_faulty_program_is_no_fault_of_the_storage(tmp_path, monkeypatch):
    refusing(monkeypatch, "save_checkpointables", TypeError("not an array"))
    with pytest.raises(TypeError):
        saved(tmp_path / "c", [3])


def test_another_model_is_refused_by_its_first_leaf(tmp_path):
    saved(tmp_path / "c", [3])
    template = abstract()
    weight = template.params["embed_tokens"]["weight"]
    for other, message in (
        (weight.update(shape=(16, 16)), r"float32\[16, 8\] there and float32\[16, 16\] here"),
        (weight.update(dtype=jnp.bfloat16), r"float32\[16, 8\] there and bfloat16\[16, 8\] here"),
    ):
        tree = dataclasses.replace(template, params={"embed_tokens": {"weight": other}})
        with pytest.raises(UserError, match="params/embed_tokens/weight is " + message):
            Checkpoints(str(tmp_path / "c"), 5).restore(tree)
    for params, message in (
        ({"embed_tokens": {"weight": weight}, "norm": weight}, "params/norm is none there and fl"),
        ({}, r"params/embed_tokens/weight is float32\[16, 8\] there and none here"),
    ):
        tree = dataclasses.replace(template, params=params)
        with pytest.raises(UserError, match=message):
            Checkpoints(str(tmp_path / "c"), 5).restore(tree)
    assert names(tmp_path / "c") == ["3"]


def test_another_config_is_refused(tmp_path):
    c = config.validate(config.default())
    c.checkpoint.folder = str(tmp_path / "c")
    checkpoint.of(c, tmp_path).save(state(3), 3)
    c.steps += 1  # may change
    c.data.stop = ("a", "b")
    with pytest.raises(UserError, match=r"stop \(there \[\], here \['a', 'b'\]\): give another"):
        checkpoint.of(c, tmp_path).restore(abstract())
    c.data.stop = ()
    shutil.copytree(tmp_path / "c", tmp_path / "moved")
    c.checkpoint.folder = str(tmp_path / "moved")
    equal(checkpoint.of(c, tmp_path).restore(abstract()), state(3))


def test_the_folder_of_a_run(tmp_path, monkeypatch):
    c = config.default()
    assert str(checkpoint.of(c, tmp_path / "w").folder) == str(tmp_path / "w/checkpoints")
    c.checkpoint.folder = "gs://bucket/a/b"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert os.fspath(checkpoint.of(c, tmp_path).folder / "6") == "gs://bucket/a/b/6"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="gs://bucket/a/b, which needs gcsfs: pip install gcsfs"):
        checkpoint.of(c, tmp_path)
    c.checkpoint.folder = "s3://bucket/a"
    with pytest.raises(UserError, match="s3://bucket/a: it must be a local folder, or gs://BUCKET"):
        checkpoint.of(c, tmp_path)


def test_what_others_keep_there_stays(tmp_path):
    saved(tmp_path / "c", [3])
    for name in ("my.partial_results", "notes.partial", "2024x"):
        (tmp_path / "c" / name).mkdir()
        (tmp_path / "c" / name / "thesis.txt").write_text("words")
    (tmp_path / "c/6.partial").mkdir()
    equal(restored(tmp_path / "c"), state(3))
    assert {path.name for path in (tmp_path / "c").iterdir()} == {
        "3", "my.partial_results", "notes.partial", "2024x",
    }  # fmt: skip


def test_a_reader_that_fails_alike_at_all_sets_none_aside(tmp_path, monkeypatch):
    saved(tmp_path / "c", [3, 6])

    def changed(*_):
        raise TypeError("load_checkpointables() got an unexpected keyword argument")

    monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", changed)
    with pytest.raises(UserError, match="left as they are: .*unexpected keyword"):
        restored(tmp_path / "c")
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"3", "6"}


def test_a_record_without_what_is_read_again_is_none(tmp_path):
    from fgrpo_jax.metrics import Journal

    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"step": 2, "reward": 1.0}\n')
    with pytest.raises(UserError, match="m.jsonl, line 1 is no record of a run"):
        Journal(tmp_path / "m.jsonl", 2, ("reward",))


def test_every_flipped_bit_changes_the_checksum():
    x = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    plain = checksums({"x": x})["x"]
    bits = np.asarray(x).view(np.uint32)
    for place in range(6):
        for bit in range(32):
            changed = bits.copy()
            changed.reshape(-1)[place] ^= np.uint32(1 << bit)
            assert checksums({"x": jnp.asarray(changed.view(np.float32))})["x"] != plain


def test_checksum_by_hand_in_every_layout_and_type():
    x = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    expected = sum(int(v) * (2 * i + 1) for i, v in enumerate(x.reshape(-1)))
    assert checksums({"x": jnp.asarray(x)}) == {"x": expected}
    assert checksums({"x": jnp.float32(1)}) == {"x": 0x3F800000}
    assert checksums({"x": jnp.bfloat16(1)}) == {"x": 0x3F80}
    big = state(7)
    assert checksums(big) == checksums(state(7, (1, 2, 4))) != checksums(state(8))


def test_the_journal_goes_back_to_the_checkpoint(tmp_path):
    from fgrpo_jax.metrics import Journal

    path = tmp_path / "m.jsonl"
    journal = Journal(path, 0)
    for step in (1, 2, 3):
        journal.write({"step": step, "loss": np.float32(step)})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    again = Journal(path, 2)
    assert [record["step"] for record in again.records] == [1, 2]
    again.write({"step": 3})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_the_newest_is_not_saved_again(tmp_path):
    checkpoints = saved(tmp_path / "c", [3, 6])
    checkpoints.save(state(7), 6)  # of the same step, so the same state in a run
    equal(checkpoints.restore(abstract()), state(6))


def test_adapters_of_another_model_are_refused(tmp_path):
    checkpoints = Checkpoints(str(tmp_path / "c"), 2)
    checkpoints.beside = {"norm/weight": 7}
    checkpoints.save(state(3), 3)
    checkpoints.beside = {"norm/weight": 8}
    with pytest.raises(UserError, match="adapters of other weights than model.path has now"):
        checkpoints.restore(abstract())
    checkpoints.beside = {"norm/weight": 7}
    equal(checkpoints.restore(abstract()), state(3))
