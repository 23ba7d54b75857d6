"""Params -> folders that transformers and peft read. A folder appears whole or not at all; every
host must call, and the main one writes."""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from fgrpo_jax import distributed, sharding, storage
from fgrpo_jax.adapters import Lora
from fgrpo_jax.jsons import read_json
from fgrpo_jax.weights import hf_names, hf_shape

FILE = 4 << 30  # most bytes of a written file
BESIDE = ("*token*", "generation_config.json", "chat_template*", "vocab*", "merges*")


@contextlib.contextmanager
def _whole(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty folder beside it that takes its place at the end."""
    if not distributed.is_main():
        yield folder
        return
    partial, old = (folder.with_name(folder.name + end) for end in (".partial", ".old"))
    with storage.at(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)  # its room may be what is lacking
            raise
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old)
        else:
            partial.rename(folder)


def _leaves(params: Any) -> dict[str, jax.Array]:
    return {sharding.path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}


def _copy(like: pathlib.Path, folder: pathlib.Path) -> None:
    """The tokenizer and what else a model's folder holds beside its weights."""
    for pattern in BESIDE:
        for source in like.glob(pattern):
            shutil.copyfile(source, folder / source.name)


def export(folder: pathlib.Path, params: Any, like: pathlib.Path) -> None:
    """Writes a Hugging Face folder of float32 weights that transformers and `weights.load` read,
    with the config.json and the tokenizer of the folder `like`."""
    from safetensors.numpy import save_file

    leaves = _leaves(params)
    plan: list[list[tuple[str, str, int | None]]] = [[]]  # file -> (HF name, leaf, layer)
    size = 0
    for name, leaf in leaves.items():
        layers = leaf.shape[0] if name.startswith("layers/") else 1
        for i, hf_name in enumerate(hf_names(name, layers)):
            if size and size + leaf.nbytes // layers > FILE:
                plan.append([])
                size = 0
            plan[-1].append((hf_name, name, i if name.startswith("layers/") else None))
            size += leaf.nbytes // layers
    weight_map = {}
    with _whole(folder) as partial:
        for i, entries in enumerate(plan):
            file = (
                "model.safetensors"
                if len(plan) == 1
                else f"model-{i + 1:05d}-of-{len(plan):05d}.safetensors"
            )
            tensors = {}
            for hf_name, name, layer in entries:
                leaf = leaves[name]
                value = distributed.whole(leaf if layer is None else leaf[layer])
                tensors[hf_name] = value.reshape(hf_shape(name, leaf.shape)).astype(np.float32)
                weight_map[hf_name] = file
            if distributed.is_main():
                save_file(tensors, partial / file, metadata={"format": "pt"})
        if not distributed.is_main():
            return
        if len(plan) > 1:
            total = sum(4 * leaf.size for leaf in leaves.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        as_float32 = {"dtype": "float32", "torch_dtype": "float32"}
        config_json = {**read_json(like / "config.json"), **as_float32}
        (partial / "config.json").write_text(json.dumps(config_json, indent=1) + "\n")
        _copy(like, partial)


def export_adapters(folder: pathlib.Path, adapters: Any, lora: Lora, like: pathlib.Path) -> None:
    """Writes the adapters as a peft folder, which names the model's folder `like` as theirs and
    has its tokenizer."""
    from safetensors.numpy import save_file

    tensors = {}
    for name, leaf in _leaves(adapters).items():
        value = distributed.whole(leaf)
        # peft's A is [R, in], its B [out, R]
        shape = (lora.rank, -1) if name.endswith("lora_A") else (-1, lora.rank)
        for i, hf_name in enumerate(hf_names(name, len(value))):
            tensors[f"base_model.model.{hf_name}.weight"] = value[i].reshape(shape)
    with _whole(folder) as partial:
        if not distributed.is_main():
            return
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(like.resolve()),
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": sorted(lora.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (partial / "adapter_config.json").write_text(json.dumps(settings, indent=1) + "\n")
        _copy(like, partial)
