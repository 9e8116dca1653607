"""How a process ended that its parent has waited for."""

import os
import select
import signal
import subprocess
import sys

import pytest

from harness.runtime.processes import wait_status
from harness.tools.watchdog.deaths import status_after_reaping
from tests.tools.watchdog.hosts import LINUX

SLEEPER = "import time; time.sleep(60)"


@pytest.mark.skipif(LINUX < (6, 15), reason="this kernel forgets how a process ended once its parent has waited for it")
@pytest.mark.parametrize(
    ("code", "status"), [(SLEEPER, signal.SIGTERM), ("raise SystemExit(7)", 7 << 8)], ids=["a_signal", "an_exit_code"]
)
def test_the_kernel_tells_how_a_process_ended_that_its_parent_has_waited_for(code: str, status: int) -> None:
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        descriptor = os.pidfd_open(process.pid)
        assert status_after_reaping(descriptor) is None
        if code == SLEEPER:
            process.terminate()
        select.select([descriptor], [], [])
        assert status_after_reaping(descriptor) is None  # a zombie, of which /proc still tells
        assert wait_status(process.pid) == status
        process.wait()
        assert wait_status(process.pid) is None
        assert status_after_reaping(descriptor) == status
        os.close(descriptor)
