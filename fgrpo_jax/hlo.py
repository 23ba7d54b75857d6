"""Reads compiled programs: their collectives, inside loops and outside, and their largest array."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

KINDS = "all-reduce all-gather reduce-scatter all-to-all collective-permute".split()
BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "pred": 1}

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_COLLECTIVE = re.compile(rf" = (.+?) ({'|'.join(KINDS)})(-start)?\(")
_CALLS = re.compile(
    r"(body|condition|to_apply|calls|branch_computations|true_computation|false_computation"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count"?[:=]\s*\{"?n"?[:=]"?(\d+)')
_FUSION = re.compile(r" fusion\(.* calls=%?([\w.\-]+)")
_OPERATION = re.compile(r" = (\(.*?\)|\S+) ([\w\-]+)\(")  # "%name = f32[8]{0} add(...", or a tuple
_MAKES_NOTHING = "parameter tuple get-tuple-element bitcast while conditional call".split()
_CONSTANT = re.compile(r"%?([\w.\-]+) = [su]32\[\]\S* constant\((\d+)\)")
_UPTO = re.compile(r"ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT")


def _trips(line: str, condition: list[str]) -> int:
    """Turns of a while loop: as noted, or the bound of its condition, counted from 0; else 1."""
    if noted := _TRIPS.search(line):
        return int(noted[1])
    found = [match for x in condition if (match := _CONSTANT.search(x))]
    constants = {str(match[1]): int(match[2]) for match in found}
    bounds = [match[1] for x in condition if (match := _UPTO.search(x))]
    return constants.get(str(bounds[0]), 1) if bounds else 1


def size(shape: str) -> list[int]:
    """Bytes of the arrays of an HLO shape, as "bf16[64,1,3584]{2,1,0}" or a tuple of such."""
    found = []
    for kind, dims in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shape):
        bits = re.search(r"\d+", kind)
        item = BYTES.get(kind) or (int(bits[0]) / 8 if bits else 0)
        found.append(int(item * math.prod(int(d) for d in dims.split(",") if d)))
    return found


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """The entry's name, and the lines of each computation."""
    lines: dict[str, list[str]] = {}
    entry = here = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            if head := _HEAD.match(line):
                here = head[2]
                lines[here] = []
                entry = here if head[1] else entry
        elif here:
            lines[here].append(line)
    return entry, lines


def largest(text: str) -> tuple[int, str]:
    """Bytes of the largest array that an operation of an HLO text makes, and the operation's line.
    What is inside a fusion is no array in memory, and arguments are made by nobody."""
    _, lines = _computations(text)
    fused = set(_FUSION.findall(text))
    made = [
        (max(size(match[1]), default=0), line.strip())
        for name, body in lines.items()
        if name not in fused
        for line in body
        if (match := _OPERATION.search(line)) and match[2] not in _MAKES_NOTHING
    ]
    return max(made, default=(0, ""))


class Collective(NamedTuple):
    """One operation."""

    kind: str
    shape: str  # of its result
    bytes: int  # that it moves
    looped: bool  # in a loop
    times: int  # how often it runs, where loops' lengths are known; others count as one turn
    line: str


def each_collective(text: str) -> Iterator[Collective]:
    """Those of an HLO text, as often as they are called."""
    entry, lines = _computations(text)

    def visit(name: str, times: int, looped: bool) -> Iterator[Collective]:
        for line in lines.get(name, ()):
            if match := _COLLECTIVE.search(line):
                kind, sizes = match[2], size(match[1])
                if name.startswith("all-reduce-scatter"):  # how a TPU fuses one
                    kind = "reduce-scatter"
                gathers = match[3] and kind != "all-reduce"  # the operand is in the tuple too
                moved = max(sizes, default=0) if gathers else sum(sizes)
                yield Collective(kind, match[1], moved, looped, times, line.strip())
                continue
            calls = _CALLS.findall(line)
            turns = 1
            for role, names in calls:
                if role == "condition":
                    turns = _trips(line, lines.get(names.lstrip("%"), []))
            for role, names in calls:
                inside = role in ("body", "condition")
                for child in re.findall(r"[\w.\-]+", names):
                    yield from visit(child, times * (turns if inside else 1), looped or inside)

    yield from visit(entry, 1, False)


def collectives(text: str) -> dict[str, dict[str, dict[str, Any]]]:
    """{"loops" or "outside": {kind: {"count", "largest", "times", "bytes"}}} of an HLO text.

    count: how often it is written; times, and bytes in all: how often it runs, as Collective's.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {"loops": {}, "outside": {}}
    for x in each_collective(text):
        row = found["loops" if x.looped else "outside"].setdefault(
            x.kind, {"count": 0, "largest": 0, "times": 0, "bytes": 0}
        )
        row["count"] += 1
        row["largest"] = max(row["largest"], x.bytes)
        row["times"] += x.times
        row["bytes"] += x.times * x.bytes
    return found
