"""Engines that release and resume their memory at the wrong time, or lack it."""

import os
from typing import Any

from harness.runtime import GIB, MIB
from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import OTHER_WEIGHTS, PROMPT, checkpoint_tensors, prepare_process, tiny_engine

ON_GPU: dict[str, Any] = {"needs": "one_gpu", "requires": ("torch_memory_saver",), "engine": True}


def _free_bytes(gpu: int = 0) -> int:
    """Return what the driver has; the first call makes this process's CUDA context there."""
    import torch

    torch.cuda.synchronize(gpu)
    return int(torch.cuda.mem_get_info(gpu)[0])


def _allocate(size: int, gpu: int = 0) -> Any:
    import torch

    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")


@Case(
    broken="resume",
    healthy="release, then resume",
    signature=(
        r"KeyError: '(weights|kv_cache)'|CUresult error\s+result=1|Cannot resume allocation that is not paused",
    ),
    engine=True,
)
def double_resume_or_release(broken: bool) -> None:
    """A resume without a release before it kills the scheduler."""
    with tiny_engine() as engine:
        if not broken:
            engine.release()
        engine.resume()
        engine.generate()


@Case(
    **ON_GPU,
    broken="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    healthy="PYTORCH_CUDA_ALLOC_CONF is not set",
    signature=(r"TorchMemorySaver is disabled for the current process because expandable_segments",),
)
def expandable_segments(broken: bool) -> None:
    """The memory saver refuses to work with expandable_segments, which schedulers inherit from the trainer."""
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if broken:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    with tiny_engine() as engine:
        engine.release()
        engine.resume()


@Case(
    **ON_GPU,
    broken='resume(["kv_cache"]) before the update',
    healthy="resume of all before the update",
    signature=(r"an illegal memory access was encountered|CUDA error: invalid argument",),
)
def ima_second_step(broken: bool) -> None:
    """The second step's update is an illegal memory access if only the KV cache was resumed."""
    with tiny_engine() as engine:
        for step in (1, 2, 3):
            if step > 1:
                engine.resume(["kv_cache"] if broken else None)
            trainer = engine.trainer(seed=step)
            engine.update(checkpoint_tensors(trainer))
            engine.compare(trainer)
            print(f"step {step} passed", flush=True)
            engine.release()


@Case(
    **ON_GPU,
    broken="enable_memory_saver=False",
    healthy="enable_memory_saver=True",
    signature=(r"the release freed too little",),
)
def memory_saver_silently_off(broken: bool) -> None:
    """A release without the memory saver answers success and frees nothing."""
    prepare_process()
    before = _free_bytes()
    with tiny_engine(enable_memory_saver=not broken) as engine:
        engine.generate()
        resumed = before - _free_bytes()
        engine.release()
        held = (before - _free_bytes()) / resumed
        print(f"held after the release: {held:.1%} of the engine's memory", flush=True)
        if held > 0.5:
            print("the release freed too little", flush=True)


@Case(
    broken="mem_fraction_static=0.0001",
    healthy="mem_fraction_static as the harness sets it",
    signature=(r"leave no GPU memory for the KV cache|Not enough memory\. Please try to increase",),
    engine=True,
)
def no_room_for_kv_cache(broken: bool) -> None:
    """An engine does not start if its weights take all that mem_fraction_static allows."""
    arguments: dict[str, Any] = {"mem_fraction_static": 0.0001} if broken else {}
    with tiny_engine(**arguments) as engine:
        engine.generate()


@Case(
    broken="a pool of 256 tokens",
    healthy="a pool of 2048 tokens",
    signature=(r"(Prefill|Decode) out of memory\. Try to lower your batch size|KV cache pool is full",),
    engine=True,
)
def prefill_out_of_memory(broken: bool) -> None:
    """Prompts that together need more than the KV pool end the scheduler, although each fits alone."""
    with tiny_engine(max_total_tokens=256 if broken else 2048) as engine:
        prompts = [[5 + (n + token) % 500 for token in range(200)] for n in range(8)]
        sampling = {"max_new_tokens": 20, "ignore_eos": True}
        engine.engine.generate(input_ids=prompts, sampling_params=sampling)


