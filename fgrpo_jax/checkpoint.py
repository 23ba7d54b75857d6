"""Orbax save and restore of the train state; the only file that knows orbax."""

import logging
import math
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from fgrpo_jax import UserError, sharding
from fgrpo_jax.structs import TrainState


class Checkpoints:
    """The checkpoints of a run, numbered by the rollout steps done; a context manager."""

    def __init__(self, folder: pathlib.Path, keep: int):
        self.folder = folder
        self.beside: dict[str, int] = {}  # checksums of what is trained beside, and is not saved
        self.newest = -1  # the step of the last checkpoint that was saved or restored
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
        """Returns when the checkpoint is whole on disk, at once if it is the newest there."""
        if step == self.newest:
            return
        meta = {"checksums": checksums(state), "beside": self.beside}
        content = {"state": state, "meta": meta}
        self._store.save_checkpointables(step, content, force=True, overwrite=True)
        self.newest = step

    def restore(self, abstract: TrainState) -> TrainState | None:
        """The newest whole checkpoint in the layout of `abstract` (shapes with shardings), or None
        where there is none. Damaged ones are named on stderr and passed over; UserError where
        there are only those."""
        self._store.reload()
        steps = sorted((checkpoint.step for checkpoint in self._store.checkpoints), reverse=True)
        for step in steps:
            try:
                state = self._load(step, abstract)
                self.newest = step
                return state
            except UserError:
                raise
            except Exception as error:
                folder = self.folder / str(step)
                print(f"checkpoint {folder} is damaged and passed over: {error}", file=sys.stderr)
        if steps:
            raise UserError(f"no checkpoint in {self.folder} can be read: give another --workdir")
        return None

    def _load(self, step: int, abstract: TrainState) -> TrainState:
        content = self._store.load_checkpointables(step, {"state": abstract, "meta": None})
        if content["meta"].get("beside", {}) != self.beside:
            raise UserError(
                f"{self.folder / str(step)} holds adapters of other weights than model.path has "
                "now: give the model that the run began with, or another --workdir"
            )
        saved, found = content["meta"]["checksums"], checksums(content["state"])
        wrong = [name for name in saved.keys() | found.keys() if saved.get(name) != found.get(name)]
        if wrong:
            raise ValueError(f"{min(wrong)} has another checksum than when it was saved")
        return content["state"]

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()


def checksums(tree: Any) -> dict[str, int]:
    """Of each leaf, the sum of its elements' bits, each times an odd number of its place's own,
    modulo 2 ** 32: computed where the leaf lies, the same in every layout, changed by any one
    flipped bit."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
    return {sharding.path_name(p): int(s) for (p, _), s in zip(leaves, sums, strict=True)}


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    def one(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        place = jnp.zeros(x.shape, jnp.uint32)
        for axis in range(x.ndim):
            stride = jnp.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
            place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
        return (bits.astype(jnp.uint32) * (2 * place + 1)).sum(dtype=jnp.uint32)

    return [one(leaf) for leaf in leaves]
