"""JSON that others wrote: size and depth are bounded, and what is none gets one sentence."""

import json
import pathlib
from typing import Any, NoReturn

from fgrpo_jax import UserError

LIMIT = 16 << 20  # bytes of a document, or of a line of one
DEPTH = 100  # lists and objects within each other; Python's own limit differs by version


def parse(text: bytes, strict: bool = False) -> Any:
    """The value of a JSON text in UTF-8; ValueError where it is none, or nested beyond DEPTH.

    Args:
        strict: NaN, infinities and a key twice in an object are no JSON; Python takes them.
    """
    hooks: dict[str, Any] = {"parse_constant": _no_constant, "object_pairs_hook": _once}
    try:
        value = json.loads(text.decode(), **(hooks if strict else {}))
    except RecursionError:
        raise ValueError(f"nested more than {DEPTH} deep") from None
    level = [value]
    for _ in range(DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise ValueError(f"nested more than {DEPTH} deep")


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object has a key twice")
    return value


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; UserError where it is none."""
    try:
        _regular(path)
        if path.stat().st_size > LIMIT:
            raise OSError(f"it is larger than {LIMIT >> 20} MiB")
        value = parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value


def read_lines(path: pathlib.Path) -> list[bytes]:
    """The lines of a file that a run has written, none where there is no file; UserError."""
    if not path.exists():
        return []
    try:
        _regular(path)
        return path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}; give another --workdir") from error


def _regular(path: pathlib.Path) -> None:
    if not path.is_file():  # a pipe might never end
        raise OSError("it is no file")
