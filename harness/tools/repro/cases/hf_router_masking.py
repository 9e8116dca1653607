"""With negative correction biases transformers picks experts of groups that lost.

By DeepSeek-V3's formula all experts are of the best group. Losing groups used to be masked with 0, more than a negative score.
"""

from harness.tools.repro.case import Case

CASE = Case(
    broken="correction biases of -2",
    healthy="correction biases of +2",
    signature=(r"of [1-9]\d* tokens: experts outside of the best group",),
    requires=("transformers>=4.53",),
)
TOKENS = 64


def program(broken: bool) -> None:
    import torch

    from harness.task.tiny_models import tiny_config, tiny_model

    config = tiny_config("deepseek_v3")
    block = tiny_model(config, seed=0).model.layers[1].mlp
    hidden = torch.randn(1, TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        block.gate.e_score_correction_bias.fill_(-2.0 if broken else 2.0)
        scores = torch.nn.functional.linear(hidden[0].float(), block.gate.weight.float()).sigmoid()
        routed = block.gate(hidden)  # (experts, weights), or what transformers 5 makes them of in a second call
        if hasattr(block, "route_tokens_to_experts"):
            routed = block.route_tokens_to_experts(routed[0] if isinstance(routed, tuple) else routed)
    picked = next(each for each in routed if not each.is_floating_point())  # int [tokens, top_k]
    biased = (scores + block.gate.e_score_correction_bias).view(TOKENS, config.n_group, -1)
    best_group = biased.topk(2).values.sum(-1).argmax(-1)
    outside = (picked // biased.shape[-1] != best_group[:, None]).any(-1).sum().item()
    print(f"of {outside} tokens: experts outside of the best group ({TOKENS} tokens in all)")
