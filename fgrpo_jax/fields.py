r"""Rows of any file become problems: which field holds what is guessed, or said by data.fields.

Names are compared without case, and a dot goes into a nested field. The first row decides for all.

* The problem is a text, or verl's list of chat messages, of which the user's only one is taken: a
  system message in the file gives way to data.system. SVAMP's Body, and a context, come in front.
* A last sentence such as "Please put your final answer within \boxed{}." is cut off verl's
  messages, since data.system and data.template say what is to be said; nothing else is changed.
* The gold answer is a text, a number (27.0 reads 27) or a list, joined by commas. "... #### 1,234"
  is GSM8K's: gold 1234, and the whole of it is the worked solution. Where there is none, or an
  empty one, it is the last \boxed{} of the solution; where there is none either, it is empty.
* A gold that a common clean-up of MATH has damaged gives way to that box: a matrix without its row
  breaks, "19{}43" of "19 and 43", "144^3" of "144 m^3", a brace too many.
"""

import decimal
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from fgrpo_jax import UserError, forms, jsons
from fgrpo_jax.answers import boxed_answer
from fgrpo_jax.structs import Problem

Row = dict[str, Any]

GUESSES = {
    "problem": "problem question prompt query text input instruction".split(),
    "answer": (
        "answer final_answer expected_answer ground_truth gold gold_answer target "
        "reward_model.ground_truth reward_model.ground_truth.target "
        "reward_model.ground_truth.answer solution"
    ).split(),
    "kind": "kind level subject type subfield source data_source category".split(),
    "worked": (
        "worked solution rationale generated_solution reward_model.ground_truth.solution"
    ).split(),
}
PREAMBLES = "body context".split()
OWN = set("text answer kind worked data".split())  # rlvr_dataset's
INSTRUCTION = re.compile(
    r"\s*(?<![^\s.?!])(?:Let's|Let us|Please|Put|Make sure|Remember|Return|Present|Enclose|Output|"
    r"Think|Reason|Solve|Write|Give)\b[^.?!\n]*\\boxed\{\s*\}[^.?!\n]*[.!]?\s*$"
)
TAIL = 500  # characters at the end of a message in which one is looked for
GSM8K = re.compile(r"(?:^|\n)####([^\n]*)$")


def problems(rows: Iterable[Row], name: str, stem: str, mapping: str = "") -> Iterator[Problem]:
    """The problems of a file's rows.

    Args:
        name: of the file, for errors.
        stem: the kind of problems whose file has no field for it.
        mapping: data.fields.
    """
    names: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        own = set(row) == OWN and not mapping
        if not own:
            names = names or _names(row, name, forms.mapping(mapping))
            for field in ("problem", "answer"):
                if not _has(row, names[field]):
                    raise UserError(
                        f"{name}, row {number} lacks the field {names[field]!r}, which row 1 has"
                    )
        try:
            problem = _own(row) if own else _problem(row, names, stem)
            for text in (problem.text, problem.answer, problem.kind, problem.worked):
                text.encode()  # JSON may hold half a surrogate pair, which no tokenizer takes
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}, row {number}: {error}") from error
        yield problem


def _own(row: Row) -> Problem:
    """The problem that rlvr_dataset wrote as this row."""
    if not all(isinstance(value, str) for value in row.values()):
        raise ValueError(f"its fields {', '.join(sorted(OWN))} must be texts")
    try:
        data = jsons.parse(row["data"].encode()) if row["data"] else None
    except ValueError as error:
        raise ValueError("its field data must hold JSON, or nothing") from error
    return Problem(row["text"], row["answer"], row["kind"], row["worked"], data)


def _names(row: Row, name: str, mapping: dict[str, list[str]]) -> dict[str, str]:
    """The row's field by ours."""
    names = {}
    for field in forms.FIELDS:
        if field in mapping:
            found = [word for word in mapping[field] if _has(row, word)]
            if not found:
                raise UserError(
                    f"data.fields says {field}={'|'.join(mapping[field])}, which {name} does not "
                    f"have: its fields are {_listed(row)}"
                )
        else:
            found = [w for w in GUESSES.get(field, []) if _has(row, w) and _fits(field, row, w)]
            if not found and field in ("problem", "answer"):
                raise UserError(
                    f"{name} has no field that is known to hold the {field}; its fields are "
                    f"{_listed(row)}: say which in data.fields, as problem=FIELD,answer=FIELD"
                )
        names[field] = found[0] if found else ""
    if "problem" not in mapping and names["problem"] == "question":
        names["preamble"] = next((word for word in PREAMBLES if _has(row, word)), "")
    return names


