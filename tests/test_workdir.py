import json
import subprocess
import sys

import pytest

from fgrpo_jax import StorageError, UserError, config, workdir


@pytest.fixture
def c():
    return config.validate(config.default())


def test_the_same_config_goes_on(tmp_path, c):
    workdir.check(c, tmp_path / "run")
    workdir.claim(c, tmp_path / "run")
    workdir.check(c, tmp_path / "run")
    written = json.loads((tmp_path / "run/config.json").read_text())
    assert written == json.loads(json.dumps(config.keys(c)))  # a tuple is a list there


def test_another_config_is_refused_by_its_keys(tmp_path, c):
    workdir.claim(c, tmp_path)
    c.optim.lr = 0.5
    c.seed = 4
    with pytest.raises(
        UserError, match=r"lr \(there 1e-06, here 0.5\), seed \(there 0, here 4\): give"
    ):
        workdir.check(c, tmp_path)


def test_what_may_change(tmp_path, c):
    workdir.claim(c, tmp_path)
    c.steps = 500
    c.mesh.tp = 2
    workdir.check(c, tmp_path)
    assert set(workdir.MAY_CHANGE) <= config.keys(c).keys()


@pytest.mark.parametrize("content", ["{", "[1]", "3"])
def test_a_broken_config_is_told(tmp_path, c, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(
        UserError, match="config.json is no config of a run: give another --workdir"
    ):
        workdir.check(c, tmp_path)


def test_a_place_that_cannot_be_written(tmp_path, c):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/run/config.json: Not a directory; once that"):
        workdir.claim(c, tmp_path / "file" / "run")


def test_two_runs_at_once_in_a_workdir(tmp_path):
    """The second is refused while the first lives, whatever way that ends."""
    code = (
        "import pathlib, sys, time\nfrom fgrpo_jax import workdir\n"
        "with workdir.locked(pathlib.Path(sys.argv[1])):\n print(1, flush=True)\n time.sleep(99)"
    )
    first = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    with first:
        assert first.stdout and first.stdout.readline() == b"1\n"
        with (
            pytest.raises(UserError, match=f"is in use by process {first.pid} on "),
            workdir.locked(tmp_path),
        ):
            pass
        first.kill()
    with workdir.locked(tmp_path):
        pass
