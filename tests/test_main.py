"""The program as its user runs it: exit codes, sentences, a killed run that goes on."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import qwen2_folder
from conftest import CACHE
from etils import epath

import fgrpo_jax
from fgrpo_jax import manifest, weights

ROOT = pathlib.Path(fgrpo_jax.__file__).parents[1]
TINY = weights.EMBEDDED / "tiny_arithmetic"
SMALL = (
    "steps=6 checkpoint.every=3 eval.every=0 eval.problems=4 eval.samples=4 rollout.prompts=4 "
    "algo.group_size=4 learn.minibatch=2 learn.microbatch=4 optim.lr=1e-3 optim.warmup=2 "
    "rollout.max_response=12 rollout.chunk=6 score.workers=1"
).split()


def command(workdir, *settings, config="configs/tiny_arithmetic_focal.py"):
    flags = [f"--config.{s}" for s in (*SMALL, *settings)]
    return [
        sys.executable,
        "-m",
        "fgrpo_jax.main",
        "--config",
        config,
        "--workdir",
        workdir,
        *flags,
    ]


def command_of_gang(workdir, *settings):
    """The same, for one process of several."""
    python, _, _, *flags = command(workdir, *settings)
    return [python, str(ROOT / "tests/cached.py"), *flags]


ENVIRONMENT = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def hosts(count):
    """The environments of so many processes that find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        {
            **ENVIRONMENT,
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(i),
        }
        for i in range(count)
    ]


def run(*args, **kwargs):
    return subprocess.run(
        command(*args, **kwargs), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )


def metrics(workdir):
    """Of each step, but for what depends on the clock."""
    timing = re.compile(r"\w+_s|tokens_per_s.*|mfu/.*")
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not timing.fullmatch(k)} for line in lines
    ]


