import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax import UserError, sharding
from fgrpo_jax.checkpoint import Checkpoints
from fgrpo_jax.structs import TrainState


def state(seed=0, mesh=(1, 8, 1)):
    mesh = sharding.make_mesh(*mesh)
    tree = TrainState(
        {"embed_tokens": {"weight": jax.random.normal(jax.random.key(seed), (16, 8))}},
        {"count": jnp.int32(seed)},
        jnp.int32(seed),
    )
    return jax.device_put(tree, sharding.state_shardings(mesh, tree))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_nothing_to_restore(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        assert checkpoints.restore(state()) is None


def test_the_newest_is_restored_and_old_ones_go(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        for step in (3, 6, 9):
            checkpoints.save(state(step), step)
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        equal(checkpoints.restore(state()), state(9))
    assert {p.name for p in (tmp_path / "c").iterdir() if p.name.isdigit()} == {"6", "9"}


def test_on_another_mesh(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        checkpoints.save(state(5), 5)
        template = state(0, (1, 2, 4))
        restored = checkpoints.restore(template)
    equal(restored, state(5))
    weight = restored.params["embed_tokens"]["weight"]
    assert weight.sharding == template.params["embed_tokens"]["weight"].sharding


def data_files(folder: pathlib.Path):
    return sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: -p.stat().st_size)


def test_a_changed_value_is_noticed(tmp_path, monkeypatch):
    """Orbax loads what it finds: the checksums say that it is not what was saved."""
    from fgrpo_jax import checkpoint

    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        checkpoints.save(state(5), 5)
        real = checkpoint.checksums
        flipped = lambda tree: real(jax.tree.map(lambda x: x + jnp.ones_like(x), tree))
        monkeypatch.setattr(checkpoint, "checksums", flipped)
        with pytest.raises(UserError, match=r"c/5 is damaged: opt_state/count has another"):
            checkpoints.restore(state())


def test_a_removed_file_is_noticed(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        checkpoints.save(state(5), 5)
    for path in data_files(tmp_path / "c/5/state"):
        path.unlink()
    with (
        Checkpoints(tmp_path / "c", keep=2) as checkpoints,
        pytest.raises(UserError, match="c/5 cannot be restored: remove that folder"),
    ):
        checkpoints.restore(state())


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
