"""Random Hugging Face folders, the same on every machine, and their logits by torch.

`python tests/qwen2_folder.py` writes tests/data/golden_logits.npz with transformers' own
models; needs torch.
"""

import json
import pathlib
import tempfile

import numpy as np
from safetensors.numpy import save_file

VARIANTS = {
    "tied": dict(tie_word_embeddings=True, num_key_value_heads=4),
    "untied": dict(tie_word_embeddings=False, num_key_value_heads=4),
    "gqa": dict(tie_word_embeddings=True, num_key_value_heads=2, rope_theta=1_000_000.0),
    "one_kv_head": dict(tie_word_embeddings=False, num_key_value_heads=1, hidden_size=48),
    "qwen3": dict(
        model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=16, attention_bias=False
    ),
    "llama3": dict(  # wavelengths that are kept, blended and stretched, within ten positions
        model_type="llama", architectures=["LlamaForCausalLM"], rope_theta=50.0, head_dim=16,
        rope_scaling=dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
}  # fmt: skip


def hf_config(**changes):
    return dict(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu", vocab_size=64,
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=80, max_position_embeddings=128, rms_norm_eps=1e-6, rope_theta=10_000.0,
        tie_word_embeddings=True, use_sliding_window=False, bos_token_id=None, eos_token_id=1,
    ) | changes  # fmt: skip


def random_tensors(config, seed=0):
    """Weights by Hugging Face's names, from numpy's frozen generator."""
    random = np.random.RandomState(seed)
    D, F = config["hidden_size"], config["intermediate_size"]
    H = config.get("head_dim") or D // config["num_attention_heads"]
    Q, K = config["num_attention_heads"] * H, config["num_key_value_heads"] * H
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], D)}
    for i in range(config["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj.weight": (Q, D), "self_attn.q_proj.bias": (Q,),
            "self_attn.k_proj.weight": (K, D), "self_attn.k_proj.bias": (K,),
            "self_attn.v_proj.weight": (K, D), "self_attn.v_proj.bias": (K,),
            "self_attn.o_proj.weight": (D, Q), "mlp.gate_proj.weight": (F, D),
            "mlp.up_proj.weight": (F, D), "mlp.down_proj.weight": (D, F),
            "input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,),
            "self_attn.q_norm.weight": (H,), "self_attn.k_norm.weight": (H,),
        }.items():  # fmt: skip
            if name.endswith("bias") and config["model_type"] != "qwen2":
                continue
            if name[10:].startswith(("q_norm", "k_norm")) and config["model_type"] != "qwen3":
                continue
            shapes[f"model.layers.{i}.{name}"] = shape
    shapes["model.norm.weight"] = (D,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], D)
    return {
        name: (random.randn(*shape) * 0.3 + ("norm" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write(folder, config, tensors=None, files=1):
    """A model folder without a tokenizer, its tensors in one or several files."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(files):
        name = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::files]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def tokens(vocab=64):
    """Two rows of ten; the second is left-padded by three."""
    ids = np.random.RandomState(7).randint(0, vocab, (2, 10))
    return ids, np.array([0, 3])


def torch_logits(folder, ids, start):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    columns = np.arange(ids.shape[1])[None]
    mask = torch.tensor(columns >= start[:, None]).long()
    position = torch.tensor(np.maximum(columns - start[:, None], 0))
    with torch.no_grad():
        out = model(torch.tensor(ids), attention_mask=mask, position_ids=position)
    return out.logits.numpy()


def main():
    out = {}
    for name, changes in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            write(folder, hf_config(**changes))
            out[name] = torch_logits(folder, *tokens())
    path = pathlib.Path(__file__).parent / "data" / "golden_logits.npz"
    np.savez_compressed(path, **out)
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
