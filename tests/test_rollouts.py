import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax import rewards, sharding, tokenizer, weights
from fgrpo_jax.advantages import success_rate
from fgrpo_jax.answers import Score
from fgrpo_jax.layout import SamplerSettings
from fgrpo_jax.metrics import rollout_metrics
from fgrpo_jax.prompts import PromptSet
from fgrpo_jax.rollouts import learner_batch, make_collect
from fgrpo_jax.sampling import Sampling
from fgrpo_jax.structs import Problem, Response, unwatched

N, T, C = 4, 5, 8


@pytest.fixture(scope="module")
def tiny():
    return tokenizer.load(weights.EMBEDDED / "tiny_arithmetic")


def prompt_set(tiny, answers):
    problems = tuple(Problem(str(i), a, f"kind{i % 2}") for i, a in enumerate(answers))
    tokens = tuple(np.full(i + 1, i + 1, np.int32) for i in range(len(answers)))
    return PromptSet(problems, tokens, C, {})


SETTINGS = SamplerSettings(N, T, Sampling(), (0,))


def scripted(tiny, says, chunk=3):
    """A stream whose sample j of the prompt i says says(i, j); so many responses end at a time."""

    def stream(params, prompts, key, watch=unwatched):
        responses = []
        for row in range(len(prompts.problems) * N):
            first = int(prompts.tokens_PC[row // N, -1]) - 1  # prompt i is made of the token i + 1
            (ids,) = tiny.encode([says(first, row % N)])
            tokens = np.array([*ids, tiny.stop_ids[0]][:T], np.int32)
            logp = np.full(len(tokens), -0.5, np.float32)
            finished = bool(np.isin(tokens, tiny.stop_ids).any())
            responses.append(Response(row, tokens, logp, None, finished))
        responses = responses[::-1]  # in any order
        for begin in range(0, len(responses), chunk):
            yield responses[begin : begin + chunk]

    return stream


def text_of(tiny):
    return lambda tokens: tiny.decode(tokens.tolist())


def collector(tiny, says, scorer, **kwargs):
    return make_collect(scripted(tiny, says), SETTINGS, text_of(tiny), scorer, **kwargs)


@pytest.fixture(scope="module")
def collect(tiny):
    says = lambda prompt, j: "1" if j <= prompt else "22222"  # the latter is cut off
    with rewards.Scorer("exact", 1, 1.0) as scorer:
        yield collector(tiny, says, scorer)


def gather(tiny, collect, answers):
    loaded = prompt_set(tiny, answers)
    everything = np.arange(len(answers))
    return collect(None, loaded.batch(everything, everything), jax.random.key(0))


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
        dropping = collector(tiny, says, scorer, drop_truncated=True)
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
        other = collector(tiny, says, scorer, wrong=-1.0, right=2.0)
        rollouts = gather(tiny, other, ["1", "1"])
        uneven = collector(tiny, says, scorer, wrong=-0.3, right=0.1)
        exact = gather(tiny, uneven, ["1", "1"]).reward_PN
    assert set(exact.reshape(-1)) == {np.float32(-0.3), np.float32(0.1)}
    assert rollouts.reward_PN.tolist() == [[2, -1, -1, -1], [2, 2, -1, -1]]
    assert rollouts.correct_PN.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]


def test_responses_are_judged_as_they_end(tiny):
    """The first are with the judges while others are sampled; scores are awaited at the end."""
    events = []

    class Judge(rewards.Scorer):
        def __init__(self):
            pass

        def start(self, problems, responses, finished):
            events.append(f"began {len(responses)}")

            def scores():
                events.append("awaited")
                yield from [Score(1.0, True, "right")] * len(responses)

            return scores()

    def stream(*arguments):
        for some in scripted(tiny, lambda p, j: "1", chunk=2)(*arguments):
            events.append("sampled")
            yield some

    @contextlib.contextmanager
    def scoring():
        events.append("waits")
        yield
        events.append("has all")

    collect = make_collect(stream, SETTINGS, text_of(tiny), Judge(), scoring=scoring)
    assert gather(tiny, collect, ["1"]).reward_PN.tolist() == [[1] * N]
    assert events == ["sampled", "began 2"] * 2 + ["waits", "awaited", "awaited", "has all"]
