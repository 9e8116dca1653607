"""One weight of a tiny engine on CPU, updated outside any session: what sglang 0.5.21 began to refuse."""

import sys
import tempfile

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SIZE = 64


def main() -> str | None:
    """The complaint, if there is one."""
    import sglang

    config = Qwen2Config(
        vocab_size=512,
        hidden_size=SIZE,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(config).save_pretrained(folder)
        engine = sglang.Engine(
            model_path=folder,
            skip_tokenizer_init=True,
            device="cpu",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            disable_cuda_graph=True,
            max_total_tokens=2048,
            dtype="float32",
            log_level="error",
        )
        arrived, message = engine.update_weights_from_tensor([("model.norm.weight", torch.ones(SIZE))])
        engine.shutdown()
    return None if arrived else f"update_weights_from_tensor refused: {message}"


if __name__ == "__main__":
    sys.exit(main())
