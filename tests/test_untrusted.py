"""What others give — checkpoints, data, journals, answers — is loaded or refused in one sentence
that names the file: no traceback, no hang, no memory beyond what the files take.

Flipped bits of weights are out of reach: safetensors has no checksums. Only what is not finite is.
"""

import ast
import contextlib
import io
import json
import math
import os
import pathlib
import resource
import shutil
import signal
import struct
import time

import jax
import numpy as np
import pyarrow
import pytest
import qwen2_folder
from pyarrow import parquet
from rich.console import Console

import fgrpo_jax
from fgrpo_jax import (
    UserError,
    config,
    held_out,
    metrics,
    prompts,
    report,
    rewards,
    sharding,
    sources,
    tokenizer,
    weights,
    workdir,
)
from fgrpo_jax.model import Policy
from fgrpo_jax.structs import Problem

PACKAGE = pathlib.Path(fgrpo_jax.__file__).parent
TINY = weights.EMBEDDED / "tiny_arithmetic"
SECONDS = 10  # that a case may take on a busy machine
MEMORY = 1 << 30  # bytes of address space that a case may add


class TookTooLong(BaseException):
    """No Exception: nothing in between may catch it."""


@contextlib.contextmanager
def bounded(seconds=SECONDS):
    """Ends what takes too long, and makes an allocation that is too large a MemoryError."""

    def ring(*_):
        raise TookTooLong

    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


needs_linux = pytest.mark.skipif(
    not pathlib.Path("/proc/self/statm").exists(), reason="reads Linux's /proc"
)
pytestmark = needs_linux


def refused(function, *arguments):
    """The sentence of the UserError with which the call has to end."""
    with bounded(), pytest.raises(UserError) as error:
        function(*arguments)
    sentence = str(error.value)
    assert "\n" not in sentence and len(sentence) < 3000
    return sentence


# ---- nothing that is read is executed


FORBIDDEN_MODULES = "pickle cPickle _pickle dill cloudpickle joblib marshal shelve".split()
FORBIDDEN_CALLS = "eval exec compile __import__".split()
FORBIDDEN_NAMES = (
    "torch.load np.load numpy.load jnp.load yaml.load yaml.unsafe_load os.system os.popen"
).split()
FORBIDDEN_ARGUMENTS = "trust_remote_code allow_pickle shell".split()
# config and method files are Python by design; a reward is module:function of the user's own
IMPORTS = {
    ("config", "exec_module"),
    ("judge", "import_module"),
    ("verifiers", "import_module"),  # of names that it has itself
}


def executions(tree):
    """What a source does that could execute data, as words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (n for n in names if n.split(".")[0] in FORBIDDEN_MODULES)
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in FORBIDDEN_CALLS + FORBIDDEN_NAMES:
            yield name
        if name.split(".")[-1] in ("exec_module", "import_module"):
            yield name.split(".")[-1]
        yield from (k.arg for k in node.keywords if k.arg in FORBIDDEN_ARGUMENTS)


def test_no_source_executes_data():
    found = {
        (path.stem, word)
        for path in PACKAGE.glob("*.py")
        for word in executions(ast.parse(path.read_text()))
    }
    assert found == IMPORTS


@pytest.mark.parametrize(
    "source, word",
    [
        ("import pickle", "pickle"),
        ("from dill import loads", "dill"),
        ("eval(x)", "eval"),
        ("np.load(f, allow_pickle=True)", "allow_pickle"),
        ("torch.load(f)", "torch.load"),
        ("A.from_pretrained(f, trust_remote_code=True)", "trust_remote_code"),
        ("subprocess.run(x, shell=True)", "shell"),
    ],
)
def test_such_sources_would_be_found(source, word):
    assert word in executions(ast.parse(source))


# ---- checkpoints


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small random checkpoint in one file."""
    folder = tmp_path_factory.mktemp("model")
    return qwen2_folder.write(folder, qwen2_folder.hf_config(num_hidden_layers=1))


@pytest.fixture
def own(model, tmp_path):
    """A copy of it that a test may break."""
    return shutil.copytree(model, tmp_path / "own")


def read(folder):
    """All that a run reads of a model's weights; their params."""
    policy = Policy(weights.model_config(folder))
    return weights.load(folder, policy, sharding.make_mesh(8, 1, 1))


