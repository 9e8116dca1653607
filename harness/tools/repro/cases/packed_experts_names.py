"""transformers 5 holds experts fused in memory (experts.gate_up_proj) and writes them one by one. SGLang ignores the names
in memory, and answers success."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case, Number
from harness.tools.repro.engine import checkpoint, live, tiny_engine

CASE = Case(
    title="a MoE model's experts keep their old weights when tensors have their names in memory",
    needs="cpu",
    broken="names as model.state_dict() has them",
    healthy="names as save_pretrained() writes them",
    number=Number(name="mean log-prob difference", broken_above=0.1, healthy_below=0.05),
    engine=True,
    on_gpu=True,
    seconds=420,
)


def program(broken: bool) -> None:
    with tiny_engine("qwen3_moe") as engine:
        trainer = engine.trainer(seed=1)
        engine.update(live(trainer) if broken else checkpoint(trainer))
        engine.print_difference(trainer)


if __name__ == "__main__":
    variant.main(program)
