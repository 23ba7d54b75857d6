"""Strict settings for every test, eight CPU devices, and a tiny random Qwen2."""

import os
import pathlib
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
CACHE = pathlib.Path(tempfile.gettempdir()) / f"fgrpo_jax_test_cache_{jax.__version__}"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

from fgrpo_jax.model import Policy  # noqa: E402
from fgrpo_jax.model_config import ModelConfig  # noqa: E402

DATA = pathlib.Path(__file__).parent / "data"
FAULTS: list[tuple[str, ...]] = []  # what was tried, for the table at the end
SHARED = pathlib.Path(__file__).parents[2] / "shared"  # extra real files, where they are laid out


def tiny_config(**changes) -> ModelConfig:
    """Two layers, grouped queries, a vocabulary that divides by eight."""
    fields = dict(
        vocab=48, width=32, layers=2, heads=4, kv_heads=2, head_size=8, feed_forward=64,
        rope_theta=10_000.0, rms_eps=1e-6, tied=True,
    )  # fmt: skip
    return ModelConfig(**(fields | changes))


def pytest_collection_modifyitems(items):
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: tests/gpu/check.sh"))


def pytest_terminal_summary(terminalreporter):
    if FAULTS:
        terminalreporter.section("faults")
        for row in [("fault", "tried", "survived", "s to detect", "s to resume"), *FAULTS]:
            terminalreporter.write_line(" | ".join(row))


@pytest.fixture(scope="session")
def policy() -> Policy:
    return Policy(tiny_config())


@pytest.fixture(scope="session")
def params(policy):
    """Random weights, scaled so that distributions are far from flat; norms stay 1."""
    return jax.tree.map(lambda x: jax.numpy.where(x == 1, x, x * 8), policy.init(jax.random.key(0)))


@pytest.fixture(scope="session")
def shared_folder() -> pathlib.Path:
    if not SHARED.is_dir():
        pytest.skip("the shared folder of real files is not here")
    return SHARED