def split(path):
    """(header, data) of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


NORM = "model.norm.weight"  # 32 float32


def entry(**changes):
    def change(header):
        header[NORM] |= changes

    return change


def moved(begin, end):
    """data_offsets of the norm, so many bytes away from where they should be."""

    def change(header):
        offsets = header[NORM]["data_offsets"]
        header[NORM]["data_offsets"] = [offsets[0] + begin, offsets[1] + end]

    return change


def reversed_offsets(header):
    header[NORM]["data_offsets"].reverse()


def without(key):
    return lambda header: header[NORM].pop(key)


def replaced(value):
    def change(header):
        header[NORM] = value

    return change


def named(name):
    def change(header):
        header[name] = header.pop(NORM)

    return change


SIZED = "has a shape or data_offsets that are no lists of sizes"


@pytest.mark.parametrize(
    "change, message",
    [
        (entry(shape=[1 << 40, 1 << 40]), "has a shape of another size than its data_offsets"),
        (entry(shape=[1 << 62, 4]), SIZED),
        (entry(shape=[10**400]), SIZED),
        (entry(shape=[2] * 100_000), SIZED),
        (entry(shape=[-32]), SIZED),
        (entry(shape=[-4, -8]), SIZED),
        (entry(shape=[32.0]), SIZED),
        (entry(shape=[True] * 5), SIZED),
        (entry(shape=["32"]), SIZED),
        (entry(shape=[[32]]), SIZED),
        (entry(shape=32), SIZED),
        (entry(shape=None), SIZED),
        (entry(shape={"0": 32}), SIZED),
        (entry(shape=[31]), "of another size than its data_offsets"),
        (entry(shape=[]), "of another size than its data_offsets"),
        (entry(data_offsets=[0, 128]), "begins at byte"),  # another's bytes
        (entry(data_offsets=[-128, 0]), SIZED),
        (entry(data_offsets=[0.0, 128.0]), SIZED),
        (entry(data_offsets=["0", "128"]), SIZED),
        (entry(data_offsets=[128]), SIZED),
        (entry(data_offsets=[0, 64, 128]), SIZED),
        (entry(data_offsets=[0, 1 << 63]), SIZED),
        (entry(data_offsets=None), SIZED),
        (reversed_offsets, "of another size than its data_offsets"),
        (moved(4, 4), "begins at byte"),
        (moved(1 << 40, 1 << 40), "begins at byte"),
        (moved(0, 4), "of another size than its data_offsets"),
        (entry(dtype="F99"), "is of dtype F99, and must be one of F32, F16, BF16"),
        (entry(dtype="x" * 9999), "is of dtype xxxxxxxxxxxxxxxxxxxx, and must be"),
        (entry(dtype="F64"), "is of dtype F64"),
        (entry(dtype=32), "is of dtype 32"),
        (entry(dtype=["F32"]), "is of dtype ['F32']"),
        (without("dtype"), "lacks its dtype, shape or data_offsets"),
        (without("shape"), "lacks its dtype, shape or data_offsets"),
        (without("data_offsets"), "lacks its dtype, shape or data_offsets"),
        (replaced(None), "lacks its dtype, shape or data_offsets"),
        (replaced([]), "lacks its dtype, shape or data_offsets"),
        (named("x" * 1000), "is no name of a tensor"),
        (named("a\nb"), "is no name of a tensor"),
        (named("\x1b[2J"), "is no name of a tensor"),
        (named("\ud800"), "is no name of a tensor"),
        (named("../../x"), "lacks tensor model.norm.weight"),
        (lambda header: header.pop(NORM), "has 128 bytes behind its last tensor"),
        (lambda header: header.pop("model.embed_tokens.weight"), "begins at byte"),
    ],
)  # fmt: skip
def test_headers(own, change, message):
    file = own / "model.safetensors"
    header, data = split(file)
    change(header)
    join(file, header, data)
    sentence = refused(read, own)
    assert message in sentence and str(own) in sentence


@pytest.mark.parametrize(
    "text, message",
    [
        (b"", "malformed header: Expecting value"),
        (b"[]", "malformed header: it is no object"),
        (b"3", "malformed header: it is no object"),
        (b"\xff\xfe{\x00}\x00", "malformed header: 'utf-8' codec"),
        (b"\xef\xbb\xbf{}", "malformed header: Unexpected UTF-8 BOM"),
        (b'{"a": 1, "a": 2}', "malformed header: an object has a key twice"),
        (b'{"a": NaN}', "malformed header: NaN is no number"),
        (b'{"a": -Infinity}', "malformed header: -Infinity is no number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "malformed header: Exceeds the limit"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested more than 100 deep"),
        (b"[" * 1_000_000, "nested more than 100 deep"),
        (b'{"a":' * 200_000, "nested more than 100 deep"),
        (b"{}" + b" " * (100 << 20), "it has 104857602 bytes, and a model's has at most"),
        (b"{}", "bytes behind its last tensor"),
    ],
)
def test_headers_that_are_no_list_of_tensors(own, text, message):
    join(own / "model.safetensors", text, b"\0" * 64)
    sentence = refused(read, own)
    assert message in sentence and "model.safetensors" in sentence


@pytest.mark.parametrize("raw", [b"", b"1234567", b"\xff" * 8, struct.pack("<Q", 1 << 63) + b"{}"])
def test_lengths_beyond_the_file(own, raw):
    (own / "model.safetensors").write_bytes(raw)
    assert "model.safetensors is truncated or no safetensors file" in refused(read, own)


def test_what_is_behind_the_last_tensor_is_told(own):
    with (own / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "has 4 bytes behind its last tensor" in refused(read, own)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(tmp_path, value):
    shape = qwen2_folder.hf_config(num_hidden_layers=1)
    tensors = qwen2_folder.random_tensors(shape)
    tensors["model.layers.0.mlp.up_proj.weight"][79, 31] = value
    folder = qwen2_folder.write(tmp_path, shape, tensors)
    sentence = refused(read, folder)
    assert "model.layers.0.mlp.up_proj.weight has a weight that is not finite" in sentence


def test_a_file_that_shrinks_while_it_is_read(own):
    tensors = weights.read_index(own)
    file = own / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    last = max(tensors.values(), key=lambda tensor: tensor.offset)
    out = np.empty(last.shape, np.float32)
    bounds = tuple((0, size) for size in last.shape)
    sentence = refused(weights._read_slice, last, last.shape, bounds, out)
    assert "has changed while it was read" in sentence


@pytest.fixture
def sharded(tmp_path):
    """A small random checkpoint in two files, with its index."""
    shape = qwen2_folder.hf_config(num_hidden_layers=1)
    return qwen2_folder.write(tmp_path / "sharded", shape, files=2)


OUTSIDE = "has no weight_map of safetensors files in its own folder"


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors", "/etc/passwd", "/tmp/x.safetensors", "a/b.safetensors",
        "..\\x.safetensors", "C:\\x.safetensors", "", ".", "..", " ", "config.json",
        "model.safetensors.index.json", "pytorch_model.bin", "x.safetensors\0", "\0.safetensors",
        "x\n.safetensors", "~.safetensors/..", "\ud800.safetensors", "x" * 5000 + ".safetensors",
        None, 3, 1.5, True, [], ["a.safetensors"], {"a": "b"},
    ],
)  # fmt: skip
def test_an_index_names_files_of_its_own_folder(sharded, name):
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"][NORM] = name
    file.write_text(json.dumps(index))
    sentence = refused(read, sharded)
    assert OUTSIDE in sentence and "model.safetensors.index.json" in sentence


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "cannot be read as JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", OUTSIDE),
        ('{"weight_map": null}', OUTSIDE),
        ('{"weight_map": {}}', OUTSIDE),
        ('{"weight_map": ["model.safetensors"]}', OUTSIDE),
        ('{"weight_map": "model.safetensors"}', OUTSIDE),
        ('{"weight_map": ' + "[" * 100_000, "nested more than 100 deep"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors is missing"),
        ('{"weight_map": {"a": "folder.safetensors"}}', "folder.safetensors is missing"),
        ('{"weight_map": {"a": "pipe.safetensors"}}', "pipe.safetensors is missing"),
        ('{"weight_map": {"a": "loop.safetensors"}}', "loop.safetensors is missing"),
    ],
)
def test_an_index_that_is_none(sharded, text, message):
    (sharded / "folder.safetensors").mkdir()
    os.mkfifo(sharded / "pipe.safetensors")
    (sharded / "loop.safetensors").symlink_to("loop.safetensors")
    (sharded / "model.safetensors.index.json").write_text(text)
    assert message in refused(read, sharded)


def test_a_tensor_is_in_one_file_and_in_the_one_that_is_said(sharded):
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    names = sorted(set(index["weight_map"].values()))
    there = index["weight_map"][NORM]
    other = next(name for name in names if name != there)
    for tensor, name in ((NORM, other), ("model.nothing", there)):
        changed = {"weight_map": index["weight_map"] | {tensor: name}}
        file.write_text(json.dumps(changed))
        sentence = refused(read, sharded)
        assert f"{name} has tensor '{tensor}', and it has not" in sentence
    file.write_text(json.dumps(index))
    shutil.copyfile(sharded / there, sharded / other)
    assert "both have tensor" in refused(read, sharded)


def test_links_out_of_the_folder_are_followed(sharded, tmp_path):
    """Hugging Face's cache is made of them: snapshots/REVISION/FILE -> ../../blobs/HASH."""
    snapshot, blobs = tmp_path / "hub/snapshots/1", tmp_path / "hub/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sharded.iterdir()):
        shutil.copyfile(file, blobs / f"hash{i}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash{i}")
    jax.tree.map(np.testing.assert_array_equal, read(snapshot), read(sharded))


