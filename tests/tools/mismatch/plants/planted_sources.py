"""Errors that tests plant in SGLang or in transformers: sources of a mismatch, and processes that die.

PLANT names what is planted. SGLang calls `register` in every process of an engine before it builds the model; whoever
starts the trainer calls `register_in_trainer` there, before it builds its model. The first planted code that runs makes
the file that PLANT_REACHED names: a release or a device may have another path, which no plant is on.
"""

import functools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLANTS: dict[str, Callable[[], None]] = {}
TRAINER_PLANTS: dict[str, Callable[[], None]] = {}


def register() -> None:
    """Plant what PLANT names in this process of an engine, if it belongs there."""
    PLANTS.get(os.environ.get("PLANT", ""), lambda: None)()


def register_in_trainer() -> None:
    """Plant what PLANT names in this process of the trainer, if it belongs there."""
    TRAINER_PLANTS.get(os.environ.get("PLANT", ""), lambda: None)()


def plant(function: Callable[[], None]) -> Callable[[], None]:
    PLANTS[function.__name__] = function
    return function


def plant_in_trainer(function: Callable[[], None]) -> Callable[[], None]:
    TRAINER_PLANTS[function.__name__] = function
    return function


@functools.cache
def reached() -> None:
    """Note that planted code has run. `wrap` calls this; a plant without `wrap` calls it itself."""
    if file := os.environ.get("PLANT_REACHED"):
        Path(file).touch()


def wrap(owner: Any, name: str, around: Callable[..., Any], when: Callable[..., Any] = lambda *_, **__: True) -> None:
    """Replace a method by around(the method, its self, its other arguments), where `when` of self and the arguments is
    true."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def replaced(self: Any, *args: Any, **kw: Any) -> Any:
        if not when(self, *args, **kw):
            return real(self, *args, **kw)
        reached()
        return around(real, self, *args, **kw)

    setattr(owner, name, replaced)


# In the engine.


@plant
def rope_base() -> None:
    """Rotate with another base than the model's, as after an upgrade of transformers (sglang#14745)."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    def around(
        real: Any, self: Any, head: int, rotary: int, positions: int, base: float, *args: Any, **kw: Any
    ) -> None:
        real(self, head, rotary, positions, base * 2, *args, **kw)

    wrap(RotaryEmbedding, "__init__", around)


@plant
def correction_bias_ignored() -> None:
    """Choose experts with a correction bias of zeros; SGLang has used memory that was never filled (sglang#10440)."""
    import torch
    from sglang.srt.layers.moe.topk import TopK

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        self.topk_config.correction_bias = torch.zeros_like(self.topk_config.correction_bias)
        return real(self, *args, **kw)

    wrap(TopK, "forward", around, when=lambda self, *_, **__: self.topk_config.correction_bias is not None)


@plant
def router_in_bfloat16() -> None:
    """Round the scores of the router to bfloat16, as DeepSeek's were before sglang#29783."""
    from sglang.srt.layers.linear import ReplicatedLinear

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        output, bias = real(self, *args, **kw)
        return output.bfloat16().to(output.dtype), bias

    wrap(ReplicatedLinear, "forward", around)


@plant
def double_all_reduce() -> None:
    from sglang.srt.distributed import tensor_model_parallel_all_reduce
    from sglang.srt.models.qwen2 import Qwen2MLP

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        return tensor_model_parallel_all_reduce(real(self, *args, **kw))

    wrap(Qwen2MLP, "forward", around)


@plant
def decode_position() -> None:
    """Decode one position too far."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    def around(real: Any, self: Any, positions: Any, *args: Any, **kw: Any) -> Any:
        return real(self, positions + 1, *args, **kw)

    wrap(RotaryEmbedding, "forward", around, when=lambda self, positions, *_, **__: len(positions) <= 16)


@plant
def first_cached_token_lost() -> None:
    """When a prefill finds a cached prefix, use the second token's keys and values for the first token as well."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    # Every attention backend reads this table, some before the model runs. The stream of the forward pass puts it right
    # again.
    def around(real: Any, self: Any, forward_batch: Any, *args: Any, **kw: Any) -> Any:
        table = self.req_to_token_pool.req_to_token
        cached = forward_batch.req_pool_indices[forward_batch.extend_prefix_lens > 1]
        own = table[cached, 0]
        table[cached, 0] = table[cached, 1]
        output = real(self, forward_batch, *args, **kw)
        table[cached, 0] = own
        return output

    def has_prefix(self: Any, forward_batch: Any, *args: Any, **kw: Any) -> bool:
        is_extend = forward_batch.forward_mode.is_extend()
        return is_extend and any(length > 1 for length in forward_batch.extend_prefix_lens_cpu or ())

    wrap(ModelRunner, "forward", around, when=has_prefix)


