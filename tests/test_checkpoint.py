"""Save and resume of the trainer's parts on real gloo ranks, without an engine; whole runs are in end_to_end."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from harness import checkpoint
from harness.checkpoint import Checkpoints
from harness.config import schema
from harness.config.layers import ConfigError
from harness.config.run_folder import checkpoint_to_resume, checkpoints_in
from harness.tools.command_line import parse
from harness.trainer.actor import Actor
from harness.trainer.advantages import KlControl
from harness.trainer.critic import Critic
from harness.trainer.model import load_causal_lm
from harness.weights.sync import WeightSync
from tests.cluster.gloo import on_ranks
from tests.trainer.sequences import advantage_batch, sequences
from tests.trainer.tiny_models import tiny_config

CPU = torch.device("cpu")
ROLES: Any = ("actor", "critic")


def parts(folder: Path, model: str = "qwen2", seed: int = 5, keep: int = 0, **actor: Any) -> Checkpoints:
    """What a checkpoint saves, on this rank; moments wait in host memory between uses."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    source = folder / f"source-{model}"
    if rank == 0:
        description = tiny_config(model)
        description.vocab_size = 321  # shards of unequal size
        description.save_pretrained(source)
    dist.barrier()
    updates = {"minibatch_size": 4, "microbatch_size": 2, "learning_rate": 1e-3}
    config = schema.Config(
        actor=schema.ActorConfig(**updates | actor),
        critic=schema.CriticConfig(**updates),
        memory=schema.Memory(offload_optimizer=ROLES, offload_parameters=("critic",)),
        checkpoint=schema.Checkpoint(keep=keep),
    )
    load: Any = {"weights": "random", "seed": seed}
    policy = load_causal_lm(str(source), torch.float32, CPU, mesh, **load)
    critic = Critic(load_causal_lm(str(source), torch.float32, CPU, mesh, value_head=True, **load), config, mesh, CPU)
    engine: Any = SimpleNamespace(api=SimpleNamespace(custom_weight_loader=True), device_type="cpu")
    ppo: Any = SimpleNamespace(
        config=config,
        world=SimpleNamespace(rank=rank),
        events=SimpleNamespace(phase=lambda *_, **__: nullcontext(), said=[]),
        actor=Actor(policy, config, mesh, CPU),
        critic=critic,
        sync=WeightSync(engine, policy, schema.Weights(transport="tensor"), folder),
        kl_control=KlControl(0.1),
        verification=SimpleNamespace(movement=float("inf"), own_checkpoint={}),
    )
    ppo.events.say = ppo.events.said.append
    return Checkpoints(ppo=ppo, folder=folder / "checkpoints", source=source)


def update(made: Checkpoints, seed: int) -> dict[str, float]:
    """Metrics of one update of actor and critic, on this rank's share of eight sequences."""
    share = 8 // dist.get_world_size()
    batch = advantage_batch(*sequences(), slice(dist.get_rank() * share, (dist.get_rank() + 1) * share))
    generator = torch.Generator().manual_seed(seed)
    with made.ppo.critic.learning():
        batch = batch.replace(old_values=made.ppo.critic.values(batch))
        metrics = made.ppo.critic.update(batch, generator)
    with made.ppo.actor.learning():
        return metrics | made.ppo.actor.update(batch, generator)


def digests(made: Checkpoints) -> dict[str, str]:
    """Of every tensor of a checkpoint, whole, and of what is beside them."""
    with made._tensors() as tensors:
        whole = {
            name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in tensors.items()
        }
        found = {name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in whole.items()}
    return found | {"state": json.dumps(made._state(0))}


def save_and_go_on(rank: int, folder: Path) -> Any:
    made = parts(folder)
    update(made, 1)
    made.ppo.kl_control.coefficient, made.ppo.verification.movement = 0.3, 0.7
    made.save(3)
    saved = digests(made)
    return saved, update(made, 2), digests(made)


def resume_and_go_on(rank: int, folder: Path) -> Any:
    made = parts(folder, seed=6)
    before = digests(made)
    assert made.resume(folder / "checkpoints" / "step-3") == 3
    resumed = digests(made)
    return before, resumed, update(made, 2), digests(made), made.ppo.events.said


