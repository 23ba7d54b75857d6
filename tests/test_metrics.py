import io

from rich.console import Console

from fgrpo_jax.metrics import Bar


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
