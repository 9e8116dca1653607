"""Run in a process of its own: a real sglang.Engine on a tiny model with the stand-ins; prints its tokens and their
reference.

python engine_worker.py MODEL FOLDER
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.rollout.engine_settings import cpu_environment
from harness.runtime.cpu_standins import activate


def main(name: str, folder: str) -> None:
    activate()
    os.environ.update(cpu_environment(1))
    import sglang
    import torch
    from transformers import AutoModelForCausalLM

    from harness.task.tiny_models import save_tiny_model

    save_tiny_model(name, folder, seed=0, texts=["hello world, the quick brown fox"] * 4)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    engine = sglang.Engine(
        model_path=folder,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        max_total_tokens=2048,
        disable_cuda_graph=True,
        log_level="error",
    )
    try:
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        answer = engine.generate(input_ids=[prompt], sampling_params=sampling, return_logprob=True)[0]
    finally:
        engine.shutdown()
    tokens = answer["output_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    got = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
    print("ANSWER " + json.dumps({"tokens": tokens, "got": got, "expected": expected}))


if __name__ == "__main__":
    main(*sys.argv[1:])
