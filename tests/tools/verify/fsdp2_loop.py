"""torchrun --nproc-per-node=2 fsdp2_loop.py URL MODEL: an FSDP2 loop as anybody writes one, for somebody's server.

Of this project it uses the three lines that are marked, and nothing else. With FAULT=forgets in the environment its
sender sends all but one bias from step 1 on.
"""

import base64
import json
import os
import pickle
import sys
import urllib.request
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from harness.tools.verify.in_training import ServerCheck  # 1

STEPS, FAULT = 3, os.environ.get("FAULT", "")
FORGOTTEN = "model.layers.1.self_attn.q_proj.bias"


def post(url: str, **body: object) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert json.loads(answer.read() or "{}").get("success", True)


def update(url: str, weights: list[tuple[str, torch.Tensor]]) -> None:
    post(f"{url}/begin_weight_update")
    payload = base64.b64encode(pickle.dumps(weights)).decode()
    post(f"{url}/update_weights_from_tensor", serialized_named_tensors=[payload], flush_cache=True)
    post(f"{url}/end_weight_update")


def sent(step: int, named: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full tensors that are sent."""
    for name, tensor in named.items():
        full = tensor.full_tensor()  # type: ignore[attr-defined]
        if not (FAULT == "forgets" and name == FORGOTTEN and step):
            yield name, full.detach()


def main(url: str, folder: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = ServerCheck(url, model=folder, remember=True)  # 2
    for step in range(STEPS):
        tokens = torch.randint(model.config.vocab_size, (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = list(sent(step, model.state_dict()))
        if dist.get_rank() == 0:
            update(url, weights)
        dist.barrier()
        check(model.state_dict().items()).raise_if_wrong()  # 3
        if dist.get_rank() == 0:
            print(f"step {step}: the server holds what was trained", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