WHOLE = "it must be a whole number from 1 to"
MULTIPLE = "each must be a multiple of the next"


@pytest.mark.parametrize(
    "key, value, message",
    [
        *[
            (key, value, WHOLE)
            for key in (
                "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size",
                "num_attention_heads", "num_key_value_heads", "head_dim",
            )
            for value in (0, -1, 10**9, 10**12, "32", 32.0, 1.5, True, [32], {}, math.inf)
        ],
        *[
            (key, value, "it must be a number above 0")
            for key in ("rope_theta", "rms_norm_eps")
            for value in (0, -1, "10000", True, None, math.nan, math.inf, 10**400, [1])
        ],
        ("hidden_size", 33, MULTIPLE),
        ("num_attention_heads", 5, MULTIPLE),
        ("num_key_value_heads", 3, MULTIPLE),
        ("head_dim", 7, "RoPE turns pairs"),
        ("hidden_size", 36, "RoPE turns pairs"),
        ("tie_word_embeddings", "yes", "it must be true or false"),
        ("tie_word_embeddings", None, "it must be true or false"),
        ("model_type", ["qwen2"], "model_type ['qwen2']: it must be one of qwen2"),
        ("model_type", "x" * 9999, "it must be one of qwen2"),
        ("hidden_act", {"a": 1}, "it must be silu"),
        ("rope_scaling", "yarn", "scales RoPE"),
        ("rope_scaling", [1], "scales RoPE"),
        ("rope_parameters", {"rope_type": ["default"]}, "scales RoPE"),
        ("num_hidden_layers", 1000, "lacks tensor model.layers.1."),
        ("vocab_size", 1 << 24, "config.json needs (16777216, 32)"),
    ],
)  # fmt: skip
def test_config(own, key, value, message):
    path = own / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    sentence = refused(read, own)
    assert message in sentence and (str(path) in sentence or "tensor" in sentence)


