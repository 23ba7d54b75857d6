"""Compiles the update of packed rows for TPUs that are not here, and of rows that are not packed,
and lowers it for a mesh whose axes cut a torus's sides. Run by test_plan.py as test_attention.py
runs tpu_attention.py:
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_OPTIMIZATION_LEVEL=O0 \
        PYTHONPATH=. python tests/tpu_packing.py
"""

import json
import pathlib

from ahead_of_time import report

from fgrpo_jax import accelerators, config, programs

TINY = str(pathlib.Path(__file__).parents[1] / "configs" / "tiny_arithmetic_focal.py")
SETTINGS = (
    "model.dtype=bfloat16 model.remat=attention rollout.prompts=8 learn.minibatch=8 "
    "learn.microbatch=8 rollout.max_response=1024 data.max_prompt=512"
).split()


def lowered(name, model, *overrides):
    settings = [f"model.path={model}", *SETTINGS, *overrides]
    topology = accelerators.topology(name)
    devices = programs.devices(topology)
    built = programs.build(config.load(TINY, settings), topology, 512, devices)
    return built.programs["update"]()


def main():
    for pack in (0, 1536):
        asked = ("mesh.tp=2", f"learn.pack={pack}")
        report(f"learn.pack {pack}", lowered("v5e:2x2", "Qwen2.5-0.5B", *asked))
    text = lowered("v5p:4x4x4", "Qwen2.5-32B", "mesh.fsdp=8", "mesh.tp=8").as_text()
    print(json.dumps({"name": "8 x 8", "partitions": "num_partitions = 64" in text}))


if __name__ == "__main__":
    main()
