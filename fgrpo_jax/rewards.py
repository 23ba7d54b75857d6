"""Verdicts on answers, from worker processes that can be killed.

`python -m fgrpo_jax.rewards` is a worker: it says "ready", then reads one JSON task a line and
answers each with one line. A task that outlasts its limit is ended by the kernel (an interval
timer with the default action), however deep in C code it hangs, and whether or not the parent
still lives. No jax here.
"""

import contextlib
import dataclasses
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

VERDICTS = ("right", "wrong", "no answer", "timed out", "crashed")
MAX_ANSWER = 400  # characters; a longer answer is wrong
MEMORY = 4 << 30  # bytes of address space a worker may take


@dataclasses.dataclass(frozen=True)
class Score:
    """The verdict on one response."""

    reward: float  # shaped: what the advantage is made of
    correct: bool  # raw: what the focal weight and pass@k are made of
    info: str  # one of VERDICTS


def boxed_answer(response: str) -> str | None:
    r"""The inside of the last \boxed{} after the end of any think block, or None.

    None too where a think block or the last box never closes: an unfinished answer is no excuse
    to look earlier.

    >>> boxed_answer(r"\boxed{5} no, \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    if "<think>" in response and "</think>" not in response:
        return None
    answer = response.rpartition("</think>")[2]
    start = answer.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for i in range(start, len(answer)):
        depth += {"{": 1, "}": -1}.get(answer[i], 0)
        if depth == 0:
            return answer[start:i].strip() or None
    return None


def last_number(response: str) -> str | None:
    """The last number of a response, thousands' commas removed, or None.

    >>> last_number("4,000 - 5 is 3,995.")
    '3995'
    """
    numbers = re.findall(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?", response)
    return numbers[-1].replace(",", "") if numbers else None


def quick_verdict(gold: str, answer: str) -> bool | None:
    """Equal strings, and two plain numbers compared exactly; None where sympy must look."""
    gold, answer = (text.strip().strip("$").strip() for text in (gold, answer))
    if gold == answer:
        return True
    number = re.compile(r"[-+]?[0-9]{1,100}(\.[0-9]{1,100})?")
    if number.fullmatch(gold) and number.fullmatch(answer):
        return Fraction(gold) == Fraction(answer)
    return None


def math_verdict(gold: str, answer: str) -> bool:
    """math-verify's verdict on two LaTeX answers; only to be called in a worker."""
    from math_verify import LatexExtractionConfig, parse, verify

    # Its own time limits are signals, which the worker's timer makes needless.
    options: Any = {"parsing_timeout": None, "raise_on_error": False}
    options["extraction_config"] = [LatexExtractionConfig(boxed_match_priority=0)]
    golds, answers = (parse(rf"\boxed{{{text}}}", **options) for text in (gold, answer))
    return bool(verify(golds, answers, timeout_seconds=None, raise_on_error=False))


def _work() -> None:
    """The worker's loop: {"gold", "answer", "timeout"} in, {"correct"} out, a line each."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    answers, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    math_verdict("1", "2")  # imports sympy before the first task's time runs
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, task["timeout"])
        try:
            verdict = math_verdict(task["gold"], task["answer"])
        except (Exception, RecursionError, MemoryError):
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"correct": verdict}), file=answers, flush=True)


class _Worker:
    """One worker process, started anew after each death."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.start()

    def start(self) -> None:
        self.ready = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fgrpo_jax.rewards"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def judge(self, gold: str, answer: str) -> tuple[bool, str]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin and stdout
        if not self.ready and stdout.readline() != "ready\n":
            raise RuntimeError(
                "a reward worker cannot start; `python -m fgrpo_jax.rewards` shows why"
            )
        self.ready = True
        try:
            task = {"gold": gold, "answer": answer, "timeout": self.timeout}
            stdin.write(json.dumps(task) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            correct = json.loads(line)["correct"]
            return correct, "right" if correct else "wrong"
        status = self.process.wait()
        self.close()
        self.start()
        return False, "timed out" if status == -signal.SIGALRM else "crashed"

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
        reward: "math", the last \\boxed{} by math-verify; "number", the last number; "exact", the
            whole response.
        workers: processes.
        timeout: seconds an answer; past it the answer is wrong and its process is replaced.
    """

    def __init__(self, reward: str, workers: int, timeout: float):
        self._extract: Callable[[str], str | None] = {
            "math": boxed_answer,
            "number": last_number,
            "exact": lambda response: response.strip() or None,
        }[reward]
        self._sympy = reward == "math"
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(timeout) for _ in range(workers if self._sympy else 0)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="rewards")
        self._known: dict[tuple[str, str], tuple[bool, str]] = {}
        self._lock = threading.Lock()

    def score(self, golds: Sequence[str], responses: Sequence[str]) -> list[Score]:
        """One Score a response, in order; 1 for right and 0 for wrong."""
        answers = [self._extract(response) for response in responses]
        if self._extract is last_number:
            golds = [last_number(gold) or gold for gold in golds]
        verdicts = self._threads.map(self._judge, golds, answers)
        return [Score(float(correct), correct, info) for correct, info in verdicts]

    def _judge(self, gold: str, answer: str | None) -> tuple[bool, str]:
        if answer is None:
            return False, "no answer"
        if len(answer) > MAX_ANSWER:
            return False, "wrong"
        quick = quick_verdict(gold, answer)
        if quick is None and not self._sympy:
            quick = False
        if quick is not None:
            return quick, "right" if quick else "wrong"
        verdict = self._known.get((gold, answer))
        if verdict is None:
            worker = self._idle.get()
            try:
                verdict = worker.judge(gold, answer)
            finally:
                self._idle.put(worker)
            if verdict[1] in ("right", "wrong"):  # a time-out may be a busy moment's
                with self._lock:
                    if len(self._known) > 100_000:
                        self._known.clear()
                    self._known[gold, answer] = verdict
        return verdict

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


if __name__ == "__main__":
    _work()
