"""A SGLang plugin (entry point group sglang.srt.plugins): MLA models on attention_backend="torch_native".

torch_native always attends to the latent KV cache, so MLA models (DeepSeek) must take the absorbed method for prefill
too; SGLang registers no method for it. SGLang calls `register` in every process of an engine, logs an error raised
here, and goes on: harness.rollout.cpu.activate.require_absorbed_mla is what refuses a release without the registry.
"""


def register() -> None:
    """Register absorbed MLA for torch_native; ImportError on a SGLang without the registry."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
