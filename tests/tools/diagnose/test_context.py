"""What makes a name wrong: a warning, another engine, a failure that came later and has nothing to do with it."""

import json
from pathlib import Path

import pytest

from harness.tools.diagnose.diagnose import Diagnosis, diagnose
from harness.tools.diagnose.diagnosis_text import as_json, as_text

USER = """Traceback (most recent call last):
  File "/app/my_reward.py", line 31, in score
    return table[answer]
KeyError: 'answer'
"""
SGLANG = '  File "/env/site-packages/sglang/srt/managers/scheduler.py", line 9, in run_scheduler_process\n'
VLLM = '  File "/env/site-packages/vllm/model_executor/models/qwen2.py", line 9, in load_weights\n'
HEALTHY = "[2026-11-21 05:44:00 TP0] Decode batch. #running-req: 4, #token: 20480, token usage: 0.13\n"
SAVER = "[torch_memory_saver.cpp] cudaError error: 1 (invalid argument)  file=csrc/core.cpp func={} line=172\n"
ROTARY = "rank 0 FAILED: WeightsDidNotArrive: step 1: after the {}: model.rotary_emb.cos_sin_cache\n"
OWN_ERROR = "RuntimeError: Cannot pause allocation that is not active\n"


def diagnosed(folder: Path, text: str) -> Diagnosis:
    (folder / "a.log").write_text(text, encoding="utf-8")
    return diagnose([str(folder / "a.log")])


def name(found: Diagnosis) -> str:
    return (
        f"{found.finding.entry.slug} {'known' if found.finding.is_known else 'like'}"
        if found.finding
        else found.verdict
    )


WARNINGS = (
    "[2026-11-21 05:00:00 TP0] `pause` will not save memory because torch_memory_saver is not enabled.",
    "[2026-11-21 05:00:00 TP0] Cache not flushed because there are pending requests. #queue-req: 0, #running-req: 3",
    "WARNING:torch_memory_saver:TorchMemorySaver is disabled for the current process because invalid LD_PRELOAD",
    "(WorkerDict pid=3) WARNING resume_memory_occupation timed out, sglang: out of memory in resume_memory_occupation",
    "env of sglang workers: CUDA_VISIBLE_DEVICES=0,0",
    "sglang 0.5.20: libcudart.so.12: cannot open shared object file, falling back",
)


STRANGERS = (
    "AttributeError: 'Parameter' object has no attribute 'weight_loader'",
    "AssertionError: Attempted to load weight (torch.Size([3])) into parameter (torch.Size([4]))",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. in update_weights",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
)


PLAIN_TORCH = (
    "node1:1:1 [0] NCCL WARN Bootstrap : too many interfaces\nRuntimeError: NCCL error",
    "RuntimeError: nonce == returnedNonce INTERNAL ASSERT FAILED, Ping failed, invalid nonce returned",
    "AssertionError: dp_size must be 1",
    "AttributeError: 'Booster' object has no attribute 'scoring_func'",
    "OSError: libcudart.so.12: cannot open shared object file: No such file or directory",
)


GLOO = "RuntimeError: [enforce fail at gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find"
IN_EACH_PROGRAM = {
    f"{GLOO} address for: eth9": ("no-network-interface", "multinode-tp-init-timeout"),
    f"{GLOO} interface for: [10.0.0.9]": ("no-network-interface", "multinode-tp-init-timeout"),
    "RuntimeError: Gloo connectFullMesh failed with [../pair.cc:144] no error": (
        "ranks-did-not-meet",
        "multinode-tp-init-timeout",
    ),
    "RuntimeError: connect() timed out. Original timeout was 1800000 ms.": (
        "ranks-did-not-meet",
        "multinode-tp-init-timeout",
    ),
    "TimeoutError: The client socket has timed out after 1800s while trying to connect to (127.0.0.1, 4891).": (
        "ranks-did-not-meet",
        "torchelastic-agent-store-hang",
    ),
    "torch.distributed.DistNetworkError: The server socket has failed to listen. code: -98, name: EADDRINUSE": (
        "address-in-use",
        "port-collision-same-seed",
    ),
    "RuntimeError: NCCL error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000": (
        "duplicate-gpu",
        "illegal-cuda-visible-devices",
    ),
    "ValueError: signal only works in main thread of the main interpreter": ("signal-outside-main-thread",) * 2,
    "multiprocessing.context.AuthenticationError: digest sent was rejected": ("cpu-payload-authkey",) * 2,
    "Exception: worker said AuthenticationError('digest received was wrong')": ("cpu-payload-authkey",) * 2,
}