@pytest.mark.parametrize(
    "key",
    "model_type vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size"
    .split(),
)  # fmt: skip
def test_config_that_lacks_a_key(own, key):
    path = own / "config.json"
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    assert key in refused(read, own)


def test_the_largest_shapes_that_are_believed_cost_nothing(own):
    path = own / "config.json"
    sizes = {
        "vocab_size": 1 << 24, "hidden_size": 1 << 18, "intermediate_size": 1 << 20,
        "num_hidden_layers": 1000, "num_attention_heads": 1 << 12, "num_key_value_heads": 1 << 12,
    }  # fmt: skip
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    assert "lacks tensor" in refused(read, own) or "has shape" in refused(read, own)


NOT_JSON = [
    b"", b"{", b"[1]", b"3", b"null", b"\x00" * 100, b"\xff\xfe", b"PK\x03\x04", b"[" * 100_000,
    b'{"a":' * 100_000, b'{"a": ' + b"9" * 5000 + b"}",
]  # fmt: skip


@pytest.fixture
def embedded(tmp_path):
    """A copy of the embedded policy without its weights."""
    ignore = shutil.ignore_patterns("*.safetensors")
    return shutil.copytree(TINY, tmp_path / "tiny", ignore=ignore)


@pytest.mark.parametrize("content", NOT_JSON)
@pytest.mark.parametrize(
    "name", "config.json generation_config.json tokenizer.json tokenizer_config.json".split()
)
def test_files_that_hold_no_object(embedded, name, content):
    (embedded / name).write_bytes(content)
    assert name in refused(tokenizer.load, embedded)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_pipes_and_folders_and_huge_files(embedded, name):
    path = embedded / name
    path.unlink()
    os.mkfifo(path)
    assert f"{name} cannot be read as JSON: it is no file" in refused(tokenizer.load, embedded)
    path.unlink()
    path.mkdir()
    assert f"{name} cannot be read as JSON: it is no file" in refused(tokenizer.load, embedded)
    path.rmdir()
    path.touch()
    os.truncate(path, 1 << 40)  # sparse
    assert f"{name} cannot be read as JSON: it is larger than" in refused(tokenizer.load, embedded)