@Case(
    broken="the engine is released after the first of 1000 tokens",
    healthy="it is released after the last of 4",
    signature=(r"release_memory_occupation should be called only when|assert self\._?is_(no_request|fully_idle)",),
    engine=True,
)
def release_not_idle(broken: bool) -> None:
    """A release while a request is running kills the scheduler."""
    with tiny_engine() as engine:
        sampling = {"max_new_tokens": 1000 if broken else 4, "ignore_eos": True}
        answer = engine.engine.generate(input_ids=PROMPT, sampling_params=sampling, stream=True)
        next(answer)
        if not broken:
            list(answer)
        engine.release()
        print("released", flush=True)
        engine.resume()


@Case(
    **ON_GPU,
    broken="release, release, resume",
    healthy="release, resume",
    signature=(r"Cannot pause allocation that is not active|func=pause\b|an illegal memory access was encountered",),
    failure="double-resume-or-release",
)
def release_twice(broken: bool) -> None:
    """A second release in a row ends the scheduler in the memory saver."""
    with tiny_engine() as engine:
        for _ in range(2 if broken else 1):
            engine.release()
        engine.resume()
        engine.generate()


@Case(
    **ON_GPU,
    broken="resume while the freed blocks are cached",
    healthy="torch.cuda.empty_cache(), then resume",
    signature=(r"func=(cu_mem_create|resume)\b|cuMemCreate CUDA_ERROR_OUT_OF_MEMORY|CUDA out of memory",),
)
def resume_before_empty_cache(broken: bool) -> None:
    """An engine cannot resume while torch's allocator keeps what the trainer has freed."""
    import torch

    with tiny_engine() as engine:
        engine.release()
        _allocate(_free_bytes() - 512 * MIB)  # freed at once, and cached
        if not broken:
            torch.cuda.empty_cache()
        print(f"free when the engine resumes: {_free_bytes() / GIB:.2f} GiB", flush=True)
        engine.resume()


@Case(
    **ON_GPU,
    broken="the trainer holds all but 512 MiB of what is free",
    healthy="the trainer holds 512 MiB",
    signature=(r"func=(cu_mem_create|resume)\b|cuMemCreate CUDA_ERROR_OUT_OF_MEMORY",),
)
def tms_cumemcreate_oom(broken: bool) -> None:
    """An engine dies in cu_mem_create if it resumes while the trainer holds its memory."""
    with tiny_engine() as engine:
        engine.release()
        held = _allocate(_free_bytes() - 512 * MIB if broken else 512 * MIB)
        print(f"the trainer holds {held.nbytes / GIB:.2f} GiB, free are {_free_bytes() / GIB:.2f} GiB", flush=True)
        engine.resume()


@Case(
    needs="several_gpus",
    broken="the trainer holds 15 % of one GPU",
    healthy="the trainer holds 2 % of it",
    signature=(r"Error: The memory capacity is unbalanced",),
    engine=True,
)
def tp_memory_imbalance(broken: bool) -> None:
    """An engine on two GPUs does not start if a trainer holds 15 % of one of them."""
    for name in [name for name in os.environ if "TP_MEMORY_INBALANCE_CHECK" in name]:
        del os.environ[name]
    held = _allocate(int(_free_bytes(1) * (0.15 if broken else 0.02)), gpu=1)
    print(f"the trainer holds {held.nbytes / GIB:.2f} GiB of GPU 1", flush=True)
    with tiny_engine(tp_size=2) as engine:
        engine.generate()


@Case(
    **ON_GPU,
    broken="release, resume, generate",
    healthy="release, resume, update, generate",
    signature=(OTHER_WEIGHTS,),
)
def weights_garbage_after_resume(broken: bool) -> None:
    """An engine that was resumed and not updated generates with garbage."""
    with tiny_engine() as engine:
        trainer = engine.trainer(seed=0)  # what the engine was started with
        engine.release()
        engine.resume()
        if not broken:
            engine.update(checkpoint_tensors(trainer))
        engine.compare(trainer)
