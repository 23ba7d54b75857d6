"""What a run survives, tried: nothing is lost. `pytest -m faults` runs all of it, 25 minutes on two
cores, and prints a table; the other tests have a short form of each."""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

import pytest
from conftest import FAULTS
from test_main import ENVIRONMENT, ROOT, checkpoint_sums, command, command_of_gang, hosts, metrics

SETTINGS = (
    "steps=8 checkpoint.every=2 eval.every=3 rollout.max_response=20 rollout.prompts=8 "
    "algo.group_size=8 checkpoint.keep=1 checkpoint.best=pass@1"
).split()
SCRIPT = ROOT / "tpu_scripts/run_with_restart.sh"


def evaluations(workdir):
    return [json.loads(line) for line in (workdir / "evals.jsonl").read_text().splitlines()]


def same_run(workdir, whole, last):
    assert metrics(workdir) == metrics(whole)
    assert evaluations(workdir) == evaluations(whole)
    assert committed(workdir) == committed(whole)  # the last, and the best
    assert checkpoint_sums(workdir, last) == checkpoint_sums(whole, last)
    policies = [(w / "policy/model.safetensors").read_bytes() for w in (workdir, whole)]
    assert policies[0] == policies[1]


def committed(workdir):
    """The steps whose checkpoints have their final names."""
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(int(name) for name in names if name.isdigit())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, and the seconds that a start with warm caches takes."""
    seconds = []
    for i in range(2):  # the first fills the compilation cache
        workdir = tmp_path_factory.mktemp("whole") / str(i)
        begun = time.monotonic()
        subprocess.run(
            command(workdir, *SETTINGS), cwd=ROOT, env=ENVIRONMENT, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        seconds.append(time.monotonic() - begun)
    assert sum(record["grad_norm"] > 0 for record in metrics(workdir)) >= 6  # it learns
    return workdir, seconds[1]


def sources(folder):
    """Two files of problems, six and five, so that each ends within a run of four a step."""
    for name, first, count in (("a", 35, 6), ("b", 477, 5)):
        rows = [
            {"problem": f"{n}+{n + 8}", "answer": str(2 * n + 8)}
            for n in range(first, first + count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.source=0.6*jsonl:{folder / 'a.jsonl'}+0.4*jsonl:{folder / 'b.jsonl'}"


def test_all_that_a_run_learns_and_counts_is_resumed(tmp_path):
    """Several sources within and past an epoch, schedule, minibatches and epochs, a trained weight
    of the loss, the typical norm, the best checkpoint: three processes end where one does."""
    settings = [
        *SETTINGS, sources(tmp_path), "algo.aggregator=lambda_grpo", "learn.epochs=2",
        "eval.every=1", "guard.spike=1000",
        "optim.decay_start=3", "optim.decay_end=9", "checkpoint.every=3",
    ]  # fmt: skip
    for name, ends in (("one", [6]), ("three", [1, 4, 6])):
        for end in ends:
            subprocess.run(
                command(tmp_path / name, *settings, f"steps={end}"), cwd=ROOT, env=ENVIRONMENT,
                check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
    same_run(tmp_path / "three", tmp_path / "one", 6)
    records = metrics(tmp_path / "one")
    assert len({record["lambda"] for record in records}) >= 3
    assert records[5]["lr"] < records[3]["lr"] < records[2]["lr"]
    for name in ("one", "three"):
        best = json.loads((tmp_path / name / "summary.json").read_text())["best"]
        passes = {e["step"]: e["pass@1"] for e in evaluations(tmp_path / name)}
        first = min(step for step in passes if passes[step] == max(passes.values()))
        assert best == {"step": first, "pass@1": passes[first]}
        assert {first, 6} == set(committed(tmp_path / name))


def in_save(workdir, begun):
    folder = workdir / "checkpoints"
    return folder.exists() and any("partial" in path.name for path in folder.iterdir())


def in_evaluation(workdir, begun):
    return any(path.stat().st_mtime > begun for path in workdir.glob("evaluation/*.jsonl"))


def in_steps(workdir, begun):
    """It has made a step since it began."""
    file = workdir / "metrics.jsonl"
    cut = workdir / "evals.jsonl"  # written right after the steps' journal was cut
    return file.exists() and cut.exists() and file.stat().st_mtime > max(begun, cut.stat().st_mtime)


def in_removal(workdir, begun):
    """Of a checkpoint that is older than the newest whole one."""
    partial, whole = workdir.glob("checkpoints/*.partial"), committed(workdir)
    return bool(whole) and any(
        path.stem.isdigit() and int(path.stem) < whole[-1] for path in partial
    )


MOMENTS = {
    "any time": None,
    "a save": in_save,
    "a removal": in_removal,
    "an evaluation": in_evaluation,
    "steps": in_steps,
}


def killed_once(workdir, moment, delay):
    """Starts the run and kills it so many seconds after the moment; the seconds to the first new
    line of its metrics (None: there was none), and in which moment (None: it ended before)."""
    before = committed(workdir)
    begun, wall = time.monotonic(), time.time()
    process = subprocess.Popen(
        command(workdir, *SETTINGS), cwd=ROOT, env=ENVIRONMENT,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    resumed = due = None
    seen = MOMENTS[moment]
    while process.poll() is None:
        now = time.monotonic()
        with contextlib.suppress(FileNotFoundError):  # a file that has just got its name
            if resumed is None and in_steps(workdir, wall):
                resumed = now - begun
            if due is None and (seen is None or seen(workdir, wall)):
                due = now + delay
        if due is not None and now >= due:
            process.kill()
        time.sleep(0.001)
    _, err = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), err
    assert "damaged" not in err, err  # a kill leaves whole checkpoints, or none of that step
    if moment == "a removal" and not in_removal(workdir, wall):
        moment = "steps"  # it was over
    after = committed(workdir)
    assert not before or after[-1] >= before[-1]  # never fewer than were committed
    return resumed, moment if process.returncode else None


def series(kills, seed, folder, whole):
    """So many kill -9 at random moments; each finished run must equal the uninterrupted one."""
    workdir, seconds = whole
    rng = random.Random(seed)
    done, finished, resumes, moments = 0, 0, [], dict.fromkeys(MOMENTS, 0)
    here = folder / "0"
    while done < kills or not finished or here.exists():
        moment = list(MOMENTS)[done % len(MOMENTS)] if done < kills else "any time"
        most = {"any time": seconds, "a removal": 0.004}.get(moment, 0.3 * seconds * rng.random())
        delay = rng.uniform(0, most) if done < kills else 1e9
        resumed, moment = killed_once(here, moment, delay)
        resumes += [resumed] if resumed else []
        if moment is None:
            same_run(here, workdir, 8)
            finished += 1
            here = folder / str(finished)
        else:
            done += 1
            moments[moment] += 1
    where = ", ".join(f"{n} in {moment}" for moment, n in moments.items() if n)
    FAULTS.append(
        ("kill -9", f"{kills} ({where})", f"{kills}; {finished} runs ended bit-equal", "-",
         f"{statistics.median(resumes):.0f}")
    )  # fmt: skip


def test_killed_at_random_moments_the_short_form(whole, tmp_path):
    series(4, 1, tmp_path, whole)


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_killed_fifty_times_at_random_moments(whole, tmp_path):
    series(50, int(os.environ.get("FAULTS_SEED", "0")), tmp_path, whole)


GANG = "steps=6 checkpoint.every=2 eval.every=0 learn.minibatch=4".split()


def gang(workdir, *settings, count=2):
    """The processes' codes and what they said on stderr."""
    processes = [
        subprocess.Popen(
            command_of_gang(workdir, *GANG, *settings), cwd=ROOT, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for environment in hosts(count)
    ]  # fmt: skip
    said = [process.communicate(timeout=400)[1] for process in processes]
    return [process.returncode for process in processes], said


@pytest.fixture(scope="module")
def whole_gang(tmp_path_factory):
    """Uninterrupted runs by the number of processes, made when they are asked for."""
    made = {}

    def run(count):
        if count not in made:
            made[count] = tmp_path_factory.mktemp("gang") / str(count)
            codes, said = gang(made[count], count=count)
            assert codes == [0] * count, said
        return made[count]

    return run


def supervised(workdir, fault, process, count):
    """A fault after step 3 under the supervisor: what was said, and the seconds until the last of
    the others had ended, until all started again, and from there to the run's end."""
    once = workdir.with_name("once")
    python, _, *flags = command_of_gang(workdir, *GANG)
    line = [python, str(ROOT / "tests/faulty.py"), fault, str(process), "3", once, *flags]
    supervisor = subprocess.Popen(
        ["bash", SCRIPT, "--processes", str(count), "--", *line],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # a stopped member of ours would have all of us hung up
    )  # fmt: skip
    ended = again = None
    said = []
    assert supervisor.stderr
    for text in supervisor.stderr:
        said.append(text)
        if "starting again" in text:
            again = time.time()
        elif number := re.match(r"run_with_restart: process (\d+) ended", text):
            ended = time.time() if int(number[1]) != process or ended is None else ended
    supervisor.wait(timeout=300)
    supervisor.stderr.close()
    assert supervisor.returncode == 0, "".join(said)
    begun = float(once.read_text())
    last = (workdir / "summary.json").stat().st_mtime
    return "".join(said), ended - begun, again - begun, last - again


WORDS = {  # what somebody must say, of the process and of the fault
    "kill": r"process {p} on \S+ has not been heard of",
    "stop": r"process {p} on \S+ has not been heard of|"
    r"process {p} on the first host does not answer",
    "raise": r"process {p} on \S+ failed: RuntimeError: a fault on purpose",
    "stuck": r"process {p} on \S+ is stuck: for \d+ s it has been in",
    "deaf": r"process {p} on \S+ has not been heard of",
    "full": r"process {p} on \S+ failed: checkpoint \S+/4: No space left on device; the last",
    "exit": r"process {p} on \S+ has not been heard of",
    "kill 0": r"the leader.*\n(.*\n)*.*process 0 ended with code 137",  # JAX aborts all at once
}
STACKS = re.compile(r"most recent call first")


@pytest.mark.faults
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "fault, process, count",
    [
        ("kill", 1, 2),
        ("kill", 0, 2),
        ("stop", 1, 2),
        ("stop", 0, 2),
        ("raise", 0, 2),
        ("stuck@rollout", 1, 2),
        ("deaf", 1, 2),
        ("full", 1, 2),
        ("exit", 1, 2),
        ("stuck", 3, 4),
    ],
)
def test_a_process_of_several_fails(whole_gang, tmp_path, fault, process, count):
    expected = whole_gang(count)
    workdir = tmp_path / "run"
    said, detected, again, rest = supervised(workdir, fault, process, count)
    words = WORDS.get(f"{fault} {process}", WORDS[fault.partition("@")[0]])
    assert re.search(words.format(p=process), said), said[-6000:]
    assert STACKS.search(said)
    assert detected < 60, f"{detected:.0f} s"
    assert metrics(workdir) == metrics(expected)
    assert checkpoint_sums(workdir, 6) == checkpoint_sums(expected, 6)
    FAULTS.append(
        (f"{fault}, process {process} of {count}", "1", "1; ended bit-equal", f"{detected:.0f}",
         f"{again - detected + rest:.0f} (to the end of the run)")
    )  # fmt: skip


