"""tpu_scripts/run_with_restart.sh around small programs that end as they are told."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "tpu_scripts/run_with_restart.sh"

# Ends start after start with the codes in `plan`: of each process "code", "code+" after a new
# checkpoint, "hang" for ever. What it saw goes to `seen`.
PROGRAM = """
import json, os, pathlib, sys, time
work = pathlib.Path(sys.argv[sys.argv.index("--workdir") + 1])
me = os.environ.get("JAX_PROCESS_ID", "0")
seen = work / f"seen{me}"
start = len(seen.read_text().splitlines()) if seen.exists() else 0
with seen.open("a") as file:
    names = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"
    print(*(os.environ.get(name) for name in names), file=file)
plan = (work / f"plan{me}").read_text().split()
what = plan[min(start, len(plan) - 1)]
if what == "hang":
    time.sleep(1000)
if what == "wait":  # until it is asked to stop
    import signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (work / "waits").touch()
    while True:
        time.sleep(0.05)
if what.endswith("+"):
    config = work / "config.json"
    folder = work / "checkpoints"
    if config.exists():
        folder = pathlib.Path(json.loads(config.read_text())["checkpoint.folder"])
    (folder / str(start + 1)).mkdir(parents=True)
sys.exit(int(what.rstrip("+")))
"""


@pytest.fixture
def script(tmp_path):
    """The script with pauses and grace a twentieth of what they are."""
    text = SCRIPT.read_text()
    assert text.count("grace=20\n") == text.count("sleep 1;") == 1
    path = tmp_path / "run.sh"
    path.write_text(text.replace("grace=20\n", "grace=1\n").replace("sleep 1;", "sleep 0.05;"))
    return path


def supervised(script, workdir, *plans):
    workdir.mkdir(exist_ok=True)
    (workdir / "program.py").write_text(PROGRAM)
    for i, plan in enumerate(plans):
        (workdir / f"plan{i}").write_text(plan)
    some = ["--processes", str(len(plans))] if len(plans) > 1 else []
    program = [sys.executable, str(workdir / "program.py"), "--workdir", str(workdir)]
    return subprocess.Popen(
        ["bash", str(script), *some, "--", *program], stderr=subprocess.PIPE, text=True
    )


def starts(workdir, process=0):
    return (workdir / f"seen{process}").read_text().splitlines()


@pytest.mark.parametrize(
    "plan, code, count",
    [
        ("0", 0, 1),
        ("2", 2, 1),  # a mistake: no restart
        ("130", 130, 1),
        ("1 0", 0, 2),
        ("75 75 0", 0, 3),  # asked to stop by the platform, which has saved
        ("1 1 1 1 1 1", 1, 4),  # three restarts without a checkpoint
        ("1 1 1+ 1 1 1 1", 1, 6),  # and counted from the newest checkpoint on
        ("1+ 1+ 1+ 1+ 1+ 0", 0, 6),
        ("74 0", 0, 2),
    ],
)
def test_codes_decide(script, tmp_path, plan, code, count):
    process = supervised(script, tmp_path / "w", plan)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert len(starts(tmp_path / "w")) == count
    assert ("giving up" in err) == (plan.count("1") >= 4 and code == 1)


def test_progress_is_looked_for_where_the_config_puts_it(script, tmp_path):
    keys = {"checkpoint.every": 50, "checkpoint.folder": str(tmp_path / "elsewhere"), "steps": 3}
    (tmp_path / "w").mkdir()
    (tmp_path / "w/config.json").write_text(json.dumps(keys, indent=1) + "\n")
    process = supervised(script, tmp_path / "w", "1+ 1+ 1+ 1+ 1+ 0")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


def test_a_gang_is_killed_and_starts_again_together(script, tmp_path):
    process = supervised(script, tmp_path / "w", "hang 0", "9 0", "hang 0")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "process 1 ended with code 9" in err and "starting again" in err
    for i in range(3):
        first, second = starts(tmp_path / "w", i)
        address, count = first.split()
        assert address.startswith("127.0.0.1:") and count == "3"
        assert second.split()[1] == "3"


def test_one_that_does_not_end_with_the_others_is_killed(script, tmp_path):
    process = supervised(script, tmp_path / "w", "0", "hang 0")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "process 1 ended with code 137" in err
    assert len(starts(tmp_path / "w")) == len(starts(tmp_path / "w", 1)) == 2


def test_a_mistake_of_one_ends_all(script, tmp_path):
    process = supervised(script, tmp_path / "w", "1", "2")
    process.communicate(timeout=60)
    assert process.returncode == 2 and len(starts(tmp_path / "w")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_asks_and_does_not_start_again(script, tmp_path, number):
    process = supervised(script, tmp_path / "w", "wait")
    deadline = time.monotonic() + 20
    while not (tmp_path / "w/waits").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 75 and len(starts(tmp_path / "w")) == 1


def test_the_end_of_the_script_leaves_none_alive(script, tmp_path):
    process = supervised(script, tmp_path / "w", "hang")
    deadline = time.monotonic() + 20
    while not (tmp_path / "w/seen0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for _ in range(2):  # the first asks, which `hang` does not survive either
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    process.communicate(timeout=20)
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
    assert not [pid for pid in left.split() if int(pid) != os.getpid()]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "usage"),
        (["--processes", "x", "--", "true"], "takes a number, not 'x'"),
        (["--", "true"], "needs --workdir"),
        (["true"], "usage"),
    ],
)
def test_mistakes(arguments, message):
    out = subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True)
    assert out.returncode == 2 and message in out.stderr
