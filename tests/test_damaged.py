"""Checkpoints and data files damaged at random: what is read of them is whole, or one sentence
names the file. `pytest -m faults` damages thousands."""

import functools
import json
import pathlib
import random
import resource
import shutil
import struct
import time

import jax
import numpy as np
import pyarrow
import pytest
import qwen2_folder
from pyarrow import parquet
from test_untrusted import TINY, bounded, join, needs_linux, read, split

from fgrpo_jax import UserError, sources, tokenizer

pytestmark = needs_linux
FEW, MANY = 60, 1000  # files of each kind in an ordinary run, and under the marker
EXTREME = [
    0, 1, -1, 2**31, 2**63, 10**18, 10**400, 0.5, -0.0, float("nan"), float("inf"), True, None, "",
    "x", "\ud800", "\0", "../x", "/etc/passwd", "9" * 100, [], {}, [[]], {"a": 1},
]  # fmt: skip


def damaged_bytes(draw, raw):
    """The bytes after one to three accidents."""
    raw = bytearray(raw)
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = draw.randrange(len(raw) + 1)
        end = min(len(raw), at + draw.choice([1, 2, 8, 100]))
        accident = draw.randrange(6)
        if accident == 0 and at < len(raw):
            raw[at] ^= 1 << draw.randrange(8)
        elif accident == 1:
            del raw[at:]
        elif accident == 2:
            raw[at:at] = draw.randbytes(draw.choice([1, 3, 50]))
        elif accident == 3:
            del raw[at:end]
        elif accident == 4:
            raw[at:at] = raw[at:end]
        else:
            raw[at:end] = draw.choice([b"\0", b"\xff", b"[", b'"', b"9" * 30]) * (end - at)
    return bytes(raw)


def places(value):
    """(container, key) of all that is inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def damaged_json(draw, value):
    """The value after one to three changes of its structure, as a text."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice([1, 1, 2, 3])):
        spots = list(places(value))
        if not spots:
            break
        (outer, key), (other, name) = draw.choice(spots), draw.choice(spots)
        accident = draw.randrange(5)
        if accident == 0:
            del outer[key]
        elif accident == 1:
            outer[key] = json.loads(json.dumps(other[name]))
        elif accident == 2 and isinstance(outer[key], int | float):
            outer[key] = draw.choice([outer[key] + 1, -outer[key], outer[key] * 2])
        elif accident == 3 and isinstance(outer, dict):
            outer[draw.choice(["x", "", key + "x", "__metadata__"])] = outer.pop(key)
        else:
            outer[key] = draw.choice(EXTREME)
    return json.dumps(value).encode()


def damaged(draw, raw):
    """A JSON file's bytes, damaged in either way."""
    return damaged_bytes(draw, raw) if draw.random() < 0.4 else damaged_json(draw, json.loads(raw))


def damage_weights(draw, folder):
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    header, data = split(file)
    kind = draw.randrange(4)
    if kind == 0:
        join(file, damaged_json(draw, header), data)
    elif kind == 1:
        join(file, damaged_bytes(draw, json.dumps(header).encode()), data)
    elif kind == 2:  # another length than the header has
        length = struct.unpack("<Q", raw[:8])[0]
        length = draw.choice([0, 1, length - 1, length + 1, length * 2, draw.getrandbits(64)])
        file.write_bytes(struct.pack("<Q", length) + raw[8:])
    else:
        file.write_bytes(damaged_bytes(draw, raw))


def damage(name):
    def change(draw, folder):
        (folder / name).write_bytes(damaged(draw, (folder / name).read_bytes()))

    return change


def use(folder):
    """Loads a tokenizer, and does with it what a run does."""
    loaded = tokenizer.load(folder)
    text = loaded.with_chat_template("plain").render("1+2=３")
    (ids,) = loaded.encode([text])
    loaded.decode(ids)


def whole_params(folder):
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(read(folder)))


