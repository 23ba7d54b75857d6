"""Compiling for TPUs that are not here, where libtpu is installed: a test runs a script in a
process of its own, which prints what XLA says of each program as a line of JSON."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from fgrpo_jax import hlo

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'jax[tpu]'"
)
SETTINGS = dict(  # libtpu reads them before Python code runs: a process of its own
    JAX_PLATFORMS="cpu",
    JAX_OPTIMIZATION_LEVEL="O0",
    TPU_SKIP_MDS_QUERY="1",
    TPU_LOG_DIR="disabled",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)


def reports(script, *arguments):
    """The JSON objects that it prints, a line each."""
    tests = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(tests.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(tests / script), *arguments],
        env=os.environ | SETTINGS | dict(PYTHONPATH=path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def report(name, lowered):
    """Compiles it, and prints a line for the test."""
    before = time.time()
    compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    line = dict(
        name=name,
        seconds=round(time.time() - before, 2),
        temporaries=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
        kernels=text.count("tpu_custom_call"),
        collectives=[(x.kind, x.bytes) for x in hlo.each_collective(text)],
    )
    print(json.dumps(line), flush=True)
