"""Ends a run whose processes have stopped going on together, and says which of them and where.

JAX's own heartbeats notice a process that died or was stopped, but neither one that is alive and
stuck nor one that has failed and waits for the others. Here each process puts a note of how far it
is on the coordinator's board every two seconds, from a thread, and reads those of all. Its clock
alone counts: no two have to agree.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from fgrpo_jax import Preempted, StorageError, UserError, distributed

BEAT = 2.0  # seconds between notes
SILENT = 25.0  # without a new note, after which a process is gone
# Once one has failed, often since another is gone, that other one is looked for.
SILENT_AFTER_FAILURE = 6.0
GRACE = 8.0  # for a process to end by itself after another has failed
DISKS = ("checkpoint", "profile", "finish")  # stages whose time is that of one process's disk


@dataclasses.dataclass
class Note:
    """What a process says of itself."""

    host: str
    beat: int = 0  # notes so far
    points: int = 0  # passed so far, at which all processes come by equally often
    stage: str = "start"
    limited: bool = False  # a stage that an earlier step had, so that it is compiled, and no disk's
    signs: int = 0  # of life within a stage
    failed: str = ""
    left: bool = False  # it is done

    @property
    def ended(self) -> bool:
        return self.left or bool(self.failed)


class Verdict(NamedTuple):
    """Why the run must end."""

    process: int  # to blame; -1: all
    host: str
    why: str

    def __str__(self) -> str:
        who = f"process {self.process} on {self.host}" if self.process >= 0 else "the run"
        return f"{who} {self.why}"


def failures(notes: dict[int, Note], me: int) -> list[Verdict]:
    """Of the processes but this one."""
    return [
        Verdict(p, note.host, f"failed: {note.failed}")
        for p, note in notes.items()
        if note.failed and p != me
    ]


class Peers:
    """What the notes of all processes mean to one of them, by its clock in seconds."""

    def __init__(self, me: int, count: int, lag: float, stall: float):
        self.me, self.count, self.lag, self.stall = me, count, lag, stall
        self._beats: dict[int, tuple[int, float]] = {}  # last beat and when it came
        self._held: dict[int, tuple[tuple[int, int], float]] = {}  # how far, and since when behind
        self._furthest = (-1, 0.0)  # points of the first, and when it came there
        self._failed_at = 0.0

    def verdict(self, now: float, notes: dict[int, Note]) -> Verdict | None:
        notes = notes | {p: Note("?") for p in range(self.count) if p not in notes}
        going = {p: note for p, note in notes.items() if not note.ended}
        failed = {p: note for p, note in notes.items() if note.failed}
        if failed and not self._failed_at:
            self._failed_at = now
        return (
            self._silent(now, going, SILENT_AFTER_FAILURE if failed else SILENT)
            or self._has_failed(now, failed)
            or self._stuck(now, notes, going)
            or self._standing(now, notes, going)
        )

    def _silent(self, now: float, going: dict[int, Note], limit: float) -> Verdict | None:
        for p, note in going.items():
            beat, since = self._beats.get(p, (-1, now))
            if note.beat != beat:
                self._beats[p] = note.beat, now
            elif now - since > limit:
                why = "it died, was stopped or lost its network"
                why = f"has not been heard of for {now - since:.0f} s: {why}"
                return Verdict(p, note.host, f"{why}; it was in {note.stage}")
        return None

    def _has_failed(self, now: float, failed: dict[int, Note]) -> Verdict | None:
        others = failures(failed, self.me)
        return others[0] if others and now - self._failed_at > GRACE else None

    def _stuck(self, now: float, notes: dict[int, Note], going: dict[int, Note]) -> Verdict | None:
        furthest = max(note.points for note in notes.values())
        for p, note in going.items():
            place = (note.points, note.signs)
            held, since = self._held.get(p, (place, now))
            if place != held or note.points == furthest:
                self._held[p] = place, now
                continue
            self._held[p] = held, since
            limit = self.lag if note.limited else self.stall
            if self.lag and limit and now - since > limit:
                key = "watchdog.lag" if note.limited else "watchdog.stall"
                why = f"is stuck: for {now - since:.0f} s it has been in {note.stage}, where the "
                return Verdict(p, note.host, f"{why}others have gone on ({key})")
        return None

    def _standing(
        self, now: float, notes: dict[int, Note], going: dict[int, Note]
    ) -> Verdict | None:
        furthest = max(note.points + note.signs for note in notes.values())
        if furthest != self._furthest[0]:
            self._furthest = furthest, now
        still = now - self._furthest[1]
        if not (self.stall and going and still > self.stall):
            return None
        stages = ", ".join(f"process {p} in {note.stage}" for p, note in going.items())
        return Verdict(-1, "", f"has not gone on for {still:.0f} s (watchdog.stall): {stages}")


class Watchdog:
    """A context manager around all that the processes of a run do together.

    Where one fails, the others end soon after it, with its sentence and their own stacks. A process
    leaves this context once all the others have come to its end too; one that raises, once they
    know of it or have had the time to.

    Args:
        lag: seconds that a process may hold up the others, in a stage that is compiled; 0: any.
        stall: seconds without anything new from any process; 0: any.
        end: what ends this process, with an exit code.
    """

    def __init__(self, lag: float, stall: float, end: Callable[[int], None] = os._exit):
        self.lag, self.stall, self._end = lag, stall, end
        self.signs: Callable[[], int] = lambda: 0  # grows while a process is slow, and not stuck
        self._note = Note(socket.gethostname())
        self._passed: set[str] = set()
        self._known: set[str] = set()
        self._error: BaseException | None = None
        self._failed: list[Verdict] = []  # of the others
        self._done = threading.Event()
        self._others_ended = threading.Event()
        self._asking = ThreadPoolExecutor(1)  # a coordinator that was stopped never answers

    def point(self, stage: str = "") -> None:
        """All processes must come by equally often, each before it waits for the others: one that
        is stuck is told by having passed fewer. What follows is called `stage`, if it is said, or
        goes on with the last one."""
        stage = stage or self._note.stage
        self._passed.add(stage)
        self._note.stage = stage
        self._note.limited = stage in self._known and stage not in DISKS
        self._note.points += 1

    def step_done(self) -> None:
        """What the steps so far went through is compiled."""
        self._known |= self._passed

    def _exchange(self) -> dict[int, Note]:
        self._note.beat += 1
        self._note.signs = self.signs()
        mine = json.dumps(dataclasses.asdict(self._note))
        board = distributed.exchange("watchdog", mine)
        return {p: Note(**json.loads(text)) for p, text in board.items()}

    def _watch(self) -> None:
        me = distributed.host()
        peers = Peers(me, distributed.hosts(), self.lag, self.stall)
        answered = time.monotonic()
        while not self._done.wait(BEAT):
            if self.stall:  # where this thread hangs too: no Python is needed
                faulthandler.dump_traceback_later(self.stall + SILENT, exit=True)
            verdict = None
            try:
                notes = self._asking.submit(self._exchange).result(SILENT)
            except Exception as error:
                if time.monotonic() - answered > SILENT:
                    why = f"does not answer, and it coordinates ({error or 'not a word'})"
                    verdict = Verdict(0, "the first host", why)
            else:
                answered = time.monotonic()
                verdict = peers.verdict(answered, notes)
                others = {p: note for p, note in notes.items() if p != me}
                self._failed = failures(notes, me)
                if sum(note.ended for note in others.values()) == peers.count - 1:
                    self._others_ended.set()
            if verdict and not self._done.is_set():
                self._bite(verdict, verdict.process == me)

    def _bite(self, verdict: Verdict, to_blame: bool) -> None:
        if self._error:
            traceback.print_exception(self._error)
        print(f"error: {verdict}; here it was in {self._note.stage}:", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        self._note.left, self._note.failed = True, f"it {verdict.why}" * to_blame
        with contextlib.suppress(Exception):  # the coordinator may be gone
            self._asking.submit(self._exchange).result(BEAT)
        if distributed.is_main():  # JAX ends all as soon as it is gone: first they say their own
            time.sleep(3 * BEAT)
        self._end(1)

    def __enter__(self) -> "Watchdog":
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if distributed.hosts() > 1:
            if error is None or isinstance(error, Preempted):
                self._note.left = True
                self._others_ended.wait()  # the main one may have much to write
            else:
                text = " ".join(str(error).split())[:500]
                named = isinstance(error, UserError | StorageError)
                text = text if named else f"{type(error).__name__}: {text}"
                self._error, self._note.failed = error, text
                self._others_ended.wait(GRACE + 4 * BEAT)
                for other in self._failed:
                    if text not in other.why:
                        print(f"error: {other}", file=sys.stderr)
            time.sleep(BEAT)  # for the others to read this one's last note
        self._done.set()
        self._thread.join()
        self._asking.shutdown(wait=False)
        faulthandler.cancel_dump_traceback_later()