@pytest.mark.parametrize("value", ["258", 1.5, True, [True], [[1]], {"a": 1}, -1, ["x" * 9999]])
def test_stop_ids_are_numbers(embedded, value):
    (embedded / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    sentence = refused(tokenizer.load, embedded)
    assert "generation_config.json has eos_token_id" in sentence


def changed_tokenizer(folder, name, **changes):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ messages[0] + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no') }}",
        "{{ messages | no_such_filter }}",
        "{% if %}",
        "{{ '\ud800' }}",
    ],
)
def test_templates_of_others(embedded, template):
    """They run in jinja's sandbox, and what goes wrong there is told."""
    changed_tokenizer(embedded, "tokenizer_config.json", chat_template=template)
    loaded = tokenizer.load(embedded)
    message = "the chat template cannot be rendered, see data.chat_template"
    assert message in refused(loaded.render, "1+2")


@pytest.mark.parametrize("template", [3, True, ["a"], {"a": 1}, [{"name": "a"}]])
def test_templates_that_are_no_text(embedded, template):
    changed_tokenizer(embedded, "tokenizer_config.json", chat_template=template)

    def load_and_render():
        tokenizer.load(embedded).with_chat_template("").render("1")

    sentence = refused(load_and_render)
    assert "template" in sentence or "tokenizer" in sentence


# ---- data


def jsonl(tmp_path, *lines):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path


def read_jsonl(path):
    return sources.read(f"jsonl:{path}", "train")


GOOD = b'{"problem": "p", "answer": "1"}'


def row(**fields):
    return json.dumps({"problem": "p", "answer": "1"} | fields).encode()


@pytest.mark.parametrize(
    "line, message",
    [
        (b"\xff", "line 2: not a JSON object ('utf-8' codec can't decode byte 0xff"),
        (b'{"problem": "\xc3("}', "line 2: not a JSON object ('utf-8' codec"),
        (b"\x1f\x8b\x08\x00", "line 2: not a JSON object ('utf-8' codec"),
        (b"\xef\xbb\xbf" + GOOD, "line 2: not a JSON object (Unexpected UTF-8 BOM"),
        (b"\x00" * 50, "line 2: not a JSON object (Expecting value)"),
        (b'{"problem": "a\x00b", "answer": "1"}', "line 2: not a JSON object (Invalid control"),
        (GOOD[:-4], "line 2: not a JSON object"),
        (GOOD + GOOD, "line 2: not a JSON object (Extra data)"),
        (b"3", "line 2: not a JSON object (it is of type int)"),
        (b"null", "line 2: not a JSON object (it is of type NoneType)"),
        (b'"text"', "line 2: not a JSON object (it is of type str)"),
        (b"[" * 1000 + b"]" * 1000, "line 2: not a JSON object (nested more than 100 deep)"),
        (b"[" * 5_000_000, "line 2: not a JSON object (nested more than 100 deep)"),
        (b'{"problem": "p", "answer": ' + b"9" * 5000 + b"}", "line 2: not a JSON object (Exceeds"),
        (b'{"problem": "p", "answer": ' + b"[" * 150 + b"]" * 150 + b"}", "nested more than 100"),
        (row(problem=None), "row 2: its problem must be a text that is not empty"),
        (row(problem=3), "row 2: its problem must be a text that is not empty"),
        (row(problem={"a": "b"}), "row 2: its problem must be a text that is not empty"),
        (row(problem=" \n"), "row 2: its problem must be a text that is not empty"),
        (row(problem=[]), "row 2: its prompt must be chat messages"),
        (row(problem=[1]), "row 2: its prompt must be chat messages"),
        (row(problem=[{"role": ["user"], "content": "p"}]), "row 2: its prompt must be chat"),
        (row(problem=[{"role": "user"}]), "row 2: its problem must be a text"),
        (row(problem=[{"role": "user", "content": [{"text": "p"}]}]), "row 2: its problem must"),
        (row(problem="\ud800"), "row 2: 'utf-8' codec can't encode character"),
        (row(answer="\udfff"), "row 2: 'utf-8' codec can't encode character"),
        (row(kind="\ud800"), "row 2: 'utf-8' codec can't encode character"),
        (row(worked="\ud800"), "row 2: 'utf-8' codec can't encode character"),
        (row(answer={"a": 1}), "row 2: its answer is an object"),
        (row(answer=[{"a": 1}]), "row 2: its answer is an object"),
        (b'{"problem": "p"}', "row 2 lacks the field 'answer'"),
        (b"{}", "row 2 lacks the field 'problem'"),
    ],
)  # fmt: skip
def test_lines(tmp_path, line, message):
    first = row(kind="k", worked="w")
    path = jsonl(tmp_path, first, line)
    sentence = refused(read_jsonl, path)
    assert message in sentence and f"data file {path}" in sentence
    assert read_jsonl(jsonl(tmp_path, first))


