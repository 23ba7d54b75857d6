"""Orbax save and restore of the train state; the only file that knows orbax.

A checkpoint is a folder named by its step, with a manifest of ours beside what orbax wrote: what
run and state it is of, checksums, and the size of each file. Hosts read without waiting for each
other and then agree on what came of it: orbax's own barriers hang where one host's part is damaged.
"""

import contextlib
import importlib.util
import logging
import os
import pathlib
import re
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from fgrpo_jax import StorageError, UserError, config, distributed, storage
from fgrpo_jax import manifest as manifests
from fgrpo_jax import workdir as workdirs
from fgrpo_jax.config import Config
from fgrpo_jax.manifest import Damaged, checksums
from fgrpo_jax.structs import TrainState

PAUSES = (1.0, 4.0, 16.0)  # seconds between tries at a storage that refuses
ANOTHER = "another --workdir or checkpoint.folder"
THE_MODEL = f"give the model that the run began with, or {ANOTHER}"
_PARTIAL = ".partial"  # a folder that is being written or removed; in a bucket, a mark beside it
_OURS = re.compile(r"(\d+|probe)\.partial(\..*)?")  # orbax puts more behind a name

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of a run, numbered by the rollout steps done."""

    def __init__(self, folder: str, keep: int, keys: dict[str, Any] | None = None):
        """
        Args:
            folder: a local one, or gs://BUCKET/PATH.
            keep: newest checkpoints that stay.
            keys: of the run's config, which is to be the one that began the checkpoints.
        """
        for name in ("absl", "gcsfs"):  # which tell in dozens of lines
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._bucket = folder.startswith("gs://")
        if "://" in folder and not self._bucket:
            raise UserError(
                f"checkpoint.folder is {folder}: it must be a local folder, or gs://BUCKET/PATH"
            )
        if self._bucket and importlib.util.find_spec("gcsfs") is None:
            raise UserError(f"checkpoint.folder is {folder}, which needs gcsfs: pip install gcsfs")
        self.folder = epath.Path(folder if self._bucket else os.path.abspath(folder))
        self.keep, self.keys = keep, keys or {}
        self.beside: dict[str, int] = {}  # checksums of what is trained beside, and is not saved
        self.best = -1  # the step that stays, however old it is
        self.newest = -1  # the step of the last checkpoint that was saved or restored
        self.steps: list[int] = []  # that are there

    def save(self, state: TrainState, step: int) -> None:
        """Returns when the checkpoint is whole on disk, at once if it is the newest there; only
        then do older ones go. Raises StorageError."""
        if step != self.newest:
            self._write(state, step)
            self.steps.append(step)
            self.newest = step
        stay = {*sorted(self.steps)[-self.keep :], self.best}
        for old in set(self.steps) - stay:
            self.steps.remove(old)
            if distributed.is_main():
                with storage.at(self.folder / str(old)):
                    self._remove(old)

    def restore(self, abstract: TrainState, only: int | None = None) -> TrainState | None:
        """The newest whole checkpoint, or that of step `only`, in the layout of `abstract` (shapes
        with shardings); None where there never was one. Damaged ones are set aside as STEP.bad.

        Raises:
            UserError: there are only damaged ones; or the newest is of another run.
            StorageError: what there is cannot be read now.
        """

        def listed() -> list[str]:
            self._probe()
            self._sweep()
            return self._names()

        look = listed if distributed.is_main() else list
        names = distributed.from_main(_agreed(lambda: _read(self.folder, look)))
        self.steps = sorted(int(name) for name in names if name.isdigit())
        damaged: dict[int, str] = {}
        state = None
        for step in reversed([step for step in self.steps if only in (None, step)]):
            try:
                state = self._load(step, abstract)
            except Damaged as damage:
                damaged[step] = str(damage)
            else:
                self.newest = step
                break
        if state is None and len(damaged) > 1 and len(set(damaged.values())) == 1:
            raise UserError(
                f"none of the checkpoints in {self.folder} can be read, for one reason, and they "
                f"were left as they are: {damaged[self.steps[-1]]}"
            )
        for step, why in damaged.items():
            self._set_aside(step, why)
        if state is None and (damaged or any(".bad" in name for name in names)):
            raise UserError(
                f"{self.folder} holds only damaged checkpoints (*.bad): put a whole one back, "
                f"remove them to begin anew, or give {ANOTHER}"
            )
        return state

    def _load(self, step: int, abstract: TrainState) -> TrainState:
        path = self.folder / str(step)

        def state() -> TrainState:
            me = distributed.host()
            alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
            with ocp.Context(multiprocessing_options=alone):
                return ocp.load_checkpointables(str(path), {"state": abstract})["state"]

        def checked() -> dict[str, Any]:
            manifest = _read(path, lambda: manifests.read(path))
            self._check(path, manifest, manifests.leaves(abstract))
            if distributed.is_main():
                _read(path, lambda: manifests.check_files(path, manifest["files"]))
            return manifest

        saved = _agreed(checked)["checksums"]
        out = _agreed(lambda: _read(path, state))
        found = checksums(out)
        wrong = [name for name in found if saved.get(name) != found[name]]
        if wrong:
            raise Damaged(f"{wrong[0]} has another checksum than when it was saved")
        return out

    def _check(self, path: epath.Path, manifest: dict[str, Any], leaves: dict[str, str]) -> None:
        """UserError where a checkpoint is whole, and another run's."""
        differ = workdirs.differences(manifest["keys"], self.keys)
        if differ:
            raise UserError(
                f"{path} is of a run of another config; it differs in {differ}: give {ANOTHER}"
            )
        if manifest["beside"] != self.beside:
            raise UserError(
                f"{path} holds adapters of other weights than model.path has now: {THE_MODEL}"
            )
        for name in [*leaves, *manifest["leaves"]]:
            there, here = (of.get(name, "none") for of in (manifest["leaves"], leaves))
            if there != here:
                raise UserError(
                    f"{path} is of another model: {name} is {there} there and {here} here; "
                    f"{THE_MODEL}"
                )

    def _write(self, state: TrainState, step: int) -> None:
        path = self.folder / str(step)
        mark = self.folder / f"{step}{_PARTIAL}"
        partial = path if self._bucket else mark
        manifest = {
            "keys": self.keys,
            "leaves": manifests.leaves(state),
            "checksums": checksums(state),
            "beside": self.beside,
            "files": {},
        }

        def write() -> None:
            try:
                if distributed.is_main():
                    self.folder.mkdir(parents=True, exist_ok=True)
                    if self._bucket:
                        mark.write_text("its checkpoint is not whole")
                ocp.save_checkpointables(str(partial), {"state": state}, overwrite=True)
                if not distributed.is_main():
                    return
                if self._bucket:  # whose files are whole or absent
                    (path / manifests.NAME).write_text(manifests.sealed(manifest))
                    mark.unlink()
                else:
                    manifests.write(partial, manifest)
                    partial.rename(path)
                    storage.settle(self.folder)
            except Exception:
                local = distributed.is_main() and not self._bucket  # a bucket's waits for the start
                for _ in range(5 if local else 0):
                    with contextlib.suppress(Exception):
                        self._sweep()
                    time.sleep(0.1)  # orbax's threads may still be writing there
                raise

        pauses = PAUSES if distributed.hosts() == 1 else ()  # the others are at orbax's barriers
        try:
            _patiently(path, write, pauses)
        except StorageError as error:
            last = "there is none before it"
            if self.steps:
                last = f"the last whole one is {self.folder / str(max(self.steps))}"
            raise StorageError(
                f"{error}; {last}: make room or mend it, and the same command goes on from there"
            ) from error

    def _probe(self) -> None:
        """Finds a place that takes no files before steps are lost to it."""
        file = self.folder / f"probe{_PARTIAL}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_text("a checkpoint could be written here")
            file.unlink()
        except FileNotFoundError as error:  # as of a bucket that there is not
            raise StorageError(f"checkpoint.folder {self.folder}: there is none") from error

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []

    def _sweep(self) -> None:
        """Removes what a save or a removal that did not end has left, and nothing else."""
        for name in filter(_OURS.fullmatch, self._names()):
            path = self.folder / name
            if not self._bucket:
                path.rmtree(missing_ok=True) if path.is_dir() else path.unlink(missing_ok=True)
                continue
            whole = self.folder / name.partition(".")[0]
            if whole.exists() and not (whole / manifests.NAME).exists():
                whole.rmtree()
            path.unlink(missing_ok=True)

    def _remove(self, step: int) -> None:
        path, partial = self.folder / str(step), self.folder / f"{step}{_PARTIAL}"
        if self._bucket:
            partial.write_text("its checkpoint is being removed")
            (path / manifests.NAME).unlink(missing_ok=True)
            path.rmtree()
            partial.unlink()
        else:
            path.rename(partial)
            partial.rmtree()

    def _set_aside(self, step: int, why: str) -> None:
        self.steps.remove(step)
        if not distributed.is_main():
            return
        path, names, number = self.folder / str(step), self._names(), 1
        while (name := f"{step}.bad" + (f"-{number}" if number > 1 else "")) in names:
            number += 1
        with storage.at(path):
            path.rename(self.folder / name)
        print(f"checkpoint {path} is damaged and set aside as {name}: {why}", file=sys.stderr)


