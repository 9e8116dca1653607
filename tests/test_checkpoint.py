"""Save and resume of the trainer's parts on real gloo ranks, without an engine; whole runs are in end_to_end."""

import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
import tomllib
import zlib
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from harness import checkpoint
from harness.checkpoint import Checkpoints, lock_folder
from harness.config import schema
from harness.config.checkpoint_folder import (
    CheckpointState,
    checkpoint_to_resume,
    checkpoints_in,
    config_changes,
    read_state,
)
from harness.config.layers import ConfigError, to_toml
from harness.runtime.events import EventLog
from harness.task.tiny_models import tiny_config
from harness.tools.command_line import parse
from harness.trainer.actor import Actor
from harness.trainer.critic import Critic
from harness.trainer.model import load_causal_lm
from harness.trainer.offload import local
from harness.weights.sent_model import SentModel
from harness.weights.sync import WeightSync
from harness.weights.verification.proof import Proof
from harness.weights.worker.kept_trace import OwnLoad
from tests.cluster.gloo import forkserver, on_ranks
from tests.trainer.sequences import advantage_batch, sequences

CPU = torch.device("cpu")
ROLES: Any = ("actor", "critic")
KEYS = st.sampled_from(["step", "ranks", "optimizer_steps", "checksums", "checksum", "actor", "critic", "config.toml"])
JSON_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)


def parts(folder: Path, model: str = "qwen2", seed: int = 5, keep: int = 0) -> Checkpoints:
    """What a checkpoint saves, on this rank; moments wait in host memory between uses."""
    torch.set_num_threads(1)
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    source = folder / f"source-{model}"
    if rank == 0:
        tiny_config(model, overrides={"vocab_size": 321}).save_pretrained(source)  # shards of unequal size
    dist.barrier()
    config = schema.Config(
        actor=schema.ActorConfig(minibatch_size=4, microbatch_size=2, learning_rate=1e-3),
        critic=schema.CriticConfig(learning_rate=1e-3),
        memory=schema.Memory(offload_optimizer=ROLES, offload_parameters=("critic",)),
        checkpoint=schema.Checkpoint(keep=keep),
    )
    load: Any = {"weights": "random", "seed": seed}
    policy = load_causal_lm(str(source), torch.float32, CPU, mesh, **load)
    critic = Critic(load_causal_lm(str(source), torch.float32, CPU, mesh, value_head=True, **load), config, mesh, CPU)
    engine: Any = SimpleNamespace(can_ask=True)
    return Checkpoints(
        config=config,
        events=EventLog(folder / "events" / f"{os.getpid()}.jsonl", rank, "here"),
        folder=folder / "checkpoints",
        source=source,
        actor=Actor(policy, config, mesh, CPU),
        critic=critic,
        sync=WeightSync(engine, SentModel.plain(policy), folder=folder),
        proof=Proof(Any, Any),  # type: ignore[arg-type]
    )


def said(made: Checkpoints) -> list[str]:
    """What this process has said."""
    lines = map(json.loads, made.events.path.read_text().splitlines())
    return [line["text"] for line in lines if line["event"] == "say"]


def update(made: Checkpoints, seed: int) -> dict[str, float]:
    """Metrics of one update of actor and critic, on this rank's share of eight sequences."""
    share = 8 // dist.get_world_size()
    batch = advantage_batch(*sequences(), slice(dist.get_rank() * share, (dist.get_rank() + 1) * share))
    generator = torch.Generator().manual_seed(seed)
    with made.critic.learning():
        batch = batch.replace(old_values=made.critic.values(batch))
        metrics = made.critic.update(batch, generator)
    with made.actor.learning():
        return metrics | made.actor.update(batch, generator)


def digests(made: Checkpoints) -> dict[str, str]:
    """Return digests of all tensors of a checkpoint, unsharded, and its other state."""
    found = {}
    for learner in made.learners:
        with learner.learning():
            for name, each in learner.tensors().items():
                whole = (each.full_tensor() if isinstance(each, DTensor) else each).clone()  # numpy pins storages
                found[name] = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    return found | {"state": json.dumps({"optimizer_steps": made._state(0, {}).optimizer_steps})}


SAVED = "deepseek_v3"
"""It has a buffer too, and experts that files hold one by one."""


def save_and_go_on(rank: int, folder: Path) -> Any:
    made = parts(folder, SAVED)
    update(made, 1)
    made.save(3)
    saved = digests(made)
    return saved, update(made, 2), digests(made)


