"""A SGLang plugin (entry point group sglang.srt.plugins): block-FP8 layers on a CPU without AMX, in plain torch.

SGLang has FP8 kernels for GPUs and for CPUs with AMX, and asserts that it has one of them. This stands in for the
kernels only: what a layer holds, how it is loaded, sharded and updated is SGLang's own. Weights keep the layout of the
checkpoint. For each call they are dequantized to the dtype of the activations, which are not quantized; SGLang's AMX
kernels compute so too (w8a16), its GPU kernels also quantize the activations (w8a8).

Linear layers with one scale for each tensor, as quantization="fp8" makes them of a checkpoint in 16 bits, are processed
after loading as on a GPU: the weight is transposed. Their experts are not stood in for.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


def register() -> None:
    """Replace the FP8 kernels where SGLang would assert AMX; ImportError or AttributeError on a SGLang that lacks a
    name.
    """
    from sglang.srt.layers.quantization import fp8, fp8_utils
    from sglang.srt.models.deepseek_common import deepseek_weight_loader
    from sglang.srt.utils import cpu_has_amx_support, is_cpu

    if not is_cpu() or cpu_has_amx_support():
        return
    dequantize = fp8_utils.block_quant_dequant
    linear, experts = fp8.Fp8LinearMethod, fp8.Fp8MoEMethod
    after_loading, of_blocks = "process_weights_after_loading", "process_weights_after_loading_block_quant"
    replaced = {
        (linear, after_loading): _as_on_gpu(getattr(linear, after_loading), fp8),
        (linear, of_blocks): _keep,
        (linear, "apply"): _linear(dequantize),
        (experts, of_blocks): _keep,
        (experts, "apply"): _experts(experts.apply, dequantize),
        # MLA's absorbed w_kc and w_vc: in bfloat16, as on a GPU, and not in FP8 with one scale, which needs a kernel
        # too.
        (deepseek_weight_loader, "block_quant_to_tensor_quant"): _dequantized(dequantize),
    }
    for owner, name in replaced:
        getattr(owner, name)  # all of them or none
    for (owner, name), function in replaced.items():
        setattr(owner, name, function)


def _keep(method: Any, layer: Any) -> None:
    """Leave the layer's weights and scales as they were loaded."""


def _as_on_gpu(process: Any, fp8: Any) -> Any:
    """Return process_weights_after_loading without what its module does on a CPU alone: to pack the weight for AMX."""

    def processed(method: Any, layer: Any) -> None:
        with patch.object(fp8, "_is_cpu", False):
            process(method, layer)

    return processed


def _linear(dequantize: Any) -> Any:
    """Return Fp8LinearMethod.apply with the weight dequantized."""
    from torch.nn.functional import linear

    def applied(method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        if method.block_quant:
            weight = dequantize(layer.weight, layer.weight_scale_inv, method.quant_config.weight_block_size, x.dtype)
        else:  # [columns, rows], with one scale
            weight = (layer.weight.float() * layer.weight_scale).to(x.dtype).t()
        return linear(x, weight, bias)

    return applied


def _experts(apply: Any, dequantize: Any) -> Any:
    """Return Fp8MoEMethod.apply with block-quantized experts dequantized, computed by SGLang's native experts."""

    def applied(method: Any, layer: Any, dispatch_output: Any) -> Any:
        if not method.block_quant:
            return apply(method, layer, dispatch_output)
        from sglang.srt.layers.moe import fused_moe_native  # harness_sglang_cpu replaces one of its functions
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        x, block = dispatch_output.hidden_states, method.quant_config.weight_block_size
        plain = SimpleNamespace(
            num_experts=layer.num_experts,
            w13_weight=dequantize(layer.w13_weight, layer.w13_weight_scale_inv, block, x.dtype),
            w2_weight=dequantize(layer.w2_weight, layer.w2_weight_scale_inv, block, x.dtype),
        )
        output = fused_moe_native.moe_forward_native(plain, x, dispatch_output.topk_output, method.moe_runner_config)
        return StandardCombineInput(hidden_states=output)

    return applied


def _dequantized(dequantize: Any) -> Any:
    """Return what stands in for block_quant_to_tensor_quant: the weight in bfloat16, and no scale."""
    import torch

    def to_bfloat16(weight: Any, scale: Any, block_size: Any) -> tuple[Any, None]:
        return dequantize(weight, scale, block_size, torch.bfloat16), None

    return to_bfloat16
