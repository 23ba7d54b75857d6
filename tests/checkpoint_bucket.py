"""A bucket's checkpoints, damaged and half-written ones too; test_checkpoint_bucket runs it."""

import conftest  # noqa: F401
from etils import epath
from test_checkpoint import abstract, equal, state

from fgrpo_jax.checkpoint import Checkpoints

FOLDER = "gs://bucket/run/checkpoints"


def names():
    return sorted(path.name for path in epath.Path(FOLDER).iterdir())


first = Checkpoints(FOLDER, 2)
assert first.restore(abstract()) is None
first.best = 3
for step in (3, 6, 9, 12):
    first.save(state(step), step)
assert names() == ["12", "3", "9"]
for last in ("manifest.json", "commit_success.txt"):  # as a save that was killed leaves it
    (epath.Path(FOLDER) / "12" / last).unlink()
manifest = epath.Path(FOLDER) / "9/manifest.json"
manifest.write_text(manifest.read_text()[:-20])
again = Checkpoints(FOLDER, 2)
equal(again.restore(abstract()), state(3))
assert names() == ["3", "9.bad"]
again.save(state(9), 9)
equal(Checkpoints(FOLDER, 2).restore(abstract()), state(9))
print("all is well")
