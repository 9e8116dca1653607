"""Stand-in for launch/hosts.py that runs the script itself in each host, without torchrun: a second instead of ten.

python plain_hosts.py [options of launch/hosts.py] -- SCRIPT [ARGUMENTS]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from harness.tools.command_line import read_options
from harness.tools.hosts import kernel
from harness.tools.hosts.emulation import Emulation
from harness.tools.hosts.host_plan import EmulationPlan, HostPlan, HostsOptions, make_plan


def script(plan: EmulationPlan, host: HostPlan, port: int) -> tuple[str, ...]:
    return (sys.executable, plan.script[0], str(host.index), *plan.script[1:])


if __name__ == "__main__":
    split = sys.argv.index("--")
    options = read_options(HostsOptions, "plain_hosts.py", "", sys.argv[1:split])
    refusal = "" if options.isolation == "processes" else kernel.refusal()
    sys.exit(Emulation(make_plan(options, sys.argv[split + 1 :], refusal, []), script).run())
