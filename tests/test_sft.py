import io
import json

import numpy as np
import pytest
from rich.console import Console

from fgrpo_jax import UserError, config, prompts, sft, tokenizer, weights


def small(tmp_path, **changes):
    c = config.default()
    c.sft.update(
        {"steps": 4, "rows": 16, "layers": 1, "width": 32, "heads": 4, "feed_forward": 64}
        | {"out": str(tmp_path / "out")}
        | changes
    )
    c.optim.update({"lr": 1e-2, "warmup": 1})
    return config.validate(c)


def train(c, workdir):
    sft.train(c, workdir, Console(file=io.StringIO()))


def test_a_new_model_folder(tmp_path):
    c = small(tmp_path)
    sft.new_folder(c, tmp_path / "new")
    tokens = tokenizer.load(tmp_path / "new")
    shape = weights.model_config(tmp_path / "new")
    assert shape.vocab % 16 == 0 and shape.vocab >= tokens.size
    assert tokens.decode(tokens.encode(["äß \\boxed{-12}"])[0]) == "äß \\boxed{-12}"
    assert len(tokens.encode(["\\boxed{"])[0]) == 1


def test_only_the_response_and_its_stop_token_are_trained(tmp_path):
    c = small(tmp_path)
    sft.new_folder(c, tmp_path / "new")
    tokens = tokenizer.load(tmp_path / "new")
    examples = prompts.load(c, "arithmetic:2+2", "train", tokens)
    part = examples.batch(np.arange(3), np.arange(3))
    batch = sft.worked_batch(c, part, tokens)
    C = part.tokens_PC.shape[1]
    for row, problem in enumerate(part.problems):
        trained = batch.tokens_BS[row, C:][batch.mask_BT[row]]
        assert (
            trained[-1] == tokens.stop_ids[0] and tokens.decode(trained.tolist()) == problem.worked
        )
        prompt = batch.tokens_BS[row, batch.start_B[row] : C].tolist()
        assert tokens.decode(prompt) == tokens.render(problem.text)
    assert (batch.advantage_B == 1).all()


def test_it_learns_goes_on_and_exports(tmp_path):
    c = small(tmp_path)
    train(c, tmp_path / "work")
    lines = (tmp_path / "work/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.3
    first = (tmp_path / "out/model.safetensors").read_bytes()
    train(c, tmp_path / "work")  # done already: only exports again
    assert (tmp_path / "out/model.safetensors").read_bytes() == first
    assert tokenizer.load(tmp_path / "out").stop_ids


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"out": ""}, "sft.out is empty"),
        ({"heads": 5}, "sft.width must be a multiple of sft.heads"),
        ({"rows": 12}, "sft.rows is 12: it must divide among the devices"),
    ],
)
def test_mistakes(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train(small(tmp_path, **changes), tmp_path / "work")


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious.txt").write_text("mine")
    with pytest.raises(UserError, match="it exists and is no model folder"):
        train(small(tmp_path), tmp_path / "work")
    assert (tmp_path / "out/precious.txt").read_text() == "mine"
