import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax import UserError, sharding
from fgrpo_jax.checkpoint import Checkpoints, checksums
from fgrpo_jax.structs import TrainState


def state(seed=0, mesh=(1, 8, 1)):
    mesh = sharding.make_mesh(*mesh)
    tree = TrainState(
        {"embed_tokens": {"weight": jax.random.normal(jax.random.key(seed), (16, 8))}},
        {"count": jnp.int32(seed)},
        jnp.int32(seed),
        jnp.int32(seed),
        jnp.float32(seed),
    )
    return jax.device_put(tree, sharding.state_shardings(mesh, tree))


def abstract(mesh=(1, 8, 1)):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0, mesh)
    )


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_nothing_to_restore(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        assert checkpoints.restore(abstract()) is None


def test_the_newest_is_restored_and_old_ones_go(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        for step in (3, 6, 9):
            checkpoints.save(state(step), step)
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        equal(checkpoints.restore(abstract()), state(9))
    assert {p.name for p in (tmp_path / "c").iterdir() if p.name.isdigit()} == {"6", "9"}


def test_on_another_mesh(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        checkpoints.save(state(5), 5)
        template = abstract((1, 2, 4))
        out = checkpoints.restore(template)
    equal(out, state(5))
    weight = out.params["embed_tokens"]["weight"]
    assert weight.sharding == template.params["embed_tokens"]["weight"].sharding


def data_files(folder: pathlib.Path):
    return sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: -p.stat().st_size)


def saved(folder, steps):
    with Checkpoints(folder, keep=5) as checkpoints:
        for step in steps:
            checkpoints.save(state(step), step)


def restored(folder):
    with Checkpoints(folder, keep=5) as checkpoints:
        return checkpoints.restore(abstract())


def flip(folder):
    for path in (folder / "state").rglob("d/*"):  # the arrays' own files, and their copies
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def remove(folder):
    for path in data_files(folder / "state"):
        path.unlink()


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("damage", [flip, remove, empty])
def test_damage_is_noticed_and_the_one_before_is_used(tmp_path, damage, capsys):
    saved(tmp_path / "c", [3, 6])
    damage(tmp_path / "c/6")
    equal(restored(tmp_path / "c"), state(3))
    assert "c/6 is damaged and passed over" in capsys.readouterr().err


def test_only_damaged_ones(tmp_path):
    saved(tmp_path / "c", [3])
    remove(tmp_path / "c/3")
    with pytest.raises(UserError, match="no checkpoint in .*c can be read"):
        restored(tmp_path / "c")


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


def test_the_newest_is_not_saved_again_and_a_damaged_one_is(tmp_path):
    with Checkpoints(tmp_path / "c", keep=3) as checkpoints:
        checkpoints.save(state(3), 3)
        checkpoints.save(state(6), 6)
        checkpoints.save(state(7), 6)  # of the same step, so the same state in a run
        equal(checkpoints.restore(abstract()), state(6))
    for file in (tmp_path / "c/6").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with Checkpoints(tmp_path / "c", keep=3) as checkpoints:
        equal(checkpoints.restore(abstract()), state(3))
        checkpoints.save(state(6), 6)
        equal(checkpoints.restore(abstract()), state(6))


def test_adapters_of_another_model_are_refused(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        checkpoints.beside = {"norm/weight": 7}
        checkpoints.save(state(3), 3)
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        checkpoints.beside = {"norm/weight": 8}
        with pytest.raises(UserError, match="adapters of other weights than model.path has now"):
            checkpoints.restore(abstract())
        checkpoints.beside = {"norm/weight": 7}
        equal(checkpoints.restore(abstract()), state(3))
