"""The number of parameters of SGLang's own class for a folder with a config.json. `python sglang_parameters.py FOLDER
MODULE`

For models that transformers has no class for. One rank, without quantization, on the meta device; written for sglang
0.5.23.
"""

import importlib
import sys
import tempfile

import torch

from harness.runtime.cpu_standins import activate


def main(folder: str, module: str) -> None:
    """Print the number of parameters of the class in `module` that the folder's config.json names."""
    activate()
    if not torch.cuda.is_available():
        # Some constructors make side streams, which nothing here uses.
        torch.cuda.Stream = object  # type: ignore[misc,assignment]
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    # Of a model with Mamba layers the CPU supports no overlap.
    arguments = ServerArgs(
        model_path=folder,
        device="cpu",
        dtype="bfloat16",
        attention_backend="torch_native",
        disable_overlap_schedule=True,
    )
    only_rank = runtime_context.SpawnRanks(**dict.fromkeys(runtime_context.SpawnRanks.__struct_fields__, 0))
    runtime_context.publish(arguments, role="scheduler", ranks=only_rank)
    with tempfile.TemporaryDirectory() as store:
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"file://{store}/store"
        )
        parallel_state.initialize_model_parallel(backend="gloo")
    initialize_dp_attention(arguments)
    initialize_moe_config()
    config = ModelConfig(folder).hf_config
    with torch.device("meta"):
        model = getattr(importlib.import_module(module), config.architectures[0])(config)
    print(sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    main(*sys.argv[1:])
