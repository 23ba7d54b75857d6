import pathlib
import re
from inspect import getsource

import pytest

import fgrpo_jax
from fgrpo_jax import UserError, batches, cautions, config, validation

PACKAGE = pathlib.Path(fgrpo_jax.__file__).parent
CONFIGS = [  # of runs: a study has settings of its own
    path
    for folder in (".", "maze")
    for path in sorted((PACKAGE.parent / "configs" / folder).glob("*.py"))
    if "experiments" not in path.read_text()
]
READERS = (validation.check_mesh,)  # what there uses a key, not only checks it


def test_each_key_is_read_somewhere():
    files = [path for path in PACKAGE.glob("*.py") if path.stem not in ("validation", "recipes")]
    sources = "\n".join([*(path.read_text() for path in files), *map(getsource, READERS)])
    sources = sources.replace(config.default.__doc__ or "", "")
    body = re.sub(r"def default\(.*?return c\.lock\(\)", "", sources, flags=re.S)
    body = re.sub(r"MAY_CHANGE = .*?split\(\)", "", body, flags=re.S)
    assert not any(name in body for name in ("def default(", "MAY_CHANGE ="))
    for key in config.keys(config.default()):
        section, _, leaf = key.rpartition(".")
        pattern = rf"\bc\.{re.escape(key)}\b" + (rf"|\b{section}\.{leaf}\b" if section else "")
        assert re.search(pattern, body.replace("self.", "")), f"nothing reads {key}"


def test_each_key_says_what_it_means():
    source = (PACKAGE / "config.py").read_text()
    for key in config.keys(config.default()):
        assert re.search(rf"c\.{re.escape(key)} = .*  # \w", source), f"{key} has no comment"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_are_valid_and_documented(path):
    c = config.load(str(path))
    assert c.is_locked and "python -m fgrpo_jax." in path.read_text()


def write(tmp_path, body):
    path = tmp_path / "c.py"
    path.write_text(f"from fgrpo_jax import config\n\ndef get_config():\n{body}\n")
    return str(path)


PLAIN = "    return config.default()"


def test_overrides(tmp_path):
    overrides = ["algo.focal_gamma=1", "steps=7", "model.path=a=b", "algo.clip_high=0.3"]
    c = config.load(write(tmp_path, PLAIN), overrides)
    assert (c.algo.focal_gamma, c.steps, c.model.path, c.algo.clip_high) == (1.0, 7, "a=b", 0.3)


@pytest.mark.parametrize(
    "name, bounds", [("grpo", (0.2, 0.2, 3)), ("dapo", (0.2, 0.28, 3)), ("cispo", (1, 5, 0))]
)
def test_published_bounds(tmp_path, name, bounds):
    c = config.load(write(tmp_path, PLAIN), [f"algo.name={name}"])
    assert (c.algo.clip_low, c.algo.clip_high, c.algo.dual_clip) == bounds


