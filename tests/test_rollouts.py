import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax import rewards, sharding, tokenizer, weights
from fgrpo_jax.advantages import success_rate
from fgrpo_jax.answers import Score
from fgrpo_jax.evaluate import make_evaluate
from fgrpo_jax.metrics import rollout_metrics
from fgrpo_jax.pass_at_k import pass_at_k
from fgrpo_jax.prompts import PromptSet
from fgrpo_jax.rollouts import learner_batch, make_collect
from fgrpo_jax.structs import Problem, Samples

N, T, C = 4, 5, 8


@pytest.fixture(scope="module")
def tiny():
    return tokenizer.load(weights.EMBEDDED / "tiny_arithmetic")


def prompt_set(tiny, answers):
    problems = tuple(Problem(str(i), a, f"kind{i % 2}") for i, a in enumerate(answers))
    tokens = tuple(np.full(i + 1, i + 1, np.int32) for i in range(len(answers)))
    return PromptSet(problems, tokens, C, {})


def scripted(tiny, says):
    """A sampler whose sample j of the prompt at position p says says(p, j)."""

    def sample(params, tokens_PC, length_P, key_B):
        tokens = np.zeros((len(key_B), T), np.int32)
        mask = np.zeros((len(key_B), T), bool)
        for b in range(len(key_B)):
            first = int(tokens_PC[b // N, -1]) - 1  # prompt i is made of the token i + 1
            (ids,) = tiny.encode([says(first, b % N)])
            ids = [*ids, tiny.stop_ids[0]][:T]
            tokens[b, : len(ids)] = ids
            mask[b, : len(ids)] = True
        finished = np.isin(tokens, tiny.stop_ids).any(1)
        logp = np.where(mask, -0.5, 0).astype(np.float32)
        return jax.tree.map(jnp.asarray, Samples(tokens, mask, logp, finished))

    return sample


@pytest.fixture(scope="module")
def collect(tiny):
    mesh = sharding.make_mesh(1, 1, 8)
    says = lambda prompt, j: "1" if j <= prompt else "22222"  # the latter is cut off
    with rewards.Scorer("exact", 1, 1.0) as scorer:
        yield make_collect(scripted(tiny, says), N, tiny, scorer, mesh)


def gather(tiny, collect, answers):
    loaded = prompt_set(tiny, answers)
    everything = np.arange(len(answers))
    return collect(None, loaded.batch(everything, everything), jax.random.key(0))()


def test_scores_belong_to_their_rows(tiny, collect):
    rollouts = gather(tiny, collect, ["1", "1", "9"])
    assert rollouts.correct_PN.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert rollouts.responses[:4] == ("1", "22222", "22222", "22222")
    assert rollouts.finished_B.tolist()[:2] == [True, False]


def test_metrics_by_hand(tiny, collect):
    out = rollout_metrics(gather(tiny, collect, ["1", "1", "9", "1"]))
    assert out["pass_rate"] == out["reward"] == (1 + 2 + 0 + 4) / 16
    assert (out["groups_all_wrong"], out["groups_mixed"], out["groups_all_right"]) == (
        0.25, 0.5, 0.25,
    )  # fmt: skip
    assert out["response_tokens"] == (10 * 2 + 6 * 5) / 16
    assert out["truncated"] == 6 / 16
    assert out["verdict/right"] == 7 and out["verdict/wrong"] == 9


def test_learner_rows(tiny, collect):
    rollouts = gather(tiny, collect, ["1", "1", "1", "1"])
    mesh = sharding.make_mesh(1, 1, 8)
    advantage = np.arange(16, dtype=np.float32).reshape(4, N)
    batch = learner_batch(rollouts, advantage, 2, 2, mesh)
    assert batch.tokens_BS.shape == (2, 2, 4, C + T) and batch.mask_BT.shape == (2, 2, 4, T)
    flat = lambda x: np.asarray(x).reshape(16, *x.shape[3:])
    assert flat(batch.advantage_B).tolist() == list(range(16))
    for row in range(16):
        prompt = row // N
        tokens = flat(batch.tokens_BS)[row]
        assert flat(batch.start_B)[row] == C - (prompt + 1)
        assert tokens[:C].tolist() == [0] * (C - prompt - 1) + [prompt + 1] * (prompt + 1)
        assert tokens[C:].tolist() == rollouts.tokens_BT[row].tolist()
        assert flat(batch.mask_BT)[row].tolist() == rollouts.mask_BT[row].tolist()


def test_what_leaves_the_loss(tiny, collect):
    rollouts = gather(tiny, collect, ["1", "1", "1", "1"])
    mesh = sharding.make_mesh(1, 1, 8)
    masks = lambda x, **kwargs: np.asarray(
        learner_batch(x, np.zeros((4, N)), 1, 1, mesh, **kwargs).mask_BT
    ).reshape(16, T)
    np.testing.assert_array_equal(masks(rollouts), rollouts.mask_BT)
    cut = masks(rollouts, mask_truncated=True)
    assert (cut.any(1) == rollouts.finished_B).all() and not rollouts.finished_B.all()
    valid = np.ones((4, N), bool)
    valid[2, 1] = False
    out = masks(dataclasses.replace(rollouts, valid_PN=valid))
    assert np.flatnonzero(~out.any(1)).tolist() == [2 * N + 1]


def test_dropped_samples_leave_their_group(tiny):
    """Before the success rate and the choice of groups are taken of it."""
    mesh = sharding.make_mesh(1, 1, 8)
    says = lambda prompt, j: "1" if j <= prompt else "22222"
    with rewards.Scorer("exact", 1, 1.0) as scorer:
        dropping = make_collect(scripted(tiny, says), N, tiny, scorer, mesh, drop_truncated=True)
        rollouts = gather(tiny, dropping, ["1", "9"])
    assert rollouts.valid_PN.tolist() == [[True, False, False, False], [True, True, False, False]]
    assert success_rate(jnp.asarray(rollouts.correct_PN), rollouts.valid_PN).tolist() == [1, 0]
    batch = learner_batch(rollouts, np.zeros((2, N)), 1, 1, mesh, with_lengths=True)
    assert (np.asarray(batch.length_BN).reshape(8, N)[0] == [2, 0, 0, 0]).all()


def test_lengths_of_the_group_own_first(tiny, collect):
    rollouts = gather(tiny, collect, ["1", "1", "1", "1"])
    mesh = sharding.make_mesh(1, 1, 8)
    batch = learner_batch(rollouts, np.zeros((4, N)), 1, 1, mesh, with_lengths=True)
    lengths = np.asarray(batch.length_BN).reshape(16, N)
    own = rollouts.mask_BT.sum(1)
    assert (lengths[:, 0] == own).all()
    for row in range(16):
        group = own[row // N * N : row // N * N + N]
        assert sorted(lengths[row]) == sorted(group)
    assert learner_batch(rollouts, np.zeros((4, N)), 1, 1, mesh).length_BN is None


def test_rewards_of_any_two_values(tiny, collect):
    with rewards.Scorer("exact", 1, 1.0) as scorer:
        says = lambda prompt, j: "1" if j <= prompt else "2"
        mesh = sharding.make_mesh(1, 1, 8)
        other = make_collect(scripted(tiny, says), N, tiny, scorer, mesh, wrong=-1.0, right=2.0)
        rollouts = gather(tiny, other, ["1", "1"])
        uneven = make_collect(scripted(tiny, says), N, tiny, scorer, mesh, wrong=-0.3, right=0.1)
        exact = gather(tiny, uneven, ["1", "1"]).reward_PN
    assert set(exact.reshape(-1)) == {np.float32(-0.3), np.float32(0.1)}
    assert rollouts.reward_PN.tolist() == [[2, -1, -1, -1], [2, 2, -1, -1]]
    assert rollouts.correct_PN.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize("batch", [2, 3, 5])
def test_evaluation_in_any_batch(tiny, collect, batch):
    held_out = prompt_set(tiny, ["1", "9", "1", "1", "1"])
    evaluate = make_evaluate(collect, held_out, 4, batch, N)
    out = evaluate(None, jax.random.key(0))
    counts = np.array([1, 0, 3, 4])  # of the first four problems
    for k in (1, 2, 4):
        assert out[f"pass@{k}"] == pytest.approx(pass_at_k(counts, N, k).mean())
    assert out["by_kind"] == {"kind0": pytest.approx(4 / 8), "kind1": pytest.approx(4 / 8)}


def test_keys_follow_the_prompt_and_the_sample(tiny):
    seen = []

    def sample(params, tokens_PC, length_P, key_B):
        seen.append(jax.random.key_data(key_B))
        return scripted(tiny, lambda p, j: "1")(params, tokens_PC, length_P, key_B)

    loaded = prompt_set(tiny, ["1"] * 4)
    with rewards.Scorer("exact", 1, 1.0) as scorer:
        collect = make_collect(sample, N, tiny, scorer, sharding.make_mesh(1, 1, 8))
        for positions in ([0, 1, 2, 3], [2, 3], [3]):
            indices = np.array(positions)
            collect(None, loaded.batch(indices, indices), jax.random.key(5))
    whole, pair, single = (np.asarray(x) for x in seen)
    np.testing.assert_array_equal(whole[8:], pair)
    np.testing.assert_array_equal(whole[12:], single)
    assert len({tuple(key) for key in whole}) == 16


def test_judges_work_while_the_next_batch_is_sampled(tiny):
    """In an evaluation a batch's scores are awaited after the next one is sampled."""
    events = []

    class Judge(rewards.Scorer):
        def __init__(self):
            pass

        def start(self, problems, responses, finished):
            number = len([event for event in events if event.startswith("began")])
            events.append(f"began {number}")

            def scores():
                events.append(f"awaited {number}")
                yield from [Score(1.0, True, "right")] * len(responses)

            return scores()

    mesh = sharding.make_mesh(1, 1, 8)
    collect = make_collect(scripted(tiny, lambda p, j: "1"), N, tiny, Judge(), mesh)
    held_out = prompt_set(tiny, ["1"] * 6)
    assert make_evaluate(collect, held_out, 6, 2, N)(None, jax.random.key(0))["pass@1"] == 1
    assert events == ["began 0", "began 1", "awaited 0", "began 2", "awaited 1", "awaited 2"]
