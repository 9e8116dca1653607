"""ServerCheck in a loop that is not ours, and senders that fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.config.layers import ConfigError
from harness.task.tiny_models import save_tiny_model
from harness.tools.engine_class.checkpoint_headers import read_headers
from harness.tools.verify.sender import write_checkpoint, write_tensors
from tests.tools.verify.plain_server import PlainServer

REPOSITORY = Path(__file__).resolve().parents[3]
LOOP = Path(__file__).with_name("fsdp2_loop.py")
RANK_1_FAILS = """
import os
import torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from harness.tools.verify.in_training import ServerCheck

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,))

def named():
    yield "a", distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    b = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    if dist.get_rank() == 1:
        raise OSError("no memory")
    yield "b", b

try:
    ServerCheck("http://127.0.0.1:9", model="/none")(named())
except RuntimeError as error:
    print(f"rank {dist.get_rank()} has {error!r}\\n", end="", flush=True)  # one write: both ranks share the pipe
os._exit(0)  # Python's own end can abort beside gloo's threads
"""


def torchrun(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), *words]
    paths = [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=240)


def test_an_fsdp2_loop_is_told_at_which_step_its_sender_forgot_a_tensor(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen2", tmp_path / "model", 0, "float32", texts=["12 + 7 = 19"] * 4)
    arguments = {"model_path": str(folder), "skip_tokenizer_init": True, "dtype": "float32"}
    with PlainServer(arguments, tmp_path / "server.log") as server:
        done = torchrun(LOOP, server.url, str(folder), FAULT="forgets")
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["step 0: the server holds what was trained"], done.stderr[-3000:]
    assert "WeightsDiffer: 1 of 17 tensors" in done.stderr
    assert "layers.1.self_attn.q_proj.bias kept the values of the call before" in done.stderr


def test_a_rank_that_fails_ends_the_check_of_all(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANK_1_FAILS)
    done = torchrun(script)
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} has NotVerified('rank 1: OSError: no memory')" for rank in (0, 1)
    ], done.stderr[-3000:]


def test_a_sender_that_fails_is_a_mistake_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_sender.py").write_text("def named():\n    yield 'a', None.weight\n")
    with pytest.raises(ConfigError, match=r"broken_sender:named: AttributeError: .*broken_sender.py:2\)"):
        write_checkpoint("broken_sender:named", tmp_path)
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError"):
        write_checkpoint("no_such_module:named", tmp_path)


def test_memory_that_a_sender_uses_again_is_kept_as_it_was(tmp_path: Path) -> None:
    buffer = torch.zeros(3)
    write_tensors(((name, buffer.fill_(value)) for name, value in (("a", 1.0), ("b", 2.0))), tmp_path, keep=True)
    assert set(read_headers(tmp_path)) == {"a", "b"}
    assert load_file(tmp_path / "model-00000.safetensors")["a"].tolist() == [1.0] * 3


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_a_sender_yields_each_name_once_and_at_least_one(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_tensors(((name, torch.ones(1)) for name in names), tmp_path, keep=True)
