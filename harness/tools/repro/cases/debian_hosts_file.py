"""Two emulated hosts whose /etc/hosts maps their own name to 127.0.1.1, as Debian's installer writes it: gloo looks up the
own name and tells the other host that address."""

import os
import subprocess
import sys
from pathlib import Path

from harness.tools.repro import variant
from harness.tools.repro.case import Case

CASE = Case(
    title="a host's own name stands for 127.0.1.1, and gloo tells other hosts to connect there",
    needs="hosts",
    broken="/etc/hosts begins with 127.0.1.1 and the host's own name",
    healthy="/etc/hosts has the address that other hosts reach",
    signature=(r"connectFullMesh failed|Connection refused|Connect timeout|connect timeout",),
    failure="multinode-tp-init-timeout",
)
LAUNCHER = Path(__file__).resolve().parents[4] / "launch" / "hosts.py"


def program(broken: bool) -> None:
    if "RANK" in os.environ:
        meet()
        return
    hosts = ["--hosts", "2", "--ranks-per-host", "1", "--patience", "3", *(["--debian-hosts"] if broken else [])]
    sys.exit(subprocess.run([sys.executable, str(LAUNCHER), *hosts, "--", __file__, sys.argv[1]]).returncode)


def meet() -> None:
    import datetime

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
    dist.barrier()
    print(f"rank {dist.get_rank()}: the group is up", flush=True)


if __name__ == "__main__":
    variant.main(program)
