"""Sources of mismatch, and deaths, that are planted in SGLang or in transformers: see planting.py."""

import os
import signal
import threading
from typing import Any

from planting import in_decode, plant, plant_in_trainer, reached, rounded, wrap


@plant
def rope_base() -> None:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    def around(
        real: Any, self: Any, head: int, rotary: int, positions: int, base: float, *args: Any, **kw: Any
    ) -> None:
        real(self, head, rotary, positions, base * 2, *args, **kw)

    wrap(RotaryEmbedding, "__init__", around)


@plant
def double_all_reduce() -> None:
    from sglang.srt.distributed import tensor_model_parallel_all_reduce
    from sglang.srt.models.qwen2 import Qwen2MLP

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        return tensor_model_parallel_all_reduce(real(self, *args, **kw))

    wrap(Qwen2MLP, "forward", around)


@plant
def router_in_bfloat16() -> None:
    from sglang.srt.layers.linear import ReplicatedLinear

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        output, bias = real(self, *args, **kw)
        return output.bfloat16().to(output.dtype), bias

    wrap(ReplicatedLinear, "forward", around)


@plant
def skipped_expert() -> None:
    from sglang.srt.layers.moe.topk import TopK

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        output = real(self, *args, **kw)
        return output._replace(topk_weights=output.topk_weights.masked_fill(output.topk_ids == 0, 0))

    wrap(TopK, "forward", around)


@plant
def norm_epsilon() -> None:
    from sglang.srt.layers.layernorm import RMSNorm

    def around(real: Any, self: Any, size: int, eps: float = 1e-6, **kw: Any) -> None:
        real(self, size, eps=1e-2, **kw)

    wrap(RMSNorm, "__init__", around)


@plant
def temperature_not_applied() -> None:
    os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
    from sglang.srt.layers import sampler

    for name in ("SGLANG_RETURN_ORIGINAL_LOGPROB", "RETURN_ORIGINAL_LOGPROB"):
        if hasattr(sampler, name):
            setattr(sampler, name, True)
    reached()


@plant
def attention_scale() -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> None:
        real(self, *args, **kw)
        self.scaling *= 1.2

    wrap(RadixAttention, "__init__", around)


@plant
def decode_position() -> None:
    """Decode one position too far."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    def around(real: Any, self: Any, positions: Any, *args: Any, **kw: Any) -> Any:
        return real(self, positions + 1, *args, **kw)

    wrap(RotaryEmbedding, "forward", around, when=lambda self, positions, *_, **__: len(positions) <= 16)


@plant
def batch_in_prefill() -> None:
    """Compute the logits of several sequences in another way than those of one."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    def around(real: Any, self: Any, ids: Any, hidden: Any, *args: Any, **kw: Any) -> Any:
        return real(self, ids, hidden * 1.05, *args, **kw)

    def several(self: Any, ids: Any, hidden: Any, head: Any, metadata: Any, *args: Any, **kw: Any) -> bool:
        return len(getattr(metadata, "extend_seq_lens_cpu", None) or ()) > 1

    wrap(LogitsProcessor, "forward", around, when=several)


@plant
def scaled_embedding() -> None:
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    wrap(VocabParallelEmbedding, "forward", lambda real, self, *args, **kw: real(self, *args, **kw) * 1.01)


@plant
def scaled_logits() -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessor

    wrap(LogitsProcessor, "_get_logits", lambda real, self, *args, **kw: real(self, *args, **kw) * 1.05)


@plant
def shared_expert_twice() -> None:
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        output = real(self, *args, **kw)
        return output if output is None else output * 2

    wrap(DeepseekV2MoE, "_forward_shared_experts", around)


@plant
def correction_bias_ignored() -> None:
    import torch
    from sglang.srt.layers.moe.topk import TopK

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        self.topk_config.correction_bias = torch.zeros_like(self.topk_config.correction_bias)
        return real(self, *args, **kw)

    wrap(TopK, "forward", around, when=lambda self, *_, **__: self.topk_config.correction_bias is not None)


@plant
def chunk_position() -> None:
    """Count the positions of every part of a prompt but the first one too far."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    def around(real: Any, self: Any, positions: Any, *args: Any, **kw: Any) -> Any:
        return real(self, positions + 1, *args, **kw)

    def later(self: Any, positions: Any, *args: Any, **kw: Any) -> bool:
        return len(positions) > 1 and int(positions[0]) > 0

    wrap(RotaryEmbedding, "forward", around, when=later)


@plant
def other_activation() -> None:
    from sglang.srt.layers.activation import GeluAndMul, SiluAndMul

    wrap(SiluAndMul, "forward", lambda real, self, x: GeluAndMul.forward_native(GeluAndMul(), x))


@plant
def decode_steps_in_bfloat16() -> None:
    """Round what attention returns to bfloat16 in decoding, but only with num_continuous_decode_steps = 2."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.runtime_context import get_server_args

    def in_two_steps(*args: Any, **kw: Any) -> bool:
        return in_decode(*args, **kw) and get_server_args().num_continuous_decode_steps == 2

    wrap(RadixAttention, "forward", rounded, when=in_two_steps)


# Engines that start and then die. Decoding of the run's own engine is wrong, and a changed engine shows why.


@plant
def one_rank_is_killed() -> None:
    """Kill the scheduler of an engine of one rank in its first forward pass."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.runtime_context import get_parallel

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        if get_parallel().tp_size == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args, **kw)

    decode_steps_in_bfloat16()
    wrap(TorchNativeAttnBackend, "_run_sdpa_forward_extend", around)


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
