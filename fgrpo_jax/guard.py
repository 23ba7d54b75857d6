"""Numbers that go bad in training: the batch is kept, the user told, the run ended in time."""

import io
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from fgrpo_jax import UserError, distributed, storage
from fgrpo_jax.structs import Rollouts
from fgrpo_jax.validation import Config

REASONS = {  # of a skipped update
    "not_finite": "loss or gradient is not finite",
    "spike": "the gradient norm is above guard.spike times the typical one",
    "drift": "sampler and trainer differ by more than rollout.max_drift",
}


class Guard:
    """Looks at each step's record, and goes on where an earlier process of the run left off."""

    def __init__(
        self,
        c: Config,
        folder: pathlib.Path,
        records: list[dict[str, Any]],
        tell: Callable[[str], Any] = print,
    ):
        """
        Args:
            folder: of the batches that are kept.
            records: of the steps so far.
            tell: takes a warning.
        """
        self.c, self.folder, self.tell = c, folder, tell
        self._follows = {
            "not_finite": c.guard.on_not_finite,
            "spike": c.guard.on_spike,
            "drift": c.guard.on_drift,
        }
        self._in_a_row = np.zeros(2, int)  # steps with skipped updates, and without a mixed group
        for record in records:
            self._count(record)

    def _count(self, record: dict[str, Any]) -> None:
        bad = np.array([record["skipped"] > 0, record["groups_mixed"] == 0])
        self._in_a_row = np.where(bad, self._in_a_row + 1, 0)

    def __call__(self, record: dict[str, Any], rollouts: Rollouts, adv_PN: Any) -> None:
        """Keeps the batch of a step with skipped updates; UserError where the run shall end."""
        c, step = self.c, record["step"]
        self._count(record)
        skipping, constant = self._in_a_row
        why = {
            reason: record[f"skipped/{reason}"]
            for reason in REASONS
            if record.get(f"skipped/{reason}")
        }
        if why:
            kept = self._keep(record, rollouts, adv_PN)
            words = "; ".join(f"{REASONS[reason]} ({n} skipped)" for reason, n in why.items())
            sentence = f"step {step}: {words}; {kept}"
            if any(self._follows[reason] == "end" for reason in why):
                raise UserError(f"{sentence}; the same command goes on after it")
            if skipping >= c.guard.skips:
                raise UserError(f"{sentence}; so it was in {skipping} steps running (guard.skips)")
            self.tell(f"warning: {sentence}")
        if c.guard.constant and constant >= c.guard.constant:
            raise UserError(
                f"step {step}: no group had both right and wrong answers in {constant} steps "
                "running (guard.constant), so that there is nothing to learn: take problems that "
                "are neither too hard nor too easy, or raise algo.group_size"
            )

    def _keep(self, record: dict[str, Any], rollouts: Rollouts, adv_PN: Any) -> str:
        """Writes this host's rows as arrays and as text, and says where."""
        stem = f"step_{record['step']}.{distributed.host()}"
        kept = {path.stem for path in self.folder.glob(f"*.{distributed.host()}.npz")} - {stem}
        if len(kept) >= self.c.guard.keep:
            return f"guard.keep, {self.c.guard.keep}, batches were kept before"
        arrays = {
            **{n: x for n, x in vars(rollouts.prompts).items() if isinstance(x, np.ndarray)},
            **{n: x for n, x in vars(rollouts).items() if isinstance(x, np.ndarray)},
            "advantage_PN": np.asarray(adv_PN),
        }
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays)
        storage.write(self.folder / f"{stem}.npz", packed.getvalue())
        samples = len(rollouts.responses) // len(rollouts.prompts.problems)
        lines = [record] + [
            {
                "problem": rollouts.prompts.problems[row // samples].text,
                "answer": rollouts.prompts.problems[row // samples].answer,
                "response": response,
                "verdict": verdict,
            }
            for row, (response, verdict) in enumerate(
                zip(rollouts.responses, rollouts.verdicts, strict=True)
            )
        ]
        text = "".join(json.dumps(line, default=float) + "\n" for line in lines)
        storage.write(self.folder / f"{stem}.jsonl", text)
        return f"the batch is {self.folder / stem}.npz and .jsonl"
