"""DeepSeek-V3's q_a_proj and kv_a_proj_with_mqa are fused when both arrive in one call, and dropped when they do not. The
answer is success."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case, Number
from harness.tools.repro.engine import checkpoint, tiny_engine

CASE = Case(
    title="DeepSeek-V3's fused qkv_a projection keeps its old weights when tensors come one a call",
    needs="cpu",
    broken="one tensor a call",
    healthy="all tensors in one call",
    number=Number(name="mean log-prob difference", broken_above=0.1, healthy_below=0.05),
    engine=True,
    on_gpu=True,
    seconds=420,
)


def program(broken: bool) -> None:
    with tiny_engine("deepseek_v3") as engine:
        trainer = engine.trainer(seed=1)
        tensors = checkpoint(trainer)
        for call in [[each] for each in tensors] if broken else [tensors]:
            engine.update(call)
        engine.print_difference(trainer)


if __name__ == "__main__":
    variant.main(program)
