"""Ranks that do not find each other, or find the wrong ones."""

import os
import random
import socket
import subprocess
import sys

from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import free_port, join_group, run_on_two_hosts, run_ranks


@Case(
    needs="hosts",
    broken="/etc/hosts begins with 127.0.1.1 and the host's own name",
    healthy="/etc/hosts has the address that other hosts reach",
    signature=(r"connectFullMesh failed|Connection refused|Connect timeout|connect timeout",),
    failure="multinode-tp-init-timeout",
    new_python=True,
)
def debian_hosts_file(broken: bool) -> None:
    """A host's own name resolves to 127.0.1.1, as Debian installs it, and gloo tells other hosts to connect there."""
    if "RANK" not in os.environ:
        run_on_two_hosts(*["--debian-hosts"] * broken)
    join_group(seconds=8)


@Case(
    broken="GLOO_SOCKET_IFNAME=absent0",
    healthy="GLOO_SOCKET_IFNAME=lo",
    signature=(r"Unable to find address for: absent0",),
    failure="multinode-tp-init-timeout",
)
def gloo_wrong_interface(broken: bool) -> None:
    """GLOO_SOCKET_IFNAME names an interface that this host does not have."""
    os.environ["GLOO_SOCKET_IFNAME"] = "absent0" if broken else "lo"
    run_ranks(lambda rank: join_group())


@Case(
    broken="::1:PORT",
    healthy="[::1]:PORT",
    signature=(r"Port could not be cast to integer value as ':1:\d+'",),
)
def ipv6_dist_init_addr(broken: bool) -> None:
    """torch.distributed and SGLang's dist_init_addr cannot read an IPv6 address without brackets."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        raise UnsupportedEnvironment(f"this host has no ::1 ({error.strerror})") from error
    host = "::1" if broken else "[::1]"
    join_group(init_method=f"tcp://{host}:{free_port()}", rank=0, world_size=1)


@Case(
    broken="rank 1 has another MASTER_PORT than rank 0",
    healthy="both have the same",
    signature=(r"client socket has timed out after \d+ ?ms|timed out after \d+ ?(s|ms|seconds)",),
    failure="multinode-tp-init-timeout",
)
def master_unreachable(broken: bool) -> None:
    """Nothing listens at the master's address; a closed port stands for a firewall."""
    closed = free_port()

    def work(rank: int) -> None:
        if broken and rank == 1:
            os.environ["MASTER_PORT"] = str(closed)
        join_group(seconds=2)

    run_ranks(work)


@Case(
    broken="random.seed(42) on every rank, as the trainer wants it",
    healthy="each engine draws from its own generator",
    signature=(r"EADDRINUSE|address already in use|WRONG GROUP",),
)
def port_collision_same_seed(broken: bool) -> None:
    """Two engines that draw their port from the same seed get the same port."""
    base = random.SystemRandom().randrange(20000, 28000)

    def work(rank: int) -> None:
        import torch
        import torch.distributed as dist

        engine, tp_rank = divmod(rank, 2)
        port = base + random.Random(42 if broken else 42 + engine).randint(100, 1000)
        print(f"engine {engine}: port {port}", flush=True)
        join_group(seconds=6, init_method=f"tcp://127.0.0.1:{port}", rank=tp_rank, world_size=2)
        engines = torch.tensor([engine])
        dist.all_reduce(engines)
        if engines.item() != 2 * engine:
            print(f"WRONG GROUP: engine {engine} rank {tp_rank} met a rank of another engine", flush=True)
        dist.barrier()

    run_ranks(work, 4)


@Case(
    broken="TORCHELASTIC_USE_AGENT_STORE stays in the environment, as torchrun sets it",
    healthy="it is taken out first",
    signature=(r"client socket has timed out after \d+ ?ms while trying to connect",),
    new_python=True,
)
def torchelastic_agent_store_hang(broken: bool) -> None:
    """Under torchrun the engine's process group waits for a store that nobody serves."""
    if "RANK" not in os.environ:
        torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
        command = [*torchrun, "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1", *sys.argv, str(free_port())]
        sys.exit(subprocess.run(command).returncode)
    # With it, torch makes every rank a client of any store, a private one too.
    print("TORCHELASTIC_USE_AGENT_STORE =", os.environ["TORCHELASTIC_USE_AGENT_STORE"])
    if not broken:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    join_group(seconds=4, init_method=f"tcp://127.0.0.1:{sys.argv[3]}", rank=int(os.environ["RANK"]), world_size=2)