def _problem(row: Row, names: dict[str, str], stem: str) -> Problem:
    def value(field: str) -> Any:
        name = names.get(field)
        return _get(row, name) if name and _has(row, name) else None  # as kind may lack in a row

    text = _user_text(value("problem"))
    if preamble := str(value("preamble") or "").strip():
        if names["preamble"] == "body" and preamble[-1] not in ".?!":
            preamble += "."
        text = f"{preamble} {text.strip()}"
    worked = value("worked")
    worked = worked[0] if isinstance(worked, list) and worked else worked
    worked = worked if isinstance(worked, str) else ""
    given = value("answer")
    answer = _gold(given)
    if isinstance(given, str) and (match := GSM8K.search(given.rstrip())):
        answer, worked = re.sub("[,$]", "", match[1]), worked or given
    elif r"\boxed" in answer:
        answer = boxed_answer(answer) or ""
    elif names["answer"] == names["worked"]:  # a solution that never says what its answer is
        answer = ""
    else:
        answer = _repaired(answer, boxed_answer(worked) or "")
    kind = value("kind")
    kind = f"{names['kind']} {kind}" if isinstance(kind, int | float) else str(kind or stem)
    data = value("data")
    json.dumps(data)  # TypeError: a date or bytes, which no worker can be sent
    return Problem(text, answer.strip() or boxed_answer(worked) or "", kind, worked, data)


def _user_text(value: Any) -> str:
    if isinstance(value, list):
        roles = [message.get("role") for message in value if isinstance(message, dict)]
        if roles.count("user") != 1 or len(roles) != len(value) or roles[-1] != "user":
            raise ValueError("its prompt must be chat messages of which the last is the user's one")
        value = value[-1].get("content")
        if isinstance(value, str):
            start = max(0, len(value) - TAIL)
            value = value[:start] + INSTRUCTION.sub("", value[start:])
    if not isinstance(value, str) or not value.strip():
        raise ValueError("its problem must be a text that is not empty")
    return value


def _gold(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_gold, value))
    if isinstance(value, dict):
        raise ValueError("its answer is an object: name a field of it in data.fields, with a dot")
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        return str(int(value)) if value == int(value) else repr(value)
    if not isinstance(value, str | int | decimal.Decimal | None):
        raise ValueError(
            f"its answer is of type {type(value).__name__}: it must be a text, a number or a list"
        )
    return "" if value is None else str(value).strip()


def _repaired(gold: str, box: str) -> str:
    """The gold, or what its solution has in the box where the gold is damaged."""
    power = re.compile(r"\^\{?[23]\}?$")
    if unit := re.search(r"\\(?:text|mbox)\s*\{[^{}]*\}\^\{?[23]\}?$", box):
        bare = box[: unit.start()].strip().removesuffix(r"\,")
        lost_unit = power.search(gold) and not re.search(r"\\(text|mbox)", gold)
        return bare if lost_unit and not power.search(bare) else gold
    lost_rows = r"\begin" in gold and r"\\" in box and r"\\" not in gold
    if box and (lost_rows or "{}" in gold or gold.count("{") != gold.count("}")):
        return box
    return gold


def _fits(field: str, row: Row, name: str) -> bool:
    """Whether a guessed field holds what could be meant: a nested one is named by its parts."""
    value = _get(row, name)
    if field == "problem":
        return isinstance(value, str | list)
    return not isinstance(value, dict)


def _has(row: Row, name: str) -> bool:
    try:
        _get(row, name)
    except KeyError:
        return False
    return True


def _get(row: Row, name: str) -> Any:
    """A field by its name or, through nested ones, its dotted names; KeyError if there is none."""
    if name in row:
        return row[name]
    lower = {key.lower(): key for key in row}
    if name.lower() in lower:
        return row[lower[name.lower()]]
    head, dot, rest = name.partition(".")
    inner = row.get(lower.get(head.lower(), "")) if dot else None
    if not isinstance(inner, dict):
        raise KeyError(name)
    return _get(inner, rest)


def _listed(row: Row, prefix: str = "") -> str:
    names = []
    for key, value in row.items():
        names.append(
            _listed(value, f"{prefix}{key}.") if isinstance(value, dict) else f"{prefix}{key}"
        )
    listed = ", ".join(filter(None, names)) or "none"
    return listed if listed.isprintable() and len(listed) < 2000 else f"{listed!r:.2000}"