def resume_and_go_on(rank: int, folder: Path) -> Any:
    made = parts(folder, SAVED, seed=6)
    before = digests(made)
    made.proof.weights.own_load = OwnLoad({"norm": 1})
    assert made.resume(folder / "checkpoints" / "step-3") == 3
    assert made.proof.weights.own_load is None
    resumed = digests(made)
    return before, resumed, update(made, 2), digests(made), said(made)


def resume_what_must_be_refused(rank: int, folder: Path) -> list[str]:
    """Return the errors for another model, and for copies of a checkpoint in which a shard of this rank is spoiled."""
    with pytest.raises(ConfigError) as raised:
        parts(folder, "qwen3").resume(folder / "checkpoints" / "step-3")
    made, said = parts(folder, SAVED), [str(raised.value)]
    for number, harm in enumerate((partial(flipped, at=-5), partial(os.truncate, length=100), Path.unlink)):
        copy = folder / f"copy{number}-of-rank{rank}" / "step-3"
        shutil.copytree(folder / "checkpoints" / "step-3", copy)
        shard = copy / "critic" / f"rank000{rank}.safetensors"
        harm(shard)
        with pytest.raises(ConfigError) as raised:
            made.resume(copy)
        assert str(raised.value).startswith(f"{shard} ")
        said.append(str(raised.value))
    return said


def lock_twice(rank: int, folder: Path) -> str:
    config = schema.Config(checkpoint=schema.Checkpoint(every=1, folder=str(folder / "mine")))
    lock = lock_folder(config)
    with pytest.raises(ConfigError) as raised:
        lock_folder(config)
    if lock is not None:
        os.close(lock)
    again = lock_folder(config)
    assert (rank == 0) == (again is not None)
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
def test_four_ranks_go_on_from_a_checkpoint_of_two(saved: Any, tmp_path: Path) -> None:
    folder, (tensors, metrics, _) = saved
    for _, resumed, others, _, said in on_ranks(resume_and_go_on, 4, tmp_path, folder):
        assert resumed == tensors
        assert others["learning_rate"] == metrics["learning_rate"]
        assert not [line for line in said if "warning" in line]


@pytest.mark.slow
def test_transformers_loads_the_folder_and_only_its_user_can_open_it(saved: Any) -> None:
    folder, (tensors, *_) = saved
    checkpoint_folder = folder / "checkpoints" / "step-3"
    found = AutoModelForCausalLM.from_pretrained(checkpoint_folder, dtype="auto").state_dict()
    for name, tensor in found.items():
        assert hashlib.sha256(tensor.numpy().tobytes()).hexdigest() == tensors[f"actor/model/{name}"]
    assert len(found) == len([name for name in tensors if name.startswith("actor/model/")])
    assert any("e_score_correction_bias" in name for name in found)
    assert checkpoint_folder.stat().st_mode & 0o077 == 0
    assert [path.name for path in checkpoint_folder.parent.iterdir()] == ["step-3"]
    suffixes = {path.suffix for path in checkpoint_folder.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".toml", ".safetensors"}, "nothing that is unpickled"


@pytest.mark.slow
def test_two_runs_do_not_save_into_one_folder(tmp_path: Path) -> None:
    for sentence in on_ranks(lock_twice, 2, tmp_path, tmp_path):
        assert "mine" in sentence and "another run saves there" in sentence


@pytest.mark.slow
def test_another_model_and_a_spoiled_shard_are_refused_on_every_rank(saved: Any, tmp_path: Path) -> None:
    others = []
    for rank, (other, flip, *_) in enumerate(on_ranks(resume_what_must_be_refused, 2, tmp_path, saved[0])):
        assert f"critic/rank000{rank}.safetensors is not as it was saved; move step-3 out of " in flip
        others.append(other)
    assert others[0] == others[1] and "is of another model than this run: one of the two has no " in others[0]
    assert "config.toml" in others[0]


