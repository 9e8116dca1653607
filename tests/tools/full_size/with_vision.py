"""Print as JSON what two ranks of an engine with multimodal input do with what a trainer sends.

Argument: the model's folder.
"""

import json
import sys
from pathlib import Path

from harness.tools.full_size.command import prepare_import

folder = Path(sys.argv[1])
prepare_import(folder)

import torch  # noqa: E402

from harness.tools.engine_class import meta_model  # noqa: E402
from harness.tools.engine_class.engine_answer import ask_engine  # noqa: E402
from harness.tools.engine_class.traced_ranks import EngineShape  # noqa: E402
from harness.tools.full_size.trainer_names import trainer_layout  # noqa: E402
from harness.weights.fusing import fusing_groups  # noqa: E402

if __name__ == "__main__":
    meta_model.import_all(folder)
    arguments = {"tp_size": 2, "pp_size": 1, "ep_size": 1, "dtype": "bfloat16", "enable_multimodal": True}
    shape = EngineShape(folder=folder, arguments=arguments, tp=2, pp=1, processes=2)
    answer = ask_engine(shape, fusing_groups(trainer_layout(folder, torch.bfloat16)))
    ranks = answer.ranks
    found = {
        "problems": list(map(str, answer.findings)),
        "notes": sorted({note for each in ranks for note in each.notes}),
        "held": sorted(ranks[0].held),
        "held_layers": sorted(ranks[0].held_layers),
    }
    print(json.dumps(found))
