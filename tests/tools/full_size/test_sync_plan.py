"""Bytes of a sync: the plan of one engine and one layer of a kind, against the pull's own plan of every rank and
layer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

PROGRAM = """
import json, logging, os, sys, warnings
from collections import Counter
from pathlib import Path
from typing import Any
name, overrides, dp, tp, pp, nproc, order, folder = json.loads(sys.argv[1])
from harness.task.tiny_models import tiny_config, save_config
save_config(tiny_config(name, "cpu", overrides), folder, "bfloat16")
from harness.rollout.engine_settings import cpu_environment
os.environ.update(cpu_environment(1))
from harness.tools.engine_class import meta_model
meta_model.prepare_import(Path(folder))
import torch
from harness.cluster.mesh import ParallelDims
from harness.tools.full_size import ranks_at_true_size
from harness.tools.full_size.sync_plan import RunShape, SyncPlanner
from harness.tools.full_size.trainer_names import trainer_names
from harness.trainer.rows import RowShards
from harness.weights.fusing import fusing_groups
from harness.weights.gather import plan_buckets
from harness.weights.pull.exchange import Need, plan_exchange, staging_bytes
from harness.weights.regions import cut_by_rows, regions
meta_model.import_all(Path(folder))
dims = ParallelDims(dp=dp, tp=tp, pp=pp, rank_order=order)
names = trainer_names(Path(folder), torch.bfloat16)
groups = fusing_groups(names.layout)
arguments = {"tp_size": tp, "pp_size": pp, "dtype": "bfloat16"}
shape = ranks_at_true_size.EngineShape(folder=Path(folder), arguments=arguments, tp=tp, pp=pp, processes=2)
shards, limit = names.shards(dims.world_size), 1 << 16

def planner(every_name):
    return SyncPlanner(
        shape=RunShape(dims=dims, nproc_per_node=nproc), layers=ranks_at_true_size.by_layer(groups), shards=shards,
        held={each: torch.float32 for each in names.tensors}, bucket_bytes=limit,
        engine=ranks_at_true_size.examine(shape, groups, every_name),
    )

few, every = planner(False), planner(True)
number = {group.views[0].name: index for index, group in enumerate(groups)}
hosts = {rank: rank // nproc for rank in range(dims.world_size)}
needs, own = {}, Counter()
for rank in range(dims.world_size):
    engine = every.engine[dims.engine_rank(rank)]
    needs[rank] = set()
    for group, copies in zip(engine.groups, engine.coverage.copies):
        for copy in copies:
            source, cut = copy.source, shards[copy.source.of]
            owners = range(cut.ranks) if cut.ranks > 1 else [rank]
            for region in regions(source.offset, source.shape, source.stride, source.stride, cut_by_rows(cut, owners)):
                need = Need.of(region, source.of, number[group.views[0].name], source.dtype)
                if hosts[region.owner] == hosts[rank]:
                    own[rank] += (region.owner == rank) * need.elements.numel * 4
                else:
                    needs[rank].add(need)
batches = plan_exchange(needs, hosts, len(groups), limit)
parcels = [each for batch in batches for each in batch.parcels]
received = Counter()
for each in parcels:
    received[hosts[each.receiver], hosts[each.need.owner]] += each.need.nbytes
count = max(hosts.values()) + 1
print(json.dumps({
    "true": [[received[host, sender] for sender in range(count)] for host in range(count)],
    "few": few.plan("pull").between_hosts, "every": every.plan("pull").between_hosts,
    "parcels": [len(parcels), few.plan("pull").messages],
    "staging": [staging_bytes(batches), few.plan("pull").staging],
    "own": [max(own.values()), few.plan("pull").same_gpu, few.plan("pull").nvlink],
    "pairs": [[each.get(rank, 0) for rank in range(dims.world_size)] for each in few.bytes_by_pair()],
    "engine": sum(each.nbytes for each in every.engine),
    "sent": sum(view.nbytes for view in names.layout),
    "gathered": {name: [max(plan.network_in), plan.messages, plan.files] for name in ("bucket", "distributed", "disk")
                 for plan in [few.plan(name)]},
    "buckets": len(plan_buckets([group for each in few.layers.values() for group in each], shards, limit)),
}))
"""


def planned(
    tmp_path: Path,
    name: str,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    nproc: int,
    order: str = "dp,tp,pp",
    layers: int = 5,
) -> dict[str, Any]:
    words = json.dumps([name, {"num_hidden_layers": layers}, dp, tp, pp, nproc, order, str(tmp_path)])
    done = subprocess.run([sys.executable, "-c", PROGRAM, words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("qwen3_moe", {"dp": 3, "tp": 2, "nproc": 3}),
        ("deepseek_v3", {"dp": 1, "tp": 2, "pp": 2, "nproc": 2, "order": "dp,pp,tp"}),
    ],
)
def test_one_layer_of_a_kind_and_one_engine_tell_what_a_pull_moves(
    name: str, mesh: dict[str, Any], tmp_path: Path
) -> None:
    found = planned(tmp_path, name, **mesh)
    assert found["few"] == found["every"] == found["true"]
    assert len(set(map(int, found["parcels"]))) == 1
    used, bound = found["staging"]
    assert 0 < used <= bound
    most_own, same_gpu, nvlink = found["own"]
    assert same_gpu >= most_own > 0 and nvlink > 0


def test_transports_that_gather_bring_everything_to_every_host(tmp_path: Path) -> None:
    found = planned(tmp_path, "qwen2", dp=2, tp=2, nproc=2)
    network, calls, files = found["gathered"]["bucket"]
    assert network == pytest.approx(found["sent"] / 2, rel=0.01), "the other host's half"
    assert calls == found["buckets"] and not files
    assert found["gathered"]["disk"][2] == 4 * found["sent"], "each of four ranks reads all of it"
    pairs = found["pairs"]
    assert sum(map(sum, pairs)) == found["engine"], "a pull moves what the engine holds, and nothing twice"