@pytest.mark.parametrize("line", IN_EACH_PROGRAM)
def test_a_sentence_that_each_program_means_alike_is_what_a_failure_outside_of_sglang_looks_like(
    line: str, tmp_path: Path
) -> None:
    general, special = IN_EACH_PROGRAM[line]
    plain = f'Traceback (most recent call last):\n  File "train_ddp.py", line 3, in <module>\n{line}\n'
    assert name(diagnosed(tmp_path, plain)) == f"{general} like"
    assert name(diagnosed(tmp_path, f"vllm\n{plain}")) == f"{general} like"
    assert name(diagnosed(tmp_path, f"{USER}{plain}")) == "unknown", "an earlier exception is the likelier cause"
    assert name(diagnosed(tmp_path, f"{plain}{USER}")) == f"{general} like"
    own = f'Traceback (most recent call last):\n{SGLANG}  File "x.py", line 1, in init_torch_distributed\n{line}\n'
    assert name(diagnosed(tmp_path, f"{HEALTHY}{own}")).split()[0] == special


def test_what_another_program_handled_names_nothing(tmp_path: Path) -> None:
    for line in (
        "WARNING: port 8265: address already in use, taking 8266 instead",
        "[W1121 05:44:00.1 TCPStore.cpp:358] [c10d] TCP client failed to connect/validate to host h:1 - retrying (try=0): "
        "The client socket has timed out after 600000ms while trying to connect to (h, 1).",
    ):
        found = diagnosed(tmp_path, f"epoch 1\n{line}\nepoch 2\n")
        assert found.verdict == "no failure" and "in doubt: " in as_text(found)


def test_a_schedulers_own_exception_is_the_first_failure(tmp_path: Path) -> None:
    # The line that opens its traceback says that there is one; that it is known does not explain the exception.
    text = f"[2026-11-21 05:44:01 TP0] Scheduler hit an exception: Traceback (most recent call last):\n{SGLANG}"
    found = diagnosed(tmp_path, f"{text}torch.OutOfMemoryError: CUDA out of memory.\n\nKilled\n")
    assert found.verdict == "unknown" and found.suspicious and found.suspicious.text.startswith("torch.OutOfMemory")
    assert found.ending and found.ending.text == "Killed"


def test_an_error_that_was_survived_is_not_what_ended_the_log(tmp_path: Path) -> None:
    near = diagnosed(tmp_path, f"{OWN_ERROR}{HEALTHY * 20}{USER}")
    assert name(near) == "double-resume-or-release known"
    assert near.ending and near.ending.text == "KeyError: 'answer'"
    assert "ends with: " in as_text(near) and "KeyError: 'answer'" in as_text(near)
    far = diagnosed(tmp_path, f"{OWN_ERROR}{HEALTHY * 300}{USER}")
    assert far.verdict == "unknown" and far.suspicious and far.suspicious.text == "KeyError: 'answer'"
    assert [each.entry.slug for each in far.others] == ["double-resume-or-release"]
    assert "seen as well: double-resume-or-release" in as_text(far)


FAILURES = (
    "[rank2]:[E ProcessGroupNCCL.cpp:754] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)",
    "[E ProcessGroupNCCL.cpp:475] Some NCCL operations have failed or timed out.",
    "Failed: Cuda error custom_all_reduce.cuh:307 'unknown error'",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "command terminated with exit code 137",
    "[ 1234.5] NVRM: Xid (PCI:0000:4e:00): 79, pid=1234, GPU has fallen off the bus.",
    "[2026-11-21 05:44:00 TP0] Detokenizer watchdog timeout (self.watchdog_timeout=300.0, self.soft=False)",
    "2026-11-21 05:44:00,123 ERROR worker.py:409 -- the worker is gone",
    "[2026-11-21 05:44:00 TP0] Error in the receive loop of the router: bad message",
    "Exception in callback: Invalid object: UpdateWeightReqInput(model_path='x')",
    "sh: line 1:  4242 Aborted                 python train.py",
    "./run.sh: line 3: 99 Bus error               (core dumped) python train.py",
    "Aborted",
    "Unable to open the model folder",
    "gpu4:22:27 [3] misc/socket.cc:49 NCCL WARN Socket recv failed while polling for opId=0x7f47",
    "Exception raised from throwTimeoutError at ../torch/csrc/distributed/c10d/socket.cpp:1013 (most recent call first):",
    "Current thread 0x00007f95ca716740 (most recent call first):",
    "pynvml.NVMLError_LibraryNotFound: NVML Shared Library Not Found",
)


