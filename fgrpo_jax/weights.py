"""Hugging Face safetensors -> sharded params, streamed; and the layout that decodes.

Reading takes one device shard at a time: slices of the file by pread, cast, put on their
device. A host reads only the rows that its own shards lie in (whole, where columns are
shared too), and its memory above the model stays under two shards.
"""

import dataclasses
import json
import math
import os
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from fgrpo_jax import UserError, sharding
from fgrpo_jax.model import ModelConfig, Policy
from fgrpo_jax.tokenizer import read_json
from fgrpo_jax.validation import Config

READ = 8 << 20  # bytes of whole rows read at a time
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
EMBEDDED = pathlib.Path(__file__).parent / "assets"


def resolve(path: str, key: str = "model.path") -> pathlib.Path:
    """The folder that a config's key names; UserError where there is none."""
    if path.startswith("embedded:"):
        folder = EMBEDDED / path.removeprefix("embedded:")
    else:
        folder = pathlib.Path(path)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{key} is {path}: there is no {folder}/config.json; give a Hugging Face folder"
        )
    return folder


def model_config(folder: pathlib.Path) -> ModelConfig:
    """The model's shape, from the folder's config.json."""
    return ModelConfig.from_hugging_face(read_json(folder / "config.json"))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in a file."""

    file: pathlib.Path
    offset: int  # bytes
    dtype: np.dtype
    shape: tuple[int, ...]


def read_index(folder: pathlib.Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, from their headers alone.

    Raises UserError for a missing, truncated or malformed file.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if not names or any(pathlib.Path(str(name)).name != name for name in names):
            raise UserError(f"{index} has no weight_map of files in its own folder")
    else:
        names = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= _read_header(folder / name)
    return tensors


def _read_header(path: pathlib.Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"checkpoint file {path} is missing: copy the whole folder again")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, 100 << 20):
            raise UserError(f"checkpoint file {path} is truncated or no safetensors file")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {}
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
                if end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
                    raise UserError(
                        f"checkpoint file {path}: {name} has a wrong size in the header"
                    )
                if 8 + length + end > size:
                    raise UserError(
                        f"checkpoint file {path} is truncated: {name} ends at byte "
                        f"{8 + length + end}, the file at {size}; copy it again"
                    )
                tensors[name] = Tensor(path, 8 + length + begin, dtype, shape)
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"checkpoint file {path} has a malformed header: {error}") from error
        except KeyError as error:
            raise UserError(f"checkpoint file {path}: {error} is not supported") from error
    return tensors


def hf_names(name: str, layers: int) -> list[str]:
    """Hugging Face's names of a leaf, one a layer where it is stacked."""
    dotted = name.replace("/", ".")
    if name.startswith("layers/"):
        rest = dotted.removeprefix("layers.")
        return [f"model.layers.{i}.{rest}" for i in range(layers)]
    return [dotted if name.startswith("lm_head") else f"model.{dotted}"]


def hf_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Hugging Face's shape of one layer of a leaf: heads and head size are one axis there."""
    shape = shape[1:] if name.startswith("layers/") else shape
    if "o_proj" in name:
        return (shape[0], math.prod(shape[1:]))
    if "self_attn" in name:
        return (math.prod(shape[:2]), *shape[2:])
    return shape


def check(folder: pathlib.Path, policy: Policy) -> dict[str, Tensor]:
    """The folder's tensors, from headers alone; UserError naming one that is missing,
    unexpected or of another shape than the policy's."""
    tensors = read_index(folder)
    expected = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(_shapes(policy)):
        name = sharding.path_name(path)
        names = hf_names(name, policy.config.layers)
        expected |= dict.fromkeys(names, hf_shape(name, leaf.shape))
    for name, shape in expected.items():
        if name not in tensors:
            raise UserError(f"checkpoint {folder} lacks tensor {name}, which its config.json needs")
        if tensors[name].shape != shape:
            raise UserError(
                f"checkpoint {folder}: tensor {name} has shape {tensors[name].shape}, and "
                f"config.json needs {shape}"
            )
    for name in tensors.keys() - expected.keys():
        tied_head = name == "lm_head.weight" and policy.config.tied
        if not tied_head and not name.endswith("rotary_emb.inv_freq"):
            raise UserError(f"checkpoint {folder} has tensor {name}, which Qwen2 has no place for")
    return tensors


