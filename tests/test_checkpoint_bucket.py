"""Against an emulated bucket, where gcsfs and gcp-storage-emulator are installed."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

for package in ("gcsfs", "gcp_storage_emulator"):
    pytest.importorskip(package)


def test_a_bucket():
    here = pathlib.Path(__file__).parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = "from gcp_storage_emulator.server import create_server as s; "
    start += f"s('127.0.0.1', {port}, True, default_bucket='bucket').run()"
    server = subprocess.Popen([sys.executable, "-c", start], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as try_it:
                if try_it.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        url = f"http://127.0.0.1:{port}"
        environment = os.environ | {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "PYTHONPATH": os.pathsep.join([*sys.path, str(here)]),
        }
        out = subprocess.run(
            [sys.executable, here / "checkpoint_bucket.py"],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert "all is well" in out.stdout, out.stderr
        assert "9 is damaged and set aside as 9.bad: its manifest.json is missing" in out.stderr
    finally:
        server.kill()
        server.wait()