def alone(folder: Path, work: Callable[[Checkpoints], None]) -> None:
    """Do the work in a new process that is the only rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{os.getpid()}", rank=0, world_size=1)
    work(parts(folder, keep=2))
    os._exit(0)


def process(folder: Path, work: Callable[[Checkpoints], None]) -> int:
    """How it ended."""
    child = forkserver().Process(target=alone, args=(folder, work))
    child.start()
    child.join(120)
    assert child.exitcode is not None
    return child.exitcode


def save_many(made: Checkpoints) -> None:
    for step in (2, 4, 6, 10):
        made.save(step)


def killed_in(made: Checkpoints, patched: str, call: int) -> None:
    """Save step 12; SIGKILL at that call of a function of the module."""
    real, calls = attrgetter(patched)(checkpoint), []

    def kills(*arguments: Any, **named: Any) -> Any:
        calls.append(0)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    with patch(f"harness.checkpoint.{patched}", kills):
        made.save(12)


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
    assert names() == ["step-6", "step-10"]
    for patched, call in (("save_file", 1), ("CheckpointState", 1), ("_to_disk", 5)):
        assert process(tmp_path, partial(killed_in, patched=patched, call=call)) == -signal.SIGKILL
        assert names() == ["step-6", "step-10"]
        assert (there / "step-12.partial").is_dir()
    assert process(tmp_path, partial(killed_in, patched="shutil.rmtree", call=2)) == -signal.SIGKILL
    assert names() == ["step-10", "step-12"]
    (there / "step-99").mkdir()  # as no save leaves it
    (there / "notes").mkdir()
    assert process(tmp_path, resume_latest) == 0
    assert names() == ["step-12", "step-13"]
    assert {each.name for each in there.iterdir()} == {"step-12", "step-13", "step-99", "notes"}


STEPS, MOMENTS = 14, 5


def make_steps(rank: int, folder: Path, rows: Path) -> None:
    """Go on from the newest checkpoint to STEPS, and save each step; rank 0 writes its metrics."""
    dist.init_process_group("gloo", init_method=f"file://{rows}.store", rank=rank, world_size=2)
    made = parts(folder, keep=2)
    there = checkpoints_in(made.folder)
    for step in range(made.resume(there[-1]) if there else 0, STEPS):
        metrics = update(made, step)
        if rank == 0:
            with rows.open("a") as file:
                file.write(json.dumps([step, metrics, digests_of_this_rank(made)]) + "\n")
        made.save(step + 1)
    dist.barrier()
    os._exit(0)


def digests_of_this_rank(made: Checkpoints) -> list[str]:
    with made.actor.learning(), made.critic.learning():
        tensors = [each for learner in made.learners for each in learner.tensors().values()]
        return [hashlib.sha256(local(each).clone().numpy().tobytes()).hexdigest()[:8] for each in tensors]


def start(folder: Path, rows: Path) -> list[Any]:
    context = forkserver()
    ranks = [context.Process(target=make_steps, args=(rank, folder, rows)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    return ranks


def read(rows: Path) -> dict[int, Any]:
    return {row[0]: row[1:] for row in map(json.loads, rows.read_text().splitlines())} if rows.exists() else {}


@pytest.mark.long
def test_killed_at_random_moments_two_ranks_make_the_steps_of_ranks_that_were_not(tmp_path: Path) -> None:
    draw, made = random.Random(15), {}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for moment in range(MOMENTS + 1):
        rows = tmp_path / f"rows{moment}"
        ranks, wanted = start(tmp_path / "a", rows), draw.randrange(1, 4)
        while moment < MOMENTS and len(read(rows)) < wanted:
            assert all(rank.is_alive() for rank in ranks)
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.3))
        for rank in ranks if draw.random() < 0.5 else [draw.choice(ranks)]:
            if moment < MOMENTS:
                rank.kill()
        if moment < MOMENTS:
            time.sleep(0.2)
        for rank in ranks:
            if moment < MOMENTS:
                rank.kill()  # which may wait for the other for minutes
            rank.join()
        made |= read(rows)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    whole = start(tmp_path / "b", tmp_path / "whole")
    for rank in whole:
        rank.join()
    assert made == read(tmp_path / "whole") and len(made) == STEPS


def saved_step(folder: Path, step: int, config: str = "") -> None:
    """Make the files of a checkpoint, without tensors."""
    (folder / f"step-{step}" / "actor").mkdir(parents=True)
    checksums = {}
    for name, content in (("config.toml", config), ("actor/rank0000.safetensors", "")):
        (folder / f"step-{step}" / name).touch(0o600)
        (folder / f"step-{step}" / name).write_text(content)
        checksums[name] = zlib.crc32(content.encode())
    state = CheckpointState(step=step, ranks=1, optimizer_steps={"actor": 2}, checksums=checksums)
    (folder / f"step-{step}" / "state.json").write_text(state.to_json())


def config_of(*words: str) -> schema.Config:
    return parse(words).config


def test_latest_is_by_number_and_nothing_while_there_is_none(tmp_path: Path) -> None:
    words = ["--checkpoint.resume", "latest", "--checkpoint.folder", str(tmp_path)]
    for name in ("step-x", "step-11.partial", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").touch()
    assert checkpoint_to_resume(config_of(*words)) is None
    for step in (9, 10):
        saved_step(tmp_path, step)
    words += ["--run.steps", "10"]
    assert checkpoint_to_resume(config_of(*words)) == tmp_path / "step-10", "its final check is to come"
    with pytest.raises(ConfigError, match="step-10. is from after step 9, the last one; raise run.steps"):
        checkpoint_to_resume(config_of(*words, "--run.steps", "9"))
    epochs = config_of(*words, "--run.steps", "9", "--run.epochs", "1")
    assert checkpoint_to_resume(epochs, steps_are_known=False) == tmp_path / "step-10"
    with pytest.raises(ConfigError, match="is from after step 9, the last one; raise run.epochs"):
        checkpoint_to_resume(epochs)
    assert checkpoint_to_resume(config_of()) is None
    with pytest.raises(ConfigError, match="is not a checkpoint.* it has step-9, step-10; give one"):
        checkpoint_to_resume(config_of("--checkpoint.resume", str(tmp_path)))
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        checkpoint_to_resume(config_of("--checkpoint.resume", str(tmp_path / "step-11.partial")))


def test_no_run_saves_among_checkpoints_that_it_does_not_continue(tmp_path: Path) -> None:
    for name, step in (("a", 4), ("a", 10), ("b", 10)):
        saved_step(tmp_path / name, step)
    words = ["--run.steps", "12", "--checkpoint.every", "1", "--checkpoint.folder", str(tmp_path / "a")]
    for resumed in ("", str(tmp_path / "a" / "step-4"), str(tmp_path / "b" / "step-10")):
        with pytest.raises(
            ConfigError, match="holds step-10, which is newer than what this run starts from; give another folder"
        ):
            checkpoint_to_resume(config_of(*words, "--checkpoint.resume", resumed))
    assert checkpoint_to_resume(config_of(*words, "--checkpoint.resume", "latest")) == tmp_path / "a" / "step-10"
    assert checkpoint_to_resume(config_of(*words, "--checkpoint.every", "0")) is None


def flipped(file: Path, at: int = -3) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def another_number(file: Path) -> None:
    file.write_text(file.read_text().replace('"ranks": 1', '"ranks": 2'))


def as_saved(**changed: Any) -> Callable[[Path], Any]:
    """Return what writes a state.json whose checksum is right."""
    table = {"step": 10, "ranks": 1, "optimizer_steps": {"actor": 2}} | changed
    checksums = {"config.toml": 0, "actor/rank0000.safetensors": 0}
    return lambda file: file.write_text(CheckpointState(**{"checksums": checksums} | table).to_json())


def with_another_key(file: Path) -> None:
    table = {"step": 10, "format": 2}
    file.write_text(json.dumps(table | {"checksum": zlib.crc32(json.dumps(table, sort_keys=True).encode())}))


def into(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def replace(file: Path) -> None:
        file.unlink()
        make(file)

    return replace


HARMS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "state: a flipped bit": ("state.json", flipped),
    "state: a flipped bit of a number": ("state.json", another_number),
    "state: cut": ("state.json", partial(os.truncate, length=20)),
    "state: empty": ("state.json", partial(os.truncate, length=0)),
    "state: removed": ("state.json", Path.unlink),
    "state: deep": ("state.json", lambda file: file.write_text("[" * 100_000)),
    "state: a list": ("state.json", lambda file: file.write_text("[1, 2]")),
    "state: not UTF-8": ("state.json", lambda file: file.write_bytes(b"\xff\xfe")),
    "state: a folder": ("state.json", into(Path.mkdir)),
    "state: a FIFO": ("state.json", into(os.mkfifo)),
    "state: a link": ("state.json", into(lambda file: file.symlink_to("/dev/zero"))),
    "state: another version": ("state.json", with_another_key),
    "state: another step": ("state.json", as_saved(step=9)),
    "state: a text for a number": ("state.json", as_saved(ranks="1")),
    "state: a wrong number of ranks": ("state.json", as_saved(ranks=2)),
    "state: a huge number of ranks": ("state.json", as_saved(ranks=10**12)),
    "state: a path for a role": ("state.json", as_saved(optimizer_steps={"actor": 1, "../../x": 1})),
    "state: a path for a shard": ("state.json", as_saved(checksums={"config.toml": 0, "../step-9/config.toml": 0})),
    "config: changed": ("config.toml", lambda file: file.write_text("[run]\nseed = 1\n")),
    "config: removed": ("config.toml", Path.unlink),
    "config: a FIFO": ("config.toml", into(os.mkfifo)),
    "shard: removed": ("actor/rank0000.safetensors", Path.unlink),
    "shard: a FIFO": ("actor/rank0000.safetensors", into(os.mkfifo)),
    "shard: a link": ("actor/rank0000.safetensors", into(lambda file: file.symlink_to("/dev/zero"))),
    "shard: of anybody": ("actor/rank0000.safetensors", lambda file: file.chmod(0o666)),
    "folder: of a group": ("actor", lambda folder: folder.chmod(0o720)),
}
if os.getuid() == 0:
    HARMS["shard: of another user"] = ("actor/rank0000.safetensors", lambda file: os.chown(file, 65534, 65534))


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_newest_checkpoint_is_refused_before_any_rank_starts(harm: str, tmp_path: Path) -> None:
    for step in (9, 10):
        saved_step(tmp_path, step)
    words = ["--checkpoint.folder", str(tmp_path), "--run.steps", "12", "--checkpoint.resume"]
    assert checkpoint_to_resume(config_of(*words, "latest")) == tmp_path / "step-10"
    name, spoil = HARMS[harm]
    spoil(tmp_path / "step-10" / name)
    with pytest.raises(ConfigError) as raised:
        checkpoint_to_resume(config_of(*words, "latest"))
    sentence = str(raised.value)
    assert sentence.startswith(f"{tmp_path / 'step-10' / name} ") and len(sentence.splitlines()) == 1
    if "move step-10 out of" in sentence:
        assert "resume step-9, the one before" in sentence
        (tmp_path / "step-10").rename(tmp_path / "away")
        assert checkpoint_to_resume(config_of(*words, "latest")) == tmp_path / "step-9"
    else:
        assert "cp -rL" in sentence


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60) | st.recursive(JSON_LEAVES, lambda each: st.dictionaries(KEYS, each) | st.lists(each)))
@example({"step": None, "ranks": None, "optimizer_steps": None, "checksums": None})
@example({"step": 10, "ranks": 1, "optimizer_steps": {"actor": 1}, "checksums": [1, 2]})
@example({"step": 10, "ranks": 1, "optimizer_steps": {"actor": {}}, "checksums": {}})
def test_whatever_is_in_its_state_is_a_sentence(content: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved_step(Path(folder), 10)
        file = Path(folder, "step-10", "state.json")
        if isinstance(content, dict):
            content |= {"checksum": zlib.crc32(json.dumps(content, sort_keys=True).encode())}
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        with pytest.raises(ConfigError, match=r"state\.json .*; move step-10 out of .* and start anew"):
            read_state(file.parent)


def changes(saved: str, resumed: str) -> list[str]:
    before, now = (tomllib.loads(to_toml(config_of(*words.split()))) for words in (saved, resumed))
    return list(config_changes(Path("/step-3"), before, now))


def test_another_config_is_warned_of_and_other_prompts_are_refused(tmp_path: Path) -> None:
    [learning_rate, steps] = sorted(changes("", "--run.steps 9 --actor.learning_rate 0.5 --run.dir x"))
    assert learning_rate.startswith("actor.learning_rate is 0.5, and was 1e-05 in")
    assert steps.startswith("run.steps is 9, and was 3 in")
    saved_step(tmp_path, 1, to_toml(config_of()))
    words = ("--checkpoint.resume", str(tmp_path / "step-1"))
    assert checkpoint_to_resume(config_of(*words)) == tmp_path / "step-1"
    for key, value in (("run.seed", "2"), ("task.rows", "8"), ("rollout.prompts_per_step", "4")):
        with pytest.raises(
            ConfigError,
            match=f"^{key} = {value} would change the prompts: .* new run from its weights with --model.name /",
        ):
            checkpoint_to_resume(config_of(*words, f"--{key}", value))
