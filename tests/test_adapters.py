import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwen2_folder
from conftest import tiny_config
from safetensors.numpy import load_file
from test_update import SCHEDULE, rows, same, settings

from fgrpo_jax import UserError, adapters, choices, config, export, sharding, weights
from fgrpo_jax.adapters import EQUATIONS, Lora, equations
from fgrpo_jax.model import Policy
from fgrpo_jax.rollouts import put_batch
from fgrpo_jax.update import abstract_state, init_state, make_old_logprobs, make_update

ALL = tuple(EQUATIONS)
LORA = Lora(rank=3, alpha=6.0, targets=ALL)


def random_adapters(lora, policy, seed=1):
    """As after training: B is not zero."""
    fresh = lora.init(jax.random.key(seed), jax.eval_shape(policy.init, jax.random.key(0)))
    keys = iter(jax.random.split(jax.random.key(seed + 1), 99))
    return jax.tree.map(lambda x: 0.3 * jax.random.normal(next(keys), x.shape), fresh)


def test_a_matrix_by_hand():
    """W is 2 x 2, R is 1 and alpha 4: y = W x + 4 B (A x)."""
    lora = Lora(1, 4.0, ("down_proj",))
    base = {"layers": {"mlp": {"down_proj": {"weight": jnp.array([[[1.0, 0.0], [0.0, 2.0]]])}}}}
    pair = {"lora_A": jnp.array([[[3.0, 1.0]]]), "lora_B": jnp.array([[[0.5], [-1.0]]])}
    merged = adapters.merge(lora.join(base, {"layers": {"mlp": {"down_proj": pair}}}))
    # 4 [0.5, -1]ᵀ [3, 1] = [[6, 2], [-12, -4]]
    np.testing.assert_array_equal(
        merged["layers"]["mlp"]["down_proj"]["weight"], [[[7.0, 2.0], [-12.0, -2.0]]]
    )
    assert merged["layers"]["mlp"]["down_proj"].keys() == {"weight"}


def test_fresh_adapters_change_nothing_and_are_as_peft_s(policy):
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    fresh = LORA.init(jax.random.key(5), shapes)["layers"]
    A = fresh["self_attn"]["o_proj"]["lora_A"]
    assert A.shape == (2, 3, 4, 8) and fresh["self_attn"]["o_proj"]["lora_B"].shape == (2, 32, 3)
    assert fresh["mlp"]["up_proj"]["lora_B"].shape == (2, 64, 3)
    for name, linear in (fresh["self_attn"] | fresh["mlp"]).items():
        assert not linear["lora_B"].any()
        fan_in = 64 if name == "down_proj" else 32
        # uniform within 1 / sqrt(in): its deviation is that by sqrt(3)
        assert np.abs(linear["lora_A"]).max() < fan_in**-0.5
        assert np.std(linear["lora_A"]) == pytest.approx((3 * fan_in) ** -0.5, rel=0.15)
    draws = [np.asarray(x["lora_A"]).ravel() for x in (fresh["self_attn"] | fresh["mlp"]).values()]
    assert len({draw[0] for draw in draws}) == 7  # each its own key


@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj"), ("down_proj",)])
def test_beside_the_weights_is_as_merged_into_them(params, targets):
    policy = Policy(tiny_config(), lora=Lora(3, 6.0, targets))
    trained = random_adapters(policy.lora, policy)
    ids, start_B = jax.random.randint(jax.random.key(3), (2, 6), 0, 48), jnp.zeros(2, jnp.int32)
    beside, merged, plain = (
        policy.hidden(x, ids, start_B)
        for x in (policy.weights(trained, params), policy.merged(trained, params), params)
    )
    np.testing.assert_allclose(beside, merged, rtol=1e-4, atol=1e-4)
    assert np.abs(beside - plain).max() > 0.1


def test_equations_are_the_layers_own():
    assert list(EQUATIONS) == choices.TARGETS
    assert equations("q_proj") == ("BTD,RD->BTR", "BTR,QHR->BTQH", "LQHR,LRD->LQHD")
    assert equations("down_proj") == ("BTF,RF->BTR", "BTR,DR->BTD", "LDR,LRF->LDF")


def run(params, mesh, samples=1, steps=2):
    """Adapters, their base and the metrics after some steps of an update."""
    policy = Policy(tiny_config(), lora=LORA)
    optimizer = optax.adamw(SCHEDULE, eps=1e-3)
    devices = np.array(jax.devices()[: int(np.prod(mesh))]).reshape(mesh)
    mesh = jax.sharding.Mesh(devices, sharding.AXES)
    with jax.set_mesh(mesh):
        abstract = abstract_state(policy, optimizer, mesh)
        how = dataclasses.replace(settings(), samples=samples)
        update = make_update(policy, optimizer, SCHEDULE, how, abstract)
        base = jax.device_put(params, sharding.state_shardings(mesh, params))
        state = init_state(random_adapters(LORA, policy), optimizer, abstract)
        for _ in range(steps):
            state, metrics = update(state, put_batch(rows(), 1, 2, mesh), base)
    return jax.device_get((state, base, metrics))


def test_only_adapters_train(params):
    state, base, metrics = run(params, (1, 1, 1))
    jax.tree.map(np.testing.assert_array_equal, base, jax.device_get(params))
    before = random_adapters(LORA, Policy(tiny_config()))
    assert jax.tree.structure(state.params) == jax.tree.structure(before)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max() > 1e-4, state.params, before)
    assert all(jax.tree.leaves(moved))
    # Adam's moments are of the adapters alone
    size = sum(x.size for x in jax.tree.leaves(before))
    assert sum(np.size(x) for x in jax.tree.leaves(state.opt_state)) == 2 * size + 2  # two counts
    assert metrics["grad_norm"] > 0


