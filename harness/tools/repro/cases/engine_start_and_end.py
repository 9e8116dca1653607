"""Engines that do not start, and processes of theirs that die, block, or outlive their trainer."""

import datetime
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import RankLocation, parse_visible, place
from harness.rollout import sglang_api
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.repro.case import Case
from harness.tools.repro.local_ranks import free_port, run_ranks
from harness.tools.repro.tiny_engine import prepare_process, tiny_engine

SECONDS = 8
NOBODY = 65534
SCRIPT = """
import multiprocessing, sys

def scheduler():
    print("the scheduler is up", flush=True)

def start():
    child = multiprocessing.get_context("spawn").Process(target=scheduler)
    child.start()
    child.join()
    if child.exitcode:
        sys.exit(f"the scheduler died: exit code {child.exitcode}")

"""


@Case(
    broken="the ranks' lists are joined, or joined as a sorted set",
    healthy="each rank's GPU is looked up on its host, and kept in the ranks' order",
    signature=(
        r"WRONG repeated: CUDA_VISIBLE_DEVICES=0,1,0,1 is illegal",
        r"WRONG order: the engine's rank 2 is on GPU 10, its trainer on 2",
        r"WRONG hosts: 1 host\(s\) seen, there are 2",
        r"WRONG shared: the engine of ranks 2,3 is on GPUs 0,1",
    ),
)
def illegal_cuda_visible_devices(broken: bool) -> None:
    """The ranks' CUDA_VISIBLE_DEVICES, joined, are illegal, out of order, or another engine's."""

    def engines(lists: list[str], tp: int, hosts: int = 1, unique: bool = True) -> list[list[list[str]]]:
        """Return the devices that each engine sees on each of its hosts."""
        if not broken:
            share = len(lists) // hosts
            ranks = [RankLocation(n, f"host{n // share}", n % share, parse_visible(x)) for n, x in enumerate(lists)]
            placed = place(ParallelDims(dp=len(lists) // tp, tp=tp, pp=1), ranks, "cuda")
            return [[list(node.visible_devices or ()) for node in engine.nodes] for engine in placed]
        joined = [",".join(lists[first : first + tp]).split(",") for first in range(0, len(lists), tp)]
        seen = [sorted(set(each)) if unique else each for each in joined]
        return [[each] * math.ceil(tp / len(each)) for each in seen]

    def report(form: str, right: bool, wrong: str) -> None:
        print(f"right {form}" if right else f"WRONG {form}: {wrong}")

    twice = engines(["0,1"] * 2, tp=2, unique=False)[0][0]
    report("repeated", len(set(twice)) == len(twice), f"CUDA_VISIBLE_DEVICES={','.join(twice)} is illegal")
    ordered = engines([str(gpu) for gpu in range(16)], tp=16)[0][0]
    report("order", ordered[2] == "2", f"the engine's rank 2 is on GPU {ordered[2]}, its trainer on 2")
    nodes = len(engines(["0,1", "0,1", "2,3", "2,3"], tp=4, hosts=2)[0])
    report("hosts", nodes == 2, f"{nodes} host(s) seen, there are 2")
    second = engines(["0,1,2,3"] * 4, tp=2)[1][0][:2]
    report("shared", second == ["2", "3"], f"the engine of ranks 2,3 is on GPUs {','.join(second)}")


@Case(
    broken="the start stands at module level",
    healthy='it stands under if __name__ == "__main__":',
    signature=(r"An attempt has been made to start a new process before the", r"the scheduler died: exit code [1-9]"),
    new_python=True,
)
def missing_main_guard(broken: bool) -> None:
    """A script without `if __name__ == "__main__":` dies in the child that it spawns, as SGLang spawns schedulers."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT + ("start()\n" if broken else 'if __name__ == "__main__":\n    start()\n'))
        sys.exit(subprocess.run([sys.executable, str(script)]).returncode)


@Case(
    broken="SGLANG_BLOCK_NONZERO_RANK_CHILDREN is not set",
    healthy='it is "0"',
    signature=(r"wait timeout after \d+ ?ms, keys: /node 1 is up",),
    engine=True,
)
def nonzero_node_engine_blocks(broken: bool) -> None:
    """The constructor of an engine's second node never returns."""
    address, port = f"127.0.0.1:{free_port()}", free_port()
    os.environ.pop("SGLANG_BLOCK_NONZERO_RANK_CHILDREN", None)
    if not broken:
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    prepare_process(ranks=2)

    def work(rank: int) -> None:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=datetime.timedelta(seconds=280))
        with tiny_engine(tp_size=2, nnodes=2, node_rank=rank, dist_init_addr=address):
            store.set(f"node {rank} is up", "")
            store.wait(["node 0 is up"])
            store.wait(["node 1 is up"], datetime.timedelta(seconds=15))
            store.set(f"node {rank} is done", "")
            store.wait(["node 0 is done", "node 1 is done"])

    run_ranks(work)


@Case(
    broken="SIGKILL as soon as the engine's processes are there",
    healthy="SIGKILL once the engine is up",
    signature=(r"still there after \d+ s: \d+ of 2",),
    failure="teardown-orphans",
    engine=True,
    new_python=True,
)
def orphans_of_a_start(broken: bool) -> None:
    """An engine's processes outlive a trainer that was killed while it was starting."""
    # They ask the kernel to be killed with their parent after their imports, when it is gone already: the scheduler
    # goes through its whole start, memory and all, and ends when it first answers the parent; the detokenizer waits
    # forever.
    _end_trainer(is_up=not broken, kill=True)


@Case(
    broken="SIGKILL to the process that built the engine",
    healthy="it shuts the engine down",
    signature=(r"still there after \d+ s: .*scheduler",),
    engine=True,
    new_python=True,
)
def teardown_orphans(broken: bool) -> None:
    """Schedulers outlive a trainer that was killed, and hold their memory."""
    _end_trainer(is_up=True, kill=broken)


def _end_trainer(is_up: bool, kill: bool) -> None:
    """Start a trainer, end it once its engine is up or has its processes, and print which of them are left later."""
    import psutil

    from harness.runtime.processes import is_alive

    if sys.argv[3:] == ["trainer"]:
        with tiny_engine():
            sys.stdin.read()
        return
    command, pipe = [sys.executable, *sys.argv, "trainer"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as trainer:
        assert trainer.stdout and trainer.stdin
        if is_up:
            print(next((line for line in trainer.stdout if "the engine is up" in line), ""), end="", flush=True)
        names: dict[psutil.Process, str] = {}
        while len(names) < 2:  # the scheduler and the detokenizer, under the name of spawn or of SGLang
            time.sleep(0.1)
            if trainer.poll() is not None:
                sys.exit(f"the trainer ended with {trainer.returncode} before its engine had its processes")
            commands = {}
            for each in psutil.Process(trainer.pid).children(recursive=True):
                with suppress(psutil.Error):  # it has just ended
                    commands[each] = " ".join(each.cmdline())
            names = {each: words for each, words in commands.items() if "spawn_main" in words or "sglang::" in words}
        if kill:
            trainer.kill()
        else:
            trainer.stdin.close()
        trainer.wait()
        time.sleep(SECONDS)
        left = [names[each] for each in names if is_alive(each)]
        found = f"still there after {SECONDS} s: {len(left)} of {len(names)}: {', '.join(left)}"
        print(found if left else "all are gone", flush=True)


@Case(
    broken="SIGKILL to the scheduler",
    healthy="signal 0, which does nothing",
    signature=(
        r"[Ss]ubprocess \S*scheduler\S* .*(crashed|died|exit)|[Ss]cheduler.*(died|crashed|exit)",
        r"[Rr]eceived sigquit|SIGQUIT",
    ),
    failure="peer-vanished",
    engine=True,
)
def scheduler_killed(broken: bool) -> None:
    """A scheduler is killed, as by the out-of-memory killer, and SGLang kills the process that built the engine."""
    import psutil

    with tiny_engine() as engine:
        engine.generate()
        schedulers = [p for p in psutil.Process().children(recursive=True) if "scheduler" in p.name()]
        print("schedulers:", [each.name() for each in schedulers], flush=True)
        os.kill(schedulers[0].pid, signal.SIGKILL if broken else 0)
        engine.generate()  # waits for an answer that never comes, until SGLang ends it


@Case(
    broken="the engine is built in a threading.Thread",
    healthy="it is built in the main thread",
    signature=(r"signal only works in main thread of the main interpreter",),
    engine=True,
)
def signal_outside_main_thread(broken: bool) -> None:
    """An engine cannot be built outside of the main thread."""

    def build() -> None:
        with tiny_engine():
            pass

    if not broken:
        build()
        return
    thread = threading.Thread(target=build)
    thread.start()
    thread.join()


@Case(
    broken="a limit of one process or thread for the user",
    healthy="the limit that the user has",
    signature=(r"RuntimeError: can't start new thread",),
)
def too_many_processes(broken: bool) -> None:
    """The user has as many processes and threads as the kernel allows, and a thread cannot be started."""
    import resource

    if os.geteuid() == 0:  # the limit does not hold for root
        try:
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError as error:
            raise UnsupportedEnvironment(f"root cannot become user {NOBODY} here ({error})") from error
    if broken:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    workers = [threading.Thread(target=time.sleep, args=(0.1,)) for _ in range(4)]
    for each in workers:
        each.start()
    print(f"{len(workers)} threads were started", flush=True)


@Case(
    broken="the argument is passed as it is",
    healthy="it is looked up in this sglang first, and dropped",
    signature=(r"[Uu]nexpected keyword argument|[Uu]nknown (argument|field)|no attribute 'disable_piece",),
)
def unknown_engine_argument(broken: bool) -> None:
    """An engine argument of another release fails deep inside SGLang."""
    prepare_process()
    unknown = {"disable_piecewise_cuda_graph_of_0_5_13": True}  # of no release, to fail alike with all
    if broken:
        arguments = {"model_path": "dummy", "load_format": "dummy", **unknown}
        sglang_api.load("srt/server_args.py", "ServerArgs")(**arguments)
    else:
        _, dropped = sglang_api.check_arguments(sglang_api.probe(), {"model_path": "dummy"}, unknown)
        print("dropped:", *dropped)


@Case(
    broken="VerlEngine is imported from sglang",
    healthy="VerlEngine is imported from this harness",
    signature=(r"No module named 'sglang.srt.entrypoints.verl_engine'",),
    new_python=True,
)
def verl_engine_removed(broken: bool) -> None:
    """sglang no longer has VerlEngine, which scripts of spring 2025 import."""
    prepare_process()
    if broken:
        print(sglang_api.load("srt/entrypoints/verl_engine.py", "VerlEngine"))
    else:
        from harness.rollout.verl_engine import VerlEngine

        print(VerlEngine)
