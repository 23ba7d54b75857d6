import contextlib
import errno
import os

import pytest

from fgrpo_jax import StorageError, UserError, storage
from fgrpo_jax.held_out import Tallies, Tally
from fgrpo_jax.metrics import Journal

FULL = "/dev/full"  # where every write finds no space
needs_full = pytest.mark.skipif(not os.path.exists(FULL), reason="this system has no /dev/full")


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "a/b.json"
    storage.write(path, "one")
    assert path.read_text() == "one"
    storage.write(path, b"two")
    storage.append(path, "three")
    assert path.read_text() == "twothree" and os.listdir(path.parent) == ["b.json"]
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageError, match="b.json: Is a directory; once that is mended, the same"):
        storage.write(path, "four")
    assert os.listdir(path.parent) == ["b.json"]


@needs_full
def test_a_full_disk(tmp_path):
    (tmp_path / "log").symlink_to(FULL)
    with pytest.raises(StorageError, match=r"/log: No space left on device; once that is mended"):
        storage.append(tmp_path / "log", "line")
    (tmp_path / "file.partial").symlink_to(FULL)
    with pytest.raises(StorageError, match="/file: No space left on device"):
        storage.write(tmp_path / "file", "text")
    assert os.listdir(tmp_path) == ["log"]


def test_a_workdir_that_has_vanished(tmp_path):
    journal = Journal(tmp_path / "run/metrics.jsonl", 0)
    tallies = Tallies(tmp_path / "run/step_0.0.jsonl", 4)
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    (tmp_path / "run").rmdir()
    with pytest.raises(StorageError, match="metrics.jsonl: No such file or directory"):
        journal.write({"step": 1})
    with pytest.raises(StorageError, match="step_0.0.jsonl: No such file or directory"):
        tallies.add(0, Tally(1, 0, 9, None))
    (tmp_path / "run").write_text("")
    for make in (Journal, Tallies):
        with pytest.raises(StorageError, match="run/file: (Not a directory|File exists)"):
            make(tmp_path / "run/file", 0)


def raised(error, cause=None):
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    "error, says",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (ConnectionResetError("by peer"), "by peer"),
        (
            ValueError("Error writing [OS error 28: ENOSPC No space left on device]\nmore"),
            "No space",
        ),
        (raised(KeyError("x"), OSError(errno.EIO, "Input/output error")), "Input/output error"),
        (ExceptionGroup("two", [KeyError("x"), TimeoutError("timed out")]), "timed out"),
        (ValueError("UNAVAILABLE: Could not resolve host"), "UNAVAILABLE"),
        (FileNotFoundError(errno.ENOENT, "No such file"), None),
        (ValueError("DATA_LOSS: bad checksum"), None),
        (KeyError("leaf"), None),
    ],
)
def test_what_a_refusal_is(error, says):
    found = storage.reason(error)
    assert found is None if says is None else found and found.startswith(says)


def test_other_errors_stay_as_they_are(tmp_path):
    for error in (UserError("a mistake"), KeyError("a fault"), StorageError("told already")):
        with pytest.raises(type(error)) as caught, storage.at(tmp_path):
            raise error
        assert caught.value is error


@pytest.mark.parametrize("number, raises", [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_disk_that_cannot_settle_a_folder_is_no_refusal(tmp_path, monkeypatch, number, raises):
    def fsync(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError) if raises else contextlib.nullcontext():
        storage.settle(tmp_path)
