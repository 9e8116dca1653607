"""A real SGLang engine on a tiny model, for cases: on the GPU where there is one, in SGLang's CPU mode elsewhere."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.rollout.sglang_api.probe import SGLangApi

if TYPE_CHECKING:
    import torch

PROMPT = list(range(5, 37))
NEW_TOKENS = 16
TEXTS = ["the quick brown fox jumps over the lazy dog"] * 4

Named = Sequence[tuple[str, "torch.Tensor"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyEngine:
    """An engine that runs, and what a trainer beside it needs. The engine starts on the weights of seed 0."""

    api: SGLangApi
    engine: Any
    """sglang.Engine."""
    folder: Path
    """Of its checkpoint."""
    name: str
    device: Literal["cpu", "cuda"]

    def trainer(self, seed: int) -> Any:
        """A transformers model of the same shape with other weights, on the engine's device."""
        from harness.task.tiny_models import tiny_config, tiny_model

        config = tiny_config(self.name, self.device)
        return tiny_model(config, seed, dtype_on(self.device)).eval().to(self.device)

    def update(self, tensors: Named, *, flush_cache: bool = True) -> None:
        """update_weights_from_tensor, in a session where this sglang wants one."""
        from harness.rollout import sglang_api

        with sglang_api.update_session(self.api, self.engine):
            sglang_api.update_weights_from_tensor(self.api, self.engine, tensors, flush_cache=flush_cache)

    def release(self, tags: Sequence[str] | None = None) -> None:
        """release_memory_occupation."""
        from harness.rollout import sglang_api

        sglang_api.release_memory_occupation(self.api, self.engine, tags)

    def resume(self, tags: Sequence[str] | None = None) -> None:
        """resume_memory_occupation."""
        from harness.rollout import sglang_api

        sglang_api.resume_memory_occupation(self.api, self.engine, tags)

    def generate(self) -> dict[str, Any]:
        """The engine's answer to PROMPT, greedily, with log-probs."""
        sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answer: list[dict[str, Any]] = self.engine.generate(
            input_ids=[PROMPT], sampling_params=sampling, return_logprob=True
        )
        return answer[0]

    def print_difference(self, model: Any) -> None:
        """`mean log-prob difference: N`: |engine - model| over NEW_TOKENS tokens that the engine samples, in nats.

        A NaN counts as an infinite difference: trainers here have none.
        """
        import torch

        sampled = [(log_prob, token) for log_prob, token, *_ in self.generate()["meta_info"]["output_token_logprobs"]]
        tokens = PROMPT + [token for _, token in sampled]
        with torch.no_grad():
            ours = model(torch.tensor([tokens], device=self.device)).logits[0].float().log_softmax(-1)
        gaps = [abs(ours[len(PROMPT) - 1 + n, token].item() - its) for n, (its, token) in enumerate(sampled)]
        mean = sum(gaps) / len(gaps)
        print(f"mean log-prob difference: {math.inf if math.isnan(mean) else mean:.3e}", flush=True)


@contextmanager
def tiny_engine(
    name: str = "qwen2", *, prepare: Callable[[Path], None] | None = None, **args: Any
) -> Iterator[TinyEngine]:
    """From the main thread, under `if __name__ == "__main__":`. prepare: may change the checkpoint's folder first."""
    from harness.rollout import sglang_api

    api = sglang_api.probe()
    tp, stages, hosts = (args.get(name, 1) for name in ("tp_size", "pp_size", "nnodes"))
    device = prepare_process(ranks=tp * stages // hosts if api.cores_by_device else tp)
    from harness.rollout.defaults import engine_defaults
    from harness.task.tiny_models import save_tiny_model

    folder = Path(tempfile.mkdtemp()) / "model"
    save_tiny_model(name, folder, seed=0, dtype=dtype_on(device), device=device, texts=TEXTS)
    if prepare:
        prepare(folder)
    defaults = engine_defaults(device) | ({"mem_fraction_static": 0.2} if device == "cuda" else {})
    given = {"model_path": str(folder), "dtype": dtype_on(device), "random_seed": 0} | args
    chosen, _ = sglang_api.check_arguments(api, given, defaults)
    engine = sglang_api.build_engine(chosen)
    print(f"the engine is up: sglang {api.version} on {device}", flush=True)
    try:
        yield TinyEngine(api=api, engine=engine, folder=folder, name=name, device=device)
    finally:
        sys.stdout.flush()
        sglang_api.shutdown(engine)


def prepare_process(ranks: int = 1) -> Literal["cpu", "cuda"]:
    """Where engines of this process will run; in CPU mode what SGLang then lacks is put in place."""
    from harness.rollout.cpu.activate import activate, engine_environment

    os.environ.setdefault(
        "NCCL_NVLS_ENABLE", "0"
    )  # multicast memory outlives a process that is killed on some machines
    import torch

    if torch.cuda.is_available():
        return "cuda"
    activate()
    for name, value in engine_environment(ranks).items():
        os.environ.setdefault(name, value)
    return "cpu"


def dtype_on(device: str) -> str:
    """float32 on the CPU, where it is as fast and shows the smallest difference."""
    return "float32" if device == "cpu" else "bfloat16"


def checkpoint(model: Any) -> Named:
    """All tensors as save_pretrained names them, in the order of the live ones."""
    from harness.weights.names import checkpoint_layout

    live = model.state_dict()
    return [(each.name, each.view(live[each.live_name]).contiguous()) for each in checkpoint_layout(model, live)]


def live(model: Any) -> Named:
    """All tensors as the model names them in memory."""
    return [(name, tensor.detach()) for name, tensor in model.state_dict().items()]
