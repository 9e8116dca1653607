"""torchrun, except that the imports of a host's ranks are made once.

    .venv/bin/python launch/torchrun.py --nproc-per-node=2 launch/ppo.py configs/cpu/quickstart.toml

It takes torchrun's options and runs torchrun; only how ranks start and how a failed run ends are different. On a host
without a GPU this process imports torch, transformers and SGLang, and all ranks of the host are forked from it.

torchrun's own report of a run that fails is kept in the run directory, so that what a rank or its watchdog says is the
last thing on the screen. Exit codes: of the rank that failed first, 1 if a signal killed it; 2 also if torchrun's
command line is wrong; 128 + N signal N ended the run.
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
    from harness.config.layers import ConfigError
    from harness.runtime.errors import report_user_error
    from harness.tools.forked_ranks import check_numbers, run_torchrun

    try:
        check_numbers(sys.argv[1:])
    except ConfigError as error:
        sys.exit(report_user_error(error, rank=0))
    sys.exit(run_torchrun())
