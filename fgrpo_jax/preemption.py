"""Asked to stop: SIGTERM, SIGINT or a notice of the platform's, found where the run can leave off.

A rollout outlasts the half minute that a spot machine is given, so it is looked for between decode
chunks, and once more before the update, which is the longest wait: what was sampled is dropped,
and its keys make it again.
"""

import os
import signal
import socket
import sys
import threading
from typing import Any

from jax.experimental import multihost_utils

from fgrpo_jax import Preempted, distributed


class Notice:
    """A context manager in which the first SIGTERM or SIGINT only asks; a later SIGINT kills.

    Several hosts agree through JAX's own notifier, which takes SIGTERM there, and all of them
    learn of it at the same poll. A thread listens, since Python runs no handler while its main
    thread waits for a device or a compiler.
    """

    def __init__(self) -> None:
        self._asked = False
        self._polls = 0
        self._before: dict[int, Any] = {}

    def poll(self) -> None:
        """Raises Preempted once the run shall stop; all hosts must call it equally often."""
        self._polls += 1
        several = distributed.hosts() > 1
        if multihost_utils.reached_preemption_sync_point(self._polls) if several else self._asked:
            raise Preempted("asked to stop: run the same command again to go on")

    def _listen(self) -> None:
        while numbers := self._reader.recv(64):  # a byte for each signal
            for number in numbers:
                if number == signal.SIGINT and self._asked:
                    os._exit(128 + number)
                if number in self._before and not self._asked:
                    self._asked = True
                    print(
                        "asked to stop: the run leaves off when it next can, and saves; interrupt "
                        "again to end at once",
                        file=sys.stderr,
                    )
                    if distributed.hosts() > 1:
                        os.kill(os.getpid(), signal.SIGTERM)

    def __enter__(self) -> "Notice":
        taken = [signal.SIGINT] if distributed.hosts() > 1 else [signal.SIGINT, signal.SIGTERM]
        before = {number: signal.getsignal(number) for number in taken}
        self._before = {n: was for n, was in before.items() if was is not signal.SIG_IGN}  # nohup
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        for number in self._before:
            signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._writer.close()  # which ends the thread
        self._thread.join()
        self._reader.close()
