"""Two hosts take the same decision on a checkpoint, whichever of them sees what is wrong."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

HOST = pathlib.Path(__file__).with_name("checkpoint_hosts.py")
RECORD = {"step": 3, "pass@1": 0.5}


def two_hosts(folder, what):
    """What each printed, of stdout as JSON, and stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "COORDINATOR": coordinator, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, HOST, folder, what],
            env=environment | {"HOST": str(i), "PYTHONPATH": str(HOST.parents[1])},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        outs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outs
    lines = [[line for line in out.splitlines() if line.startswith("{")] for out, _ in outs]  # Gloo
    return [json.loads(line) for one in lines for line in one], [err for _, err in outs]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    two_hosts(folder, "save")
    (folder / "0").mkdir()
    (folder / "0/evals.jsonl").write_text(json.dumps(RECORD) + "\n")
    return folder


def names(folder):
    return sorted(path.name for path in (folder / "c").iterdir())


@pytest.fixture
def copy(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "copy"))


def test_whole_ones_and_what_the_main_host_alone_knows(copy):
    for out in two_hosts(copy, "restore")[0]:
        assert out == {"same": True, "step": 6, "records": [RECORD]}


def truncated(folder):
    (file,) = (folder / "ocdbt.process_1/d").iterdir()
    os.truncate(file, file.stat().st_size // 2)


def flipped(folder):
    """In the part of the host that is not the main one."""
    (file,) = (folder / "ocdbt.process_1/d").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [truncated, flipped, None])
def test_damage_that_one_host_sees(copy, damage):
    if damage:
        damage(copy / "c/6/state")
    outs, errors = two_hosts(copy, "restore" if damage else "damaged")
    for out in outs:
        assert out["same"] and out["step"] == 3
    assert names(copy) == ["3", "6.bad"]
    assert "6 is damaged and set aside as 6.bad: " in errors[0] and "set aside" not in errors[1]


def test_a_refusal_that_one_host_sees(copy):
    for out in two_hosts(copy, "refused")[0]:
        assert (
            out["error"].partition("; ")[0].endswith("c/6: Permission denied") and out["step"] == -1
        )
    assert names(copy) == ["3", "6"]
