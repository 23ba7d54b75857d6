"""LoRA (arXiv 2106.09685): low-rank adapters beside the matrices of the layers, which stay as
they are.

    y = W x + alpha / R * B (A x)

A tree of adapters is params' with `lora_A` [L, R, in] and `lora_B` [L, out, R] where those have
`weight`; in and out are the weight's own axes, of which heads and head size are two.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fgrpo_jax.validation import Config

EQUATIONS = {  # x, W -> y, of the matrices of a layer
    "q_proj": "BTD,QHD->BTQH",
    "k_proj": "BTD,KHD->BTKH",
    "v_proj": "BTD,KHD->BTKH",
    "o_proj": "BTQH,DQH->BTD",
    "gate_proj": "BTD,FD->BTF",
    "up_proj": "BTD,FD->BTF",
    "down_proj": "BTF,DF->BTD",
}


def equations(name: str) -> tuple[str, str, str]:
    """Of an adapter: x, A -> z and z, B -> y, and B, A -> W of all layers.

    >>> equations("o_proj")
    ('BTQH,RQH->BTR', 'BTR,DR->BTD', 'LDR,LRQH->LDQH')
    """
    inputs, out = EQUATIONS[name].split("->")
    x, weight = inputs.split(",")
    read = "".join(axis for axis in weight if axis in x)
    made = "".join(axis for axis in weight if axis in out)
    z = x.removesuffix(read) + "R"
    return f"{x},R{read}->{z}", f"{z},{made}R->{out}", f"L{made}R,LR{read}->L{weight}"


@dataclasses.dataclass(frozen=True)
class Lora:
    """The adapters of a run."""

    rank: int  # R
    alpha: float  # their products count alpha / rank times
    targets: tuple[str, ...]  # matrices of every layer that have one

    def init(self, key: Array, params: Any) -> Any:
        """float32 adapters of params, whose shapes alone are read. A is uniform within
        1 / sqrt(in), as in peft; B is zero, so that nothing is changed yet."""

        def of_matrix(name: str, shape: tuple[int, ...], key: Array) -> dict[str, Array]:
            B, A, W = equations(name)[2].replace("->", ",").split(",")
            size = dict(zip(W, shape, strict=True)) | {"R": self.rank}
            shape_A, shape_B = ([size[axis] for axis in axes] for axes in (A, B))
            bound = math.prod(shape_A[2:]) ** -0.5
            return {
                "lora_A": jax.random.uniform(key, shape_A, minval=-bound, maxval=bound),
                "lora_B": jnp.zeros(shape_B),
            }

        found = [
            (module, name, linear["weight"].shape)
            for module, linears in sorted(params["layers"].items())
            for name, linear in sorted(linears.items())
            if name in self.targets
        ]
        layers: dict[str, Any] = {}
        for (module, name, shape), own in zip(
            found, jax.random.split(key, len(found)), strict=True
        ):
            layers.setdefault(module, {})[name] = of_matrix(name, shape, own)
        return {"layers": layers}

    def join(self, base: Any, adapters: Any) -> Any:
        """The base's params with the adapters in them, as layers.Linear takes them: alpha / R is
        in lora_B then."""

        def overlay(tree: Any, more: Any) -> Any:
            if "lora_A" in more:
                return tree | more | {"lora_B": more["lora_B"] * (self.alpha / self.rank)}
            return {key: overlay(x, more[key]) if key in more else x for key, x in tree.items()}

        return overlay(base, adapters)


def merge(params: Any) -> Any:
    """Joined params with every adapter added to its weight, which becomes float32."""

    def merged(tree: Any, name: str) -> Any:
        if not isinstance(tree, dict):
            return tree
        if "lora_A" not in tree:
            return {key: merged(x, key) for key, x in tree.items()}
        rest = {key: x for key, x in tree.items() if not key.startswith("lora_")}
        product = jnp.einsum(
            equations(name)[2], tree["lora_B"], tree["lora_A"], precision=jax.lax.Precision.HIGHEST
        )
        return rest | {"weight": tree["weight"].astype(jnp.float32) + product}

    return merged(params, "")


def make_lora(c: Config) -> Lora | None:
    """The config's; None where all weights are trained."""
    targets = tuple(c.lora.targets) or tuple(EQUATIONS)
    return Lora(c.lora.rank, c.lora.alpha, targets) if c.lora.rank else None
