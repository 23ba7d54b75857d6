import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import qwen2_folder
from safetensors.numpy import load_file, save_file

from fgrpo_jax import UserError, export, sharding, weights
from fgrpo_jax.model import Policy


def load(folder, mesh=(1, 4, 2)):
    policy = Policy(weights.model_config(folder))
    return weights.load(folder, policy, sharding.make_mesh(*mesh))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("variant", ["tied", "untied", "gqa"])
def test_import_of_export_is_the_same_bit_for_bit(variant, tmp_path):
    config = qwen2_folder.hf_config(**qwen2_folder.VARIANTS[variant])
    start = qwen2_folder.write(tmp_path / "start", config)
    params = load(start)
    export.export(tmp_path / "out", params, start)
    equal(load(tmp_path / "out"), params)
    theirs, ours = (
        load_file(start / "model.safetensors"),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert theirs.keys() == ours.keys()
    equal(ours, theirs)


def test_every_mesh_and_number_of_files_reads_the_same(tmp_path):
    config = qwen2_folder.hf_config()
    one = qwen2_folder.write(tmp_path / "one", config)
    three = qwen2_folder.write(tmp_path / "three", config, files=3)
    params = load(one, (1, 8, 1))
    for mesh in ((1, 4, 2), (2, 2, 2), (8, 1, 1)):
        equal(load(three, mesh), params)


def test_export_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FILE", 20_000)
    start = qwen2_folder.write(tmp_path / "start", qwen2_folder.hf_config())
    params = load(start)
    export.export(tmp_path / "out", params, start)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    equal(load(tmp_path / "out"), params)


def test_bfloat16_and_float16_become_float32(tmp_path):
    config = qwen2_folder.hf_config()
    for dtype in ("bfloat16", "float16"):
        tensors = {
            name: np.asarray(jax.numpy.asarray(value, dtype))
            for name, value in qwen2_folder.random_tensors(config).items()
        }
        params = load(qwen2_folder.write(tmp_path / dtype, config, tensors))
        norm = params["norm"]["weight"]
        assert norm.dtype == np.float32
        np.testing.assert_array_equal(norm, tensors["model.norm.weight"].astype(np.float32))


def test_transformers_reads_what_is_exported(tmp_path):
    pytest.importorskip("torch")
    config = qwen2_folder.hf_config(tie_word_embeddings=False)
    start = qwen2_folder.write(tmp_path / "start", config)
    export.export(tmp_path / "out", load(start), start)
    ids, first = qwen2_folder.tokens()
    theirs = [qwen2_folder.torch_logits(tmp_path / name, ids, first) for name in ("start", "out")]
    np.testing.assert_array_equal(*theirs)


def broken(tmp_path, config=None, **changes):
    config = config or qwen2_folder.hf_config()
    tensors = qwen2_folder.random_tensors(config)
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    return qwen2_folder.write(tmp_path, config, tensors)


def test_a_missing_tensor_is_named(tmp_path):
    with pytest.raises(UserError, match=r"lacks tensor model.layers.1.mlp.up_proj.weight"):
        load(broken(tmp_path, model__layers__1__mlp__up_proj__weight=None))


def test_a_tensor_of_another_shape_is_named(tmp_path):
    with pytest.raises(UserError, match=r"model.norm.weight has shape \(5,\), and .* \(32,\)"):
        load(broken(tmp_path, model__norm__weight=np.zeros(5, np.float32)))


def test_an_unexpected_tensor_is_named(tmp_path):
    with pytest.raises(UserError, match=r"has tensor model.layers.0.self_attn.q_norm.weight"):
        load(broken(tmp_path, model__layers__0__self_attn__q_norm__weight=np.zeros(8, np.float32)))


def test_a_tied_model_may_bring_its_head(tmp_path):
    load(broken(tmp_path, lm_head__weight=np.zeros((64, 32), np.float32)))


@pytest.mark.parametrize("keep", [0, 5, 100, 2000, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    file = qwen2_folder.write(tmp_path, qwen2_folder.hf_config()) / "model.safetensors"
    os.truncate(file, keep if keep >= 0 else file.stat().st_size - 1)
    with pytest.raises(UserError, match="model.safetensors.* truncated"):
        load(tmp_path)


def test_a_missing_file_of_several_is_named(tmp_path):
    folder = qwen2_folder.write(tmp_path, qwen2_folder.hf_config(), files=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="model-00002-of-00002.safetensors is missing"):
        load(folder)


def test_an_index_may_not_leave_its_folder(tmp_path):
    folder = qwen2_folder.write(tmp_path, qwen2_folder.hf_config())
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="its own folder"):
        load(folder)


def test_integers_are_refused(tmp_path):
    folder = qwen2_folder.write(tmp_path, qwen2_folder.hf_config())
    save_file({"x": np.zeros(3, np.int64)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="I64"):
        load(folder)


def test_no_folder():
    with pytest.raises(UserError, match="no /nowhere/config.json"):
        weights.resolve("/nowhere")


MEASURE = """
import pathlib, sys, threading, time
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from fgrpo_jax import sharding, weights
from fgrpo_jax.model import Policy

def anonymous():
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024

policy = Policy(weights.model_config(pathlib.Path(sys.argv[1])))
mesh = sharding.make_mesh(1, 4, 2)
jax.block_until_ready([jax.device_put(np.zeros(9), d) for d in jax.devices()])
shapes = jax.eval_shape(policy.init, jax.random.key(0))
peak, stop = [0], threading.Event()

def watch():
    while not stop.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.0005)

before = anonymous()
threading.Thread(target=watch, daemon=True).start()
params = weights.load(pathlib.Path(sys.argv[1]), policy, mesh)
jax.block_until_ready(params)
stop.set()
model = sum(x.nbytes for x in jax.tree.leaves(params))
shard = max(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
print(peak[0] - before, model, shard)
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_above_the_model_stays_under_two_shards(tmp_path):
    config = qwen2_folder.hf_config(
        hidden_size=1024, intermediate_size=8192, num_hidden_layers=8, vocab_size=4096,
        num_attention_heads=16, num_key_value_heads=8,
    )  # fmt: skip
    random = np.random.RandomState(0)
    block = random.randn(8192 * 1024).astype(jax.numpy.bfloat16)
    tensors = {
        name: block[: value.size].reshape(value.shape)
        for name, value in qwen2_folder.random_tensors(config | {"num_hidden_layers": 1}).items()
    }
    layer = {k: v for k, v in tensors.items() if ".layers.0." in k}
    for i in range(1, 8):
        tensors |= {k.replace(".layers.0.", f".layers.{i}."): v for k, v in layer.items()}
    qwen2_folder.write(tmp_path, config, tensors)
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True
    )
    grown, model, shard = map(int, out.stdout.split())
    above = (grown - model) / shard
    print(
        f"{model >> 20} MiB of model, shards up to {shard >> 20} MiB, {above:.2f} shards above it"
    )
    assert 0 < above < 2


@pytest.mark.slow
def test_smollm2_equals_transformers():
    """FGRPO_SMOLLM2 names the folder of a real SmolLM2-135M as a Qwen2 checkpoint."""
    pytest.importorskip("torch")
    if "FGRPO_SMOLLM2" not in os.environ:
        pytest.skip("FGRPO_SMOLLM2 names no folder")
    folder = pathlib.Path(os.environ["FGRPO_SMOLLM2"])
    ids = np.random.RandomState(0).randint(0, 49152, (2, 24))
    start = np.array([0, 5])
    theirs = qwen2_folder.torch_logits(folder, ids, start)
    policy = Policy(weights.model_config(folder))
    params = weights.load(folder, policy, sharding.make_mesh(8, 1, 1))
    hidden = policy.hidden(
        params, jax.numpy.asarray(ids, np.int32), jax.numpy.asarray(start, np.int32)
    )
    ours = np.asarray(policy.logits(params, hidden, 1.0))
    largest = max(np.abs(ours[i, s:] - theirs[i, s:]).max() for i, s in enumerate(start))
    print(f"largest logit difference {largest:.2e}, largest logit {np.abs(theirs).max():.1f}")
    assert largest < 2e-3
