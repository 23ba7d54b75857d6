"""Facts of chips: memory, arithmetic, bandwidth, and the names of topologies."""

import dataclasses
import math
import pathlib
import re

from fgrpo_jax import UserError

ASSETS = pathlib.Path(__file__).parent / "assets" / "accelerators"
NEEDS = {  # platform -> what compiles for it without one
    "tpu": "libtpu: pip install 'fgrpo_jax[plan]', or 'jax[tpu]'",
    "gpu": "the CUDA plugin, though no GPU: pip install 'fgrpo_jax[cuda]', or 'jax[cuda12]'",
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as jax counts them: a TPU chip (both cores of v4 and v5p), or a GPU."""

    name: str  # as in a topology
    platform: str  # tpu or gpu
    gib: float  # of memory that a program can have
    tflops: float  # dense bfloat16, 10^12 a second, sums in float32
    gbs: float  # of memory bandwidth, 10^9 bytes a second
    axes: int = 1  # of a topology's shape
    kinds: tuple[str, ...] = ()  # its jax.Device.device_kind, by any version of the runtime

    def target_config(self) -> str:
        """The GPU as XLA's gpu_target_config describes one; from its data sheet and the CUDA
        programming guide's table of compute capabilities."""
        return (ASSETS / f"{self.name}.pbtxt").read_text()


# TPUs: Google Cloud's pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e". What a program can have
# of v5e's 16 GiB, v6e's 32 and v4's 32 is what XLA's compiler for them allows.
# GPUs: NVIDIA's data sheets of H100 SXM, H200 SXM, A100 80GB SXM and L4 (half of the figures "with
# sparsity"), and the Ada GPU architecture's white paper for the RTX 4090, whose tensor cores run
# at half rate with sums in float32. Memory: what CUDA reports, a little less than the sheet's.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", 31.25, 275.0, 1228.0, 3, ("TPU v4",)),
        Chip("v5e", "tpu", 15.75, 197.0, 819.0, 2, ("TPU v5 lite", "TPU v5e")),
        Chip("v5p", "tpu", 95.0, 459.0, 2765.0, 3, ("TPU v5", "TPU v5p")),
        Chip("v6e", "tpu", 31.25, 918.0, 1640.0, 2, ("TPU v6 lite", "TPU v6e")),
        Chip("h100", "gpu", 79.1, 989.0, 3350.0, kinds=("NVIDIA H100 80GB HBM3",)),
        Chip("h200", "gpu", 139.8, 989.0, 4800.0, kinds=("NVIDIA H200",)),
        Chip("a100", "gpu", 79.15, 312.0, 2039.0, kinds=("NVIDIA A100-SXM4-80GB",)),
        Chip("l4", "gpu", 22.0, 121.0, 300.0, kinds=("NVIDIA L4",)),
        Chip("rtx4090", "gpu", 23.6, 165.0, 1008.0, kinds=("NVIDIA GeForce RTX 4090",)),
    )
}


def chip_of(kind: str) -> Chip | None:
    """The chip of a jax.Device.device_kind; None where it is not in the table."""
    return next((chip for chip in CHIPS.values() if kind in chip.kinds), None)


@dataclasses.dataclass(frozen=True)
class Topology:
    name: str  # as given, "v5e:4x4" or "h100:8"
    chip: Chip
    dims: tuple[int, ...]

    @property
    def devices(self) -> int:
        return math.prod(self.dims)


def topology(name: str) -> Topology:
    """From "v5e:4x4" or "h100:8"; UserError on a chip or shape that is not known."""
    kind, _, shape = name.partition(":")
    chip = CHIPS.get(kind)
    if chip is None:
        raise UserError(f"topology {name!r}: the chip must be one of {', '.join(CHIPS)}")
    example = {1: f"{kind}:8", 2: f"{kind}:4x4", 3: f"{kind}:2x2x2"}[chip.axes]
    if not re.fullmatch("x".join([r"[1-9]\d*"] * chip.axes), shape):
        raise UserError(f"topology {name!r}: write the shape of its devices as in {example}")
    return Topology(name, chip, tuple(map(int, shape.split("x"))))