# In the trainer.


@plant_in_trainer
def trainer_without_temperature() -> None:
    """Compute the trainer's log-probs at temperature 1, whatever the tokens were sampled at (miles#68)."""
    from harness.trainer import actor

    real = actor.log_probs_from_logits

    def replaced(logits: Any, ids: Any, temperature: float) -> Any:
        reached()
        return real(logits, ids, 1.0)

    actor.log_probs_from_logits = replaced


@plant_in_trainer
def trainer_positions_of_left_padding() -> None:
    """Count positions as if the padding were on the left: position 0 for as many tokens as the row has padding, then 1,
    2, ...

    The longest row of a batch, and a sequence alone, are right.
    """
    import torch
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        mask = kw["attention_mask"]
        width = mask.shape[1]
        padding = width - mask.sum(-1, keepdim=True)
        positions = (torch.arange(width, device=mask.device)[None] - padding).clamp(min=0)
        return real(self, *args, **kw | {"position_ids": positions})

    def is_padded(*args: Any, attention_mask: Any = None, position_ids: Any = None, **kw: Any) -> bool:
        return isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 and position_ids is None

    wrap(Qwen2Model, "forward", around, when=is_padded)


@plant_in_trainer
def trainer_sends_a_rounded_bias() -> None:
    """Round the routers' correction bias to bfloat16 as it is sent (miles#524)."""
    from harness.weights.converter import CheckpointConverter

    def around(real: Any, self: Any) -> Any:
        sent = real(self)
        return {
            name: each.bfloat16().to(each.dtype) if name.endswith("e_score_correction_bias") else each
            for name, each in sent.items()
        }

    wrap(CheckpointConverter, "tensors", around)


# Engines that start and then die. Decoding of the run's own engine is wrong, and a changed engine shows why.


def decode_steps_in_bfloat16() -> None:
    """Round what attention returns to bfloat16 in decoding, but only with num_continuous_decode_steps = 2."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.runtime_context import get_server_args

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        output = real(self, *args, **kw)
        return output.bfloat16().to(output.dtype)

    def in_two_steps(self: Any, q: Any, k: Any, v: Any, forward_batch: Any, *args: Any, **kw: Any) -> bool:
        return forward_batch.forward_mode.is_decode() and get_server_args().num_continuous_decode_steps == 2

    wrap(RadixAttention, "forward", around, when=in_two_steps)


@plant
def second_rank_fails_in_decoding() -> None:
    """Raise on the second rank of an engine when it decodes, unless num_continuous_decode_steps = 2."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.runtime_context import get_parallel, get_server_args

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        if get_parallel().tp_rank == 1 and get_server_args().num_continuous_decode_steps != 2:
            raise RuntimeError("planted: CUDA error: an illegal memory access was encountered")
        return real(self, *args, **kw)

    decode_steps_in_bfloat16()
    wrap(TorchNativeAttnBackend, "_run_sdpa_forward_decode", around)


@plant
def second_rank_is_killed_while_asked() -> None:
    """Kill the second scheduler of a changed engine when its trainer rank has it put hooks on the model."""
    from sglang.srt.runtime_context import get_parallel, get_server_args
    from torch.nn import Module

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        is_asked = threading.current_thread().name == "harness-channel"
        if is_asked and get_parallel().tp_rank == 1 and get_server_args().num_continuous_decode_steps != 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args, **kw)

    decode_steps_in_bfloat16()
    wrap(Module, "register_forward_hook", around)


@plant
def own_engine_is_killed() -> None:
    """Kill a scheduler of the run's own engine while it decodes; num_continuous_decode_steps = 2 tells that engine from
    changed ones."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.runtime_context import get_parallel, get_server_args

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        if get_parallel().tp_rank == 0 and get_server_args().num_continuous_decode_steps == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args, **kw)

    wrap(TorchNativeAttnBackend, "_run_sdpa_forward_decode", around)


# A changed trainer that cannot be built.


@plant_in_trainer
def trainer_without_sdpa() -> None:
    """Make transformers refuse sdpa for Qwen2, as it does for gpt_oss: the trainer's attention is eager, and no other
    works."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

    Qwen2ForCausalLM._supports_sdpa = False