def test_what_is_harmless_alone_hides_no_exception_that_quotes_it(tmp_path: Path) -> None:
    quoted = (
        "The client socket has failed to connect to [h]:29500 (errno: 97 - Address family not supported by protocol)."
    )
    error = "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (h, 29500)."
    assert as_text(
        diagnosed(tmp_path, f"{HEALTHY}[rank1]:[W1121 05:44:00.1 socket.cpp:752] [c10d] {quoted}\n")
    ).startswith("no failure seen: ")
    assert name(diagnosed(tmp_path, f"{error} {quoted}\n")) == "ranks-did-not-meet like"


def test_a_line_in_doubt_is_shown_with_the_last_lines(tmp_path: Path) -> None:
    text = "[2026-11-21 05:44:00 TP0] The store is unreachable, giving up\n"
    found = as_text(diagnosed(tmp_path, f"{HEALTHY}{text}{HEALTHY}"))
    assert found.startswith("no failure recognized, but") and "in doubt: " in found and found.count("last line: ") == 3
    assert as_text(diagnosed(tmp_path, HEALTHY)).startswith("no failure seen: ")
    assert as_text(diagnosed(tmp_path, f"{HEALTHY}errors: 0, timeout=300, 0.1 failed\n")).startswith("no failure ")


WITH_WORDS_OF_FAILURE = (
    "WARNING 11-21 05:44:00 [core.py:7] Timed out waiting for the workers. A worker died or was killed",
    "[rank1]:[W1121 05:44:00.1 socket.cpp:752] [c10d] The IPv6 network addresses cannot be retrieved, retrying",
    "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node-0]:29500 (errno: 111 - Connection refused).",
    "node1:1:1 [0] NCCL WARN Call to ibv_modify_qp ended with 110",
    "2026-11-21 05:44:00.1: E tensorflow/stream_executor/cuda/cuda_driver.cc:265] failed call to cuInit: CUDA_ERROR_NO_DEVICE",
    "        raise RuntimeError(f'worker {rank} is gone')",
    "WARNING:root:the reward said <class 'KeyError'>",
    "\tsize mismatch for head.weight: copying a param with shape torch.Size([10, 512]) from checkpoint",
    '  File "/app/train.py", line 3, in step\n    raise TrainingStopped(step)',
    "third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:72] Timed out waiting 30000ms for recv operation to complete",
    "Port could not be cast to integer value as '$(PORT)'",
    "INFO 05:44 the router is gone: no such host",
)


@pytest.mark.parametrize("line", WITH_WORDS_OF_FAILURE)
def test_no_line_with_words_of_failure_is_passed_over_in_silence(line: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, f"{HEALTHY}{line}\n{HEALTHY}")
    text = as_text(found)
    if found.verdict == "no failure":
        assert text.startswith("no failure recognized, but") and line.splitlines()[-1].strip()[:60] in text
        assert text.count("last line: ") == 3
    else:
        assert found.finding or found.suspicious


def test_in_a_log_that_begins_with_its_end_a_later_line_is_not_before(tmp_path: Path) -> None:
    late = "2026-11-21 05:44:09 ERROR x.py:1 -- the worker is gone\n"
    lost = (
        "2026-11-21 05:44:03 RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:3\n"
    )
    assert "before it" not in as_text(diagnosed(tmp_path, late + lost))
    assert "before it" in as_text(diagnosed(tmp_path, late.replace("09 E", "01 E") + lost))


def test_a_consequence_that_nobody_knows_does_not_make_its_cause_survived(tmp_path: Path) -> None:
    gone = 'Traceback (most recent call last):\n  File "/x/aiohttp/client.py", line 7, in connect\n'
    gone += "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host 10.0.0.1:30000\n"
    found = diagnosed(tmp_path, f"{OWN_ERROR}{HEALTHY * 300}{gone}")
    assert name(found) == "double-resume-or-release known"
    assert diagnosed(tmp_path, gone).verdict == "unknown"
    both = diagnosed(tmp_path, f"{gone}{USER}")
    assert both.verdict == "unknown" and both.suspicious and both.suspicious.text == "KeyError: 'answer'"


