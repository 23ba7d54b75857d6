import dataclasses
import json
import threading

import pytest

from fgrpo_jax import distributed, watchdog
from fgrpo_jax.watchdog import BEAT, GRACE, SILENT, SILENT_AFTER_FAILURE, Note, Peers, Watchdog

LAG, STALL = 30.0, 3600.0


class Gang:
    """Three processes whose notes come every two seconds, seen from process 0."""

    def __init__(self, lag=LAG, stall=STALL):
        self.peers, self.now = Peers(0, 3, lag, stall), 0.0
        self.notes = {p: Note(f"host{p}", limited=True) for p in range(3)}

    def run(self, seconds, silent=(), still=()):
        """The first verdict within so many seconds, and how many they were."""
        begun = self.now
        while self.now - begun < seconds:
            self.now += BEAT
            for p, note in self.notes.items():
                self.notes[p] = dataclasses.replace(
                    note, beat=note.beat + (p not in silent), points=note.points + (p not in still)
                )
            if why := self.peers.verdict(self.now, dict(self.notes)):
                return str(why), self.now - begun
        return "", seconds

    def change(self, p, **changes):
        self.notes[p] = dataclasses.replace(self.notes[p], **changes)


def test_processes_that_go_on_are_left_alone():
    assert Gang().run(10_000) == ("", 10_000)


def test_a_silent_process_is_named():
    gang = Gang()
    gang.run(100)
    gang.change(2, stage="update")
    why, seconds = gang.run(100, silent=[2], still=[0, 1, 2])
    assert "process 2 on host2 has not been heard of" in why and "it was in update" in why
    assert SILENT < seconds <= SILENT + 2 * BEAT


def test_one_that_never_said_a_word_is_named():
    gang = Gang()
    del gang.notes[1]
    why, seconds = gang.run(100)
    assert "process 1 on ? has not been heard of" in why and seconds <= SILENT + 2 * BEAT


def test_a_stuck_process_is_named_and_not_those_that_wait_for_it():
    gang = Gang()
    gang.run(100)
    gang.change(1, stage="scoring")
    gang.run(BEAT, still=[1])  # the others reach the point where they wait for it
    why, seconds = gang.run(100, still=[0, 1, 2])
    assert "process 1 on host1 is stuck: for 3" in why and "it has been in scoring" in why
    assert LAG - BEAT <= seconds <= LAG + 2 * BEAT < 60


def test_the_first_time_of_a_stage_may_take_long():
    gang = Gang()
    gang.change(1, limited=False)
    gang.run(BEAT, still=[1])
    assert gang.run(1000, still=[0, 1, 2]) == ("", 1000)
    assert "is stuck" in gang.run(STALL, still=[0, 1, 2])[0]


def test_one_that_is_slow_and_comes_after_is_left_alone():
    gang = Gang()
    for _ in range(100):
        gang.run(BEAT, still=[1])
        assert not gang.run(LAG - 2 * BEAT, still=[0, 1, 2])[0]
        gang.run(BEAT, still=[0, 2])


def test_one_that_still_judges_answers_is_left_alone():
    gang = Gang()
    gang.run(100)
    gang.change(1, stage="scoring")
    gang.run(BEAT, still=[1])
    for sign in range(20):
        gang.change(1, signs=sign)
        assert not gang.run(LAG - 4 * BEAT, still=[0, 1, 2])[0]
    assert "process 1 on host1 is stuck" in gang.run(100, still=[0, 1, 2])[0]


def test_a_failure_is_told_to_the_others_in_its_own_words():
    gang = Gang()
    gang.run(100)
    gang.change(2, failed="ValueError: x")
    why, seconds = gang.run(100, still=[0, 1, 2])
    assert why == "process 2 on host2 failed: ValueError: x"
    assert GRACE < seconds <= GRACE + 2 * BEAT


def test_a_failure_that_a_death_has_caused_names_the_dead():
    gang = Gang()
    gang.run(100)
    gang.change(0, failed="JaxRuntimeError: connection reset by peer")
    gang.change(2, failed="JaxRuntimeError: connection reset by peer")
    why, seconds = gang.run(100, silent=[1], still=[0, 1, 2])
    assert "process 1 on host1 has not been heard of" in why
    assert SILENT_AFTER_FAILURE < seconds <= SILENT_AFTER_FAILURE + 2 * BEAT < GRACE + 2 * BEAT


def test_its_own_failure_is_no_verdict():
    gang = Gang()
    gang.change(0, failed="UserError")
    assert gang.run(100, still=[0, 1, 2])[0] == ""


def test_those_that_have_left_are_not_missed():
    gang = Gang()
    gang.change(1, left=True)
    gang.change(2, left=True)
    assert gang.run(1000, silent=[1, 2], still=[1, 2]) == ("", 1000)


def test_a_run_that_stands_still():
    gang = Gang()
    why, seconds = gang.run(2 * STALL, still=[0, 1, 2])
    assert why.startswith("the run has not gone on for 360") and "process 1 in start" in why
    assert STALL < seconds <= STALL + 2 * BEAT


@pytest.mark.parametrize("lag, stall", [(0.0, STALL), (LAG, 0.0), (0.0, 0.0)])
def test_limits_can_be_switched_off(lag, stall):
    gang = Gang(lag, stall)
    gang.change(1, limited=lag == 0)
    gang.run(BEAT, still=[1])
    seconds = STALL - 2 * BEAT if stall else 3 * STALL
    assert gang.run(seconds, still=[0, 1, 2])[0] == ""


def test_a_process_that_stands_still_ends_with_its_stacks(capfd):
    ended = threading.Event()
    with Watchdog(0.0, 1.0, end=lambda code: ended.set()) as dog:
        dog.point("update")
        assert ended.wait(20)
    err = capfd.readouterr().err
    assert "the run has not gone on for" in err and "here it was in update" in err
    assert "test_a_process_that_stands_still_ends_with_its_stacks" in err


class Board:
    """distributed's, of one other process that has left; fails as often as it is told to."""

    def __init__(self, fails):
        self.fails = fails

    def __call__(self, topic, mine):
        if self.fails > 0:
            self.fails -= 1
            raise RuntimeError("UNAVAILABLE: a blip")
        return {0: mine, 1: json.dumps(dataclasses.asdict(Note("other", left=True)))}


@pytest.mark.parametrize("fails, bites", [(2, False), (1000, True)])
def test_a_coordinator_that_does_not_answer_for_a_moment(monkeypatch, capfd, fails, bites):
    monkeypatch.setattr(watchdog, "BEAT", 0.1)
    monkeypatch.setattr(watchdog, "SILENT", 1.0)
    monkeypatch.setattr(distributed, "hosts", lambda: 2)
    monkeypatch.setattr(distributed, "exchange", Board(fails))
    ended = threading.Event()
    dog = Watchdog(LAG, STALL, end=lambda code: (ended.set(), dog._others_ended.set()))
    with dog:
        assert ended.wait(3) == bites
    assert ("process 0 on the first host does not answer" in capfd.readouterr().err) == bites


def test_a_stage_is_known_once_a_step_had_it():
    dog = Watchdog(LAG, STALL)
    seen = []
    for _ in range(2):
        for stage in ("rollout", "checkpoint"):
            dog.point(stage)
            seen.append((dog._note.stage, dog._note.limited))
        dog.step_done()
    assert seen == [
        ("rollout", False), ("checkpoint", False), ("rollout", True), ("checkpoint", False),
    ]  # fmt: skip
    assert dog._note.points == 4
