"""fgrpo_jax.main with a fault in it: python faulty.py FAULT PROCESS STEP [the flags of main].

FAULT happens in one process when it has done so many steps: raise, user (a UserError), stuck
(asleep while its other threads go on), deaf (stuck, and no thread of it can run), exit.
"""

import ctypes
import os
import runpy
import sys
import time

from fgrpo_jax import UserError, metrics

fault, process, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
write = metrics.Journal.write


def faulty(self, record):
    write(self, record)
    if self.path.name != "metrics.jsonl" or record["step"] != step:
        return
    if os.environ.get("JAX_PROCESS_ID", "0") != process:
        return
    print(f"fault at {time.time():.1f}", file=sys.stderr, flush=True)
    if fault == "raise":
        raise RuntimeError("a fault on purpose")
    if fault == "user":
        raise UserError("a mistake on purpose: mend it")
    if fault == "exit":
        os._exit(3)
    if fault == "stuck":
        time.sleep(1000)
    if fault == "deaf":
        ctypes.PyDLL(None).sleep(1000)  # which keeps the interpreter's lock


metrics.Journal.write = faulty
sys.argv = ["fgrpo_jax.main", *sys.argv[4:]]
runpy.run_module("fgrpo_jax.main", run_name="__main__", alter_sys=True)
