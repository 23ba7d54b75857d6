import os
import signal
import subprocess
import sys
import time

import pytest

from fgrpo_jax import Preempted
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
