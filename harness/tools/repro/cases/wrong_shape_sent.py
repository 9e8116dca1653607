"""A tensor sent transposed, as a name wrongly mapped makes it: the scheduler dies, and takes its parent with it."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import checkpoint, tiny_engine

CASE = Case(
    title="a tensor of a wrong shape kills the scheduler",
    needs="cpu",
    broken="down_proj is sent transposed",
    healthy="it is sent as the checkpoint has it",
    signature=(
        r"param_data\.shape=torch\.Size|Attempted to load weight|The size of tensor a .* must match|"
        r"assert param\.size\(\) == loaded_weight\.size\(\)",
    ),
    engine=True,
    seconds=420,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        tensors = dict(checkpoint(engine.trainer(seed=1)))
        name = "model.layers.1.mlp.down_proj.weight"
        if broken:
            tensors[name] = tensors[name].T.contiguous()
        engine.update(list(tensors.items()))
        engine.generate()


if __name__ == "__main__":
    variant.main(program)
