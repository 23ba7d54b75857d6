"""What tells one run from another: config and code, and the config that owns a folder."""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import socket
from collections.abc import Collection, Iterator
from typing import Any

from fgrpo_jax import UserError, config, distributed, jsons, storage
from fgrpo_jax.config import Config

MAY_CHANGE = (  # what leaves the results as they are, but for float32 rounding
    "steps checkpoint.every checkpoint.keep checkpoint.best eval.every rollout.attempts "
    "score.workers score.timeout model.remat model.attention rollout.slots rollout.cache_gib "
    "rollout.waiting rollout.prefill rollout.chunk rollout.unroll rollout.max_drift "
    "learn.microbatch learn.pack learn.widths learn.logit_chunk mesh.replica mesh.fsdp mesh.tp "
    "mesh.sequence kl.offload lora.export profile.steps watchdog.lag watchdog.stall "
    "guard.on_not_finite guard.on_spike guard.on_recompile guard.skips guard.constant guard.keep"
).split()  # not checkpoint.folder: in another, empty one a run would silently begin anew

PACKAGES = "jax jaxlib flax optax orbax-checkpoint".split()


def identity(c: Config) -> dict[str, Any]:
    """What must be the same in all processes of a run."""
    folder = pathlib.Path(__file__).parent
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))))
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        **config.keys(c),
        **versions,
        "Python": platform.python_version(),
        "fgrpo_jax's code": code.hexdigest()[:12],
        "JAX_NUM_PROCESSES": os.environ.get("JAX_NUM_PROCESSES"),
    }


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Keeps other processes that are started on the workdir out of it: UserError for them. The
    system lets go of it when the process ends, however it does."""
    if not distributed.is_main():
        yield
        return
    path = workdir / "lock"
    with storage.at(path):
        workdir.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"workdir {workdir} is in use by process {file.read().strip() or '?'}: wait for "
                "it, or give another --workdir"
            ) from None
        except OSError:  # a disk that knows no locks
            pass
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def check(c: Config, workdir: pathlib.Path, may_change: Collection[str] = MAY_CHANGE) -> None:
    """UserError naming the keys in which the workdir's run differs from this one, if any."""
    path = workdir / "config.json"
    try:
        if not path.exists():
            return
        theirs = jsons.read_json(path)
    except UserError as error:
        raise UserError(f"{path} is no config of a run: give another --workdir") from error
    differ = differences(theirs, config.keys(c), may_change)
    if differ:
        raise UserError(
            f"workdir {workdir} holds a run of another config; it differs in {differ}: give "
            "another --workdir"
        )


def differences(
    theirs: dict[str, Any], mine: dict[str, Any], may_change: Collection[str] = MAY_CHANGE
) -> str:
    """The keys in which two configs are of different runs, with the values of both."""
    mine = json.loads(json.dumps(mine))  # lists for tuples
    return ", ".join(
        f"{key} (there {theirs.get(key)!r}, here {mine.get(key)!r})"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key) and key not in may_change
    )


def claim(c: Config, workdir: pathlib.Path) -> None:
    """Makes the workdir this run's: writes its config.json, whole or not at all."""
    if distributed.is_main():
        storage.write(workdir / "config.json", json.dumps(config.keys(c), indent=1) + "\n")
