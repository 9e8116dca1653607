"""Print the KV cache of the first rank of each stage as JSON.

Arguments: folder, tensor-parallel ranks, pipeline stages.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from harness.tools.engine_class.forks import in_forks
from harness.tools.full_size.command import prepare_import

folder, tp, pp = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
prepare_import(folder)

from harness.tools.engine_class import meta_model  # noqa: E402
from harness.tools.engine_class.absent_hardware import AssumedGpu  # noqa: E402


def kv_caches(rank: int) -> dict[str, dict[str, object]]:
    AssumedGpu().answer()
    arguments = {"tp_size": tp, "pp_size": pp, "ep_size": 1, "dtype": "bfloat16"}
    built = meta_model.build_on_meta(folder, arguments, rank)
    return {kind: asdict(each) for kind, each in built.kv_caches.items()}


if __name__ == "__main__":
    meta_model.import_all(folder)
    found = in_forks(kv_caches, {rank: (rank,) for rank in range(0, tp * pp, tp)}, 2)
    print(json.dumps([found[rank] for rank in sorted(found)]))
