"""The library in other people's training loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fgrpo_jax.advantages import focal_weight, group_advantage
from fgrpo_jax.aggregators import token_mean
from fgrpo_jax.losses import ppo_clip

DIGITS, P, N = 10, 16, 8


@pytest.fixture(autouse=True)
def jax_as_others_have_it():
    """Without the strictness of this project's tests, in every thread."""
    keys = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    ours = {key: getattr(jax.config, key) for key in keys}
    for key, value in keys.items():
        jax.config.update(key, value)
    yield
    for key, value in ours.items():
        jax.config.update(key, value)


def test_a_loop_of_thirty_lines():
    """A bigram table learns to say the successor of a digit, and then 0."""
    optimizer = optax.adam(0.1)

    def logp_of(table, first, answer):
        logits = table[jnp.stack([first, answer[:, 0]], 1)]
        return jnp.take_along_axis(jax.nn.log_softmax(logits), answer[..., None], 2)[..., 0]

    @jax.jit
    def step(table, opt_state, key):
        key_first, key_one, key_two = jax.random.split(key, 3)
        first = jnp.repeat(jax.random.randint(key_first, (P,), 0, DIGITS), N)
        one = jax.random.categorical(key_one, table[first])
        answer = jnp.stack([one, jax.random.categorical(key_two, table[one])], 1)
        right = (answer == jnp.stack([(first + 1) % DIGITS, jnp.zeros_like(first)], 1)).mean(1)
        reward = right.reshape(P, N)
        advantage = group_advantage(reward) * focal_weight(reward, 0.5)[:, None]
        old_logp, mask = logp_of(table, first, answer), jnp.ones(answer.shape, bool)

        def loss(table):
            logp = logp_of(table, first, answer)
            total, count = token_mean(ppo_clip(logp, old_logp, advantage.reshape(-1, 1)), mask)
            return total / count

        updates, opt_state = optimizer.update(jax.grad(loss)(table), opt_state)
        return optax.apply_updates(table, updates), opt_state, reward.mean()

    table = jnp.zeros((DIGITS, DIGITS))
    opt_state, rewards = optimizer.init(table), []
    for key in jax.random.split(jax.random.key(0), 150):
        table, opt_state, reward = step(table, opt_state, key)
        rewards.append(float(reward))
    assert np.mean(rewards[:10]) < 0.2 and np.mean(rewards[-10:]) > 0.45  # 1 of 2 can be had


@pytest.mark.filterwarnings("ignore")
def test_registered_in_tunix():
    """F-GRPO's advantage under a name that tunix knows trains a step there."""
    pytest.importorskip("tunix.rl", exc_type=ImportError)
    from flax import nnx
    from tunix.models.qwen2 import model as qwen2
    from tunix.rl import function_registry, rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    calls = []

    def f_grpo(rewards, num_generations):
        reward_PN = jnp.asarray(rewards).reshape(-1, num_generations)
        adv_PN = group_advantage(reward_PN) * focal_weight(reward_PN, 0.5)[:, None]
        calls.append((np.asarray(rewards), np.asarray(adv_PN)))
        return adv_PN.reshape(-1)

    class Numbers:
        """Space-separated integers <-> ids."""

        def encode(self, text, **_):
            return [int(token) for token in text.split()]

        def decode(self, ids, **_):
            return " ".join(str(int(i)) for i in ids)

        def bos_id(self):
            return 0

        def eos_id(self):
            return 1

        def pad_id(self):
            return 0

    shape = qwen2.ModelConfig(
        num_layers=1, vocab_size=32, embed_dim=16, hidden_dim=32, num_heads=2, head_dim=8,
        num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
        remat_config=qwen2.RematConfig.NONE, dtype=jnp.float32, param_dtype=jnp.float32,
    )  # fmt: skip
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        model = qwen2.Qwen2(shape, rngs=nnx.Rngs(0))
        # a tied head of N(0, 1) would always say the same token
        model.embedder.input_embedding.value = model.embedder.input_embedding.value * 0.02
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    role = rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=model,
        tokenizer=Numbers(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((role.ACTOR, role.REFERENCE, role.ROLLOUT), mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-2), eval_every_n_steps=10**9, max_steps=1,
                mini_batch_size=2, train_micro_batch_size=2, rollout_micro_batch_size=2,
                compute_logps_micro_batch_size=2,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=4, max_prompt_length=4, kv_cache_size=16, temperature=1.0,
                top_p=1.0, top_k=None, return_logprobs=True, seed=0,
            ),
        ),
    )  # fmt: skip
    even = lambda prompts, completions, **_: [
        float(text.split()[0:1] != [] and int(text.split()[0]) % 2 == 0) for text in completions
    ]
    plain = function_registry.get_advantage_estimator("grpo")
    function_registry.register_advantage_estimator("grpo")(f_grpo)
    try:
        learner = grpo_learner.GRPOLearner(
            rl_cluster=cluster,
            reward_fns=even,
            algo_config=grpo_learner.GRPOConfig(num_generations=8, num_iterations=1, beta=0.0),
        )
        learner.train([{"prompts": np.array(["2 3 4 5", "6 7 8 9"])}])
    finally:
        function_registry.register_advantage_estimator("grpo")(plain)
    (rewards, advantages), *_ = calls
    rate = rewards.reshape(-1, 8).mean(axis=1, keepdims=True)
    expected = np.asarray(plain(rewards, 8)).reshape(-1, 8) * np.sqrt(1 - rate)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-6)
    assert advantages.any()
    after = nnx.state(cluster.actor_trainer.model, nnx.Param)
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), after, before)
    assert any(jax.tree.leaves(moved))
