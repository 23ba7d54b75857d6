"""What a checkpoint is of, and how to tell that it is still what was saved: manifest.json."""

import json
import math
import os
import pathlib
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from fgrpo_jax import jsons, sharding, storage

NAME = "manifest.json"
KEYS = {"keys", "leaves", "checksums", "beside", "files"}
SMALL = 1 << 20  # bytes of a file whose content is known too


class Damaged(Exception):
    """A checkpoint that is not what was saved."""


def sealed(manifest: dict[str, Any]) -> str:
    """The file's text, in which any change can be told."""
    content = json.dumps(manifest)
    return json.dumps({"content": content, "crc32": zlib.crc32(content.encode())})


def read(path: epath.Path) -> dict[str, Any]:
    """That of a checkpoint. Raises Damaged."""
    try:
        sealed = jsons.parse((path / NAME).read_bytes())
        if zlib.crc32(sealed["content"].encode()) == sealed["crc32"]:
            manifest = jsons.parse(sealed["content"].encode())
            if manifest.keys() == KEYS:
                return manifest
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise Damaged(f"its {NAME} is missing or garbled")


def write(path: epath.Path, manifest: dict[str, Any]) -> None:
    """Seals a local checkpoint, and returns when all of it is on the disk itself."""
    (path / NAME).write_text(sealed(manifest | {"files": files(path)}))
    for folder, _, names in os.walk(path):
        for name in (*names, "."):
            storage.settle(os.path.join(folder, name))


def files(path: epath.Path) -> dict[str, list[int]]:
    """Size of each file, and the checksum of a small one."""
    found = {}

    def refuse(error: OSError) -> None:
        raise error

    for folder, _, names in os.walk(path, onerror=refuse):
        for file in (pathlib.Path(folder, name) for name in names if name != NAME):
            size = file.stat().st_size
            content = [zlib.crc32(file.read_bytes())] if size <= SMALL else []
            found[str(file.relative_to(path))] = [size, *content]
    return found


def check_files(path: epath.Path, saved: dict[str, list[int]]) -> None:
    """Raises Damaged where a file is not as it was saved; others may be there too."""
    found = files(path) if saved else {}
    for name, content in sorted(saved.items()):
        if found.get(name) != content:
            raise Damaged(f"{name} {'has changed' if name in found else 'is missing'}")


def leaves(tree: Any) -> dict[str, str]:
    """Type and shape of each leaf, by its name."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {sharding.path_name(p): f"{x.dtype}{list(x.shape)}" for p, x in pairs}


def checksums(tree: Any) -> dict[str, int]:
    """Of each leaf, the sum of its elements' bits, each times an odd number of its place's own,
    modulo 2 ** 32: computed where the leaf lies, the same in every layout, changed by any one
    flipped bit of elements of at most 32."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
    return {sharding.path_name(p): int(s) for (p, _), s in zip(leaves, sums, strict=True)}


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    def one(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        place = jnp.zeros(x.shape, jnp.uint32)
        for axis in range(x.ndim):
            stride = jnp.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
            place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
        return (bits.astype(jnp.uint32) * (2 * place + 1)).sum(dtype=jnp.uint32)

    return [one(leaf) for leaf in leaves]