def _shapes(policy: Policy) -> Any:
    return jax.eval_shape(policy.init, jax.random.key(0))


def load(folder: pathlib.Path, policy: Policy, mesh: Mesh, dtype: Any = np.float32) -> Any:
    """The folder's params, cast, in the `train` layout of the mesh. Raises as `check`."""
    tensors = check(folder, policy)
    shapes = _shapes(policy)

    def leaf(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct, target) -> jax.Array:
        name = sharding.path_name(path)
        sources = [tensors[hf_name] for hf_name in hf_names(name, policy.config.layers)]
        stacked = name.startswith("layers/")
        places: dict[tuple, list[Any]] = {}
        for device, index in target.addressable_devices_indices_map(shape.shape).items():
            bounds = tuple(s.indices(size)[:2] for s, size in zip(index, shape.shape, strict=True))
            places.setdefault(bounds, []).append(device)
        arrays = []
        for bounds, devices in places.items():
            shard = np.empty([end - begin for begin, end in bounds], dtype)
            if stacked:
                for i, layer in enumerate(range(*bounds[0])):
                    _read_slice(sources[layer], shape.shape[1:], bounds[1:], shard[i])
            else:
                _read_slice(sources[0], shape.shape, bounds, shard)
            arrays += [jax.device_put(shard, device) for device in devices]
            jax.block_until_ready(arrays[-1])  # frees the shard before the next is read
        return jax.make_array_from_single_device_arrays(shape.shape, target, arrays)

    return jax.tree_util.tree_map_with_path(leaf, shapes, sharding.state_shardings(mesh, shapes))


def _read_slice(
    tensor: Tensor, shape: tuple[int, ...], bounds: tuple[tuple[int, int], ...], out: np.ndarray
) -> None:
    """out[...] = the slice `bounds` of a tensor seen as `shape`, by blocks of whole rows."""
    (begin, end), rest = bounds[0], tuple(slice(*bound) for bound in bounds[1:])
    row = math.prod(shape[1:]) * tensor.dtype.itemsize
    step = max(1, READ // row)
    descriptor = os.open(tensor.file, os.O_RDONLY)
    try:
        for first in range(begin, end, step):
            last = min(first + step, end)
            data = os.pread(descriptor, (last - first) * row, tensor.offset + first * row)
            block = np.frombuffer(data, tensor.dtype).reshape(last - first, *shape[1:])
            out[first - begin : last - begin] = block[:, *rest]
    finally:
        os.close(descriptor)


def unrolls(c: Config, platform: str) -> bool:
    """Whether the layers that decode are unrolled on devices of this kind."""
    return c.rollout.unroll == "yes" or (c.rollout.unroll == "auto" and platform != "tpu")


def make_decode_params(policy: Policy, mesh: Mesh, unroll: bool = False) -> Callable[..., Any]:
    """The jitted decode_params(params, base=None): a copy in the `decode` layout and the compute
    dtype, so that no weight is gathered or cast inside the decode loop. Adapters stay beside the
    weights, in whose bfloat16 the first of their updates would be lost.

    unroll: whether each layer is a block of its own, so that none is cut out of a stack there
    either; the program grows with the layers.
    """

    @jax.named_scope("rollout")
    def decode_params(params: Any, base: Any = None) -> Any:
        weights = policy.weights(params, base)
        params = jax.tree.map(lambda x: x.astype(policy.dtype), weights)
        if not unroll:
            return params
        block = lambda i: jax.tree.map(lambda x: x[i : i + 1], params["layers"])
        return params | {"layers": tuple(map(block, range(policy.config.layers)))}

    key = jax.random.key(0)
    shapes = jax.eval_shape(
        lambda key: decode_params(policy.trained(key), policy.init(key) if policy.lora else None),
        key,
    )
    return jax.jit(decode_params, out_shardings=sharding.state_shardings(mesh, shapes, "decode"))
