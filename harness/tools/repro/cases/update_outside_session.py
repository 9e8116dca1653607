"""An update outside of a session is refused by a returned value, without an exception.

From 0.5.21 on it returns (False, message), and a trainer that does not look keeps the old weights.
"""

from harness.tools.repro.case import Case, NotPresent
from harness.tools.repro.tiny_engine import checkpoint_tensors, tiny_engine

CASE = Case(
    broken="update_weights_from_tensor alone",
    healthy="between begin_weight_update() and end_weight_update()",
    signature=(r"the answer: \(?False.*session",),
    engine=True,
)


def program(broken: bool) -> None:
    from harness.rollout import sglang_api

    if not (api := sglang_api.probe()).update_session:
        raise NotPresent(f"sglang {api.version} has no sessions of updates; they came with 0.5.21.")
    with tiny_engine() as engine:
        tensors = checkpoint_tensors(engine.trainer(seed=1))
        if broken:
            print("the answer:", engine.engine.update_weights_from_tensor(tensors), flush=True)
        else:
            engine.update(tensors)