OWN = {"text": "p", "answer": "1", "kind": "k", "worked": "", "data": ""}


@pytest.mark.parametrize(
    "change, message",
    [
        *[({key: value}, "row 1: its fields answer, data, kind, text, worked must be texts")
          for key in OWN for value in (3, None, ["p"], {"a": 1})],
        ({"data": "{"}, "row 1: its field data must hold JSON, or nothing"),
        ({"data": "[" * 100_000}, "row 1: its field data must hold JSON, or nothing"),
        ({"text": "\ud800"}, "row 1: 'utf-8' codec can't encode"),
        ({"worked": "\ud800"}, "row 1: 'utf-8' codec can't encode"),
    ],
)  # fmt: skip
def test_rows_of_our_own_schema(tmp_path, change, message):
    path = jsonl(tmp_path, json.dumps(OWN | change).encode())
    sentence = refused(read_jsonl, path)
    assert message in sentence and str(path) in sentence


def test_a_line_is_at_most_16_mib_long(tmp_path):
    path = jsonl(tmp_path, GOOD, row(worked="x" * (15 << 20)))
    with bounded():
        assert len(read_jsonl(path)) == 2
    with path.open("ab") as file:
        file.write(b"\n" + GOOD + b"\n")
        file.truncate(file.tell() + (4 << 30))  # sparse: a line of 4 GiB
    began = time.monotonic()
    assert f"data file {path}, line 4: longer than 16 MiB" in refused(read_jsonl, path)
    assert time.monotonic() - began < 5


def test_a_mark_at_the_beginning_and_carriage_returns_are_no_matter(tmp_path):
    expected = [Problem("p", "1", "a"), Problem("p", "1", "a")]
    assert read_jsonl(jsonl(tmp_path, b"\xef\xbb\xbf" + GOOD + b"\r", b"\r", GOOD)) == expected


def test_hostile_texts_take_no_longer_than_others(tmp_path):
    """What is looked for in a field takes time by its length, not by its square."""
    chat = lambda text: [{"role": "user", "content": text}]
    rows = [
        {"problem": chat(" " * 1_000_000 + "x"), "answer": "1"},
        {"problem": chat("Put " * 250_000), "answer": "1"},
        {"problem": chat("Put " + r"\boxed{}" * 100_000 + "?"), "answer": "1"},
        {"problem": chat("p"), "answer": "####" + " " * 1_000_000 + "\nx"},
        {"problem": chat("p"), "answer": "####\n" * 200_000 + "x"},
        {"problem": chat("p"), "answer": "1", "solution": r"\boxed{" * 150_000},
        {"problem": chat("p"), "answer": "1", "solution": r"\boxed{\text{" + " " * 500_000 + "}"},
    ]
    path = jsonl(tmp_path, *(json.dumps({"solution": ""} | row).encode() for row in rows))
    with bounded():
        assert len(read_jsonl(path)) == len(rows)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_is_no_regular_file(tmp_path, kind):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link", "."):
        sentence = refused(sources.read, f"{kind}:{tmp_path / name}", "train")
        assert sentence.endswith("cannot be read: it is no regular file")
    (tmp_path / "empty").touch()
    sentence = refused(sources.read, f"{kind}:{tmp_path / 'empty'}", "train")
    assert f"data file {tmp_path / 'empty'}" in sentence


def table(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)
    return f"parquet:{path}"


def binary_as_text(*values):
    """A column of texts that are none."""
    return pyarrow.Array.from_buffers(
        pyarrow.string(), len(values), pyarrow.array(values, pyarrow.binary()).buffers()
    )