@pytest.mark.parametrize(
    "override, message",
    [
        ("algo.focal_gama=1", "no config key 'algo.focal_gama'; did you mean 'algo.focal_gamma'"),
        ("gamma=1", "no config key 'gamma'; did you mean 'algo.focal_gamma'"),
        ("zzzz=1", "no config key 'zzzz'; config.default() lists them all"),
        ("algo=1", "no config key 'algo'"),
        ("steps=ten", "config key steps takes int, not 'ten'"),
        ("optim.lr=fast", "config key optim.lr takes float, not 'fast'"),
        ("steps", "has no value: write --config.steps=VALUE"),
        ("steps=0", "steps is 0: it must be above 0"),
        ("rollout.temperature=0", "rollout.temperature is 0.0: it must be above 0"),
        ("rollout.top_p=0", "rollout.top_p is 0.0: it must be above 0"),
        ("eval.top_p=1.5", "eval.top_p is 1.5: it must be at most 1"),
        ("rollout.top_k=-1", "rollout.top_k is -1: it must not be below 0"),
        ("rollout.unroll=maybe", "rollout.unroll is 'maybe': it must be one of auto, yes, no"),
        ("data.stop=[1]", "config key data.stop takes a string or a JSON list of strings, not"),
        ('data.stop=[""]', "data.stop holds an empty string"),
        ("learn.pack=3", "learn.pack is 3: a packed row must hold the longest response"),
        ("algo.focal_gamma=-1", "algo.focal_gamma is -1.0: it must not be below 0"),
        ("algo.name=ppo", "algo.name is 'ppo': it must be one of grpo, dapo, cispo, gspo"),
        ("algo.advantage=gae", "algo.advantage is 'gae': it must be one of grpo, mean_only"),
        ("algo.aggregator=mean", "algo.aggregator is 'mean': it must be one of token_mean"),
        ("algo.group_size=1", "algo.group_size is 1: a group needs at least 2 samples"),
        ("rollout.dynamic=maybe", "config key rollout.dynamic takes bool, not 'maybe'"),
        ("rollout.subset=9", "rollout.subset is 9: it must be in 2 ... algo.group_size, 8, or 0"),
        ("score.wrong=1", "score.wrong is 1.0: it must be below score.right, 1.0"),
        ("kl.reference=x", "kl.reference is 'x' and kl.coef is 0: the reference would not be used"),
        ("kl.coef=-1", "kl.coef is -1.0: it must not be below 0"),
        ("score.overlong_buffer=33", "score.overlong_buffer is 33: it must be at most rollout.max"),
        ("score.coin=-0.1", "score.coin is -0.1: it must not be below 0"),
        ("score.coin=1", "score.coin is 1.0: it must be below 1, where all samples would be paid"),
        ("score.unlikeliness=2", "score.unlikeliness is 2.0: it must be at most 1"),
        ("reward=maths", "reward is 'maths': it must be one of math, gsm8k, number"),
        (
            "data.source=csv:x",
            "data.source is 'csv:x': it must be arithmetic[:KINDS], jsonl:PATH, ",
        ),
        ("data.source=0*arithmetic", "data.source has the weight '0': it must be a number above 0"),
        ("data.eval_source=1*arithmetic", "it takes no weights, every problem counts"),
        ("data.fields=question", "data.fields has 'question': write FIELD=NAME once a field"),
        ("learn.minibatch=5", "rollout.prompts is 32: it must be a multiple of learn.minibatch, 5"),
        ("learn.microbatch=7", "learn.microbatch is 7: it must divide the minibatch's 256 rows"),
        ("algo.dual_clip=0.5", "algo.dual_clip is 0.5: it must be above 1, or 0 for none"),
        ("algo.clip_low=1.5", "algo.clip_low is 1.5"),
        ("profile.steps=5-3", "profile.steps is '5-3': write steps, the first of which is 1, as"),
        ("profile.steps=0", "profile.steps is '0': write steps"),
        ("profile.steps=two", "profile.steps is 'two': write steps"),
        ("profile.steps=1,,2", "profile.steps is '1,,2': write steps"),
        ("profile.steps=199-201", "profile.steps is '199-201' and the run has 200 steps"),
        (
            "checkpoint.best=pass@32",
            "checkpoint.best is 'pass@32': evaluations measure pass@1, pass",
        ),
        ("mesh.fsdp=0", "mesh.fsdp must be above 0, or -1"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, override, message):
    with pytest.raises(UserError) as error:
        config.load(write(tmp_path, PLAIN), [override])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_cispo_has_no_dual_clip(tmp_path):
    with pytest.raises(UserError, match="cispo has no dual clip"):
        config.load(write(tmp_path, PLAIN), ["algo.name=cispo", "algo.dual_clip=3"])


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["algo.name=sapo", "algo.dual_clip=3"], "algo.dual_clip is 3.0: sapo has no dual clip"),
        (["algo.name=sapo", "algo.clip_high=0.2"], "sapo has no clip, leave them None"),
        (["algo.advantage=pkpo", "algo.pass_k=9"], "algo.pass_k is 9: a group has only 8 samples"),
        (["algo.advantage=maxrl", "score.wrong=-1"], "score.wrong is -1.0: maxrl divides by a"),
        (
            ["algo.advantage=disco", "score.overlong_buffer=4"],
            "score.overlong_buffer is set: disco divides by a group's mean reward",
        ),
        (["algo.advantage=maxrl", "kl.coef=1", "kl.place=reward"], "kl.place is reward: maxrl div"),
        (["score.unlikeliness=0.5", "score.right=0", "score.wrong=-1"], "score.right is 0.0: sco"),
        (["importance.kind=truncate", "importance.high=0.9"], "the weight 1 of samples without d"),
        (["kl.coef=inf"], "kl.coef must be finite"),
        (["kl.coef=1", "kl.place=reward", "kl.estimator=k3+"], "its + is about the gradient"),
        (
            ["importance.kind=mask", "importance.low=1.5"],
            "importance.high are 1.5 and 2.0: the weig",
        ),
    ],
)
def test_what_does_not_fit_together_gets_one_sentence(tmp_path, overrides, message):
    with pytest.raises(UserError) as error:
        config.load(write(tmp_path, PLAIN), overrides)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["algo.name=gspo", "algo.clip_low=0.2", "algo.clip_high=0.28"], "0.28 is a bound for sin"),
        (["algo.name=gspo_token", "algo.clip_low=0.2"], "the paper has 3e-4 and 4e-4"),
        (["algo.name=gmpo"], "gmpo never clips here: with one optimizer update a step"),
        (["kl.coef=0.1", "kl.estimator=k1"], "k1 in the loss has a gradient of mean 0"),
        (["optim.warmup=1", "optim.decay_start=2", "optim.decay_end=9"], "the learning rate is 0"),
        (["algo.name=reinforce", "learn.minibatch=8"], "4 optimizer updates a step leave the pol"),
        (["rollout.subset=8"], "rollout.subset is all 8 samples of a group: nothing is chosen"),
        (["rollout.dynamic=true", "algo.advantage=ngrpo"], "which ngrpo is to learn from"),
        (
            ["score.coin=0.5"],
            "score.coin pays whatever the answers are, and algo.focal_gamma, roll",
        ),
        (["algo.tau_wrong=2"], "algo.tau_wrong is 2.0 and nothing reads it: algo.name is grpo"),
        (["importance.kind=truncate", "importance.low=0.4"], "importance.low is 0.4 and nothing"),
        (["score.overlong_buffer=4", "algo.truncated=mask"], "lowers the reward of long samples"),
    ],
)
def test_what_is_odd_is_warned_of(tmp_path, overrides, message):
    (warning,) = [
        sentence
        for sentence in cautions.warnings(
            config.load(write(tmp_path, PLAIN), overrides), config.default()
        )
        if message in sentence
    ]
    assert "\n" not in warning


