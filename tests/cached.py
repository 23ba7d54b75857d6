"""fgrpo_jax.main, with the programs of every process of a gang in the compilation cache.

JAX writes those of process 0 alone, and on CPUs each process's differ, so that the others would
compile all of theirs at each start.
"""

import runpy

from jax._src import compiler
from jax._src.distributed import global_state

write = compiler._cache_write


def write_mine(*arguments):
    process, global_state.process_id = global_state.process_id, 0
    try:
        write(*arguments)
    finally:
        global_state.process_id = process


compiler._cache_write = write_mine
if __name__ == "__main__":
    runpy.run_module("fgrpo_jax.main", run_name="__main__", alter_sys=True)
