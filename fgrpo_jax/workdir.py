"""The folder of a run: which config owns it."""

import json
import pathlib
from typing import Any

from fgrpo_jax import UserError, config, distributed, storage
from fgrpo_jax.config import Config

MAY_CHANGE = (  # what leaves the results as they are, but for float32 rounding
    "steps checkpoint.every checkpoint.keep checkpoint.best eval.every rollout.attempts "
    "score.workers score.timeout model.remat model.attention rollout.slots rollout.cache_gib "
    "rollout.waiting rollout.prefill rollout.chunk rollout.unroll rollout.max_drift "
    "learn.microbatch learn.pack learn.widths learn.logit_chunk mesh.replica mesh.fsdp mesh.tp "
    "mesh.sequence kl.offload lora.export profile.steps"
).split()  # not checkpoint.folder: in another, empty one a run would silently begin anew


def check(c: Config, workdir: pathlib.Path) -> None:
    """UserError naming the keys in which the workdir's run differs from this one, if any."""
    path = workdir / "config.json"
    try:
        with storage.at(path):
            if not path.exists():
                return
            theirs = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no config of a run: give another --workdir") from error
    differ = differences(theirs, config.keys(c))
    if differ:
        raise UserError(
            f"workdir {workdir} holds a run of another config; it differs in {differ}: give "
            "another --workdir"
        )


def differences(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """The keys in which two configs are of different runs, with the values of both."""
    mine = json.loads(json.dumps(mine))  # lists for tuples
    return ", ".join(
        f"{key} (there {theirs.get(key)!r}, here {mine.get(key)!r})"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key) and key not in MAY_CHANGE
    )


def claim(c: Config, workdir: pathlib.Path) -> None:
    """Makes the workdir this run's: writes its config.json, whole or not at all."""
    if distributed.is_main():
        storage.write(workdir / "config.json", json.dumps(config.keys(c), indent=1) + "\n")
