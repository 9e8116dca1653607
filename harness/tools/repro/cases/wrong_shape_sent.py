"""A tensor of a wrong shape kills the scheduler, which takes its parent along.

A wrongly mapped name makes a tensor transposed.
"""

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import checkpoint_tensors, tiny_engine

CASE = Case(
    broken="down_proj is sent transposed",
    healthy="it is sent as the checkpoint has it",
    signature=(
        r"param_data\.shape=torch\.Size|Attempted to load weight|The size of tensor a .* must match|"
        r"assert param\.size\(\) == loaded_weight\.size\(\)",
    ),
    engine=True,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        tensors = dict(checkpoint_tensors(engine.trainer(seed=1)))
        name = "model.layers.1.mlp.down_proj.weight"
        if broken:
            tensors[name] = tensors[name].T.contiguous()
        engine.update(list(tensors.items()))
        engine.generate()
