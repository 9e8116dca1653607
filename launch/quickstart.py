"""The quickstart: three PPO steps of a tiny model on two ranks, on CPU, from a bare Python 3.11 or newer.

    python3 launch/quickstart.py [--section.key VALUE ...]

Makes the environment where it is not there (harness/tools/environments.py), checks the overrides, and becomes `torchrun
--nnodes=1 --nproc-per-node=2 launch/ppo.py configs/cpu/quickstart.toml [overrides]`, whose exit code is its own; with
another mesh, as many ranks as it has. Exit code 2: an override is wrong; 125: the environment cannot be made here.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, installed or not

from harness.tools import environments


def main(overrides: list[str]) -> int:
    """Does not return once torchrun has taken this process's place."""
    if {"-h", "--help"} & set(overrides):
        print(__doc__)
        return 0
    try:
        python = environments.ensure()
    except environments.Unusable as problem:
        print(f"environment: {problem}", file=sys.stderr)
        return problem.exit_code
    os.chdir(environments.REPOSITORY)
    job = ["launch/ppo.py", "configs/cpu/quickstart.toml", *overrides]
    # torchrun answers 1 whatever its ranks answered: a mistake is found before it.
    checked = subprocess.run(
        [str(python), "-m", "harness.tools.preflight", *job[1:]], stdout=subprocess.PIPE, text=True
    )
    if checked.returncode:
        return checked.returncode
    ranks = int(checked.stdout)
    command = [*environments.torchrun(python), "--nnodes=1", f"--nproc-per-node={ranks}", *job]
    print(f"+ {shlex.join(command)}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its warning
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
