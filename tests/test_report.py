import io
import json

import numpy as np
import pytest
from rich.console import Console

from fgrpo_jax import report
from fgrpo_jax.metrics import Bar, Clock, Journal

BEFORE = {"step": 0, "pass@1": 0.25, "pass@2": 0.3, "pass@4": 0.5, "by_kind": {"a": 0.5, "b": 0.0}}
AFTER = {"step": 9, "pass@1": 0.5, "pass@2": 0.6, "pass@4": 0.45, "by_kind": {"a": 0.9, "b": 0.1}}


def text(table):
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    return console.file.getvalue()


def test_table():
    out = text(report.table(BEFORE, AFTER, 4))
    assert "pass@1 " in out and "25.0 %" in out and "+25.0" in out and "-5.0" in out
    assert "pass@16" not in out


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_picture(steps):
    records = [{"step": i + 1, "reward": 0.1 * i} for i in range(steps)]
    png = report.draw("title", records, [BEFORE, AFTER], 4)
    assert png.startswith(b"\x89PNG")


def test_journal_writes_plain_json(tmp_path):
    journal = Journal(tmp_path / "m.jsonl", 0)
    journal.write({"step": 1, "a": np.float32(0.5), "b": np.array(3), "c": {"d": 1}})
    record = json.loads((tmp_path / "m.jsonl").read_text())
    assert record == {"step": 1, "a": 0.5, "b": 3, "c": {"d": 1}} == journal.records[0]


def test_the_clock_goes_on():
    clock = Clock()
    clock.go_on([{"wall_s": 7.0, "cpu_s": 3.0}, {"wall_s": 100.0, "cpu_s": 50.0}])
    out = clock.read()
    assert 100 <= out["wall_s"] < 101 and out["cpu_s"] > 50


RECORD = {"reward": 0.5, "pass_rate": 0.25, "tokens_per_s": 1234.0}


def test_lines_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), width=120)
    with Bar(20, 0, console) as bar:
        for step in range(1, 21):
            bar.show(step, RECORD)
    lines = console.file.getvalue().strip().splitlines()
    assert len(lines) == 10 and lines[-1].startswith("step 20/20  reward 0.500  pass rate 0.250")


def test_a_bar_on_a_terminal():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Bar(4, 1, console) as bar:
        for step in (2, 3):
            bar.show(step, RECORD)
    out = console.file.getvalue()
    assert "3/4" in out and "reward 0.500" in out and "tokens/s 1,234" in out
