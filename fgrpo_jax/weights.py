"""Hugging Face safetensors -> sharded params, streamed; and the layout that decodes.

Reading takes one device shard at a time: slices of the file by pread, cast, put on their
device. A host reads only the rows that its own shards lie in (whole, where columns are
shared too), and its memory above the model stays under two shards.
"""

import dataclasses
import math
import os
import pathlib
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from fgrpo_jax import UserError, sharding
from fgrpo_jax.jsons import LIMIT, parse, read_json
from fgrpo_jax.model import Policy
from fgrpo_jax.model_config import ModelConfig
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
    path = folder / "config.json"
    return ModelConfig.from_hugging_face(read_json(path), str(path))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in a file."""

    file: pathlib.Path
    name: str
    offset: int  # bytes
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def read_index(folder: pathlib.Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, from their headers alone.

    The files' names stay in the folder; what they link to may lie elsewhere, as in Hugging Face's
    own cache. Raises UserError for a missing, truncated or malformed file.
    """
    index = folder / "model.safetensors.index.json"
    weight_map: Any = {}
    names = ["model.safetensors"]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        good = isinstance(weight_map, dict) and weight_map
        if not good or not all(map(_names_a_file, weight_map.values())):
            raise UserError(f"{index} has no weight_map of safetensors files in its own folder")
        names = sorted(set(weight_map.values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        found = _read_header(folder / name)
        if twice := tensors.keys() & found.keys():
            first = tensors[min(twice)].file
            raise UserError(f"checkpoint files {first} and {name} both have tensor {min(twice)}")
        tensors |= found
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise UserError(f"{index} says that {file} has tensor {name!r:.200}, and it has not")
    return tensors


def _names_a_file(name: Any) -> bool:
    return isinstance(name, str) and bool(
        re.fullmatch(r"[A-Za-z0-9_.=+-]{1,200}\.safetensors", name)
    )


def _read_header(path: pathlib.Path) -> dict[str, Tensor]:
    """A file's tensors; nothing of the size that a header names is made before it is known to be
    the file's."""
    if not path.is_file():
        raise UserError(f"checkpoint file {path} is missing: copy the whole folder again")
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > size - 8:
                raise UserError(f"checkpoint file {path} is truncated or no safetensors file")
            if length > LIMIT:
                raise ValueError(f"it has {length} bytes, and a model's has at most {LIMIT}")
            header = parse(file.read(length), strict=True)
        if not isinstance(header, dict):
            raise ValueError("it is no object")
        header.pop("__metadata__", None)
        tensors = [_tensor(path, 8 + length, *item) for item in header.items()]
        end = 8 + length
        for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.end)):
            if tensor.offset != end:
                raise ValueError(
                    f"{tensor.name} begins at byte {tensor.offset}, and what is before it ends at "
                    f"{end}"
                )
            end = tensor.end
    except OSError as error:
        raise UserError(f"checkpoint file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"checkpoint file {path} has a malformed header: {error}") from error
    if end > size:
        raise UserError(
            f"checkpoint file {path} is truncated: its tensors end at byte {end}, the file at "
            f"{size}; copy it again"
        )
    if end < size:
        raise UserError(
            f"checkpoint file {path} has {size - end} bytes behind its last tensor: copy it again"
        )
    return {tensor.name: tensor for tensor in tensors}


def _tensor(path: pathlib.Path, start: int, name: str, entry: Any) -> Tensor:
    """A tensor as its entry in the header has it; ValueError."""
    if len(name) > 200 or not name.isprintable():
        raise ValueError(f"{name!r:.40} is no name of a tensor")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{name} lacks its dtype, shape or data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not (_sizes(shape) and _sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"{name} has a shape or data_offsets that are no lists of sizes")
    dtype = DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise ValueError(
            f"{name} is of dtype {entry['dtype']!s:.20}, and must be one of {', '.join(DTYPES)}"
        )
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has a shape of another size than its data_offsets")
    return Tensor(path, name, start + begin, dtype, tuple(shape))


def _sizes(value: Any) -> bool:
    """Whether it is a list of few whole numbers from 0, none of them absurd."""
    good = isinstance(value, list) and len(value) <= 8
    return good and all(type(size) is int and 0 <= size < 1 << 60 for size in value)


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
            raise UserError(
                f"checkpoint {folder} has tensor {name}, which its config.json has no place for"
            )
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
            if len(data) != (last - first) * row:
                raise UserError(f"checkpoint file {tensor.file} has changed while it was read")
            block = np.frombuffer(data, tensor.dtype).reshape(last - first, *shape[1:])
            part = out[first - begin : last - begin]
            part[...] = block[:, *rest]
            if not np.isfinite(part).all():  # a tenth of the reading; else told after a step
                raise UserError(
                    f"checkpoint file {tensor.file}: tensor {tensor.name} has a weight that is "
                    "not finite: copy it again"
                )
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


if __name__ == "__main__":
    from fgrpo_jax.release import main

    sys.exit(main(sys.argv[1:]))