def test_the_shipped_configs_are_not_odd():
    for path in CONFIGS:
        assert not cautions.warnings(config.load(str(path)), config.default()), path


def test_none_means_published_again(tmp_path):
    (tmp_path / "m.py").write_text("def apply(c):\n    c.algo.clip_low = 0.1\n")
    c = config.load(write(tmp_path, PLAIN), ["algo.clip_low=None"], [str(tmp_path / "m.py")])
    assert c.algo.clip_low == 0.2


def test_booleans(tmp_path):
    for text, value in (("true", True), ("False", False)):
        assert (
            config.load(write(tmp_path, PLAIN), [f"rollout.dynamic={text}"]).rollout.dynamic
            is value
        )


def test_methods_come_between_the_config_and_the_overrides(tmp_path):
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("def apply(c):\n    c.algo.name = 'gspo'\n    c.steps = 5\n")
    second.write_text("def apply(c):\n    c.steps *= 2\n    c.seed = 9\n")
    c = config.load(write(tmp_path, PLAIN), ["seed=4"], [str(first), str(second)])
    assert (c.algo.name, c.algo.clip_high, c.steps, c.seed) == ("gspo", 4e-4, 10, 4)


@pytest.mark.parametrize(
    "body, message",
    [
        ("def apply(c):\n    c.algo.gama = 1\n", "did you mean 'algo.focal_gamma'"),
        ("def get_config():\n    pass\n", "has no attribute 'apply'"),
    ],
)
def test_bad_methods_get_one_sentence(tmp_path, body, message):
    (tmp_path / "m.py").write_text(body)
    with pytest.raises(UserError, match="method file") as error:
        config.load(write(tmp_path, PLAIN), [], [str(tmp_path / "m.py")])
    assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UserError, match="method file none.py does not exist: give --method a Py"):
        config.load(write(tmp_path, PLAIN), [], ["none.py"])


