"""The variables of SGLang's CPU mode. Imports nothing heavy: in an environment for the CPU every Python runs this when it
starts (tools/environments.py).
"""

import os

CPU_MODE = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # With two threads MKL's first vector call (cos of the rotary table) races over the choice of kernels: half of the
    # table may come out with 13 bits, for the life of the engine. Seen with torch 2.13: log-probs off by 5e-5.
    "OMP_NUM_THREADS": "1",
    # With tp > 1 SGLang compiles a few integer operations (masking of token ids) with torch.compile, which on the CPU
    # runs a C++ compiler: 5 to 30 s at the first token on a fresh machine.
    "TORCHDYNAMO_DISABLE": "1",
    # With a CUDA build of torch, which brings NCCL, SGLang would open NCCL communicators on the CPU and die. The name
    # of a library that does not exist turns that off.
    "SGLANG_NCCL_SO_PATH": "absent-in-cpu-mode",
}
"""The variables that are the same for every engine in SGLang's CPU mode. SGLang reads some of them when it is
imported."""


def set_variables() -> None:
    """Set those of CPU_MODE that this process does not have yet; none if it has SGLANG_USE_CPU_ENGINE = 0."""
    for name, value in CPU_MODE.items() if os.environ.get("SGLANG_USE_CPU_ENGINE") != "0" else ():
        os.environ.setdefault(name, value)
