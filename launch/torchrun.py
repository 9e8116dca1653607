"""torchrun, except that the ranks of a host share their imports: they are forked from a process that has done them.

    .venv/bin/python launch/torchrun.py --nproc-per-node=2 launch/ppo.py configs/cpu/quickstart.toml

Takes torchrun's options and is torchrun; only the start of a rank differs. It pays on a machine without a GPU, where cores
are few and most of a run's start is to import torch, transformers and SGLang. With a GPU it starts ranks as torchrun does.
"""

import sys

import _checkout

_checkout.use()

if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit()
    from harness.tools import environments

    environments.need("torch", "psutil")
    from harness.tools.forked_ranks import run_torchrun

    run_torchrun()