KINDS = {  # what is damaged, and what reads it
    "model.safetensors": (damage_weights, whole_params, "one"),
    "model.safetensors.index.json": (damage("model.safetensors.index.json"), whole_params, "two"),
    "config.json": (damage("config.json"), whole_params, "one"),
    "tokenizer.json": (damage("tokenizer.json"), use, "tiny"),
    "tokenizer_config.json": (damage("tokenizer_config.json"), use, "tiny"),
    "generation_config.json": (damage("generation_config.json"), use, "tiny"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Whole folders by name."""
    root = tmp_path_factory.mktemp("whole")
    shape = qwen2_folder.hf_config(num_hidden_layers=1)
    qwen2_folder.write(root / "one", shape)
    qwen2_folder.write(root / "two", shape, files=2)
    shutil.copytree(TINY, root / "tiny", ignore=shutil.ignore_patterns("*.safetensors"))
    return root


def outcomes(cases, name):
    """Runs each case within bounds: it is read, or refused by the name of the file."""
    refused, read, longest = 0, 0, 0.0
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    before = peak()
    for number, case in enumerate(cases):
        began = time.monotonic()
        try:
            with bounded():
                case()
            read += 1
        except UserError as error:
            refused += 1
            assert name in str(error) and len(str(error)) < 3000, (number, str(error))
        except BaseException as error:
            raise AssertionError(f"{name}, case {number}: {error!r}") from error
        longest = max(longest, time.monotonic() - began)
    print(
        f"{pathlib.Path(name).name}: {refused} refused, {read} read, {longest:.2f} s at most, "
        f"peak of the process {before} -> {peak()} MiB"
    )
    assert refused and read


def damage_checkpoints(folders, tmp_path, name, number):
    change, reads, whole = KINDS[name]
    reads(folders / whole)

    def cases():
        for seed in range(number):
            folder = tmp_path / "damaged"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(folders / whole, folder)
            change(random.Random(seed), folder)
            yield functools.partial(reads, folder)

    # a wrong config shows in the weights, whose file or folder is then named
    outcomes(cases(), str(tmp_path / "damaged"))


@pytest.mark.parametrize("name", KINDS)
def test_damaged_checkpoints(folders, tmp_path, name):
    damage_checkpoints(folders, tmp_path, name, FEW)


@pytest.mark.faults
@pytest.mark.parametrize("name", KINDS)
def test_many_damaged_checkpoints(folders, tmp_path, name):
    damage_checkpoints(folders, tmp_path, name, MANY)


ROWS = [
    {"problem": f"{i} + 1?", "answer": str(i + 1), "level": i % 3, "solution": f"it is {i + 1}"}
    for i in range(40)
]
CHATS = [
    {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"{i}?"}],
        "reward_model": {"ground_truth": i / 2, "style": None},
    }
    for i in range(40)
]
OWN = [{"text": f"{i}", "answer": "1", "kind": "", "worked": "", "data": "[1]"} for i in range(40)]


def damage_data(tmp_path, kind, number):
    def cases():
        for seed in range(number):
            draw = random.Random(seed)
            rows = draw.choice([ROWS, CHATS, OWN])
            path = tmp_path / f"a.{kind}"
            if kind == "parquet":
                parquet.write_table(
                    pyarrow.Table.from_pylist(rows), path, compression=draw.choice(["snappy", None])
                )
                path.write_bytes(damaged_bytes(draw, path.read_bytes()))
            else:
                lines = [json.dumps(row).encode() for row in rows]
                place = draw.randrange(len(lines))
                lines[place] = damaged(draw, lines[place])
                path.write_bytes(b"\n".join(lines))
            yield functools.partial(sources.read, f"{kind}:{path}", "train")

    outcomes(cases(), f"data file {tmp_path / f'a.{kind}'}")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_damaged_data(tmp_path, kind):
    damage_data(tmp_path, kind, FEW)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_much_damaged_data(tmp_path, kind):
    damage_data(tmp_path, kind, MANY)
