"""Packed sequences compute what padded ones do, with attention by sequence."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig

from harness.task.tiny_models import ARCHITECTURES, tiny_config
from harness.trainer.actor import token_log_probs
from harness.trainer.model import choose_attention
from harness.trainer.packing import model_inputs
from tests.trainer.sequences import advantage_batch, sequences

SLIDING = MistralConfig(
    vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, sliding_window=4,
)  # fmt: skip


def computed(config: PretrainedConfig, wanted: Any, packed: bool, checkpointing: bool = False) -> list[torch.Tensor]:
    """Log-probs of the responses, their entropies, and the gradient of each parameter."""
    torch.manual_seed(0)
    attention, _ = choose_attention(config, wanted, packed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = advantage_batch(*sequences(), slice(0, 8))
    log_probs, entropy = token_log_probs(model, batch, 0.7, packed=packed)
    mask = batch.response_mask.bool()
    (log_probs * batch.require("advantages") + 0.1 * entropy)[mask].sum().backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert not log_probs[:, 0].any() and len(gradients) == len(list(model.parameters()))
    return [log_probs[mask].detach(), entropy[mask].detach(), *gradients]


@pytest.mark.parametrize("wanted", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "sliding"])
def test_packed_is_padded(name: str, wanted: str) -> None:
    config = SLIDING if name == "sliding" else tiny_config(name)
    padded, packed = (computed(config, wanted, each, each) for each in (False, True))
    for one, other in zip(padded, packed, strict=True):
        assert (one - other).norm() < 1e-5 * one.norm()


def test_a_packed_row_has_every_token_once_and_positions_restart() -> None:
    batch = advantage_batch(*sequences(), slice(0, 3))
    inputs = model_inputs(batch, packed=True)
    assert inputs["sequence_lengths"] == (5, 14, 2) and inputs["input_ids"].shape == (1, 21)
    assert inputs["position_ids"][0].tolist() == [*range(5), *range(14), *range(2)]
