"""python -m fgrpo_jax.weights export --config FILE --workdir RUN --out DIR [--step N]

Writes a run's checkpoint, the newest or that of a step, as a Hugging Face folder that transformers,
vLLM and fgrpo_jax.evaluate load; adapters as lora.export says. --config, --method and
--config.KEY=VALUE are the run's own.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

import jax

from fgrpo_jax import UserError, build, checkpoint, config, distributed, sharding, validation
from fgrpo_jax import main as command_line
from fgrpo_jax import tokenizer as tokenizers
from fgrpo_jax import workdir as workdirs
from fgrpo_jax.batches import updates_a_step
from fgrpo_jax.config import Config
from fgrpo_jax.manifest import checksums
from fgrpo_jax.optimizer import make_optimizer, make_schedule
from fgrpo_jax.update import abstract_state
from fgrpo_jax.weights import load, resolve


def release(c: Config, workdir: pathlib.Path, out: pathlib.Path, step: int | None = None) -> int:
    """Writes the checkpoint of a run to `out`; its step. Raises UserError, StorageError."""
    if not (workdir / "config.json").exists():
        raise UserError(f"{workdir} holds no run: give --workdir the folder of one")
    if out.exists():
        raise UserError(f"{out} exists: remove it, or give another --out")
    workdirs.check(c, workdir)
    folder = resolve(c.model.path)
    mesh = sharding.make_mesh(*validation.check_mesh(c, jax.device_count(), distributed.hosts()))
    policy = build.make_policy(c, folder, tokenizers.load(folder))
    optimizer = make_optimizer(c.optim, make_schedule(c.optim, updates_a_step(c)))
    with jax.set_mesh(mesh), workdirs.locked(workdir):
        checkpoints = checkpoint.of(c, workdir)
        base = load(folder, policy, mesh, policy.dtype) if policy.lora else None
        checkpoints.beside = checksums(base)  # the adapters' model, which must be the run's
        state = checkpoints.restore(abstract_state(policy, optimizer, mesh), step)
        if state is None:
            there = ", ".join(map(str, checkpoints.steps)) or "none"
            of = "" if step is None else f" of step {step}"
            raise UserError(f"{checkpoints.folder} has no checkpoint{of}: there are {there}")
        build.export_policy(c, policy, mesh, folder, out, state.params)
    return int(state.step)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fgrpo_jax.weights", allow_abbrev=False)
    parser.add_argument("action", choices=["export"])
    parser.add_argument("--config", required=True, help="the run's")
    parser.add_argument("--method", action="append", default=[], help="the run's")
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="the run's")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="the new folder")
    parser.add_argument("--step", type=int, help="of the checkpoint; default the newest")
    arguments, rest = parser.parse_known_args(argv)

    def work() -> None:
        c = config.load(arguments.config, command_line.overrides(rest), arguments.method)
        distributed.start()
        step = release(c, arguments.workdir, arguments.out, arguments.step)
        if distributed.is_main():
            print(f"step {step} of {arguments.workdir}: {arguments.out}")

    return command_line.exit_code(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
