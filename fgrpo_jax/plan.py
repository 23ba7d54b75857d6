"""python -m fgrpo_jax.plan --config FILE --topology v5e:4x4 [--topology h100:8] ...

Will it fit, how fast at best, how long to compile: answered without an accelerator. Options:
--method FILE, --config.KEY=VALUE, --level O0|default, --mean-response TOKENS, --json FILE,
--cache FOLDER, --markdown.

The real programs of a step are compiled ahead of time for each topology. Memory is what XLA says
of them; seconds are formulas' (roofline.py), below which no run can be, but by packing its rows,
which they know nothing of. Under 10 % of free memory counts as too little.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fgrpo_jax import UserError, accelerators, config

Report = dict[str, Any]
Rows = tuple[list[str], list[list[str]]]  # headings, and cells
GIB = 2**30
CACHE = pathlib.Path.home() / ".cache" / "fgrpo_jax" / "plan"
SETTINGS = {  # read by jax and libtpu when they start
    "JAX_PLATFORMS": "cpu",  # so that no device here is touched
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # it cannot be read back for devices not here
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
}


def environment(platform: str, level: str) -> dict[str, str]:
    """Of the process that compiles."""
    env = {key: x for key, x in os.environ.items() if key != "JAX_OPTIMIZATION_LEVEL"} | SETTINGS
    if level == "O0":
        env["JAX_OPTIMIZATION_LEVEL"] = "O0"
    if platform == "gpu":  # tuning would need the GPU
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    return env


def compile_for(spec: dict[str, Any], console: Console) -> Report:
    """The report of one topology, compiled in a process of its own."""
    platform = accelerators.topology(spec["topology"]).chip.platform
    command = [sys.executable, "-m", "fgrpo_jax.compiles", json.dumps(spec)]
    result: Report = {}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(platform, spec["level"]),
        ) as process,
    ):
        assert process.stdout
        for line in process.stdout:
            if line.startswith("{"):
                result = json.loads(line)
            if "program" in result:
                source = "kept from before" if result["cached"] else "compiled"
                size = result.get("oom") or f"peak {result['peak'] / GIB:.2f} GiB"
                console.print(
                    f"{spec['topology']}: {result['program']} {source}, "
                    f"{result['seconds']} s, {size}"
                )
        code = process.wait()
        errors.seek(0)
        stderr = errors.read()
    if "error" in result:
        raise UserError(result["error"])
    if code or "fits" not in result:
        last = (stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise UserError(f"{spec['topology']}: compiling ended with exit code {code}: {last}")
    return result


def _gib(size: int | float) -> str:
    return f"{size / GIB:.2f}"


def summary(reports: Sequence[Report]) -> Rows:
    """One row a topology."""
    names = (
        "topology|mesh r x fsdp x tp|micro, remat, slots|rollout GiB|update GiB|of GiB|free|fits"
        "|rollout s|update s|tokens/s/chip|compile s"
    )
    head, rows = [str(name) for name in names.split("|")], []
    for r in reports:
        s, best = r["settings"], r["roofline"]
        rows.append(
            [
                r["topology"],
                " x ".join(str(n) for n in r["mesh"].values()),
                f"{s['learn.microbatch']}, {s['model.remat']}, {s['rollout.slots']}",
                _gib(r["peaks"]["rollout phase"]),
                _gib(r["peaks"]["update phase"]),
                _gib(r["memory"]),
                f"{r['free']:.0%}",
                "yes" if r["fits"] else "no",
                f"{best['rollout_s']:.0f}",
                f"{best['update_s']:.0f}",
                f"{best['tokens_per_s_per_chip']:.0f}",
                f"{r['compile_s']:.0f}",
            ]
        )
    return head, rows


def parts(r: Report) -> Rows:
    """Memory of a device, and when it is taken."""
    p = r["parts"]
    rows = [
        [name, _gib(p[key]), when]
        for name, key, when in (
            ("parameters", "parameters", "always"),
            ("optimizer state", "optimizer", "always"),
            ("reference weights", "reference", "always"),
            ("decode weights", "decode weights", "rollout"),
            ("cache of slots and waiting prompts", "cache", "rollout"),
            ("batch", "batch", "update"),
        )
        if p[key]
    ]
    for name, when in (("decode", "rollout"), ("prefill", "rollout"), ("update", "update")):
        program = r["programs"][name]
        title = "gradients and temporaries" if name == "update" else f"temporaries of {name}"
        beside = program["peak"] - program["arguments"] if "arguments" in program else None
        rows.append([title, "?" if beside is None else _gib(max(0, beside)), when])
    for phase in ("rollout phase", "update phase"):
        rows.append([f"peak of the {phase}", _gib(r["peaks"][phase]), f"of {_gib(r['memory'])}"])
    return ["part of a device's memory", "GiB", "when"], rows


def programs(r: Report) -> Rows:
    """One row a program."""
    head = ["program", "peak GiB, alone", "with all that lives", "compile s"]
    rows = [
        [
            name,
            p.get("oom") or _gib(p["peak"]),
            _gib(r["peaks"][name]),
            f"{p['seconds']:.0f}{' (kept)' if p['cached'] else ''}",
        ]
        for name, p in r["programs"].items()
    ]
    return head, rows


def collectives(r: Report) -> Rows:
    """One row a kind, in loops and outside. How often loops of unknown length turn is left out."""
    head = ["program", "where", "kind", "written", "largest MiB", "GiB a device in all"]
    rows = [
        [
            name,
            where,
            kind,
            str(x["count"]),
            f"{x['largest'] / 2**20:.4g}",
            f"{x['bytes'] / GIB:.4g}",
        ]
        for name, p in r["programs"].items()
        for where, kinds in p.get("collectives", {}).items()
        for kind, x in sorted(kinds.items())
    ]
    return head, rows


def speeds(r: Report) -> Rows:
    """One row a phase."""
    head = ["phase", "TFLOP a chip", "GB a chip", "s at best", "bound by"]
    rows = [
        [
            name,
            f"{cost['flops'] / 1e12:.4g}",
            f"{cost['bytes'] / 1e9:.4g}",
            f"{cost['seconds']:.4g}",
            cost["bound"],
        ]
        for name, cost in r["roofline"]["phases"].items()
    ]
    return head, rows


def show(title: str, table: Rows, console: Console, markdown: bool) -> None:
    head, rows = table
    if not rows:
        return
    if markdown:
        lines = ["", f"{title}", "", *(f"| {' | '.join(row)} |" for row in (head, *rows))]
        lines.insert(4, f"|{'---|' * len(head)}")
        console.print("\n".join(lines), soft_wrap=True)
        return
    drawn = Table(*head, title=title)
    for row in rows:
        drawn.add_row(*row)
    console.print(drawn)


def verdict(r: Report) -> list[str]:
    """Does it fit, and if not, what would."""
    peak = max(r["peaks"]["rollout phase"], r["peaks"]["update phase"])
    if r["fits"]:
        return [f"{r['topology']}: fits, with {r['free']:.0%} of {_gib(r['memory'])} GiB free"]
    why = (
        f"{r['topology']}: does not fit: it needs {_gib(peak)} GiB and has {_gib(r['memory'])}, of "
        "which 10% must stay free"
    )
    if r["out_of_memory"]:
        said = "; ".join(f"{n}: {r['programs'][n]['oom']}" for n in r["out_of_memory"])
        why += f"; out of memory in {said}"
    tips = [f"  would fit: {tip}" for tip in r["suggestions"]]
    none = "  no smaller microbatch, full remat, fewer slots or other fsdp x tp would make it fit"
    return [why, *(tips or [none])]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fgrpo_jax.plan", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--config", required=True, help="Python file with get_config()")
    add("--method", action="append", default=[], help="Python file with apply(c)")
    add("--topology", action="append", required=True, help="v5e:4x4, v5p:2x2x4, h100:8; repeatable")
    add("--level", choices=["O0", "default"], default="O0", help="of optimisation; O0: 7 x cheaper")
    add("--mean-response", type=int, default=0, help="tokens; default half of the most")
    add("--json", type=pathlib.Path, help="file for the reports")
    add("--cache", type=pathlib.Path, default=CACHE, help=f"of compiled reports; {CACHE}")
    add("--markdown", action="store_true", help="tables as Markdown")
    flags, rest = parser.parse_known_args(argv)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    reports, mistakes = [], []
    try:
        for flag in rest:
            if not flag.startswith("--config."):
                raise UserError(f"unknown flag {flag}: settings are given as --config.KEY=VALUE")
        overrides = [flag.removeprefix("--config.") for flag in rest]
        config.load(flags.config, overrides, flags.method)
        for name in flags.topology:
            accelerators.topology(name)
        if flags.mean_response < 0:
            raise UserError(f"--mean-response is {flags.mean_response}: it must not be below 0")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in flags.topology:
        spec = dict(
            config=flags.config, methods=flags.method, overrides=overrides, topology=name,
            mean_response=flags.mean_response, cache=str(flags.cache), level=flags.level,
        )  # fmt: skip
        try:
            reports.append(compile_for(spec, console))
        except UserError as error:
            mistakes.append(str(error))
    for r in reports:
        show(f"{r['topology']}: memory", parts(r), console, flags.markdown)
        show(f"{r['topology']}: programs", programs(r), console, flags.markdown)
        show(f"{r['topology']}: collectives", collectives(r), console, flags.markdown)
        mean = r["roofline"]["mean_response"]
        title = f"{r['topology']}: a step at best, responses of {mean} tokens on average"
        if r["settings"]["learn.pack"]:
            title += "; the update's rows as if they were not packed"
        show(title, speeds(r), console, flags.markdown)
    if reports:
        show(f"{flags.config}, {reports[0]['model']}", summary(reports), console, flags.markdown)
        console.print("\n" + "\n".join(line for r in reports for line in verdict(r)))
    if flags.json:
        flags.json.write_text(json.dumps(reports, indent=1) + "\n")
    for sentence in mistakes:
        print(f"error: {sentence}", file=sys.stderr)
    return 2 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
