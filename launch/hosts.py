"""Emulate hosts on one machine, with torchrun in each, and faults on purpose.

    python launch/hosts.py --hosts 2 --ranks-per-host 2 -- launch/ppo.py configs/cpu/quickstart.toml --parallel.tp 4
    python launch/hosts.py --hosts 2 --gpus-per-host 1 --network ipv6 -- launch/ppo.py CONFIG.toml --parallel.tp 2
    python launch/hosts.py --hosts 2 --latency 20ms --loss 1% --cut host1@sync:1 -- launch/ppo.py CONFIG.toml

As root each host is a set of namespaces: own network, hostname, boot id, processes, /proc and /dev/shm; the hosts reach
each other and nothing else. Without root they are processes with GPUs of their own on loopback, and the network has no
faults. All of it ends with this process, however that ends. Exit codes: 0 every rank passed; else that of the rank that
failed first, if torchrun reported it, or 1; 2 the command line is wrong, or a fault never happened; 125 this machine
cannot do it; 128 + N: signal N ended it.
"""

import os
import sys
from pathlib import Path

import _checkout

_checkout.use()

from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.tools import environments
from harness.tools.command_line import exit_with, read_options


def main(arguments: list[str]) -> int:
    """Return the exit code; what is wrong with the command line is known before anything starts."""
    environments.need("msgspec", "psutil")
    from harness.tools.hosts import kernel
    from harness.tools.hosts.emulation import Emulation, StartError
    from harness.tools.hosts.host_plan import HostsOptions, faketime_library, make_plan

    split = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        options = read_options(HostsOptions, "launch/hosts.py", __doc__ or "", arguments[:split])
        refusal = "" if options.isolation == "processes" else kernel.refusal()
        plan = make_plan(options, arguments[split + 1 :], refusal, visible_gpus())
        if options.skew:
            faketime_library()
        return Emulation(plan).run()
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank=0)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def visible_gpus() -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them; if it is not set, one number for each NVIDIA device."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
