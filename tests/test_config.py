import pathlib
import re

import pytest

import fgrpo_jax
from fgrpo_jax import UserError, config

PACKAGE = pathlib.Path(fgrpo_jax.__file__).parent
CONFIGS = sorted((PACKAGE.parent / "configs").glob("*.py"))


def test_each_key_is_read_somewhere():
    sources = "\n".join(p.read_text() for p in PACKAGE.glob("*.py"))
    sources = sources.replace(config.default.__doc__ or "", "")
    body = re.sub(r"POSITIVE = .*?return c\.lock\(\)", "", sources, flags=re.S)
    body = re.sub(r"def validate\(.*?return c\n", "", body, flags=re.S)
    body = re.sub(r"MAY_CHANGE = .*?split\(\)", "", body, flags=re.S)
    assert not any(name in body for name in ("POSITIVE =", "def validate(", "MAY_CHANGE ="))
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
        ("algo.focal_gamma=-1", "algo.focal_gamma is -1.0: it must not be below 0"),
        ("algo.name=ppo", "algo.name is 'ppo': it must be one of grpo, dapo, cispo"),
        ("reward=maths", "reward is 'maths': it must be one of math, number, exact"),
        (
            "data.source=csv:x",
            "data.source is 'csv:x': it must be arithmetic[:KINDS] or jsonl:PATH",
        ),
        ("learn.minibatch=5", "rollout.prompts is 32: it must be a multiple of learn.minibatch, 5"),
        ("learn.microbatch=7", "learn.microbatch is 7: it must divide the minibatch's 256 rows"),
        ("algo.dual_clip=0.5", "algo.dual_clip is 0.5: it must be above 1, or 0 for none"),
        ("algo.clip_low=1.5", "algo.clip_low is 1.5"),
        ("mesh.fsdp=0", "mesh.fsdp must be above 0, or -1"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, override, message):
    with pytest.raises(UserError) as error:
        config.load(write(tmp_path, PLAIN), [override])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_cispo_has_no_dual_clip(tmp_path):
    with pytest.raises(UserError, match="CISPO has no dual clip"):
        config.load(write(tmp_path, PLAIN), ["algo.name=cispo", "algo.dual_clip=3"])


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
            "lacks algo.clip_high: begin with config.default()",
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
    assert config.check_mesh(c, 1) == (1, 1, 1) and config.check_mesh(c, 8) == (1, 8, 1)
    c.mesh.tp = 2
    assert config.check_mesh(c, 8) == (1, 4, 2)
    c.mesh.fsdp = 3
    with pytest.raises(UserError, match=r"1 \* 3 \* 2 = 6, and there are 8 devices"):
        config.check_mesh(c, 8)
    c.mesh.update({"fsdp": -1, "tp": 1})
    c.rollout.prompts = c.learn.minibatch = 12
    with pytest.raises(UserError, match="rollout.prompts is 12: it must be a multiple of the 8"):
        config.check_mesh(c, 8)
