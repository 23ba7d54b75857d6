"""Scores of responses, from worker processes that can be killed.

`python -m fgrpo_jax.rewards` is a worker: it says "ready", then reads one JSON task a line and
answers each with one line. A task that outlasts its limit is ended by the kernel (an interval
timer with the default action), however deep in C code it hangs, and whether or not the parent
still lives. No jax here.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from fgrpo_jax import UserError, judge, verifiers
from fgrpo_jax.answers import EXTRACT, MAX_ANSWER, REWARDS, Score

MEMORY = 4 << 30  # bytes of address space a worker may take
MAX_RESPONSE = 1 << 20  # characters of a response that a worker is sent


def _work() -> None:
    """The worker's loop: a task in, {"reward", "correct", "info"} out, a line each."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    answers, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    name = sys.argv[1]
    score = judge.find(name)
    if name in judge.ALGEBRA:
        judge.parses(r"\frac{1}{2}")  # imports sympy before the first task's time runs
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, task["timeout"])
        seconds = math.ceil(time.process_time() + task["timeout"]) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            if "gold" in task:
                out = {"parses": judge.parses(task["gold"])}
            else:
                problem = SimpleNamespace(**task["problem"])
                out = dataclasses.asdict(score(problem, task["response"], task["finished"]))
        except (Exception, RecursionError, MemoryError) as error:
            out = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(out), file=answers, flush=True)


class _Worker:
    """One worker process, started anew after each death."""

    def __init__(self, reward: str):
        self.reward = reward
        self.start()

    def start(self) -> None:
        self.ready = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fgrpo_jax.rewards", self.reward],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        """The answer; {"info": "timed out" or "crashed"} where the process did not live to give
        one."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin and stdout
        if not self.ready and stdout.readline() != "ready\n":
            raise RuntimeError(
                "a reward worker cannot start; "
                f"`python -m fgrpo_jax.rewards {self.reward}` shows why"
            )
        self.ready = True
        try:
            stdin.write(json.dumps(task) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        status = self.process.wait()
        self.close()
        self.start()
        late = (-signal.SIGALRM, -signal.SIGXCPU)
        return {"info": "timed out" if status in late else "crashed"}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # a task that was never read
                if pipe:
                    pipe.close()


class Scorer:
    """Scores responses in order, from any thread; a context manager that leaves no process.

    Args:
        reward: a name of judge.find's.
        workers: processes.
        timeout: seconds an answer, of wall time and of CPU; past it the answer is wrong and its
            process is replaced.
    """

    def __init__(self, reward: str, workers: int, timeout: float):
        _check(reward)
        self.reward, self.timeout = reward, timeout
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        only_text = reward in EXTRACT and reward not in judge.ALGEBRA
        self._workers = [_Worker(reward) for _ in range(0 if only_text else workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="rewards")
        self._known: dict[tuple[str, str], Score] = {}
        self._lock = threading.Lock()
        self._told = False
        self.answered = 0  # questions to workers, a sign of life

    def start(
        self, problems: Sequence[Any], responses: Sequence[str], finished: Iterable[Any]
    ) -> Iterator[Score]:
        """Begins to score, and returns at once: one Score a response, in order, whatever happens
        to its worker.

        Args:
            problems: of each response, as structs.Problem.
            finished: whether each response ended by itself, as booleans.
        """
        return self._threads.map(self._score, problems, responses, map(bool, finished))

    def score(
        self, problems: Sequence[Any], responses: Sequence[str], finished: Iterable[Any]
    ) -> list[Score]:
        """What start begins, awaited."""
        return list(self.start(problems, responses, finished))

    def check_golds(self, golds: Sequence[str]) -> list[bool]:
        """Whether each gold can be judged: for the algebraic rewards, math-verify reads it and
        finds it equal to itself; for the others, it is not empty."""
        return list(self._threads.map(self._check_gold, golds))

    def _check_gold(self, gold: str) -> bool:
        gold = judge.gold_of(self.reward, gold)
        if not gold.strip() or len(gold) > MAX_ANSWER:
            return False
        if self.reward not in judge.ALGEBRA or judge.plain(gold):
            return True
        return bool(self._ask({"gold": gold}).get("parses"))

    def _score(self, problem: Any, response: str, finished: bool) -> Score:
        quick = judge.quick_score(self.reward, problem, response, finished)
        if quick is not None:
            return quick
        extract = EXTRACT.get(self.reward)
        key = (problem.answer, (extract(response) or "") if extract else "")
        if extract and key in self._known:
            return self._known[key]
        out = self._ask(
            {
                "problem": dataclasses.asdict(problem),
                "response": response[-MAX_RESPONSE:],
                "finished": finished,
            }
        )
        if "error" in out:
            self._tell(out["error"])
        score = Score(
            float(out.get("reward", 0.0)),
            bool(out.get("correct", False)),
            out.get("info", "unparsable" if extract else "crashed"),
        )
        if extract and score.info in ("right", "wrong"):  # a time-out may be a busy moment's
            with self._lock:
                if len(self._known) > 100_000:
                    self._known.clear()
                self._known[key] = score
        return score

    def _ask(self, task: dict[str, Any]) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            return worker.ask(task | {"timeout": self.timeout})
        finally:
            self._idle.put(worker)
            with self._lock:
                self.answered += 1

    def _tell(self, error: str) -> None:
        """A user's reward that fails must not look like a policy that does."""
        if not self._told and self.reward not in EXTRACT:
            self._told = True
            print(f"warning: reward {self.reward} failed: {error}", file=sys.stderr)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(reward: str) -> None:
    """UserError where a reward of that name cannot be had."""
    if reward in judge.ALGEBRA and importlib.util.find_spec("math_verify") is None:
        raise UserError(
            f"reward is {reward!r}, which needs math-verify: pip install math-verify; or set "
            "reward to number, which needs nothing"
        )
    if reward in EXTRACT:
        return
    try:
        judge.find(reward)
    except Exception as error:
        kept = verifiers.NEEDS.get(reward.partition(":")[0])
        hint = (
            kept
            if kept and isinstance(error, ModuleNotFoundError)
            else f"it must be {REWARDS}, importable from here"
        )
        raise UserError(f"reward is {reward!r} and cannot be found ({error}): {hint}") from error


if __name__ == "__main__":
    _work()
