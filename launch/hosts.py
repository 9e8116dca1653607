"""Emulate hosts on one machine, with torchrun in each, and faults on purpose.

    python launch/hosts.py --hosts 2 --ranks-per-host 2 -- launch/ppo.py configs/cpu/quickstart.toml --parallel.tp 4
    CUDA_VISIBLE_DEVICES=0,1 python launch/hosts.py --network ipv6 -- launch/ppo.py CONFIG.toml --parallel.tp 2
    python launch/hosts.py --hosts 2 --cut host1@sync:1 -- launch/ppo.py CONFIG.toml

As root, each host has its own network, hostname, boot id, processes, /proc and /dev/shm (Linux namespaces), and the
hosts reach each other and nothing else. Without root, the hosts are groups of processes that talk over loopback. The
hosts share the GPUs of CUDA_VISIBLE_DEVICES evenly. Everything ends with this process. Exit codes: 0 every rank passed;
otherwise the exit code of the rank that failed first, if torchrun reported it, or 1; 2 the command line is wrong, or a
fault never happened; 125 this machine cannot do it; 128 + N: signal N ended it.
"""

import sys

import _checkout

_checkout.use()

from harness.config.layers import ConfigError
from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.tools import environments
from harness.tools.command_line import exit_with, read_options
from harness.tools.hosts import kernel
from harness.tools.hosts.host_plan import HostsOptions, make_plan, visible_gpus


def main(arguments: list[str]) -> int:
    """Return the exit code; what is wrong with the command line is known before anything starts."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # a model's words may be in what ranks print
    split = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        if script := next((word for word in arguments[:split] if word.endswith(".py")), None):
            raise ConfigError(f"put -- before {script}: launch/hosts.py OPTIONS -- {script}")
        options = read_options(HostsOptions, "launch/hosts.py", __doc__ or "", arguments[:split])
        environments.need("msgspec", "psutil")
        from harness.tools.hosts.emulation import Emulation

        refusal = "" if options.isolation == "processes" else kernel.refusal()
        words = arguments[split + 1 :]
        words[:1] = map(environments.shipped, words[:1])
        plan = make_plan(options, words, refusal, visible_gpus())
        return Emulation(plan).run()
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank=0)


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
