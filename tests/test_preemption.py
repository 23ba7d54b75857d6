import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest

from fgrpo_jax import Preempted, preemption
from fgrpo_jax.preemption import Notice


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_only_asks(number):
    before = signal.getsignal(number)
    with Notice() as notice:
        notice.poll()
        os.kill(os.getpid(), number)
        time.sleep(0.2)  # a thread takes it
        with pytest.raises(Preempted, match="run the same command again"):
            notice.poll()
    assert signal.getsignal(number) is before


class Metadata(http.server.BaseHTTPRequestHandler):
    """Says what is in `says`; 403 without the header that Google's wants."""

    says: ClassVar[dict[str, str]] = {}

    def do_GET(self):
        name = self.path.removeprefix("/computeMetadata/v1/instance/")
        right = self.headers["Metadata-Flavor"] == "Google" and name in self.says
        self.send_response(200 if right else 403)
        self.end_headers()
        self.wfile.write(self.says.get(name, "").encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata(monkeypatch):
    Metadata.says.update({"preempted": "FALSE", "maintenance-event": "NONE"})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which it does not ask
        monkeypatch.setattr(preemption, "LOOK", 0.05)
        yield Metadata.says
        server.shutdown()


@pytest.mark.parametrize(
    "name, value",
    [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")],
)
def test_a_notice_of_the_machine_s_end(metadata, capfd, name, value):
    with Notice() as notice:
        time.sleep(0.3)
        notice.poll()
        metadata["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"  # the run goes with it
        time.sleep(0.3)
        notice.poll()
        metadata[name] = value
        time.sleep(0.5)
        with pytest.raises(Preempted):
            notice.poll()
    assert "this machine will be stopped: the run leaves off" in capfd.readouterr().err


def test_a_notice_from_before_the_run_is_not_new(metadata):
    metadata["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    with Notice() as notice:
        time.sleep(0.4)
        notice.poll()


def test_a_metadata_server_that_fails_for_a_moment(metadata):
    with Notice() as notice:
        time.sleep(0.3)
        del metadata["preempted"]  # it answers 403
        time.sleep(0.3)
        metadata["preempted"] = "TRUE"
        time.sleep(0.5)
        with pytest.raises(Preempted):
            notice.poll()


def test_no_metadata_server(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    monkeypatch.setattr(preemption, "LOOK", 0.05)
    with Notice() as notice:
        time.sleep(0.4)
        notice.poll()


STUCK = """
import time
from fgrpo_jax.preemption import Notice
with Notice():
    print("there", flush=True)
    while True:
        time.sleep(60)
"""


def test_a_second_interrupt_ends_at_once():
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"there\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(timeout=10) == 130
    finally:
        process.kill()
        process.stdout.close()
