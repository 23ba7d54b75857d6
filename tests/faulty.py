"""fgrpo_jax.main with a fault in it: python faulty.py FAULT PROCESS STEP ONCE [the flags of main].

FAULT happens in one process when it has done so many steps, if there is no file ONCE, which it
makes: kill, stop (signals to itself), raise, user (a UserError), exit, stuck (asleep while its
other threads go on), deaf (stuck, and no thread of it can run), full (its next save is refused).
With "@rollout" behind, it happens between two decode chunks of the next step.
"""

import ctypes
import errno
import os
import pathlib
import runpy
import signal
import sys
import time

import cached  # noqa: F401

from fgrpo_jax import UserError, metrics

fault, _, where = sys.argv[1].partition("@")
process, step = sys.argv[2], int(sys.argv[3])
once = pathlib.Path(sys.argv[4])
write, show = metrics.Journal.write, metrics.Bar.watch
done = 0


def faulty_write(self, record):
    global done
    write(self, record)
    if self.path.name == "metrics.jsonl":
        done = record["step"]
        if not where:
            fail()


def faulty_watch(self, *progress):
    show(self, *progress)
    if where:
        fail()


def refuse(*arguments, **settings):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail():
    if done != step:
        return
    if os.environ.get("JAX_PROCESS_ID", "0") != process:
        return
    if once.exists():
        return
    once.write_text(f"{time.time()}")
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "raise":
        raise RuntimeError("a fault on purpose")
    if fault == "user":
        raise UserError("a mistake on purpose: mend it")
    if fault == "exit":
        os._exit(3)
    if fault == "full":
        from orbax.checkpoint import v1 as ocp

        ocp.save_checkpointables = refuse
    if fault == "stuck":
        time.sleep(1000)
    if fault == "deaf":
        ctypes.PyDLL(None).sleep(1000)  # which keeps the interpreter's lock


metrics.Journal.write, metrics.Bar.watch = faulty_write, faulty_watch
sys.argv = ["fgrpo_jax.main", *sys.argv[5:]]
runpy.run_module("fgrpo_jax.main", run_name="__main__", alter_sys=True)
