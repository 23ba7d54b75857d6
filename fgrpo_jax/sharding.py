"""The mesh and its tables: how each parameter and each activation lies on the devices.

Axes: `replica` copies the state, `fsdp` shares rows, parameters and optimizer state, `tp` shares
heads and features. Weights keep Hugging Face's [out, in] order, a leading L where layers are
stacked. The only file that holds a PartitionSpec.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fgrpo_jax import UserError

AXES = ("replica", "fsdp", "tp")
ROWS = ("replica", "fsdp")

PARAMS = (  # path, axes
    (r"(embed_tokens|lm_head)/weight", (("tp", "fsdp"), None)),  # VD; split both ways it would
    # be rematerialised in full by XLA
    (r"self_attn/[qkv]_proj/weight", (None, "tp", None, "fsdp")),  # LQHD, LKHD
    (r"self_attn/[qkv]_proj/bias", (None, "tp", None)),  # LQH, LKH
    (r"self_attn/o_proj/weight", (None, "fsdp", "tp", None)),  # LDQH
    (r"mlp/(gate|up)_proj/weight", (None, "tp", "fsdp")),  # LFD
    (r"mlp/down_proj/weight", (None, "fsdp", "tp")),  # LDF
    (r"self_attn/[qkv]_proj/lora_A", (None, None, "fsdp")),  # LRD, R the adapter's rank
    (r"self_attn/[qkv]_proj/lora_B", (None, "tp", None, None)),  # LQHR, LKHR
    (r"self_attn/o_proj/lora_A", (None, None, "tp", None)),  # LRQH
    (r"mlp/(gate|up)_proj/lora_A", (None, None, "fsdp")),  # LRD
    (r"mlp/(gate|up)_proj/lora_B", (None, "tp", None)),  # LFR
    (r"mlp/down_proj/lora_A", (None, None, "tp")),  # LRF
    (r"(o|down)_proj/lora_B", (None, "fsdp", None)),  # LDR
    (r"(input|post_attention)_layernorm/weight", (None, None)),  # LD
    (r"self_attn/[qk]_norm/weight", (None, None)),  # LH
    (r"norm/weight", (None,)),  # D
)

ACTIVATIONS = {
    "BD": (ROWS, None),
    "BTD": (ROWS, None, None),
    "BtD": (ROWS, "tp", None),  # the residual stream between layers: columns shared too
    "VD": ("tp", None),  # the embedding while it is read
    "BTF": (ROWS, None, "tp"),
    "BTQH": (ROWS, None, "tp", None),
    "BQH": (ROWS, "tp", None),
    "BKH": (ROWS, "tp", None),
    "BKSH": (ROWS, "tp", None, None),
    "LBKSH": (None, ROWS, "tp", None, None),
    "BV": (ROWS, "tp"),
    "BXV": (ROWS, "tp", None),  # X: parts of the vocabulary
    "TB": (None, ROWS),
    "BTV": (ROWS, None, "tp"),
    "B": (ROWS,),
    "BT": (ROWS, None),
    "ZZB": (None, None, ROWS),  # Z: minibatches, microbatches
    "ZZBT": (None, None, ROWS, None),
    "": (),  # replicated, of any rank
}


def make_mesh(replica: int, fsdp: int, tp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """All devices as (replica, fsdp, tp), with axes that XLA propagates (Auto)."""
    shape, auto = (replica, fsdp, tp), (AxisType.Auto,) * 3
    try:
        return jax.make_mesh(shape, AXES, axis_types=auto, devices=devices)
    except NotImplementedError:  # no axis is a product of the torus's sides, which then are cut
        laid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(laid, AXES, axis_types=auto)


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """x laid out as ACTIVATIONS says on the mesh of jax.set_mesh; without one, x as it is."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*ACTIVATIONS[axes]))


def local(function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """The function run by every device on its own part of its arguments, on the mesh of
    jax.set_mesh; without one, the function itself. The axes are trees of names in ACTIVATIONS,
    a name for an array or for all arrays of a tree."""
    if jax.sharding.get_abstract_mesh().empty:
        return function
    spec = lambda axes: PartitionSpec(*ACTIVATIONS[axes])
    ins, outs = jax.tree.map(spec, in_axes), jax.tree.map(spec, out_axes)
    return jax.shard_map(function, in_specs=ins, out_specs=outs, check_vma=False)


def shards(*axes: str) -> int:
    """Into how many parts these axes of jax.set_mesh's mesh cut; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in axes)


def constrain_state(tree: Any) -> Any:
    """Params, gradients or a whole state in the `train` layout of jax.set_mesh's mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    return jax.lax.with_sharding_constraint(tree, state_shardings(mesh, tree))


def activation(mesh: Mesh, axes: str) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*ACTIVATIONS[axes]))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def path_name(path: tuple[Any, ...]) -> str:
    """jax.tree_util's key path as "layers/self_attn/q_proj/weight"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def state_shardings(mesh: Mesh | AbstractMesh, tree: Any, layout: str = "train") -> Any:
    """A sharding for each leaf of params, or of any state whose paths end in a parameter's.

    layout: "train" (fsdp x tp), or "decode" (tp only, so that no weight is gathered while
    decoding). Scalars are replicated. Raises ValueError for an array without a rule, UserError
    for one whose axes the mesh does not divide.
    """

    def rule(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_name(path)
        if not leaf.shape:
            return replicated(mesh)
        for pattern, axes in PARAMS:
            if re.search(rf"(^|/){pattern}$", name) and len(axes) == len(leaf.shape):
                break
        else:
            raise ValueError(
                f"parameter {name} of shape {leaf.shape} has no rule in sharding.PARAMS: add one"
            )
        if layout == "decode":
            axes = tuple("tp" if axis is not None and "tp" in axis else None for axis in axes)
        for size, axis in zip(leaf.shape, axes, strict=True):
            names = (axis,) if isinstance(axis, str) else axis or ()
            shards = 1
            for mesh_axis in names:
                shards *= mesh.shape[mesh_axis]
            if size % shards:
                raise UserError(
                    f"parameter {name} of shape {leaf.shape}: {size} is not a multiple of "
                    f"{' x '.join(names)} = {shards}; choose other mesh.fsdp and mesh.tp"
                )
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(rule, tree)
