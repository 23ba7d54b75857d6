"""Compiles the sampler's programs of Qwen2.5-7B for TPUs that are not here, and prints what XLA
says as a line of JSON each.

Run by test_sampler.py in a process of its own: libtpu reads its settings from the environment.
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_OPTIMIZATION_LEVEL=O0 \
        PYTHONPATH=. python tests/tpu_sampler.py v5e:4x4 mesh.tp=4 model.attention=xla
"""

import json
import pathlib
import sys

from ahead_of_time import report

from fgrpo_jax import accelerators, config, programs

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "tiny_arithmetic_focal.py"
SETTINGS = (
    "model.path=Qwen2.5-7B rollout.prompts=256 data.max_prompt=1024 rollout.max_response=3072 "
    "rollout.slots=256"
).split()


def main(name, *settings):
    topology = accelerators.topology(name)
    c = config.load(str(CONFIG), [*SETTINGS, *settings])
    built = programs.build(c, topology, 1, programs.devices(topology))
    print(json.dumps(dict(cache=built.parts["cache"])), flush=True)
    for program in ("decode", "move_back", "prefill"):
        report(program, built.programs[program]())


if __name__ == "__main__":
    main(*sys.argv[1:])