def of(c: Config, workdir: pathlib.Path) -> Checkpoints:
    """Those of a run. They may be copied to another folder, for a run of another workdir."""
    keys = {key: value for key, value in config.keys(c).items() if key != "checkpoint.folder"}
    folder = c.checkpoint.folder or str(workdir / "checkpoints")
    return Checkpoints(folder, c.checkpoint.keep, keys)


def _patiently(path: epath.Path, action: Callable[[], T], pauses: tuple[float, ...]) -> T:
    """What the action returns, tried again after each pause while the storage refuses; then
    StorageError."""
    for pause in (*pauses, None):
        try:
            return action()
        except (StorageError, UserError, Damaged):
            raise
        except Exception as error:
            why = None if _out_of_memory(error) else storage.reason(error)
            if why is None:
                raise
            if pause is None:
                raise StorageError(f"checkpoint {path}: {why}") from error
            time.sleep(pause)
    raise AssertionError


def _read(path: epath.Path, action: Callable[[], T]) -> T:
    """The same, where all else that may be wrong is damage."""
    try:
        return _patiently(path, action, PAUSES)
    except StorageError as error:
        raise StorageError(f"{error}; {storage.MENDED}") from error
    except (UserError, Damaged):
        raise
    except Exception as error:
        if _out_of_memory(error):
            raise
        *_, deepest = storage.causes(error)
        raise Damaged(textwrap.shorten(storage.first_line(deepest), 200)) from error


def _out_of_memory(error: Exception) -> bool:
    kinds = (MemoryError, jax.errors.JaxRuntimeError)
    return any(isinstance(one, kinds) for one in storage.causes(error))


def _agreed(action: Callable[[], T]) -> T:
    """What the action returns on this host, if it does on all; else each raises the same, the
    gravest of what any of them has met."""
    result, problem = None, None
    kinds = (Damaged, StorageError, UserError)  # in the order of their weight
    try:
        result = action()
    except kinds as error:
        problem = error
    hosts, weight = distributed.hosts(), 0 if problem is None else 1 + kinds.index(type(problem))
    worst, host = divmod(int(distributed.largest(weight * hosts + distributed.host())), hosts)
    if worst:
        raise kinds[worst - 1](distributed.from_host(str(problem), host)) from problem
    return result  # pyright: ignore[reportReturnType]