def test_a_process_that_fails_ends_the_other_and_is_named(tmp_path):
    python, _, *flags = command_of_gang(tmp_path / "run", *GANG)
    line = [python, str(ROOT / "tests/faulty.py"), "raise", "1", "1", tmp_path / "once", *flags]
    processes = [
        subprocess.Popen(
            line, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )
        for environment in hosts(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], said
    assert re.search(WORDS["raise"].format(p=1), said[0]) and STACKS.search(said[0])
    assert "RuntimeError: a fault on purpose" in said[1] and "Traceback" in said[1]


def started_unalike(tmp_path, change):
    """What two processes say of which `change` makes the second's command or environment."""
    first, second = hosts(2)
    lines = [command(tmp_path / "run", *GANG), command(tmp_path / "run", *GANG)]
    lines[1], second = change(lines[1], second)
    processes = [
        subprocess.Popen(
            line, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )
        for line, environment, cwd in (
            (lines[0], first, ROOT),
            (lines[1], second, second.get("TEST_CWD", ROOT)),
        )
    ]  # fmt: skip
    said = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], said
    return said


def other_config(tmp_path):
    return lambda line, env: ([*line, "--config.seed=5"], env)


def other_code(tmp_path):
    for name in ("fgrpo_jax", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    with (tmp_path / "fgrpo_jax/losses.py").open("a") as file:
        file.write("# changed\n")
    return lambda line, env: (
        line, env | {"TEST_CWD": str(tmp_path), "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip


def other_count(tmp_path):
    return lambda line, env: (line, env | {"JAX_NUM_PROCESSES": "3"})


@pytest.mark.parametrize(
    "change, name",
    [(other_config, "seed is 0 in process 0 and 5 in process 1"),
     (other_code, "fgrpo_jax's code is"),
     (other_count, "JAX_NUM_PROCESSES is '2' in process 0 and '3' in process 1")],
)  # fmt: skip
def test_processes_that_were_not_started_alike(tmp_path, change, name):
    for said in started_unalike(tmp_path, change(tmp_path)):
        assert "error: the processes were not started alike: " in said and name in said, said


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_a_run_goes_on_with_other_devices(whole_gang, tmp_path):
    """Two processes, then one of four devices, then four processes; losses as of four all along,
    and of two, within rounding that AdamW makes much of."""
    expected = whole_gang(2)
    workdir = tmp_path / "run"
    assert gang(workdir, "steps=2")[0] == [0, 0]
    subprocess.run(
        command(workdir, *GANG, "steps=4"), cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        env={**ENVIRONMENT, "JAX_NUM_CPU_DEVICES": "4"},
    )  # fmt: skip
    assert gang(workdir, count=4)[0] == [0] * 4
    for others in (workdir, whole_gang(4)):
        for one, other in zip(metrics(expected), metrics(others), strict=True):
            assert one["step"] == other["step"]
            for name in ("loss", "grad_norm", "entropy", "reward"):
                assert other[name] == pytest.approx(one[name], rel=2e-3, abs=1e-4), name
    FAULTS.append(("2 processes, then 1 of 4 devices, then 4", "1", "1", "-", "-"))


def children(pid):
    """The process and all below it."""
    out = [pid]
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            out += children(int(child))
    return out


def held(pid):
    """Resident MB of the main process and of the others, open files, threads, processes."""
    mib, files, threads = [], 0, 0
    for p in (all_of_it := children(pid)):
        status = pathlib.Path(f"/proc/{p}/status").read_text()
        mib.append(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024)
        threads += int(re.search(r"Threads:\s+(\d+)", status)[1])
        files += len(os.listdir(f"/proc/{p}/fd"))
    return mib[0], sum(mib[1:]), files, threads, len(all_of_it)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thousand_steps_hold_no_more_than_two_hundred(tmp_path):
    small = "rollout.prompts=4 algo.group_size=2 rollout.max_response=4 rollout.chunk=2".split()
    workdir, file = tmp_path / "run", tmp_path / "run/metrics.jsonl"
    process = subprocess.Popen(
        command(workdir, "steps=1000", "checkpoint.every=100", "learn.minibatch=4", *small),
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    seen = []
    while process.poll() is None:
        try:
            step = file.read_text().count("\n") if file.exists() else 0
            seen.append((step, *held(process.pid)))
        except (OSError, TypeError):  # a process has ended meanwhile
            pass
        time.sleep(0.5)
    _, err = process.communicate()
    assert process.returncode == 0, err

    def typical(begin, end):
        return [
            statistics.median(row)
            for row in zip(*(s[1:] for s in seen if begin <= s[0] < end), strict=True)
        ]

    early, late = typical(150, 400), typical(750, 1000)
    names = "MB of main", "MB of workers", "open files", "threads", "processes"
    for name, first, last in zip(names, early, late, strict=True):
        assert last <= first * 1.05, f"{name}: {first} -> {last}"
    text = ", ".join(f"{n} {a:.0f} -> {b:.0f}" for n, a, b in zip(names, early, late, strict=True))
    FAULTS.append((f"1,000 steps: {text}", "1", "1", "-", "-"))
