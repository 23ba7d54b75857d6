"""The recipes: the paper's settings, and each in a run of small sizes."""

import json
import pathlib
import subprocess
import sys

import pytest
from test_main import ENVIRONMENT

import fgrpo_jax
from fgrpo_jax import batches, config

ROOT = pathlib.Path(fgrpo_jax.__file__).parents[1]
SMOKE = str(ROOT / "configs/methods/smoke.py")
RECIPES = sorted(
    path.stem for name in ("qwen", "llama") for path in (ROOT / "configs").glob(f"{name}*.py")
)
QUICK = ("qwen7b_dapo_focal", "qwen0_5b_gsm8k_focal")  # the others are slow together
CUT = (  # what the smoke method may change
    "steps model.path model.attention data.source data.eval_source data.fields data.system "
    "data.chat_template data.template data.max_prompt reward kl.reference score.overlong_buffer "
    "rollout.prompts rollout.max_response rollout.slots learn.minibatch learn.microbatch "
    "learn.logit_chunk learn.pack mesh.replica mesh.fsdp mesh.tp checkpoint.folder "
    "checkpoint.best profile.steps eval.problems eval.samples"
).split()
ALIKE = {  # in all of the paper's runs: its section 5.3, appendix L
    "optim.lr": 1e-6, "optim.warmup": 15, "optim.decay_end": 0, "optim.b1": 0.9, "optim.b2": 0.999,
    "optim.weight_decay": 0.01, "optim.clip_norm": 1.0, "rollout.prompts": 256,
    "learn.minibatch": 64, "learn.epochs": 1, "algo.group_size": 8, "rollout.temperature": 1.0,
    "rollout.top_p": 1.0, "rollout.top_k": 0, "kl.coef": 0.0, "algo.entropy_coef": 0.0,
    "algo.aggregator": "token_mean", "algo.advantage": "grpo", "reward": "math",
    "score.right": 1.0, "score.wrong": 0.0, "score.overlong_buffer": 0, "rollout.dynamic": False,
    "data.max_prompt": 1024,
}  # fmt: skip
PAPER = {  # recipe -> model, gamma (its table 7), bounds, response tokens
    "qwen7b_grpo": ("Qwen2.5-7B", 0.0, (0.2, 0.2), 8192),
    "qwen7b_grpo_focal": ("Qwen2.5-7B", 0.5, (0.2, 0.2), 8192),
    "qwen7b_dapo": ("Qwen2.5-7B", 0.0, (0.2, 0.28), 8192),
    "qwen7b_dapo_focal": ("Qwen2.5-7B", 0.5, (0.2, 0.28), 8192),
    "qwen7b_cispo": ("Qwen2.5-7B", 0.0, (1.0, 5.0), 8192),
    "qwen7b_cispo_focal": ("Qwen2.5-7B", 1.0, (1.0, 5.0), 8192),
    "qwen3_4b_grpo_focal": ("Qwen3-4B-Base", 0.5, (0.2, 0.2), 4096),
    "llama3b_grpo_focal": ("Llama-3.2-3B-Instruct", 0.5, (0.2, 0.2), 8192),
}


def load(name, *methods):
    return config.load(str(ROOT / f"configs/{name}.py"), (), methods)


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_settings(name):
    c = load(name)
    model, gamma, bounds, response = PAPER[name]
    assert c.model.path == f"models/{model}" and c.algo.focal_gamma == gamma
    assert (c.algo.clip_low, c.algo.clip_high) == bounds
    assert c.rollout.max_response == response
    flat = config.keys(c)
    assert {key: flat[key] for key in ALIKE} == ALIKE
    passes = c.steps * c.rollout.prompts / 39_202
    assert passes == pytest.approx(10, abs=0.05)


@pytest.mark.parametrize("name", RECIPES)
def test_smoke_changes_sizes_alone(name):
    whole, small = load(name), load(name, SMOKE)
    assert batches.updates_a_step(small) == batches.updates_a_step(whole)
    assert len(batches.widths(small)) == len(batches.widths(whole))
    whole, small = config.keys(whole), config.keys(small)
    differ = {key for key in whole if whole[key] != small[key]}
    assert differ <= set(CUT) and "model.path" in differ


def test_smoke_takes_what_has_sizes_of_its_own(tmp_path):
    """Packed rows, subsets, an overlong buffer, a reference, and the best checkpoint's metric."""
    (own := tmp_path / "own.py").write_text(
        "def apply(c):\n"
        "    c.learn.pack, c.learn.widths, c.kl.reference = 9216, 1, 'x'\n"
        "    c.checkpoint.best, c.profile.steps = 'pass@16', '3-5'\n"
    )
    names = ("pods", "overlong", "kl_loss")
    methods = [*(str(ROOT / f"configs/methods/{name}.py") for name in names), str(own)]
    c = load("qwen7b_grpo", *methods, SMOKE)
    assert (c.rollout.subset, c.algo.group_size, c.learn.minibatch * 8) == (8, 32, 16)
    assert (c.learn.pack, c.rollout.max_response, c.score.overlong_buffer) == (64, 32, 6)
    assert (c.checkpoint.best, c.kl.coef, c.kl.reference) == ("pass@1", 1e-3, "")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in RECIPES],
)
def test_each_recipe_runs(tmp_path, name):
    """Two steps, as a user runs them: all of a run's files, and the recipe's own settings."""
    command = [sys.executable, "-m", "fgrpo_jax.main", "--config", f"configs/{name}.py"]
    out = subprocess.run(
        [*command, "--method", SMOKE, "--workdir", tmp_path], cwd=ROOT, env=ENVIRONMENT,
        capture_output=True, text=True,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    used = json.loads((tmp_path / "config.json").read_text())
    whole = json.loads(json.dumps(config.keys(load(name))))
    assert {key for key in whole if used[key] != whole[key]} <= set(CUT)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    summary = json.loads((tmp_path / "summary.json").read_text())
    print(f"{name}: {summary['wall_s']} s, {summary['cpu_s']} CPU-s")
    assert (tmp_path / "policy/model.safetensors").is_file()
