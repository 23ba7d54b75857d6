"""Orbax save and restore of the train state; the only file that knows orbax."""

import logging
import pathlib
import zlib
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from fgrpo_jax import UserError, distributed, sharding
from fgrpo_jax.structs import TrainState


class Checkpoints:
    """The checkpoints of a run, numbered by the rollout steps done; a context manager."""

    def __init__(self, folder: pathlib.Path, keep: int):
        self.folder = folder
        logging.getLogger("absl").setLevel(
            logging.ERROR
        )  # orbax reports each save in a dozen lines
        policies: Any = ocp.training.preservation_policies
        self._store = ocp.training.Checkpointer(
            str(folder.absolute()),
            preservation_policy=policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

    def save(self, state: TrainState, step: int) -> None:
        """Returns when the checkpoint is whole on disk."""
        content = {"state": state, "meta": {"checksums": checksums(state)}}
        self._store.save_checkpointables(step, content, force=True, overwrite=True)

    def restore(self, state: TrainState) -> TrainState | None:
        """The newest checkpoint in the layout of `state` (arrays or shapes with shardings), or
        None where there is none. Raises UserError for one that is damaged."""
        self._store.reload()
        latest = self._store.latest
        if latest is None:
            return None
        template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        step = latest.step
        try:
            content = self._store.load_checkpointables(step, {"state": template, "meta": None})
        except Exception as error:
            raise UserError(
                f"checkpoint {self.folder / str(step)} cannot be restored: remove that folder to "
                f"go on from the one before ({type(error).__name__})"
            ) from error
        found = checksums(content["state"])
        for name, value in content["meta"]["checksums"].items():
            if found.get(name) != value:
                raise UserError(
                    f"checkpoint {self.folder / str(step)} is damaged: {name} has another "
                    "checksum than when saved; remove that folder to go on from the one before"
                )
        return content["state"]

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()


def checksums(tree: Any) -> dict[str, int]:
    """CRC-32 of each leaf's bytes."""
    return {
        sharding.path_name(path): zlib.crc32(np.ascontiguousarray(distributed.whole(leaf)).data)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