def test_the_gradient_is_the_merged_loss_s(params):
    """d/dA and d/dB of the loss of W + alpha / R B A, which autodiff takes through the merge."""
    policy = Policy(tiny_config(), lora=LORA)
    trained = random_adapters(LORA, policy)
    ids, start_B = jax.random.randint(jax.random.key(3), (2, 6), 0, 48), jnp.zeros(2, jnp.int32)
    loss = lambda trained, weights: policy.hidden(weights(trained, params), ids, start_B)[
        ..., 0
    ].sum()
    beside, merged = (jax.grad(loss)(trained, f) for f in (policy.weights, policy.merged))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max()),
        beside,
        merged,
    )


@pytest.mark.parametrize("mesh", [(1, 8, 1), (1, 4, 2)])
def test_devices_change_nothing(params, mesh):
    one, many = (run(params, mesh)[0].params for mesh in ((1, 1, 1), mesh))
    same(one, many, rtol=5e-5, atol=5e-6)


def folder_with_adapters(tmp_path):
    start = qwen2_folder.write(tmp_path / "start", qwen2_folder.hf_config())
    policy = Policy(weights.model_config(start), lora=LORA)
    base = weights.load(start, policy, sharding.make_mesh(1, 4, 2))
    trained = random_adapters(LORA, policy)
    export.export_adapters(tmp_path / "adapters", trained, LORA, start)
    export.export(tmp_path / "merged", policy.merged(trained, base), start)
    return policy, base, trained


def test_a_peft_folder(tmp_path):
    _, _, trained = folder_with_adapters(tmp_path)
    tensors = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(tensors) == 3 * 7 * 2
    name = "base_model.model.model.layers.2.self_attn.o_proj.lora_{}.weight"
    pair = trained["layers"]["self_attn"]["o_proj"]
    np.testing.assert_array_equal(
        tensors[name.format("A")], np.asarray(pair["lora_A"][2]).reshape(3, 32)
    )
    np.testing.assert_array_equal(tensors[name.format("B")], pair["lora_B"][2])
    q = np.asarray(trained["layers"]["self_attn"]["q_proj"]["lora_B"][0]).reshape(32, 3)
    ours = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    np.testing.assert_array_equal(ours, q)
    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert settings["r"] == 3 and settings["lora_alpha"] == 6.0 and settings["peft_type"] == "LORA"
    assert settings["target_modules"] == sorted(ALL)


def test_the_files_hold_what_merging_means(tmp_path):
    """W + alpha / r B A by numpy, of the files alone, is the merged folder's."""
    folder_with_adapters(tmp_path)
    start, merged = (
        load_file(tmp_path / name / "model.safetensors") for name in ("start", "merged")
    )
    pairs = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    said = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str((tmp_path / "start").resolve())
    changed = 0
    for name, weight in start.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in pairs:
            A, B = (pairs[f"{stem}.lora_{x}.weight"] for x in "AB")
            weight = weight + said["lora_alpha"] / said["r"] * (B @ A)
            changed += 1
        np.testing.assert_allclose(merged[name], weight, rtol=1e-5, atol=1e-6)
    assert changed == 3 * 7


def test_old_log_probabilities_are_those_of_base_and_adapters(params):
    policy = Policy(tiny_config(), lora=LORA)
    trained, batch = random_adapters(LORA, policy), rows()
    mesh = sharding.make_mesh(1, 8, 1)
    with jax.set_mesh(mesh):
        placed = put_batch(batch, 2, 1, mesh)
        old = make_old_logprobs(policy, settings(), mesh)(trained, placed, params).old_logp_BT
        plain = Policy(tiny_config())
        merged = make_old_logprobs(plain, settings(), mesh)(policy.merged(trained, params), placed)
    np.testing.assert_allclose(old, merged.old_logp_BT, rtol=1e-4, atol=1e-4)
    assert np.abs(old - batch.sampler_logp_BT.reshape(old.shape)).max() > 0.1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers' own, of its own property
def test_peft_and_transformers_give_the_same_logits(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch and peft")
    peft = pytest.importorskip("peft", reason="needs torch and peft")
    from transformers import Qwen2ForCausalLM

    policy, base, trained = folder_with_adapters(tmp_path)
    ids, first = qwen2_folder.tokens()
    params = policy.weights(trained, base)
    hidden = policy.hidden(params, jnp.asarray(ids), jnp.asarray(first))
    ours = np.asarray(policy.logits(params, hidden, 1.0))
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "start", attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapters"))
    with torch.no_grad():
        theirs = model(torch.tensor(ids[:1])).logits.numpy()
    np.testing.assert_allclose(ours[:1], theirs, rtol=1e-4, atol=1e-4)
    merged = qwen2_folder.torch_logits(tmp_path / "merged", ids, first)
    np.testing.assert_allclose(ours[0], merged[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ours[1, 3:], merged[1, 3:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "targets, rank, said",
    [
        (("q_proj", "lm_head"), 4, "names 'lm_head'"),
        (("q_proj", "q_proj"), 4, "each once"),
        (("q_proj",), 0, "lora.rank is 0"),
    ],
)
def test_targets_that_cannot_be(targets, rank, said):
    c = config.default()
    c.lora.targets, c.lora.rank = targets, rank
    with pytest.raises(UserError, match=said):
        config.validate(c)
