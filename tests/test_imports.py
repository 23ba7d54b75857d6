"""The layering of DESIGN: a file imports only from rows above its own, read from the sources."""

import ast
import pathlib
import subprocess
import sys

import pytest

import fgrpo_jax

PACKAGE = pathlib.Path(fgrpo_jax.__file__).parent
ROWS = [
    "structs sharding storage distributed numerics forms answers timing accelerators hlo batches "
    "pass_at_k jsons choices theory model_config",
    "validation significance fields arithmetic verifiers maze ragged packing sampling preemption "
    "products watchdog recompiles",
    "config cautions adapters attention advantages losses kl aggregators shaping tokenizer sources",
    "benchmarks workdir manifest layers optimizer prompts metrics guard objective estimators "
    "selection judge recipes",
    "model checkpoint rewards profiling flops",
    "weights logprobs layout roofline rlvr_dataset",
    "slots export throughput",
    "sampler update",
    "rollouts held_out programs",
    "reference report bench_losses bench_sampler compiles",
    "build sft bench_update plan",
    "train bench",
    "main",
    "evaluate sweep release",
]
ROW = {name: row for row, names in enumerate(ROWS) for name in names.split()}
LIBRARY = "advantages losses kl aggregators shaping pass_at_k theory".split()


COMMANDS = {
    ("sft", "main"),
    ("prompts", "rewards"),
    ("weights", "release"),
}  # what a file needs as a command


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "fgrpo_jax":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fgrpo_jax."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda p: p.stem)
def test_rows(path):
    if path.stem == "__init__":
        return
    for name in imports(path):
        assert name != "experiments", path
        if name in ROW and (path.stem, name) not in COMMANDS:
            assert ROW[name] < ROW[path.stem], f"{path.stem} imports {name}"


@pytest.mark.parametrize(
    "path",
    sorted(
        p for folder in (".", "maze") for p in (PACKAGE.parent / "configs" / folder).glob("*.py")
    ),
    ids=lambda p: p.stem,
)
def test_configs_import_only_the_config(path):
    own = {"config"}, {"recipes"}, {"experiments"}  # the last have settings of their own
    assert set(imports(path)) in own


def test_the_library_loads_jax_and_numpy_alone():
    heavy = "flax optax orbax transformers grain math_verify ml_collections tensorflow_datasets"
    code = (
        f"import sys, {', '.join(f'fgrpo_jax.{name}' for name in LIBRARY)}\n"
        f"print([name for name in {heavy.split()} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_partition_specs_and_process_indices_have_one_home():
    for word, home in (("PartitionSpec", "sharding"), ("process_index", "distributed")):
        homes = {path.stem for path in PACKAGE.glob("*.py") if word in path.read_text()}
        assert homes == {home}


def test_files_are_one_noun():
    for path in PACKAGE.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 320, path
