"""Compiles a config's programs for a topology that is not here, and says what they need.

plan.py runs this in a process of its own for each topology, since jax and libtpu read the
environment when they start. It prints a line of JSON for each program and one for the whole.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax

from fgrpo_jax import UserError, accelerators, config, flops, roofline, sharding, validation
from fgrpo_jax.hlo import collectives
from fgrpo_jax.jsons import read_json
from fgrpo_jax.programs import build, devices, model_shape

FORM = "1"  # of the reports kept: another is not read
MULTIPLES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def out_of_memory(message: str, arguments: int) -> dict[str, Any] | None:
    """Bytes that XLA wanted, from its error; None if it speaks of something else."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    if used := re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", message):
        beside = 0
    elif used := re.search(
        r"temporaries \(([\d.]+)([KMGT])\) exceeds available HBM .*?\)", message
    ):
        beside = arguments
    else:
        return None
    return {"oom": used[0], "peak": int(float(used[1]) * MULTIPLES[used[2]]) + beside}


def compile_one(
    lowered: Any, arguments: int, folder: pathlib.Path | None, options: list[str]
) -> dict[str, Any]:
    """What XLA says of a lowered program, whose arguments have so many bytes; kept in the folder,
    since executables for devices that are not here cannot be."""
    digest = hashlib.sha256("\n".join([lowered.as_text(), *options]).encode()).hexdigest()
    path = folder / f"{digest}.json" if folder else None
    if path and path.is_file():
        return read_json(path) | {"cached": True}
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if (found := out_of_memory(str(error), arguments)) is None:
            raise UserError(f"XLA cannot compile it: {str(error).splitlines()[0]}") from error
    else:
        memory = compiled.memory_analysis()
        found = {
            "peak": memory.peak_memory_in_bytes
            or memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes,
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "collectives": collectives(compiled.as_text()),
        }
    found["seconds"] = round(time.perf_counter() - wall, 1)
    found["cpu_s"] = round(time.process_time() - cpu, 1)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found) + "\n")
    return found | {"cached": False}


def peaks(parts: dict[str, int], programs: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Bytes of a device at the worst moment of each program, with all that is alive then, and of
    the two phases.

    Beside the state, sampling keeps weights in the decode layout, slots and waiting prompts; they
    are gone before the update.
    """
    state = parts["parameters"] + parts["optimizer"]
    beside = {  # what is alive and none of the program's arguments
        "decode_params": state - parts["parameters"] + parts["reference"],
        "prefill": state + parts["reference"] + parts["slots"],
        "decode": state + parts["reference"],
        "move_back": state + parts["reference"] + parts["cache"] - parts["slots"]
        + parts["decode weights"],
        "reference": state - parts["shared"],
        "old": parts["optimizer"] + parts["reference"] + parts["batch"],  # of which it reads part
        "update": parts["reference"],
    }  # fmt: skip
    worst = {name: programs[name]["peak"] + beside[name] for name in programs}
    sampling = ("decode_params", "prefill", "decode", "move_back")
    learning = [size for name, size in worst.items() if name not in sampling]
    return worst | {
        "rollout phase": max(worst[name] for name in sampling),
        "update phase": max(learning),
    }


def versions(platform: str) -> list[str]:
    """Of what compiles for it."""
    names = {"jax", "jaxlib"} | {"tpu": {"libtpu"}, "gpu": {"jax-cuda12-plugin"}}.get(
        platform, set()
    )
    installed = {d.name: d.version for d in importlib.metadata.distributions() if d.name in names}
    return [f"{name} {version}" for name, version in sorted(installed.items())]


def report(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each program's as soon as it is compiled, and at the end the whole topology's."""
    c = config.load(spec["config"], spec["overrides"], spec["methods"])
    topology = accelerators.topology(spec["topology"])
    mean = spec["mean_response"] or max(1, c.rollout.max_response // 2)
    validation.need(
        mean <= c.rollout.max_response,
        f"--mean-response is {mean}: it must be at most rollout.max_response, "
        f"{c.rollout.max_response}",
    )
    model_shape(c.model.path)
    built = build(c, topology, mean, devices(topology))
    job, folder = built.job, pathlib.Path(spec["cache"]) if spec["cache"] else None
    options = [FORM, topology.name, spec["level"], *versions(topology.chip.platform)]
    programs: dict[str, dict[str, Any]] = {}
    for name, lower in built.programs.items():
        start = time.perf_counter()
        lowered = lower()
        lowering = time.perf_counter() - start
        programs[name] = compile_one(lowered, built.arguments[name], folder, options) | {
            "lowering_s": round(lowering, 1)
        }
        yield {"program": name} | programs[name]
    worst = peaks(built.parts, programs)
    rollout, update = worst["rollout phase"], worst["update phase"]
    memory = topology.chip.gib * roofline.GIB
    free = 1 - max(rollout, update) / memory
    out = [name for name, program in programs.items() if "oom" in program]
    fits = not out and free >= roofline.HEADROOM
    yield {
        "topology": topology.name,
        "devices": topology.devices,
        "mesh": dict(zip(sharding.AXES, (job.replica, job.fsdp, job.tp), strict=True)),
        "settings": {
            "learn.microbatch": job.microbatch,
            "learn.pack": c.learn.pack,
            "model.remat": c.model.remat,
            "rollout.slots": job.slots,
        },
        "model": c.model.path,
        "parameters": flops.parameters(job.model),
        "level": spec["level"],
        "versions": options[3:],
        "programs": programs,
        "parts": built.parts,
        "formulas": roofline.memory(job),
        "peaks": worst,
        "memory": memory,
        "free": free,
        "out_of_memory": out,
        "fits": fits,
        "compile_s": round(sum(p["seconds"] for p in programs.values()), 1),
        "roofline": roofline.times(job),
        "suggestions": [] if fits else roofline.suggestions(job, rollout, update),
    }


if __name__ == "__main__":
    try:
        for line in report(json.loads(sys.argv[1])):
            print(json.dumps(line), flush=True)
    except UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(2)