@pytest.mark.parametrize(
    "columns, message",
    [
        (dict(problem=[1], answer=["1"]), "has no field that is known to hold the problem"),
        (dict(problem=[b"p"], answer=["1"]), "has no field that is known to hold the problem"),
        (dict(problem=["p"], answer=[b"1"]), "row 1: its answer is of type bytes"),
        (dict(problem=["p"], answer=[pyarrow.scalar(0, pyarrow.date32())]),
         "row 1: its answer is of type date"),
        (dict(problem=["p", None], answer=["1", "1"]), "row 2: its problem must be a text"),
        (dict(problem=["p"], answer=[{"a": 1}]), "has no field that is known to hold the answer"),
        (dict(problem=[[{"role": "user", "content": "p"}], [{"role": "user", "content": None}]],
              answer=["1", "1"]), "row 2: its problem must be a text"),
        (dict(problem=binary_as_text(b"p", b"\xff"), answer=["1", "1"]), "'utf-8' codec"),
        (dict(problem=pyarrow.array([], pyarrow.string()), answer=pyarrow.array([])), "is empty"),
    ],
)  # fmt: skip
def test_columns(tmp_path, columns, message):
    source = table(tmp_path / "a.parquet", **columns)
    sentence = refused(sources.read, source, "train")
    assert message in sentence and "a.parquet" in sentence


def test_data_is_what_a_worker_can_be_sent(tmp_path):
    day = [pyarrow.scalar(0, pyarrow.date32())]
    source = table(tmp_path / "a.parquet", problem=["p"], answer=["1"], meta=day)
    sentence = refused(sources.read, source, "train", 0.0, "data=meta")
    assert "row 1: Object of type date is not JSON serializable" in sentence
    assert sources.read(source, "train")


def test_golds_that_look_like_markup_are_shown_as_they_are():
    problem = Problem("p", "1")
    golds = ("[/x]", "[red]", "a\\", "x" * 100_000)
    loaded = prompts.PromptSet((problem,), (np.zeros(1, np.int32),), 1, {}, unparsable=golds)
    out = io.StringIO()
    Console(file=out, soft_wrap=True).print(prompts.summary(loaded), highlight=False)
    assert "'[/x]', '[red]', 'a\\\\', 'xxx" in out.getvalue() and len(out.getvalue()) < 300


@pytest.mark.parametrize("kind", [r"$\frac{$", "$$", "$", r"\$", "x" * 100_000])
def test_kinds_that_look_like_formulas_are_drawn(kind):
    evaluation = {"step": 0, "pass@1": 0.5, "by_kind": {kind: 0.5}}
    png = report.draw("title", [], [evaluation, evaluation], 1)
    assert png.startswith(b"\x89PNG")


# ---- what a run reads back


