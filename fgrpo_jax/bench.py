"""python -m fgrpo_jax.bench losses|sampler|update|step: what a part costs on this machine."""

import argparse
import sys

from fgrpo_jax import UserError, bench_losses, bench_sampler, bench_update


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fgrpo_jax.bench", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    losses = parts.add_parser("losses", help="value and gradient of each surrogate")
    losses.add_argument("--repeats", type=int, default=20)
    sampler = parts.add_parser("sampler", help="prefill and decode of a random model, as JSON")
    update = parts.add_parser(
        "update", aliases=["step"], help="an update, and a step of rollout and update, as JSON"
    )
    for part in (sampler, update):
        part.add_argument("--repeats", type=int, default=5)
        part.add_argument(
            "--shape",
            default="reference",
            choices=bench_sampler.SHAPES,
            help="what the flags below change",
        )
        for name, options in bench_sampler.FLAGS.items():
            part.add_argument(f"--{name}", **options)
    update.add_argument("--pack", type=int, default=0, help="as learn.pack")
    update.add_argument("--whole", action="store_true", help="pack prompts with their responses")
    update.add_argument("--widths", type=int, default=1, help="as learn.widths")
    update.add_argument(
        "--share",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute a prompt once for its responses",
    )
    arguments = vars(parser.parse_args(argv))
    part = arguments.pop("part")
    if arguments["repeats"] < 1:
        parser.error("--repeats must be above 0")
    try:
        {
            "losses": bench_losses.run,
            "sampler": bench_sampler.run,
            "update": bench_update.run,
            "step": bench_update.run,
        }[part](**arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