def test_one_sentence_is_shown_once(tmp_path: Path) -> None:
    line = "RuntimeError: Gloo connectFullMesh failed with [x] Connection closed by peer [10.0.0.2]:38032 gloo"
    found = as_text(diagnosed(tmp_path, f"[2026-11-21 05:44:00 TP1] sglang\n{line}\n{line}\n"))
    assert found.startswith("known as multinode-tp-init-timeout: ") and found.count("connectFullMesh") == 1


STEPS = {
    "torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: -9) local_rank: 0 (pid: 77) of binary: python": "dmesg",
    "command terminated with exit code 137": "cgroup",
    "[rank2]:[E ProcessGroupNCCL.cpp:475] Some NCCL operations have failed or timed out.": "NCCL_DEBUG=INFO",
    "RuntimeError: CUDA error: device-side assert triggered": "CUDA_LAUNCH_BLOCKING=1",
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered": "driver",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": "mem_fraction_static",
    "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-6)": "HF_TOKEN",
    "slurmstepd: error: *** JOB 8 ON n CANCELLED AT 2026-11-20T10:00:00 DUE TO TIME LIMIT ***": "sacct",
    "mine.Broken: no": "all ranks",
}


@pytest.mark.parametrize("line", STEPS)
def test_an_unknown_failure_has_a_next_step(line: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, f"Traceback (most recent call last):\n{line}\n" if "Broken" in line else f"{line}\n")
    text = as_text(found)
    assert found.finding is None or found.finding.entry.consequence
    assert "dmesg" in as_text(diagnosed(tmp_path, "sglang\nfailed (exitcode: -9) local_rank: 0\n"))
    assert "  next: " in text and STEPS[line] in " ".join(text.split())