def resume_another(rank: int, folder: Path, model: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parts(folder, model).resume(folder / "checkpoints" / "step-3")
    return str(raised.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a checkpoint of two ranks, and what rank 0 computed."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, on_ranks(save_and_go_on, 2, folder, folder)[0]


@pytest.mark.slow
def test_two_ranks_go_on_from_a_checkpoint_bit_for_bit(saved: Any, tmp_path: Path) -> None:
    folder, (tensors, metrics, after) = saved
    for found in on_ranks(resume_and_go_on, 2, tmp_path, folder):
        assert found[0]["actor/model/lm_head.weight"] != tensors["actor/model/lm_head.weight"], "of another seed"
        assert found[1:4] == (tensors, metrics, after)
        assert len([name for name in tensors if name.startswith("critic/exp_avg_sq/")]) > 20
        assert json.loads(tensors["state"])["optimizer_steps"] == {"actor": 2, "critic": 2}


@pytest.mark.slow
def test_one_rank_goes_on_from_a_checkpoint_of_two(saved: Any, tmp_path: Path) -> None:
    folder, (tensors, metrics, _) = saved
    [(_, resumed, others, _, said)] = on_ranks(resume_and_go_on, 1, tmp_path, folder)
    assert resumed == tensors
    assert others["learning_rate"] == metrics["learning_rate"]
    assert not [line for line in said if "warning" in line]


@pytest.mark.slow
def test_transformers_loads_the_folder_and_only_its_user_can_open_it(saved: Any) -> None:
    folder, (tensors, *_) = saved
    checkpoint_folder = folder / "checkpoints" / "step-3"
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder)
    for name, tensor in model.state_dict().items():
        assert hashlib.sha256(tensor.numpy().tobytes()).hexdigest() == tensors[f"actor/model/{name}"]
    assert checkpoint_folder.stat().st_mode & 0o077 == 0
    assert [path.name for path in checkpoint_folder.parent.iterdir()] == ["step-3"]


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_on_every_rank(saved: Any, tmp_path: Path) -> None:
    sentences = on_ranks(resume_another, 2, tmp_path, saved[0], "qwen3")
    assert sentences[0] == sentences[1] and "is of another model: actor/" in sentences[0]
    assert "missing there" in sentences[0] and "config.toml" in sentences[0]


def alone(folder: Path, work: Callable[[Checkpoints], None]) -> None:
    """As the only rank of a process of its own."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{os.getpid()}", rank=0, world_size=1)
    work(parts(folder, keep=2))
    os._exit(0)


def process(folder: Path, work: Callable[[Checkpoints], None]) -> int:
    """How it ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor", "harness.weights.transports"])
    child = context.Process(target=alone, args=(folder, work))
    child.start()
    child.join(120)
    assert child.exitcode is not None
    return child.exitcode


def save_many(made: Checkpoints) -> None:
    for step in (2, 4, 10, 6):
        made.save(step)


def killed_in(made: Checkpoints, patched: str, call: int) -> None:
    """Save step 6 again and step 12; SIGKILL at that call of a function of the module."""
    real, calls = getattr(checkpoint, patched.partition(".")[0]), []
    real = getattr(real, patched.partition(".")[2]) if "." in patched else real

    def kills(*arguments: Any, **named: Any) -> Any:
        calls.append(0)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    made.save(6)
    with patch(f"harness.checkpoint.{patched}", kills):
        made.save(12)


def killed_at_the_shards(made: Checkpoints) -> None:
    killed_in(made, "dcp.save", 1)


def killed_before_the_state(made: Checkpoints) -> None:
    killed_in(made, "json.dumps", 1)


def killed_on_the_way_to_the_disk(made: Checkpoints) -> None:
    killed_in(made, "_to_disk", 5)


def killed_after_all(made: Checkpoints) -> None:
    killed_in(made, "shutil.rmtree", 2)


def resume_latest(made: Checkpoints) -> None:
    [*_, newest] = checkpoints_in(made.folder)
    step = made.resume(newest)
    made.save(step + 1)
    assert not list(made.folder.glob("*.partial"))


@pytest.mark.slow
def test_the_newest_stay_and_a_save_that_is_killed_leaves_the_one_before(tmp_path: Path) -> None:
    there = tmp_path / "checkpoints"

    def names() -> list[str]:
        return [each.name for each in checkpoints_in(there)]

    assert process(tmp_path, save_many) == 0
    assert names() == ["step-4", "step-6", "step-10"], "of a later step than 6 none goes"
    shutil.rmtree(there / "step-10")
    for killed in (killed_at_the_shards, killed_before_the_state, killed_on_the_way_to_the_disk):
        assert process(tmp_path, killed) == -signal.SIGKILL
        assert names() == ["step-4", "step-6"]
        assert (there / "step-12.partial").is_dir()
    assert process(tmp_path, killed_after_all) == -signal.SIGKILL
    assert names() == ["step-4", "step-6", "step-12"]
    shutil.copytree(there / "step-12", there / "step-13.partial")
    assert process(tmp_path, resume_latest) == 0
    assert names() == ["step-12", "step-13"]


def config_of(*words: str) -> schema.Config:
    return parse(words).config


def test_latest_is_by_number_and_nothing_while_there_is_none(tmp_path: Path) -> None:
    words = ["--checkpoint.resume", "latest", "--checkpoint.folder", str(tmp_path)]
    for name in ("step-x", "step-8", "step-11.partial", "step-9.old", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").touch()
    (tmp_path / "step-8" / "state.json").unlink()
    assert checkpoint_to_resume(config_of(*words)) is None
    for name in ("step-9", "step-10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text('{"step": 10}')
    words += ["--run.steps", "11"]
    assert checkpoint_to_resume(config_of(*words)) == tmp_path / "step-10"
    with pytest.raises(ConfigError, match="step-10. is after step 10 of 10; raise run.steps"):
        checkpoint_to_resume(config_of(*words, "--run.steps", "10"))
    assert checkpoint_to_resume(config_of()) is None
    with pytest.raises(ConfigError, match="is no checkpoint.* it has step-9, step-10; give one"):
        checkpoint_to_resume(config_of("--checkpoint.resume", str(tmp_path)))


@pytest.mark.parametrize("spoiled", ["mode of a file", "mode of the folder", "link"])
def test_what_others_could_have_written_is_not_read(spoiled: str, tmp_path: Path) -> None:
    (tmp_path / "step-1" / "shards").mkdir(parents=True, mode=0o700)
    metadata = tmp_path / "step-1" / "shards" / ".metadata"
    metadata.touch(0o600)
    checkpoint.require_own(tmp_path / "step-1")
    if spoiled == "link":
        metadata.unlink()
        metadata.symlink_to(tmp_path / "elsewhere")
    else:
        (metadata if "file" in spoiled else metadata.parent).chmod(0o720)
    with pytest.raises(ConfigError, match="writable by nobody else"):
        checkpoint.require_own(tmp_path / "step-1")
