"""What a run reports: metrics.jsonl, evaluations, and a progress line."""

import contextlib
import json
import math
import pathlib
import resource
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from fgrpo_jax import UserError, distributed, jsons, storage
from fgrpo_jax.answers import VERDICTS
from fgrpo_jax.structs import Rollouts


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Means over the rows of all hosts, and the shares of groups by what they can teach.

    Of all that was sampled, before groups or samples were chosen, with rewards as the judge gave
    them.
    """
    rate_P = rollouts.correct_PN.mean(axis=1)
    rows, prompts = len(rollouts.mask_BT), len(rate_P)
    sums = {  # and of how many each is the mean; None: of none
        "reward": (rollouts.reward_PN.sum(), rows),
        "pass_rate": (rate_P.sum(), prompts),
        "groups_all_wrong": ((rate_P == 0).sum(), prompts),
        "groups_mixed": (((rate_P > 0) & (rate_P < 1)).sum(), prompts),
        "groups_all_right": ((rate_P == 1).sum(), prompts),
        "prompts_drawn": (prompts, None),
        "response_tokens": (rollouts.mask_BT.sum(), rows),
        "truncated": ((~rollouts.finished_B).sum(), rows),  # no stop token within the limit
        **{f"verdict/{name}": (rollouts.verdicts.count(name), None) for name in VERDICTS},
    }
    over = distributed.totals([(total, of or 0) for total, of in sums.values()])
    return {
        name: float(total / of) if of else round(total)
        for name, (total, of) in zip(sums, over, strict=True)
    }


FIELDS = ("reward", "groups_mixed", "skipped", "wall_s", "cpu_s")  # of steps, that are read again


class Journal:
    """A JSON Lines file of records that each have a "step"; appended to, and cut on resume.

    The main process reads and writes; the others are told what there was.
    """

    def __init__(
        self, path: pathlib.Path, step: int, fields: Sequence[str] = (), remember: bool = True
    ):
        """Keeps the records up to `step`: those after it will be written again. The last line may
        be what a killed process was writing; UserError where another one is no record.

        fields: what each record must have.
        remember: whether `records` grows with what is written.
        """
        self.path, self.remember = path, remember
        self.records: list[dict[str, Any]] = []
        if distributed.is_main():
            self.records = [
                record for record in read_records(path, fields) if record["step"] <= step
            ]
            storage.write(path, "".join(json.dumps(record) + "\n" for record in self.records))
        self.records = distributed.from_main(self.records)

    def write(self, record: dict[str, Any]) -> None:
        record = {name: _plain(value) for name, value in record.items()}
        if self.remember:
            self.records.append(record)
        if distributed.is_main():
            storage.append(self.path, json.dumps(record) + "\n")


def best(records: list[dict[str, Any]], metric: str, steps: Collection[int]) -> dict[str, Any]:
    """Step and value of the evaluation that is best by a metric, the first of equals, among those
    of the steps; without metric or such a record, no step's."""
    there = [record for record in records if record["step"] in steps]
    if not metric or not there:
        return {"step": -1}
    record = max(there, key=lambda record: record[metric])
    return {"step": record["step"], metric: record[metric]}


