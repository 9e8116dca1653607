"""DeepSeek-V3's fused qkv_a projection keeps its old weights if tensors are sent one a call.

SGLang fuses q_a_proj and kv_a_proj_with_mqa if both arrive in one call, drops them otherwise, and answers success.
"""

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import LOG_PROBS, checkpoint_tensors, tiny_engine

CASE = Case(
    broken="one tensor a call",
    healthy="all tensors in one call",
    number=LOG_PROBS,
    engine=True,
    on_gpu=True,
)


def program(broken: bool) -> None:
    with tiny_engine("deepseek_v3") as engine:
        trainer = engine.trainer(seed=1)
        tensors = checkpoint_tensors(trainer)
        for call in [[each] for each in tensors] if broken else [tensors]:
            engine.update(call)
        engine.print_difference(trainer)
