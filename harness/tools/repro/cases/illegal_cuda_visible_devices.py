"""CUDA_VISIBLE_DEVICES joined from those of the ranks is illegal, out of order, or another engine's.

RL frameworks of 2025 joined the lists as a sorted set. The control is harness/cluster/placement.py.
"""

import math

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import RankLocation, parse_visible, place
from harness.tools.repro.case import Case

CASE = Case(
    broken="the ranks' lists are joined, or joined as a sorted set",
    healthy="each rank's GPU is looked up on its host, and kept in the ranks' order",
    signature=(
        r"WRONG repeated: CUDA_VISIBLE_DEVICES=0,1,0,1 is illegal",
        r"WRONG order: the engine's rank 2 is on GPU 10, its trainer on 2",
        r"WRONG hosts: 1 host\(s\) seen, there are 2",
        r"WRONG shared: the engine of ranks 2,3 is on GPUs 0,1",
    ),
)


def joined(lists: list[str]) -> list[str]:
    return ",".join(lists).split(",")


def program(broken: bool) -> None:
    twice = engines(broken, ["0,1"] * 2, tp=2, hosts=1, unique=False)[0][0]
    report("repeated", len(set(twice)) == len(twice), f"CUDA_VISIBLE_DEVICES={','.join(twice)} is illegal")
    ordered = engines(broken, [str(gpu) for gpu in range(16)], tp=16, hosts=1)[0][0]
    report("order", ordered[2] == "2", f"the engine's rank 2 is on GPU {ordered[2]}, its trainer on 2")
    nodes = len(engines(broken, ["0,1", "0,1", "2,3", "2,3"], tp=4, hosts=2)[0])
    report("hosts", nodes == 2, f"{nodes} host(s) seen, there are 2")
    second = engines(broken, ["0,1,2,3"] * 4, tp=2, hosts=1)[1][0][:2]
    report("shared", second == ["2", "3"], f"the engine of ranks 2,3 is on GPUs {','.join(second)}")


def engines(broken: bool, lists: list[str], tp: int, hosts: int, unique: bool = True) -> list[list[list[str]]]:
    """Return the devices that each engine sees on each of its hosts."""
    if not broken:
        share = len(lists) // hosts
        locations = [
            RankLocation(n, f"host{n // share}", n % share, parse_visible(each)) for n, each in enumerate(lists)
        ]
        placed = place(ParallelDims(dp=len(lists) // tp, tp=tp, pp=1), locations, "cuda")
        return [[list(node.visible_devices or ()) for node in engine.nodes] for engine in placed]
    groups = [lists[first : first + tp] for first in range(0, len(lists), tp)]
    seen = [sorted(set(joined(group))) if unique else joined(group) for group in groups]
    return [[each] * math.ceil(tp / len(each)) for each in seen]


def report(form: str, right: bool, wrong: str) -> None:
    print(f"right {form}" if right else f"WRONG {form}: {wrong}")
