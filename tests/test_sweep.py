"""The sweep: one valid command a run, or one sentence."""

import pathlib
import shlex

import pytest

import fgrpo_jax
from fgrpo_jax import config, main, sweep

ROOT = pathlib.Path(fgrpo_jax.__file__).parents[1]
CONFIG = str(ROOT / "configs/tiny_arithmetic_grpo.py")
METHOD = str(ROOT / "configs/methods/low_lr.py")


def lines(capsys, *flags):
    assert sweep.main(["--config", CONFIG, *flags]) == 0
    return capsys.readouterr().out.splitlines()


def loaded(line):
    """Config and workdir as main reads them from the printed line."""
    python, m, module, *flags = shlex.split(line)
    assert (python, m, module) == ("python", "-m", "fgrpo_jax.main")
    found = []
    assert main.run(lambda c, workdir, console: found.append((c, workdir)), "", flags) == 0
    return found[0]


def test_all_combinations_each_in_its_folder(capsys):
    flags = ["algo.group_size=2,4", "--method", METHOD, "seed=0,1,2", "--config.steps=7"]
    runs = [loaded(line) for line in lines(capsys, *flags)]
    found = [(c.algo.group_size, c.seed) for c, _ in runs]
    assert found == [(n, seed) for n in (2, 4) for seed in (0, 1, 2)]
    assert all(c.steps == 7 and c.optim.lr == 6.8e-7 for c, _ in runs)
    assert len({workdir for _, workdir in runs}) == 6
    name = "runs/sweep_tiny_arithmetic_grpo_low_lr/algo.group_size=2_seed=0"
    assert runs[0][1] == pathlib.Path(name)


def test_only_what_is_given_differs(capsys):
    (first, _), (second, _) = (loaded(line) for line in lines(capsys, "algo.focal_gamma=0.5,1"))
    plain = config.keys(config.load(CONFIG))
    differ = {
        k for k, v in plain.items() if v != config.keys(first)[k] or v != config.keys(second)[k]
    }
    assert differ == {"algo.focal_gamma"}


def test_values_with_odd_characters(capsys):
    """JSON lists keep their commas, and folders have no slashes of their own."""
    stops = [loaded(x)[0].data.stop for x in lines(capsys, 'data.stop=["a","b"],c')]
    assert stops == [("a", "b"), ("c",)]
    (c, workdir), _ = (
        loaded(x) for x in lines(capsys, "model.path=models/A B,models/C", "--workdir", "/tmp/x")
    )
    assert c.model.path == "models/A B" and str(workdir) == "/tmp/x/model.path=models-A-B"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["algo.group_sise=2,4"], "did you mean 'algo.group_size'"),
        (["algo.group_size=8,1"], "algo.group_size is 1: a group needs at least 2 samples"),
        (["algo.group_size=2,,4"], "config key algo.group_size takes int, not ''"),
        (["algo.group_size"], "algo.group_size has no values: write algo.group_size=VALUE,VALUE"),
        (["seed=0", "seed=1"], "seed is given twice: write seed=VALUE,VALUE once"),
        (
            ["algo.focal_gamma=1,1.0"],
            "algo.focal_gamma=1 and algo.focal_gamma=1.0 are the same run",
        ),
        (["model.path=a/b,a-b"], "model.path=a/b and model.path=a-b are the same run, or of the"),
        (["--gammas=1", "seed=0"], "unknown flag --gammas=1: what differs is given as KEY=VALUE"),
        (["--config.steps=3"], "nothing differs between the runs: give KEY=VALUE,VALUE"),
        (["seed=0", "--method", "/no.py"], "method file /no.py does not exist"),
    ],
)
def test_mistakes_get_one_sentence_and_nothing_is_printed(capsys, flags, message):
    assert sweep.main(["--config", CONFIG, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("error: ") and err.count("\n") == 1
