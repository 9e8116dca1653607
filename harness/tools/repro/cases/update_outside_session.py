"""From 0.5.21 on an update from tensors is refused outside of begin_weight_update() and end_weight_update(): the call
returns (False, message), and whoever does not look goes on with the old weights."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import checkpoint, tiny_engine

CASE = Case(
    title="an update outside of a session is refused by a returned value, without an exception",
    needs="cpu",
    broken="update_weights_from_tensor alone",
    healthy="between begin_weight_update() and end_weight_update()",
    signature=(r"the answer: \(?False.*session",),
    engine=True,
    seconds=420,
)


def program(broken: bool) -> None:
    from harness.rollout import sglang_api

    if not (api := sglang_api.probe()).update_session:
        variant.not_present(f"sglang {api.version} has no sessions of updates; they came with 0.5.21.")
    with tiny_engine() as engine:
        tensors = checkpoint(engine.trainer(seed=1))
        if broken:
            print("the answer:", engine.engine.update_weights_from_tensor(tensors), flush=True)
        else:
            engine.update(tensors)


if __name__ == "__main__":
    variant.main(program)