GARBLED = [
    b"3", b"null", b"[1]", b'"step"', b"{}", b'{"step": "2"}', b'{"step": 2.0}', b'{"step": true}',
    b'{"step": null}', b"\x00" * 100, b"\xff\xfe", b'{"step": 2', b"[" * 100_000, b"",
    b'{"step": ' + b"9" * 5000 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("line", GARBLED)
def test_journals(tmp_path, line):
    """The last line may be half written; another one that is no record is told."""
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": 1, "loss": NaN}', b'{"step": 2, "loss": 0.5}']
    path.write_bytes(b"\n".join([*good, line]))
    journal = metrics.Journal(path, 9)
    assert [record["step"] for record in journal.records] == [1, 2]
    assert path.read_text().count("\n") == 2
    path.write_bytes(b"\n".join([good[0], line, good[1]]))
    sentence = refused(metrics.Journal, path, 9)
    assert f"{path}, line 2 is no record of a run" in sentence
    assert path.read_bytes().split(b"\n")[1] == line  # it is as it was


def test_journals_that_are_no_files(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        path = tmp_path / name
        assert f"{path} cannot be read" in refused(metrics.Journal, path, 1)
        assert f"{path} cannot be read" in refused(held_out.Tallies, path, 1)


TALLY = {"problem": 5, "samples": 4, "correct": 2, "truncated": 1, "tokens": 90, "majority": 0.5}


@pytest.mark.parametrize("record", [{}, {"wall_s": "1", "cpu_s": 1}, {"wall_s": None, "cpu_s": 1}])
def test_times_that_are_none(record):
    sentence = refused(metrics.Clock().go_on, [{"step": 7, **record}])
    assert "the metrics of step 7 have no wall_s and cpu_s" in sentence


@pytest.mark.parametrize(
    "line",
    [
        *GARBLED,
        *[
            json.dumps(TALLY | change).encode()
            for change in (
                {"problem": "5"}, {"problem": [5]}, {"problem": None}, {"problem": True},
                {"samples": "4"}, {"samples": 5}, {"correct": "2"}, {"correct": -1},
                {"correct": 5}, {"correct": 1.5}, {"correct": None}, {"correct": {}},
                {"truncated": 5}, {"truncated": "0"}, {"tokens": -1}, {"tokens": 1e9},
                {"majority": 2}, {"majority": "1"}, {"majority": [1]}, {"more": 1},
            )
        ],
    ],
)  # fmt: skip
def test_tallies_that_are_none_are_made_again(tmp_path, line):
    path = tmp_path / "step_0.0.jsonl"
    good = json.dumps(TALLY | {"problem": 3}).encode()
    path.write_bytes(good + b"\n" + line)
    with bounded():
        assert held_out.Tallies(path, 4).done == {3: held_out.Tally(2, 1, 90, 0.5)}
    assert path.read_bytes() == good + b"\n"


@pytest.mark.parametrize("content", [*NOT_JSON, b'[["seed", 1]]', b"[[1, 2]]", b'"ab"', b"[]"])
def test_the_config_of_a_workdir(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    sentence = refused(workdir.check, config.validate(config.default()), tmp_path)
    assert "config.json is no config of a run: give another --workdir" in sentence


def test_the_config_of_a_workdir_that_is_no_file(tmp_path):
    (tmp_path / "config.json").mkdir()
    sentence = refused(workdir.check, config.validate(config.default()), tmp_path)
    assert "config.json is no config of a run: give another --workdir" in sentence


# ---- what a model wrote


HOSTILE = [
    "", "\0", "\ud800", "\ud800" * 1000, "9**9**9", "9^{9^{9^{9}}}", "1e999999999", "1e-999999999",
    "10^{999}", r"2\times10^{999}", "٣", "１２", "²", "1/0", r"\frac{1}{0}", r"\frac" * 80,
    r"\frac{" * 60 + "}" * 60, "{" * 199 + "}" * 199, r"\sqrt{" * 50 + "2" + "}" * 50,
    r"\left(" * 60, "(" * 399, "-" * 399, "+".join("1" * 200), r"\int_0^{\infty} x^x dx",
    r"\sum_{n=1}^{10^{9}} n!", "10000000!", r"\binom{10^9}{10^8}", r"x^{x^{x^{x^{x}}}}",
    "__import__('os')", "lambda: 0", "f(x)=", "\\", "\\text{" * 60, "1,,,,2", "0x1p9999", "NaN",
    "\\infty", "-\\infty", "True", "None", "\u202e12", "\U0010ffff", "1" * 399, "1." + "0" * 390,
]  # fmt: skip
MANY = 1 << 17
LONG = [
    "{" * 8 * MANY, r"\boxed{" * MANY, r"\boxed{" + "{}" * MANY + "}", "answer " * MANY,
    "####" * MANY, "answer" + " " * 8 * MANY, "1," * MANY, "9" * 8 * MANY, "<think>" * MANY,
    r"\boxed{" + r"\text{" * MANY + "}" * (MANY + 1), "\0" * 8 * MANY, "the answer is. " * MANY,
    r"\boxed{" + "1 " * MANY + "}", "-1.5e" * MANY, "\ud800" * 8 * MANY, r"\frac " * MANY,
]  # fmt: skip


@pytest.mark.parametrize(
    "reward",
    [
        "math",
        pytest.param("gsm8k", marks=pytest.mark.slow),
        "number",
        "multiple_choice",
        "exact",
    ],
)
def test_hostile_answers_get_a_verdict(reward):
    limit = 1.0
    form = {"math": "\\boxed{{{}}}", "gsm8k": "#### {}"}.get(reward, "{}")
    responses = [form.format(text) for text in HOSTILE] + LONG
    gold = Problem("p", "B" if reward == "multiple_choice" else r"\sqrt{77}")
    with rewards.Scorer(reward, 2, limit) as scorer:
        scorer.score([gold], [r"\boxed{\sqrt{3}}"], [True])  # it is up
        began = time.monotonic()
        scores = scorer.score([gold] * len(responses), responses, [True] * len(responses))
        took = time.monotonic() - began
    late = sum(score.info == "timed out" for score in scores)
    assert not any(score.correct for score in scores)
    assert {score.info for score in scores} <= {"wrong", "no answer", "unparsable", "timed out"}
    print(f"{reward}: {len(responses)} in {took:.1f} s, {late} timed out")
    assert took < 60 + late * (limit + 10)
