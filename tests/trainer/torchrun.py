"""Run a worker under torchrun, and read back what its rank 0 measured."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def torchrun(worker: str, ranks: int, out: Path, *arguments: str) -> dict[str, Any]:
    """The JSON that tests/trainer/<worker> wrote to `out`, its first argument.

    Fails with the workers' output if they fail.
    """
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = str(Path(__file__).parent / worker)
    done = subprocess.run(
        [*command, script, str(out), *arguments], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(out.read_text())