def test_the_next_step_is_that_of_the_first_failure(tmp_path: Path) -> None:
    lost = "RuntimeError: Connection closed by peer [10.0.0.2]:38032 gloo\n"
    found = diagnosed(tmp_path, f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n{lost}")
    assert found.verdict == "unknown" and "The other side ended" not in " ".join(as_text(found).split())


WORDINGS = {
    "port-collision-same-seed": "(SGLangHttpServer pid=1) DistNetworkError: The server socket has failed to listen on any local"
    " network address. port: 30437, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    "multinode-tp-init-timeout": "(WorkerDict pid=3) torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for"
    " clients. 16/32 clients joined.",
    "ipv6-dist-init-addr": "(WorkerDict pid=3) ValueError: Port could not be cast to integer value as 'db8:1f::12:37221'",
    "verl-engine-removed": "ImportError: cannot import name 'VerlEngine' from 'sglang.srt.entrypoints.verl_engine' (/x)",
    "cache-not-flushed": "(RolloutManager pid=2) TimeoutError: Timeout while flushing cache.",
    "peer-vanished": "(SGLangHttpServer pid=1) SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "resume-before-empty-cache": f"Traceback (most recent call last):\n{SGLANG}  File 'x', line 1, in resume_memory_occupation\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "unknown-engine-argument": "error: engine.args.log_levle: sglang 0.5.20 has no such engine argument.",
    "gpu-code-without-gpu": f"Traceback (most recent call last):\n{SGLANG}AssertionError: Torch not compiled with CUDA enabled",
}


KERNEL = (
    "[812.1] Out of memory: Killed process 4242 ({}) total-vm:98304000kB, anon-rss:65536000kB, UID:1000",
    "[812.1] Out of memory: Kill process 4242 ({}) score 905 or sacrifice child",
    "[812.1] Memory cgroup out of memory: Killed process 4242 ({}) total-vm:98304000kB, anon-rss:65536000kB",
    "[812.1] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/a,task={},pid=4242,uid=0",
    "[812.1] oom_reaper: reaped process 4242 ({}), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
    "[812.1] {} invoked oom-killer: gfp_mask=0x100cca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0",
)


@pytest.mark.parametrize("line", KERNEL)
def test_the_kernel_says_which_program_it_killed(line: str, tmp_path: Path) -> None:
    for program in ("python3", "python3.11", "pt_main_thread", "ray::WorkerDict", "sglang::schedul"):
        assert name(diagnosed(tmp_path, f"{HEALTHY}{line.format(program)}\n")) == "host-out-of-memory known", program
    for program in ("chrome", "java", "mysqld", "Web Content", "node"):
        killed = line.format(program.split()[-1] if "invoked" in line else program)
        alone = diagnosed(tmp_path, f"{HEALTHY}{killed}\n{HEALTHY}")
        assert alone.verdict == "no failure" and killed in as_text(alone)
        found = diagnosed(tmp_path, f"{HEALTHY}{killed}\n{HEALTHY}{USER}")
        assert found.verdict == "unknown" and found.suspicious and found.suspicious.text == "KeyError: 'answer'"
        known = diagnosed(tmp_path, f"{HEALTHY}{killed}\n{OWN_ERROR}")
        assert name(known) == "double-resume-or-release known" and known.others == ()


def test_a_program_of_any_name_is_the_runs_if_its_launcher_names_the_pid(tmp_path: Path) -> None:
    kernel, lost = tmp_path / "dmesg.log", tmp_path / "a.log"
    kernel.write_text(KERNEL[0].format("my_trainer") + "\n")
    lost.write_text(f"{HEALTHY}failed (exitcode: -9) local_rank: 0 (pid: 4242) of binary: /usr/bin/my_trainer\n")
    assert name(diagnose([str(lost), str(kernel)])) == "host-out-of-memory known"
    lost.write_text(f"{HEALTHY}failed (exitcode: -9) local_rank: 0 (pid: 77) of binary: /usr/bin/my_trainer\n")
    assert diagnose([str(lost), str(kernel)]).verdict == "unknown"


def test_who_asked_for_memory_is_not_who_was_killed(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, f"{KERNEL[5].format('python3')}\n{KERNEL[0].format('chrome')}\n{HEALTHY}")
    assert found.verdict == "no failure"
    found = diagnosed(tmp_path, f"{KERNEL[5].format('chrome')}\n{KERNEL[0].format('python3')}\n")
    assert name(found) == "host-out-of-memory known"


def test_an_environment_or_a_folder_named_sglang_is_not_sglang(tmp_path: Path) -> None:
    vllm = VLLM.replace("/env/", "/opt/conda/envs/sglang/lib/python3.11/")
    text = f"Traceback (most recent call last):\n{vllm}RuntimeError: CUDA error: an illegal memory access was encountered\n"
    assert name(diagnosed(tmp_path, text)) == name(diagnosed(tmp_path, text.replace("/envs/sglang/", "/envs/x/")))
    error = "RuntimeError: nonce == returnedNonce INTERNAL ASSERT FAILED\n"
    for file in ("/user/sglang/train.py", "/opt/conda/envs/sglang/lib/python3.11/multiprocessing/process.py"):
        own = f'Traceback (most recent call last):\n  File "{file}", line 3, in run\n{error}'
        assert name(diagnosed(tmp_path, f"{HEALTHY}{own}")) == "port-collision-same-seed like"


STEP_LINES = (
    "(TaskRunner pid=1) step:{} - actor/entropy:0.41 - critic/score/mean:0.2 - response/aborted_ratio:0.0\n",
    "[  12.8 s] step {}  reward 0.000  truncated 94%  log-prob difference 4.1e-07\n",
    "(MegatronTrainRayActor pid=2) [2026-11-21 05:44:00] step {}: {{'train/loss': 0.1, 'train/grad_norm': 1.0}}\n",
    "[2026-11-21 05:44:00,123][__main__][INFO] - Iteration: {} | loss: 0.31\n",
    "{{'global_step': {}, 'loss': 0.31}}\n",
)
ENDS_WELL = (
    "[  15.4 s] PASSED: 3 PPO steps; 4 weight syncs\n",
    "Job 'raysubmit_a8Bc' succeeded\n",
    "Process finished with exit code 0\n",
    "exit code: 0\n",
)


@pytest.mark.parametrize("step", STEP_LINES)
def test_a_failure_after_which_steps_went_well_did_not_end_the_run(step: str, tmp_path: Path) -> None:
    before = step.format(6) + step.format(7)
    cut = f"{HEALTHY}{before}{OWN_ERROR}"
    late = step.format(7) + step.format(8)  # of the other ranks, which print the step in which the first one failed
    for text in (cut, cut + HEALTHY, cut + late):
        found = diagnosed(tmp_path, text)
        assert name(found) == "double-resume-or-release known" and found.went_on is None
    found = diagnosed(tmp_path, cut + step.format(8) + HEALTHY + step.format(9))
    assert name(found) == "double-resume-or-release known"
    assert found.went_on and found.went_on.whole == step.format(9).rstrip()
    assert "goes on well after this failure" in as_text(found) and json.loads(as_json(found))["went_on"]["line"] == 7


@pytest.mark.parametrize("end", ENDS_WELL)
def test_a_failure_of_a_run_that_ended_well(end: str, tmp_path: Path) -> None:
    assert name(diagnosed(tmp_path, f"{OWN_ERROR}{HEALTHY}{end}")) == "double-resume-or-release known"
    assert name(diagnosed(tmp_path, f"{end}{HEALTHY}{OWN_ERROR}")) == "double-resume-or-release known"
    unknown = diagnosed(tmp_path, f"{USER}{HEALTHY}{end}")
    assert unknown.verdict == "unknown" and unknown.went_on and "goes on well after this failure" in as_text(unknown)


def test_of_two_failures_the_one_that_was_not_survived_is_the_cause(tmp_path: Path) -> None:
    steps = STEP_LINES[0].format(8) + STEP_LINES[0].format(9)
    other = "AssertionError: dp_size must be 1 or dp attention must be enabled for update weights from tensor\n"
    assert name(diagnosed(tmp_path, f"{OWN_ERROR}{steps}{other}")) == "dp-attention-update known"
    assert name(diagnosed(tmp_path, f"{other}{steps}{OWN_ERROR}")) == "double-resume-or-release known"
    found = diagnosed(tmp_path, f"{OWN_ERROR}{steps}{USER}")
    assert found.verdict == "unknown" and found.suspicious and found.suspicious.text == "KeyError: 'answer'"
    assert [each.entry.slug for each in found.others] == ["double-resume-or-release"]
    found = diagnosed(tmp_path, f"{USER}{steps}ValueError: another\n")
    assert found.suspicious and found.suspicious.text == "ValueError: another" and found.went_on is None


def test_a_later_file_may_show_that_the_run_went_on(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text(f"2026-11-21 05:44:00 {OWN_ERROR}")
    (tmp_path / "trainer.log").write_text("".join(f"2026-11-21 05:4{n}:30 step {n}: loss=0.3\n" for n in range(4)))
    files = [str(tmp_path / "engine.log"), str(tmp_path / "trainer.log")]
    assert name(diagnose(files)) == "double-resume-or-release known"
    with (tmp_path / "trainer.log").open("a") as log:
        log.write("".join(f"2026-11-21 05:4{n}:30 step {n}: loss=0.3\n" for n in range(4, 6)))
    assert name(diagnose(files)) == "double-resume-or-release known"


WITHOUT = (
    "[2026-11-21 22:27:18 TP0] Failed to load NCCL library from x . It is expected if you are not running on GPUs.",
    "[2026-11-21 22:27:24 TP1] multimem all-gather disabled (Torch not compiled with CUDA enabled)",
    "Failed to import flash_attn, falling back to eager",
    "[2026-11-23 23:10:33] Failed to get yes/no token IDs dynamically: 'NoneType' object has no attribute 'encode'",
    "[2026-11-23 23:10:33] OpenAI Responses API (/v1/responses) disabled: OpenAIServingResponses init failed "
    "(ModuleNotFoundError: No module named 'openai_harmony')",
    "[2026-11-23 23:10:33] Can not initialize OpenAIServingResponses, error: Traceback (most recent call last):\n"
    '  File "/env/site-packages/sglang/srt/entrypoints/http_server.py", line 366, in lifespan\n'
    "    from sglang.srt.entrypoints.openai.serving_responses import (\n"
    "ModuleNotFoundError: No module named 'openai_harmony'\n",
    "[W socket.cpp:601] [c10d] The client socket has failed to connect to [h]:29500 (errno: 97 - Address family not supported by protocol).",
)
"""What a program says that it does without."""
ON_EVERY_CPU = (
    "sglang-kernel: Module Not Found",
    "/env/site-packages/sglang/kernels/ops/attention/fla/utils.py:223: UserWarning: Triton is not supported on current "
    "platform, roll back to CPU.",
    "[2026-11-23 23:10:17] SGLANG_CPU_OMP_THREADS_BIND is set for explicit control of CPU cores for each TP rank.Please "
    "beware that in this case the available memory amounts of the ranks cannot be determined in prior.You need to set "
    "proper --max-total-tokens to avoid the out-of-memory error.",
    "[2026-11-23 23:10:31 TP0] The total number of ranks (2) is larger than numa node number (1), in this case the "
    "available memory amount of each rank cannot be determined in prior. Please set proper `--max-total-tokens` to "
    "avoid the out-of-memory error.",
)
"""What SGLang says on every CPU."""
SETTINGS = (
    "errors: 0",
    "watchdog_timeout=300, dist_timeout=None",
    "Timeout: 300 s",
    "exit code 0",
    "log_level='error', on_exception='raise'",
)
"""Settings and counters."""
TORCH = '  File "/env/site-packages/torch/distributed/distributed_c10d.py", line 9, in init_process_group\n'


def trace(*lines: str) -> str:
    return "".join(["Traceback (most recent call last):\n", *lines])


SIGNAL = "ValueError: signal only works in main thread of the main interpreter\n"
NONCE = "RuntimeError: nonce == returnedNonce INTERNAL ASSERT FAILED\n"
SIGQUIT = "[2026-11-21 05:44:02] Received sigquit from a child process. It usually means the child failed.\n"
CONFIG = "{'engine_kwargs': {'vllm': {'seed': 1}, 'sglang': {'attention_backend': None}}}\n"
LOADER = "python: error while loading shared libraries: libcudart.so.13: cannot open shared object file\n"
DIED = "RuntimeError: Rank 0 scheduler died during initialization (exit code: {}).\n"
IGNORED = f"{HEALTHY}Ignore import error when loading sglang.srt.models.x. Can not import sgl_kernel.\n{HEALTHY}"
MISSED = "ValueError: No processor registered for architecture: ['Qwen2_5_VL']\n"
MOVED = "ImportError: cannot import name 'Engine' from 'sglang' ({})\n"
POOL = "[2026-11-21 05:44:00 TP0] Prefill out of memory. Try to lower your batch size.\nTry to allocate 8192 tokens.\n"
FREE = "Available tokens: {0} (available_size={0} + evictable_size=0)\n"
LOADED = '  File "/x/sglang/srt/models/deepseek_v2.py", line 7, in load_weights\n'
EXPERTS = "KeyError: 'model.layers.0.mlp.{}experts.gate_up_proj{}'\n"
RAY = "(raylet) node_manager.cc:3069: {} Workers (tasks / actors) killed due to memory pressure (OOM), 1 Workers crashed\n"
CONTAINER = '"State": {{"Status": "running",\n "OOMKilled": {},\n "Pid": 7}}\n'
OWN_NAME, NONCES, OUT_OF_MEMORY = "double-resume-or-release", "port-collision-same-seed", "host-out-of-memory"

NAMED = [
    ("RuntimeError: torch.cuda.MemPool doesn't currently support expandable_segments.\n", "expandable-segments known"),
    (HEALTHY + trace('  File "/app/mine.py", line 3, in <module>\n', NONCE), f"{NONCES} like"),
    (trace(SGLANG, NONCE), f"{NONCES} known"),
    # Failures in between connect a cause with the end; a line nearby counts however often it stood before.
    (
        f"{OWN_ERROR}{HEALTHY * 150}RuntimeError: Connection closed by peer [10.0.0.2]:38032\n{HEALTHY * 150}{USER}",
        f"{OWN_NAME} known",
    ),
    (
        "sglang\n" + "in resume_memory_occupation: done\n" * 500 + HEALTHY * 300
        + "in resume_memory_occupation: done\nKeyError: 'kv_cache'\n",
        f"{OWN_NAME} known",
    ),
    # Error 1 is a second release for sure only in resume.
    (SAVER.format("resume"), f"{OWN_NAME} known"),
    (SAVER.format("pause"), f"{OWN_NAME} like"),
    # A rotary table that changed is not called lost.
    (ROTARY.format("sync the engine has changed what no sync fills"), "weights-did-not-arrive"),
    (ROTARY.format("rollout the engine has changed what no sync fills, or what is derived"), "weights-did-not-arrive"),
    (ROTARY.format("sync the engine holds other weights"), "non-parameter-tensors-lost"),
    (LOADER + DIED.format(127), "tms-missing-libcudart known"),
    (LOADER + DIED.format(1), "tms-missing-libcudart known"),
    # A config that names each engine is no context.
    (CONFIG + SIGNAL, "signal-outside-main-thread like"),
    (CONFIG + SGLANG + SIGNAL, "signal-outside-main-thread known"),
    # The pool is too small only if it is; of names and folders, the end of one is another.
    (POOL + FREE.format(5248), "prefill-out-of-memory known"),
    (POOL, "prefill-out-of-memory like"),
    (MOVED.format("/env/sglang/__init__.py"), "sglang-import-moved known"),
    (trace(LOADED, EXPERTS.format("", "")), "packed-experts-names"),
    (trace(LOADED, EXPERTS.format("shared_", ".input_scale")), "quantization-scales known"),
    (IGNORED + MISSED, "sgl-kernel-missing"),
    *((HEALTHY + RAY.format(count), f"{OUT_OF_MEMORY} known") for count in (1, 10)),
    (HEALTHY + CONTAINER.format("true"), f"{OUT_OF_MEMORY} known"),
    # What only names a step, or ends one process, does not show that the run went on.
    *(
        (OWN_ERROR + "".join(f"{line.format(number)}\n" for number in range(5)), f"{OWN_NAME} known")
        for line in (
            "RuntimeError: rank 3 failed in step {}: loss=nan", "waiting for step {}", "worker {} exited with code 0",
            "exit code: 0 of step {}",
        )
    ),
    *((text, slug) for slug, text in WORDINGS.items()),
]  # fmt: skip
"""Text of a log -> name and confidence, or the name alone."""

ANSWER = "KeyError: 'answer'"
UNKNOWN = [
    *((f"{line}\n{HEALTHY}{USER}", ANSWER) for line in WARNINGS),
    *((f"{HEALTHY}{line}\n{HEALTHY}{USER}", ANSWER) for line in WITHOUT),
    (f"{HEALTHY}{USER}{SIGQUIT}", ANSWER),
    (HEALTHY + RAY.format(0) + USER, ANSWER),
    *((f"epoch 1\n{line}\n", line) for line in FAILURES),
    *(
        (f"{before}verl 0.5\nfp8\n" + trace(VLLM, "    in update_weights(\n", f"{line}\n"), line)
        for line in STRANGERS
        for before in ("", "pip list: sglang 0.5.20\nsglang==0.5.20\n")
    ),
    *(
        ("torchrun --nproc-per-node 8\n" + trace('  File "train_ddp.py", line 3, in <module>\n', TORCH, f"{line}\n"), "")
        for line in PLAIN_TORCH
    ),
    # A line alone in a log of SGLang is not more than it says.
    (f"{HEALTHY}torch.distributed.DistStoreError: wait timeout after 1800000ms, keys: /default_pg/0//cuda//0\n", ""),
    (f"{HEALTHY}E0526 11:02:25.394000 1399 torch/distributed/elastic/multiprocessing/api.py:826] failed (exitcode: -11)"
     " local_rank: 0\n", ""),
    (MOVED.format("unknown location"), ""),
    (trace(LOADED, EXPERTS.format("shared_", "")), ""),
    (MISSED, ""),
    ("(WorkerDict pid=3) ValueError: Port could not be cast to integer value as 'word@proxy:80'", ""),
    # The frame must be of the same traceback, and a bare exception is no message of the one before it.
    (
        "(WorkerDict pid=3)   at 10:00:01 in resume_memory_occupation: all is well\n[2026-11-21 05:44:00 TP0] "
        + trace(SGLANG, "torch.OutOfMemoryError: CUDA out of memory.\n"),
        "",
    ),
    (
        "Scheduler hit an exception: " + trace(
            '  File "sglang/srt/managers/scheduler.py", line 1, in run_scheduler_process\n',
            "ValueError: something new\n", "Exception: Server process terminated unexpectedly.\n",
        ),
        "ValueError: something new",
    ),
]  # fmt: skip
"""Text of a log -> the first failure, which nobody knows; "" where it does not matter."""

FINE = [
    *((f"{HEALTHY}{line}\n{HEALTHY}", "no failure") for line in WITHOUT),
    *((f"{HEALTHY}{line}\n", "no failure seen: ") for line in (*ON_EVERY_CPU, *SETTINGS)),
    (HEALTHY + CONTAINER.format("false"), "no failure seen: "),
    (IGNORED, "no failure"),
    ("Exception ignored in: <function f>\n" + USER, "no failure"),
]
"""Text of a log -> how the answer begins."""


@pytest.mark.parametrize(("text", "expected"), NAMED)
def test_a_log_that_is_named(text: str, expected: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, text)
    assert name(found).startswith(expected) and found.went_on is None


@pytest.mark.parametrize(("text", "first"), UNKNOWN)
def test_a_log_of_which_nobody_knows_the_cause(text: str, first: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, text)
    assert found.verdict == "unknown" and found.suspicious and first in found.suspicious.whole


@pytest.mark.parametrize(("text", "said"), FINE)
def test_a_log_without_a_failure(text: str, said: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, text)
    assert found.verdict == "no failure" and as_text(found).startswith(said)