def checkpoint_sums(workdir, step):
    return manifest.read(epath.Path(workdir / "checkpoints" / str(step)))["checksums"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of six steps."""
    workdir = tmp_path_factory.mktemp("run") / "whole"
    out = run(workdir)
    assert out.returncode == 0, out.stderr
    return workdir, out


def test_what_a_run_leaves(whole):
    workdir, out = whole
    assert [record["step"] for record in metrics(workdir)] == [1, 2, 3, 4, 5, 6]
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["wall_s"] > 0 and summary["cpu_s"] > 0
    for when in ("before", "after"):
        assert {"pass@1", "pass@2", "pass@4"} <= summary[when].keys()
    assert (workdir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((workdir / "config.json").read_text())["algo.focal_gamma"] == 0.5
    assert "pass@1" in out.stdout and "before" in out.stdout and "step 6/6" in out.stdout
    assert not out.stderr, out.stderr
    weights.read_index(workdir / "policy")
    assert (workdir / "policy/tokenizer.json").read_bytes() == (
        TINY / "tokenizer.json"
    ).read_bytes()


def killed_after_step_4(folder):
    """The workdir of a run that was killed past its checkpoint of step 3 and before its end."""
    for attempt in range(3):  # the steps are short: a busy machine may look too late
        workdir = folder / f"killed{attempt}"
        process = subprocess.Popen(
            command(workdir), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL
        )
        file, deadline = workdir / "metrics.jsonl", time.monotonic() + 200
        while not (file.exists() and file.read_text().count("\n") >= 4):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.005)
        process.kill()
        process.wait()
        if not (workdir / "checkpoints/6").exists():
            return workdir
    pytest.fail("no run could be killed in time")


def test_a_killed_run_goes_on_bit_for_bit(whole, tmp_path):
    workdir = killed_after_step_4(tmp_path)
    out = run(workdir)
    assert out.returncode == 0, out.stderr
    assert metrics(workdir) == metrics(whole[0])
    assert checkpoint_sums(workdir, 6) == checkpoint_sums(whole[0], 6)
    policies = [(w / "policy/model.safetensors").read_bytes() for w in (workdir, whole[0])]
    assert policies[0] == policies[1]
    for when in ("before", "after"):
        a, b = (json.loads((w / "summary.json").read_text())[when] for w in (workdir, whole[0]))
        assert a == b


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(whole, tmp_path, number):
    """Asked after step 2, it saves what it has learnt, and no step is made twice."""
    workdir = tmp_path / "run"
    process = subprocess.Popen(
        command(workdir, "checkpoint.every=100"), cwd=ROOT, env=ENVIRONMENT,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    file, deadline = workdir / "metrics.jsonl", time.monotonic() + 200
    while not (file.exists() and file.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the machine was too slow to ask in time")
    assert process.returncode == 75, stderr
    assert "run the same command again" in stderr and "Traceback" not in stderr
    done = max(int(path.name) for path in (workdir / "checkpoints").iterdir())
    assert done == len(metrics(workdir)) >= 2
    assert run(workdir, "checkpoint.every=100").returncode == 0
    assert metrics(workdir) == metrics(whole[0])
    assert checkpoint_sums(workdir, 6) == checkpoint_sums(whole[0], 6)


def test_a_finished_run_only_reports(whole):
    before = (whole[0] / "metrics.jsonl").read_bytes()
    out = run(whole[0])
    assert out.returncode == 0 and (whole[0] / "metrics.jsonl").read_bytes() == before


def test_the_exported_policy_can_be_trained_on(whole, tmp_path):
    out = run(tmp_path / "next", f"model.path={whole[0] / 'policy'}", "steps=1")
    assert out.returncode == 0, out.stderr
    summary = json.loads((tmp_path / "next/summary.json").read_text())
    old = json.loads((whole[0] / "summary.json").read_text())
    assert summary["before"]["pass@1"] == old["after"]["pass@1"]


def export(workdir, out, *flags):
    """`weights export`, with what the run was started with."""
    argv = command(workdir)
    argv[argv.index("fgrpo_jax.main")] = "fgrpo_jax.weights"
    argv.insert(argv.index("fgrpo_jax.weights") + 1, "export")
    return subprocess.run(
        [*argv, "--out", str(out), *flags],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )


def test_a_checkpoint_becomes_a_folder(whole, tmp_path):
    """The last one is policy/, bit for bit; an earlier one is not; mistakes are one sentence."""
    out = export(whole[0], tmp_path / "last")
    assert out.returncode == 0, out.stderr
    assert out.stdout == f"step 6 of {whole[0]}: {tmp_path / 'last'}\n"
    names = sorted(path.name for path in (whole[0] / "policy").iterdir())
    assert sorted(path.name for path in (tmp_path / "last").iterdir()) == names
    for name in names:
        assert (tmp_path / "last" / name).read_bytes() == (whole[0] / "policy" / name).read_bytes()
    assert export(whole[0], tmp_path / "third", "--step", "3").returncode == 0
    third, last = (tmp_path / x / "model.safetensors" for x in ("third", "last"))
    assert third.stat().st_size == last.stat().st_size and third.read_bytes() != last.read_bytes()
    out = export(whole[0], tmp_path / "fourth", "--step", "4")
    assert out.returncode == 2 and "has no checkpoint of step 4: there are 3, 6" in out.stderr
    assert f"{tmp_path / 'last'} exists" in export(whole[0], tmp_path / "last").stderr
    assert "holds no run" in export(tmp_path / "nowhere", tmp_path / "fifth").stderr


@pytest.mark.parametrize("name, low, high", [("dapo", 0.2, 0.28), ("cispo", 1.0, 5.0)])
def test_other_algorithms(tmp_path, name, low, high):
    settings = [f"algo.name={name}", "algo.focal_gamma=0", "learn.epochs=2", "steps=1"]
    out = run(tmp_path / "w", *settings)
    assert out.returncode == 0, out.stderr
    used = json.loads((tmp_path / "w/config.json").read_text())
    assert (used["algo.clip_low"], used["algo.clip_high"]) == (low, high)
    (record,) = metrics(tmp_path / "w")
    # no focal weight: a mixed group has gradients, and the second epoch is off-policy
    assert record["groups_mixed"] == 0 or (record["grad_norm"] > 0 and record["approx_kl"] != 0)


def test_the_focal_weight_is_what_gamma_changes(tmp_path):
    """The same samples; then gradients that gamma scales, group by group."""
    records = {}
    for gamma in ("0", "2"):
        more = ["steps=1", "rollout.prompts=8", "algo.group_size=8", "rollout.max_response=32"]
        out = run(tmp_path / gamma, f"algo.focal_gamma={gamma}", *more)
        assert out.returncode == 0, out.stderr
        (records[gamma],) = metrics(tmp_path / gamma)
    assert records["0"]["groups_mixed"] > 0
    assert records["0"]["reward"] == records["2"]["reward"]
    assert 0 < records["2"]["grad_norm"] < records["0"]["grad_norm"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_readme_s_run(tmp_path):
    """Five minutes on two quiet cores; from 25 to 60 %, by at least 15 points."""
    workdir = tmp_path / "run"
    config = "configs/tiny_arithmetic_focal.py"
    full = [sys.executable, "-m", "fgrpo_jax.main", "--config", config, "--workdir", workdir]
    subprocess.run(full, cwd=ROOT, env=ENVIRONMENT, check=True)
    summary = json.loads((workdir / "summary.json").read_text())
    before, after = summary["before"]["pass@1"], summary["after"]["pass@1"]
    print(f"pass@1 {before:.3f} -> {after:.3f}, {summary['wall_s']} s, {summary['cpu_s']} CPU-s")
    assert 0.25 <= before <= 0.6 and after >= before + 0.15
    assert summary["cpu_s"] < 2 * 300
    by_kind = summary["before"]["by_kind"].values()
    assert max(by_kind) > 0.8 and min(by_kind) < 0.1
    assert sum(f.stat().st_size for f in TINY.iterdir()) < 4e6


def damaged(folder):
    """Its largest file is cut in two."""
    file = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(whole, tmp_path):
    workdir = pathlib.Path(shutil.copytree(whole[0], tmp_path / "run"))
    damaged(workdir / "checkpoints/6")
    out = run(workdir)
    assert out.returncode == 0 and len(out.stderr.splitlines()) == 1
    assert "checkpoints/6 is damaged and set aside as 6.bad: state/" in out.stderr
    assert metrics(workdir) == metrics(whole[0])
    assert checkpoint_sums(workdir, 6) == checkpoint_sums(whole[0], 6)
    for step in (3, 6):
        damaged(workdir / f"checkpoints/{step}")
    for lines in (3, 1):  # at the next start nothing but *.bad is there, and nothing begins anew
        out = run(workdir)
        assert out.returncode == 2 and "holds only damaged checkpoints" in out.stderr
        assert len(out.stderr.splitlines()) == lines
        assert len(metrics(workdir)) == 6


def test_the_best_checkpoint_stays(tmp_path):
    """Through a kill, by what evals.jsonl has."""
    settings = "eval.every=1 checkpoint.every=2 checkpoint.keep=1 optim.lr=0.05".split()
    workdir, kept = tmp_path / "run", tmp_path / "elsewhere"
    settings += ["checkpoint.best=pass@1", f"checkpoint.folder={kept}"]
    for steps in (3, 6):
        assert run(workdir, *settings, f"steps={steps}").returncode == 0
        evals = [json.loads(line) for line in (workdir / "evals.jsonl").read_text().splitlines()]
        best = max(evals, key=lambda record: (record["pass@1"], -record["step"]))
        assert {int(path.name) for path in kept.iterdir()} == {best["step"], steps}
        summary = json.loads((workdir / "summary.json").read_text())
        assert summary["best"] == {name: best[name] for name in ("step", "pass@1")}
    assert not (workdir / "checkpoints").exists()


LIMITED = """
import resource, sys
from fgrpo_jax import checkpoint, main
checkpoint.PAUSES = (0.1,)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main.run(main._train, "", sys.argv[2:]))
"""


def run_limited(size, workdir, *settings):
    """Of files that can have so many bytes, as on a disk that is full."""
    flags = command(workdir, *settings)[3:]
    line = [sys.executable, "-c", LIMITED, str(size), *flags]
    return subprocess.run(line, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)


def refused(out, name):
    """One sentence that names the file, and the exit code of I/O errors."""
    assert out.returncode == 74, out.stderr
    assert len(out.stderr.splitlines()) == 1 and out.stderr.startswith("error: ")
    assert f"{name}: " in out.stderr and "the same command goes on" in out.stderr


@pytest.mark.parametrize(
    "size, name, settings",
    [
        (100, "config.json", []),
        (5000, "metrics.jsonl", ["checkpoint.every=100"]),
        (300_000, "checkpoints/3", []),
    ],
)
def test_a_full_disk(whole, tmp_path, size, name, settings):
    workdir = tmp_path / "run"
    refused(run_limited(size, workdir, *settings), name)
    assert not list(workdir.rglob("*partial*"))
    out = run(workdir)
    assert out.returncode == 0, out.stderr
    assert metrics(workdir) == metrics(whole[0])
    assert checkpoint_sums(workdir, 6) == checkpoint_sums(whole[0], 6)


def test_a_disk_that_is_full_at_the_end(whole, tmp_path):
    workdir = pathlib.Path(shutil.copytree(whole[0], tmp_path / "run"))
    before = {p: p.read_bytes() for p in (workdir / "policy").iterdir()}
    refused(run_limited(300_000, workdir), "policy")
    assert {p: p.read_bytes() for p in (workdir / "policy").iterdir()} == before
    (workdir / "report.png").unlink()
    (workdir / "report.png").mkdir()
    refused(run(workdir), "report.png")
    assert not list(workdir.rglob("*partial*"))


def copy_of_tiny(tmp_path):
    return pathlib.Path(shutil.copytree(TINY, tmp_path / "model"))


def truncated(tmp_path):
    folder = copy_of_tiny(tmp_path)
    os.truncate(folder / "model.safetensors", 100_000)
    return [f"model.path={folder}"]


def no_template(tmp_path):
    folder = copy_of_tiny(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return [f"model.path={folder}"]


def wrong_shape(tmp_path):
    folder = copy_of_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))
    return [f"model.path={folder}"]


def missing_tensor(tmp_path):
    folder = copy_of_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    tensors = qwen2_folder.random_tensors(config)
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    qwen2_folder.write(folder, config, tensors)
    return [f"model.path={folder}"]


def small_vocabulary(tmp_path):
    folder = copy_of_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 200}
    qwen2_folder.write(folder, config)
    return [f"model.path={folder}"]


def empty_data(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    return [f"data.source=jsonl:{tmp_path / 'empty.jsonl'}"]


@pytest.mark.parametrize(
    "settings, message",
    [
        (["algo.focal_gama=1"], "did you mean 'algo.focal_gamma'"),
        (["model.path=/nowhere"], "there is no /nowhere/config.json"),
        (truncated, "model.safetensors is truncated"),
        (missing_tensor, "lacks tensor model.layers.1.self_attn.k_proj.bias"),
        (wrong_shape, "mlp.down_proj.weight has shape (96, 384), and config.json needs (96, 100)"),
        (no_template, "has no chat template"),
        (small_vocabulary, "tokenizer gives id 260, and the model has 200 rows"),
        (empty_data, "empty.jsonl has no problem: it is empty"),
        (["data.max_prompt=3"], "prompts of arithmetic are longer than data.max_prompt, 3 tokens"),
        (["mesh.fsdp=3"], "there are 1 devices"),
    ],
)
def test_mistakes_get_one_sentence_and_code_2(tmp_path, settings, message):
    settings = settings(tmp_path) if callable(settings) else settings
    out = run(tmp_path / "work", *settings)
    assert out.returncode == 2, out.stderr
    assert message in out.stderr and len(out.stderr.strip().splitlines()) == 1
    assert out.stderr.startswith("error: ")
    assert not (tmp_path / "work/metrics.jsonl").exists()


def test_a_workdir_of_another_config(whole):
    before = {p: p.read_bytes() for p in whole[0].rglob("*") if p.is_file()}
    out = run(whole[0], "optim.lr=1e-2")
    assert out.returncode == 2 and "optim.lr (there 0.001, here 0.01)" in out.stderr
    assert before == {p: p.read_bytes() for p in whole[0].rglob("*") if p.is_file()}


def test_fewer_steps_than_done(whole):
    out = run(whole[0], "steps=5")
    assert out.returncode == 2 and "has already done 6 steps: raise steps" in out.stderr


def test_unknown_flags_and_no_config_file(tmp_path):
    out = subprocess.run(
        [*command(tmp_path / "w"), "--stesp=3"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert out.returncode == 2 and "unknown flag --stesp=3" in out.stderr
    out = run(tmp_path / "w", config="none.py")
    assert out.returncode == 2 and "none.py does not exist" in out.stderr


def test_eight_devices_train_as_one(whole, tmp_path):
    """fsdp 4 x tp 2: the same samples, and the same losses within float32 rounding."""
    environment = {**ENVIRONMENT, "JAX_NUM_CPU_DEVICES": "8"}
    out = subprocess.run(
        command(tmp_path / "eight", "mesh.tp=2", "steps=3"),
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    for one, eight in zip(metrics(whole[0])[:3], metrics(tmp_path / "eight"), strict=True):
        for name in ("reward", "pass_rate", "response_tokens", "truncated"):
            assert eight[name] == one[name], name
        for name in ("loss", "entropy", "grad_norm"):
            assert eight[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def test_a_run_without_data_and_reward_packages(tmp_path):
    """Neither grain nor tensorflow-datasets nor math-verify, in any process."""
    absent = "grain tensorflow_datasets math_verify".split()
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nfor name in {absent}:\n    sys.modules[name] = None\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    line = command(tmp_path / "run", "steps=1", "checkpoint.every=1", "reward=number")
    line += ["--config.optim.decay_start=0", "--config.optim.decay_end=0"]
    out = subprocess.run(
        line, cwd=ROOT, env=ENVIRONMENT | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1]
