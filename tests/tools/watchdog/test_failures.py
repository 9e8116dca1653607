"""Which failure is the first, and what errors of real runs count as: causes, or consequences of another's end."""

import pytest

from harness.runtime.failure import Failure, Kind
from harness.tools.watchdog.failures import first_failure, is_echo

ECHOES = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.77.0.2]:37912",
    "RuntimeError: [../gloo/transport/tcp/pair.cc:525] Read error [10.0.0.2]:41: Connection reset by peer",
    "RuntimeError: [enforce fail at ../gloo/transport/tcp/unbound_buffer.cc:81] . Timed out waiting 600000ms for recv operation to complete",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (host0, 29500).",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "EOFError: Ran out of input",
    "WeightsRefused: 1 tensor(s) hold a NaN or an infinity: lm_head.weight (rank 0); nothing was sent.",
    "FloatingPointError: the gradient norm of the actor must be finite, got nan; it is not on rank 0",
    "OSError: [Errno 113] No route to host",
    "EngineFailed: on rank 0: EngineRefused: update_weights_from_disk: the engine refused",
    "EngineFailed: engine start failed on rank 0: AssertionError: no (whole log: engine-rank0.log)",
    "EngineFailed: engine start failed on rank 1: RuntimeError: Connection closed by peer (whole log: engine-rank1.log)",
]
CAUSES = [
    "EngineFailed: engine start failed on rank 1: AssertionError: no (whole log: engine-rank1.log)",
    "ArithmeticError: planted on rank 1",
    "WeightsRefused: lm_head.weight: rank 1 holds 3 of the 4 rows of its shard",
    "FloatingPointError: the gradient norm of the actor must be finite, got nan; it is not on ranks 0, 1",
    "ConsoleGone: standard output is a closed pipe: the program that read this run's output has ended.",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "EngineFailed: engine process sglang::scheduler_TP1 (pid 17) died: it printed nothing (whole log: engine-rank0.log)",
    "WeightsDidNotArrive: step 0: the engine's log-probs are off by 0.3 in the mean",
    "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1",
    "OSError: [Errno 28] No space left on device",
    "EngineFailed: SGLang's TokenizerManager.handle_loop failed in this process: EOFError: Ran out of input (SGLang ...",
    "RewardFailed: task.reward = rw.py:f raised ConnectionError: reward service 10.0.0.7: connection refused",
    "TimeoutExpired: Command '['nvidia-smi']' timed out after 5 seconds",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94: Cuda failure 2 'out of memory'",
    "EngineFailed: engine start failed on rank 1: torch.distributed.DistNetworkError: The server socket has failed to listen on any"
    " local network address. port: 30008, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    "torch.distributed.DistNetworkError: [..] Too many open files",
    "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='hub.example', port=443): Max retries exceeded with url: /x",
    "torch.distributed.DistBackendError: ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
]


@pytest.mark.parametrize(("error", "echo"), [*((each, True) for each in ECHOES), *((each, False) for each in CAUSES)])
def test_an_error_of_a_broken_connection_may_be_a_consequence_and_others_are_causes(error: str, echo: bool) -> None:
    assert is_echo(error, rank=1) == echo


@pytest.mark.parametrize(
    ("first", "others"),
    [
        # The earliest cause, and a consequence only if there is none.
        (("exception", 2.0), [("echo", 1.0), ("died", 3.0)]),
        (("echo", 1.0), [("echo", 2.0)]),
        # A rank that vanished comes before ranks that torchrun ended.
        (("vanished", 10.3), [("ended", 10.0)]),
        (("ended", 10.3), [("echo", 10.0)]),
        (("exception", 12.0), [("vanished", 10.0)]),
        # A stopped rank comes before those that wait for it.
        (("stopped", 10.2), [("deadline", 10.0)]),
        (("died", 8.0), [("stopped", 10.2)]),
    ],
)
def test_the_first_failure(first: tuple[Kind, float], others: list[tuple[Kind, float]]) -> None:
    failures = [Failure(kind=kind, time=time, host="host0", ranks=(0,)) for kind, time in [*others, first]]
    assert first_failure(failures) is failures[-1]
