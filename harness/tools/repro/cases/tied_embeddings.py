"""A tied lm_head.weight is in no list of parameters, so the stage that needs it never gets it.

named_parameters() names it once, as the embedding, which a pipeline's last stage does not have.
"""

from harness.tools.repro.case import Case

CASE = Case(
    broken="tie_word_embeddings=True",
    healthy="tie_word_embeddings=False",
    signature=(r"the last stage gets no weight for its head",),
)


def program(broken: bool) -> None:
    from harness.task.tiny_models import tiny_config, tiny_model

    model = tiny_model(tiny_config("qwen2", overrides={"tie_word_embeddings": broken}), seed=0)
    last_stage = [name for name, _ in model.named_parameters() if name.startswith(("model.norm", "lm_head"))]
    print("for the last stage:", *last_stage)
    if "lm_head.weight" not in last_stage:
        print("the last stage gets no weight for its head")
