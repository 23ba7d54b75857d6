"""One of two hosts that save or restore checkpoints: FOLDER WHAT; test_checkpoint_hosts runs it."""

import json
import os
import pathlib
import sys

import jax
import numpy as np

jax.distributed.initialize(os.environ["COORDINATOR"], 2, int(os.environ["HOST"]))

from orbax.checkpoint import v1 as ocp  # noqa: E402

from fgrpo_jax import StorageError, checkpoint, distributed, manifest, metrics, sharding  # noqa: E402
from fgrpo_jax.structs import TrainState  # noqa: E402

checkpoint.PAUSES = ()
manifest.SMALL = 0  # as if every file were large


def state(seed):
    weight = np.random.default_rng(seed).standard_normal((2000, 8)).astype(np.float32)
    one = np.int32(seed)
    tree = TrainState({"embed_tokens": {"weight": weight}}, {}, one, one, one, one)
    shardings = sharding.state_shardings(sharding.make_mesh(1, 2, 1), tree)
    put = lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index])
    return jax.tree.map(put, tree, shardings)


def refuse(error):
    """This host alone cannot read the newest checkpoint."""
    real = ocp.load_checkpointables

    def load(path, *args):
        if path.endswith("6"):
            raise error
        return real(path, *args)

    ocp.load_checkpointables = load


folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
checkpoints = checkpoint.Checkpoints(str(folder / "c"), 5)
if what == "save":
    for step in (3, 6):
        checkpoints.save(state(step), step)
    sys.exit()
if what == "refused" and not distributed.is_main():
    refuse(PermissionError(13, "Permission denied"))
if what == "damaged" and not distributed.is_main():
    refuse(KeyError("zarr.json"))
out = {}
try:
    spec = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    found = checkpoints.restore(jax.tree.map(spec, state(0)))
    assert found is not None
    out["same"] = manifest.checksums(found) == manifest.checksums(state(checkpoints.newest))
except StorageError as error:
    out["error"] = str(error)
journal = metrics.Journal(folder / os.environ["HOST"] / "evals.jsonl", 9)  # no shared workdir
out |= {"step": checkpoints.newest, "records": journal.records}
print(json.dumps(out))