def _plain(value: Any) -> Any:
    """As JSON has it, which knows neither NaN nor infinity: None."""
    value = value.item() if isinstance(value, np.generic | np.ndarray) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_records(path: pathlib.Path, fields: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Those of a journal that no process writes to."""
    records = []
    lines = jsons.read_lines(path)
    for number, line in enumerate(lines, 1):
        try:
            record = jsons.parse(line)
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise ValueError("it has no step")
            if lacks := [name for name in fields if name not in record]:
                raise ValueError(f"it has no {lacks[0]}")
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(
                f"{path}, line {number} is no record of a run: remove the line, or give another "
                "--workdir"
            ) from error
        records.append(record)
    return records


class Clock:
    """Wall and CPU seconds of the run, over all the processes that it took."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), 0.0

    def go_on(self, records: list[dict[str, Any]]) -> None:
        """Adds what a run had taken by the last of its records."""
        if records:
            try:
                self._wall -= records[-1]["wall_s"]
                self._cpu += records[-1]["cpu_s"]
            except (KeyError, TypeError) as error:
                raise UserError(
                    f"the metrics of step {records[-1]['step']} have no wall_s and cpu_s in "
                    "seconds: give another --workdir"
                ) from error

    def read(self) -> dict[str, float]:
        """CPU seconds are this process's and those of its children that have ended."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = self._cpu + time.process_time() + children.ru_utime + children.ru_stime
        return {"wall_s": round(time.monotonic() - self._wall, 3), "cpu_s": round(cpu, 3)}


STAGES = ("rollout", "scoring", "logprobs", "update")  # of a step
BESIDE = ("eval", "checkpoint", "profile")  # what a run does between and around steps


class Stopwatch:
    """Where the wall time goes: `with watch("rollout"): ...`, also the name in a profile.

    A stage may be entered again and within another, and each second counts for the innermost. To
    be honest a stage waits for what it has started on the devices.

    entered: told the name of the innermost stage whenever it is another.
    """

    def __init__(self, entered: Callable[[str], None] = lambda stage: None) -> None:
        self._entered = entered
        self._open = ["idle"]
        self._turned = time.monotonic()
        self._seconds = self._zero()

    @staticmethod
    def _zero() -> dict[str, float]:
        return {name: 0.0 for name in (*STAGES, "idle", *BESIDE)}

    def _turn(self) -> None:
        """Gives the time since the last turn to the innermost stage."""
        now = time.monotonic()
        self._seconds[self._open[-1]] += now - self._turned
        self._turned = now

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._turn()
        self._open.append(stage)
        self._entered(stage)
        try:
            with jax.profiler.TraceAnnotation(stage):
                yield
        finally:
            self._turn()
            self._open.pop()
            self._entered(self._open[-1])

    def lap(self) -> dict[str, float]:
        """Seconds by stage since the last lap: those of STAGES and idle make up step_s."""
        self._turn()
        seconds, self._seconds = self._seconds, self._zero()
        step = {f"{name}_s": seconds[name] for name in (*STAGES, "idle")}
        beside = {f"{name}_s": seconds[name] for name in BESIDE}
        return {**step, "step_s": sum(step.values()), **beside}


class Bar:
    """The progress bar; where output is no terminal, a line about every tenth of the way."""

    def __init__(self, steps: int, done: int, console: Console):
        self.steps, self.console = steps, console
        self.live, self.alarmed = console.is_terminal, False
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeLeft(compact=True),
            TextColumn("{task.fields[sampled]}"),
            console=console,
            disable=not self.live,
        )
        self.task = self.progress.add_task(
            "train", total=steps, completed=done, numbers="", sampled=""
        )

    def watch(self, responses: int, of: int, tokens: int, steps: int) -> None:
        """Shows how far sampling is."""
        text = f"sampled {responses}/{of} in {steps:,} steps, {tokens:,} tokens"
        text = text if responses < of else ""
        self.progress.update(self.task, sampled=text)

    def show(self, step: int, record: dict[str, Any]) -> None:
        numbers = "  ".join(
            f"{label} {record[name]:{form}}"
            for label, name, form in (
                ("reward", "reward", ".3f"),
                ("pass rate", "pass_rate", ".3f"),
                ("loss", "loss", ".3f"),
                ("tokens/s", "tokens_per_s", ",.0f"),
            )
            if name in record
        )
        self.progress.update(self.task, completed=step, numbers=numbers)
        if not self.live and (step % max(1, self.steps // 10) == 0 or step == self.steps):
            left = self.progress.tasks[self.task].time_remaining
            eta = "" if left is None else f"  {left:.0f} s left"
            self.console.print(f"step {step}/{self.steps}  {numbers}{eta}", highlight=False)
        if record.get("drift_alarm") and not self.alarmed:
            self.alarmed = True
            self.console.print(
                f"warning: step {step}: the log-probabilities of sampler and trainer differ by "
                f"{record['drift_mean']:.3g} nats a token, more than rollout.max_drift; "
                "model.dtype=float32 tells rounding from a fault",
                highlight=False,
            )

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
