"""A real SGLang engine with a tiny model: on the GPU if there is one, else in SGLang's CPU mode."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.cluster.ports import PortLease
from harness.rollout import sglang_api
from harness.rollout.early_start import forking
from harness.runtime.fork_server import ForkServer
from harness.runtime.processes import descendants, descendants_since, end_processes

PROMPT = list(range(5, 37))
NEW_TOKENS = 16
SAME_BELOW, OTHER_ABOVE = 0.05, 0.1
"""Mean log-prob differences, in nats, that show the same or other weights; one in between shows neither."""
OTHER_WEIGHTS = r"mean log-prob difference: \S+ \(other weights\)"
"""What TinyEngine.compare prints if the engine does not have the trainer's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyEngine:
    """A running sglang.Engine, started with the weights of seed 0, and the trainer's calls to it."""

    api: sglang_api.SGLangApi
    engine: Any
    folder: Path  # of its checkpoint
    name: str
    device: Literal["cpu", "cuda"]

    def trainer(self, seed: int) -> Any:
        """Return a transformers model of the same shape with other weights, on the engine's device."""
        from harness.task.tiny_models import tiny_config, tiny_model

        config = tiny_config(self.name, self.device)
        return tiny_model(config, seed, dtype_on(self.device)).eval().to(self.device)

    def update(
        self, tensors: list[tuple[str, Any]], *, flush_cache: bool = True, load_format: str | None = None
    ) -> None:
        """Call update_weights_from_tensor, in a session where this sglang needs one. load_format: as SGLang takes
        it.
        """
        options = {"flush_cache": flush_cache, "load_format": load_format}
        if flush_cache:
            sglang_api.flush_cache(self.engine)  # when it is idle; SGLang's own flush of an update only asserts that
        with sglang_api.update_session(self.api, self.engine):
            sglang_api.call(self.engine, "update_weights_from_tensor", tensors, **options)

    def release(self) -> None:
        sglang_api.call(self.engine, "release_memory_occupation")

    def resume(self, tags: Sequence[str] | None = None) -> None:
        sglang_api.call(self.engine, "resume_memory_occupation", tags=tags)

    def generate(self) -> dict[str, Any]:
        """Return the engine's greedy answer to PROMPT, with log-probs."""
        sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answers = self.engine.generate(input_ids=[PROMPT], sampling_params=sampling, return_logprob=True)
        return dict(answers[0])

    def compare(self, model: Any) -> None:
        """Print the mean |engine - model| of the log-probs of NEW_TOKENS sampled tokens, and what it shows.

        Raise RuntimeError if it shows nothing.
        """
        gaps = self.log_prob_gaps(model)
        mean = sum(gaps) / len(gaps)
        if SAME_BELOW <= mean <= OTHER_ABOVE:
            raise RuntimeError(f"the mean log-prob difference of {mean:.3e} shows neither the same nor other weights")
        # A NaN comes from the engine's weights, because the trainers here have none.
        print(f"mean log-prob difference: {mean:.3e} ({'same' if mean < SAME_BELOW else 'other'} weights)", flush=True)

    def log_prob_gaps(self, model: Any) -> list[float]:
        """Return |engine - model| of the log-probs of NEW_TOKENS sampled tokens; the first comes of the prefill."""
        import torch

        sampled = self.generate()["meta_info"]["output_token_logprobs"]  # of (log-prob, token, text)
        tokens = PROMPT + [token for _, token, *_ in sampled]
        with torch.no_grad():
            logits = model(torch.tensor([tokens], device=self.device)).logits[0].float()
        trainer = logits.log_softmax(-1)[len(PROMPT) - 1 :]
        return [abs(trainer[n, token].item() - log_prob) for n, (log_prob, token, *_) in enumerate(sampled)]


@contextmanager
def tiny_engine(
    name: str = "qwen2", *, prepare: Callable[[Path], object] | None = None, **args: Any
) -> Iterator[TinyEngine]:
    """Start an engine, and shut it down at the end. prepare: may change the checkpoint's folder first."""
    api = sglang_api.probe()
    tp, stages, hosts = (args.get(name, 1) for name in ("tp_size", "pp_size", "nnodes"))
    device = prepare_process(ranks=tp * stages // hosts if api.cores_by_device else tp)
    from harness.rollout.engine_settings import engine_defaults
    from harness.task.tiny_models import save_tiny_model

    folder = Path(tempfile.mkdtemp()) / "model"
    save_tiny_model(
        name, folder, seed=0, dtype=dtype_on(device), device=device, texts=["the quick brown fox jumps"] * 4
    )
    if prepare:
        prepare(folder)
    defaults = engine_defaults(device) | ({"mem_fraction_static": 0.2} if device == "cuda" else {})
    # With DP attention SGLang takes ports by number, and two engines at a time would take the same.
    lease = PortLease(30000)
    ports = {"port": lease.ports.port, "dist_init_addr": f"127.0.0.1:{lease.ports.dist_init_port}"}
    given = {"model_path": str(folder), "dtype": dtype_on(device), "random_seed": 0} | ports | args
    chosen, _ = sglang_api.check_arguments(api, given, defaults)
    servers = ForkServer.handed_over()  # there is one if the program itself was forked
    before = descendants()
    with forking(servers):
        engine = sglang_api.build_engine(chosen)
    for server in servers:
        server.close()
    print(f"the engine is up: sglang {api.version} on {device}", flush=True)
    try:
        yield TinyEngine(api=api, engine=engine, folder=folder, name=name, device=device)
    finally:
        sys.stdout.flush()
        end_processes(descendants_since(before), engine.shutdown)  # which leaves files in /dev/shm
        lease.close()


def prepare_process(ranks: int = 1) -> Literal["cpu", "cuda"]:
    """Return where engines of this process will run; in CPU mode give them this process's cores."""
    from harness.rollout.engine_settings import cpu_environment

    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # its memory outlives a process that is killed on some machines
    import torch

    if torch.cuda.is_available():
        return "cuda"
    for name, value in cpu_environment(ranks).items():
        os.environ.setdefault(name, value)
    return "cpu"


def dtype_on(device: str) -> str:
    """Return float32 on the CPU, where it is as fast and shows the smallest difference."""
    return "float32" if device == "cpu" else "bfloat16"


def checkpoint_tensors(model: Any) -> list[tuple[str, Any]]:
    """Return all tensors as save_pretrained names them."""
    from harness.weights.names import checkpoint_layout

    live = model.state_dict()
    return [(each.name, each.in_memory(live[each.of]).contiguous()) for each in checkpoint_layout(model, live)]
