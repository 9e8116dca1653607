"""`launch/ppo.py --dry-run` for 32 hosts of 8 GPUs: quick, without torch, transformers or network."""

import os
import resource
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from harness.tools.command_line import parse, read_known_options
from harness.tools.full_size.model_and_options import Options

REPOSITORY = Path(__file__).parents[2]
CONFIG = "configs/multinode/deepseek_v3_671b.toml"
# Python's own error for a module that must not be imported, and one for a socket.
GUARD = """
import runpy, socket, sys
for name in ("torch", "transformers", "sglang", "rich", "numpy"):
    sys.modules[name] = None
class Refused(socket.socket):
    def __init__(self, *arguments, **options):
        raise AssertionError("a socket")
socket.socket = Refused
sys.argv = sys.argv[1:]
sys.path.insert(0, "launch")  # as Python does for a script
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def dry_run(*words: str, config: str = CONFIG, **environment: str) -> str:
    command = [sys.executable, "-c", GUARD, "launch/ppo.py", "--dry-run", config, *words]
    shell = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=shell | environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def cpu_seconds_of_children() -> float:
    """Unlike wall time, they do not depend on what else this machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_32_hosts_of_8_in_two_seconds() -> None:
    before = cpu_seconds_of_children()
    text = dry_run("--nnodes", "32", "--nproc-per-node", "8")
    assert cpu_seconds_of_children() - before < 2
    lines = text.splitlines()
    assert lines[0] == "256 ranks on 32 hosts (cuda), mesh dp=16 tp=16 pp=1, rank order dp,tp,pp"
    assert max(map(len, lines)) <= 120
    assert len(lines) < 50


def test_the_command_that_tells_memory_takes_the_same_config() -> None:
    keys = ["--parallel.tp", "4", "--model.packed", "--memory.offload_parameters", "actor,critic"]
    text = dry_run(*keys, "--cuda-visible-devices", "3,2", "--nnodes", "2", config="configs/gpu/memory_7b.toml")
    python, *words = shlex.split(text.splitlines()[-1])
    assert (python, words[0]) == ("python3", "launch/full_size.py")
    options, rest = read_known_options(Options, "", "", words[1:])
    assert (options.nnodes, options.nproc_per_node) == (2, 2)
    assert parse(rest).config == parse(["configs/gpu/memory_7b.toml", *keys]).config


def test_the_quickstart_takes_the_config_of_its_device() -> None:
    """Both have the same task: the one for GPUs differs in the dtype, and in a learning rate for its wider model."""
    on_cpu, on_gpu = (parse([f"configs/{name}.toml"]).config for name in ("cpu/quickstart", "gpu/tiny"))
    actor = replace(on_cpu.actor, learning_rate=on_gpu.actor.learning_rate)
    assert replace(on_cpu, model=on_gpu.model, engine=on_gpu.engine, actor=actor) == on_gpu
    for device, config in (("cuda", "configs/gpu/tiny.toml"), ("auto", "configs/cpu/quickstart.toml")):
        words = [sys.executable, "launch/quickstart.py", "--engine.device", device, "--dry-run"]
        done = subprocess.run(
            words, cwd=REPOSITORY, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        )
        assert f"python3 launch/full_size.py {config} " in done.stdout, done.stderr
