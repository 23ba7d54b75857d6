import signal
import subprocess
import time

import jax
import numpy as np
import pytest
from test_main import ENVIRONMENT, ROOT, command, command_of_gang, hosts, metrics

from fgrpo_jax import distributed, sharding

SETTINGS = (  # one minibatch, so that each update has the same rows
    "steps=2 learn.minibatch=4 algo.advantage=batch_std kl.coef=0.1 learn.epochs=2".split()
)


def test_on_one_host_each_move_is_the_plain_one():
    mesh = sharding.make_mesh(1, 8, 1)
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    there = distributed.to_global(x, sharding.activation(mesh, "BT"))
    np.testing.assert_array_equal(distributed.to_host({"x": there})["x"], x)
    np.testing.assert_array_equal(distributed.whole(there), x)
    assert distributed.share(8) == slice(0, 8) and distributed.is_main()
    assert distributed.total(2.5) == 2.5 and jax.process_count() == 1


def two_processes(workdir, *settings):
    """Popen objects of a run on two hosts of one device."""
    return [
        subprocess.Popen(
            command_of_gang(workdir, *settings), cwd=ROOT, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for environment in hosts(2)
    ]  # fmt: skip


def test_two_processes_train_as_one(tmp_path):
    processes = two_processes(tmp_path / "two", *SETTINGS)
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    subprocess.run(
        command(tmp_path / "one", *SETTINGS), cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        env={**ENVIRONMENT, "JAX_NUM_CPU_DEVICES": "2"},  # the same mesh: AdamW makes much of noise
    )  # fmt: skip
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for name in ("loss", "entropy", "grad_norm", "kl"):
            assert two[name] == pytest.approx(one[name], rel=2e-5, abs=1e-6), name


def test_two_processes_stop_together_when_one_is_asked_to(tmp_path):
    workdir = tmp_path / "run"
    processes = two_processes(workdir, "steps=500", "checkpoint.every=500", "lora.rank=2")
    file, deadline = workdir / "metrics.jsonl", time.monotonic() + 200
    while not (file.exists() and file.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGTERM)
    assert [process.wait(timeout=100) for process in processes] == [75, 75]
    (saved,) = [int(path.name) for path in (workdir / "checkpoints").iterdir()]
    assert saved == len(metrics(workdir)) >= 2