@pytest.mark.parametrize(
    "body, message",
    [
        (
            "    c = config.default()\n    c.algo.gama = 1\n    return c",
            "did you mean 'algo.focal_ga",
        ),
        ("    c = config.default()\n    c.steps = 'x'\n    return c", "cannot be read"),
        ("    return 3", "must return a ConfigDict"),
        (
            "    c = config.default()\n    with c.unlocked():\n        c.algo.focal_gama = 1\n"
            "    return c",
            "no config key 'algo.focal_gama'; did you mean 'algo.focal_gamma'",
        ),
        (
            "    from ml_collections import ConfigDict\n    return ConfigDict({'steps': 3})",
            "lacks algo.advantage: begin with config.default()",
        ),
        ("    return undefined", "name 'undefined' is not defined"),
        ("    return (", "cannot be read"),
    ],
)
def test_bad_files_get_one_sentence(tmp_path, body, message):
    with pytest.raises(UserError) as error:
        config.load(write(tmp_path, body))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_no_file(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        config.load(str(tmp_path / "none.py"))
    (tmp_path / "c.txt").write_text("")
    with pytest.raises(UserError, match="not a Python file"):
        config.load(str(tmp_path / "c.txt"))
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(UserError, match="get_config"):
        config.load(str(tmp_path / "empty.py"))


def test_mesh(tmp_path):
    c = config.load(write(tmp_path, PLAIN))
    assert validation.check_mesh(c, 1) == (1, 1, 1) and validation.check_mesh(c, 8) == (1, 8, 1)
    c.mesh.tp = 2
    assert validation.check_mesh(c, 8) == (1, 4, 2)
    with pytest.raises(UserError, match="is 4 and there are 8 hosts.*so lower mesh.tp"):
        validation.check_mesh(c, 8, hosts=8)
    c.mesh.fsdp = 3
    with pytest.raises(UserError, match=r"1 \* 3 \* 2 = 6, and there are 8 devices"):
        validation.check_mesh(c, 8)
    c.mesh.update({"fsdp": -1, "tp": 1})
    c.rollout.prompts = c.learn.minibatch = 12
    with pytest.raises(UserError, match="rollout.prompts is 12: it must be a multiple of the 8"):
        validation.check_mesh(c, 8)


def test_rows_that_share_a_prompt(tmp_path):
    c = config.load(write(tmp_path, PLAIN))
    c.algo.group_size, c.learn.minibatch, c.learn.microbatch = 8, 32, 64
    shared = {shards: batches.shared_rows(c, shards) for shards in (1, 4, 8, 16, 64)}
    assert shared == {1: 8, 4: 8, 8: 8, 16: 4, 64: 1}
    c.learn.microbatch = 96  # rows a device: 24, of which 8 have a prompt
    assert batches.shared_rows(c, 4) == 8
    c.rollout.subset = 3
    assert batches.shared_rows(c, 4) == 3


def test_cudnn_knows_no_packed_rows(tmp_path):
    with pytest.raises(UserError, match="is cudnn, which knows no packed rows: set it"):
        config.load(write(tmp_path, PLAIN), ["learn.pack=999", "model.attention=cudnn"])


def test_strings_in_a_list(tmp_path):
    load = lambda value: config.load(write(tmp_path, PLAIN), [f"data.stop={value}"]).data.stop
    assert load('["a b", "|"]') == ("a b", "|") and load("Question:") == ("Question:",)
    assert load("") == ()
