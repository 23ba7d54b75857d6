import io

import pytest
from rich.console import Console

from fgrpo_jax import metrics
from fgrpo_jax.metrics import Bar, Stopwatch


def test_drift_over_its_threshold_is_told_once():
    out = io.StringIO()
    with Bar(3, 0, Console(file=out, width=200)) as bar:
        for step, alarm in ((1, 0), (2, 1), (3, 1)):
            bar.show(step, {"reward": 0.5, "drift_mean": 0.25, "drift_alarm": alarm})
    text = out.getvalue()
    assert text.count("warning") == 1
    assert "step 2: the log-probabilities of sampler and trainer differ by 0.25 nats" in text


def test_the_bar_shows_how_far_sampling_is():
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=True)
    with Bar(3, 0, console) as bar:
        bar.watch(5, 40, 1234, 17)
        bar.progress.refresh()
        assert "sampled 5/40 in 17 steps, 1,234 tokens" in out.getvalue()
        bar.watch(40, 40, 9999, 99)
        assert bar.progress.tasks[0].fields["sampled"] == ""


@pytest.fixture
def at(monkeypatch):
    """at(t) sets the clock."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    return lambda t: now.__setitem__(0, t)


def test_seconds_count_once_for_the_innermost_stage(at):
    watch = Stopwatch()
    at(1)
    with watch("rollout"):
        at(3)
        with watch("scoring"):
            at(7)
        at(8)
    with watch("update"):
        at(16)
    with watch("logprobs"):
        at(32)
    with pytest.raises(ValueError), watch("update"):
        at(64)
        raise ValueError
    at(128)
    with watch("checkpoint"):
        at(256)
    out = watch.lap()
    assert out == {
        "rollout_s": 2 + 1, "scoring_s": 4, "logprobs_s": 16, "update_s": 8 + 32,
        "idle_s": 1 + 64, "step_s": 128, "eval_s": 0, "checkpoint_s": 128, "profile_s": 0,
    }  # fmt: skip
    assert sum(watch.lap().values()) == 0


def test_a_function_can_be_a_stage(at):
    watch = Stopwatch()
    timed = watch("logprobs")(lambda t: at(t))
    for t in (5, 9):
        with watch("update"):
            at(t - 1)
            timed(t)
    assert (out := watch.lap())["logprobs_s"] == 2 and out["update_s"] == 4 + 3


def test_the_stages_and_idle_make_up_the_step():
    watch = Stopwatch()
    for stage in (*metrics.STAGES, *metrics.BESIDE):
        with watch(stage):
            sum(range(10_000))
    out = watch.lap()
    parts = [out[f"{stage}_s"] for stage in (*metrics.STAGES, "idle")]
    assert all(x > 0 for x in parts) and sum(parts) == pytest.approx(out["step_s"], rel=1e-9)
