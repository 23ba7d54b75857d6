import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from fgrpo_jax import UserError, config, prompts, sft, tokenizer, weights
from fgrpo_jax.model import Policy


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


def maze_model(tmp_path):
    c = config.load("configs/maze/sft.py")
    sft.new_folder(c, tmp_path / "new")
    return c, tokenizer.load(tmp_path / "new")


def test_the_paper_s_maze_model(tmp_path):
    maze_model(tmp_path)
    shape = weights.model_config(tmp_path / "new")
    # a layer: q, o 2 * 256 * 256; k, v 2 * 128 * 256; biases 512; three of 256 * 1024; two norms
    layer = 131_072 + 65_536 + 512 + 786_432 + 512
    assert (shape.vocab, 32 * 256 + 4 * layer + 256) == (32, 3_944_704)
    params = jax.eval_shape(Policy(shape).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 3_944_704


def test_a_maze_s_tokens_are_maxrl_s(tmp_path):
    c, tokens = maze_model(tmp_path)
    assert tokens.size == 32 and tokens.stop_ids == (2, 7)
    text = "GRID_START #####\n#s..#\n###.#\n###g#\n#####\nGRID_END PATH_START"
    rows = [9] * 5, [9, 11, 8, 8, 9], [9, 9, 9, 8, 9], [9, 9, 9, 10, 9], [9] * 5
    grid = [i for row in rows for i in [*row, 12]]
    rendered = tokens.with_chat_template(c.data.chat_template).render(text)
    assert tokens.encode([rendered]) == [[1, 4, *grid, 5, 6]]
    assert tokens.encode(["UP DOWN LEFT RIGHT DONE"]) == [[13, 14, 15, 16, 7]]
    # DONE is a word of the response, and <eos> is none
    assert tokens.decode([16, 14, 7]) == "RIGHT DOWN DONE"
    assert tokens.decode([16, 14, 7, 2]) == "RIGHT DOWN DONE"
    assert tokens.decode([16, 14, 2]) == "RIGHT DOWN"


def test_worked_paths_end_in_done_and_eos(tmp_path):
    c, tokens = maze_model(tmp_path)
    examples = prompts.load(c, "maze:17x3", "train", tokens)
    part = examples.batch(np.arange(3), np.arange(3))
    assert part.length_P.tolist() == [310] * 3  # 17 * 18 + 4
    batch = sft.worked_batch(c, part, tokens)
    for row, problem in enumerate(part.problems):
        trained = batch.tokens_BS[row, 310:][batch.mask_BT[row]].tolist()
        assert trained[-2:] == [7, 2] and tokens.decode(trained) == problem.worked


def test_other_sources_have_no_worked_solutions(tmp_path):
    c = small(tmp_path)
    for source in ("jsonl:a.jsonl", "arithmetic+maze:5"):
        c.data.source = source
        with pytest.raises(UserError, match="worked solutions are of arithmetic or of maze alone"):
            train(c, tmp_path / "work")
