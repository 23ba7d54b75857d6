"""Asked to stop: SIGTERM, SIGINT or Google's notice that a machine will go, found where the run can
leave off.

A rollout outlasts the half minute that a spot machine is given, so it is looked for between decode
chunks, and once more before the update, which is the longest wait: what was sampled is dropped,
and its keys make it again.
"""

import http.client
import os
import signal
import socket
import sys
import threading
import urllib.request
from typing import Any

import jax
from jax.experimental import multihost_utils

from fgrpo_jax import Preempted, distributed

GOES = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
LOOK = 5.0  # seconds between two looks at the metadata server


def machine_goes() -> bool:
    """Whether Google's metadata server says that this machine will be taken away or stopped for
    maintenance. Raises OSError where there is no such server."""
    server = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for name, value in GOES.items():
        url = f"http://{server}/computeMetadata/v1/instance/{name}"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with direct.open(request, timeout=2) as answer:
            if answer.read(100).decode().strip() == value:
                return True
    return False


class Notice:
    """A context manager in which the first SIGTERM or SIGINT only asks; a later SIGINT kills.

    Several hosts agree through JAX's own notifier, which takes SIGTERM there, and all of them
    learn of it at the same poll. A thread listens, since Python runs no handler while its main
    thread waits for a device or a compiler; another one asks the metadata server, on TPUs and
    where GCE_METADATA_HOST names one.
    """

    def __init__(self) -> None:
        self._asked = False
        self._done = threading.Event()
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
                if number in self._before:
                    self._ask("asked to stop")

    def _look(self) -> None:
        """A notice that was there before the run is nothing new: it was started all the same."""
        before, answers = True, False
        while not self._done.wait(LOOK):
            try:
                goes = machine_goes()
            except (OSError, http.client.HTTPException):
                if not answers:  # there is no such server
                    return
                continue
            answers = True
            if goes and not before:
                self._ask("this machine will be stopped")
            before = goes

    def _ask(self, why: str) -> None:
        if self._asked:
            return
        self._asked = True
        print(
            f"{why}: the run leaves off when it next can, and saves; interrupt again to end at "
            "once",
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
        if "GCE_METADATA_HOST" in os.environ or jax.default_backend() == "tpu":
            threading.Thread(target=self._look, daemon=True).start()
        for number in self._before:
            signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._writer.close()  # which ends the thread
        self._thread.join()
        self._reader.close()
