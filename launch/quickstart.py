"""The quickstart: three PPO steps of a tiny model on two ranks, on CPU, from a bare Python 3.11 or newer.

    python3 launch/quickstart.py [--section.key VALUE ...]

Makes the environment where it is missing (harness/tools/environments.py), checks the overrides, and becomes `torchrun
--nnodes=1 --nproc-per-node=2 launch/ppo.py configs/cpu/quickstart.toml [overrides]`; with another mesh, as many ranks as it
has. Exit code: torchrun's; 2: an override is wrong; 125: the environment cannot be made here.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def main(overrides: list[str]) -> int:
    """Return only where something is wrong: torchrun takes this process's place."""
    if {"-h", "--help"} & set(overrides):
        print(__doc__)
        return 0
    os.chdir(CHECKOUT)
    made = subprocess.run([sys.executable, "harness/tools/environments.py"], stdout=subprocess.PIPE, text=True)
    if made.returncode:
        return made.returncode
    python = made.stdout.strip()
    job = ["launch/ppo.py", "configs/cpu/quickstart.toml", *overrides]
    # torchrun exits with 1 whatever its ranks exit with, so wrong overrides are found before it starts.
    checked = subprocess.run([python, "-m", "harness.tools.preflight", *job[1:]], stdout=subprocess.PIPE, text=True)
    if checked.returncode:
        return checked.returncode
    ranks = int(checked.stdout)
    command = [python, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}", *job]
    print(f"+ {shlex.join(command)}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its warning
    os.execv(python, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
