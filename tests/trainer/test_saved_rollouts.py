"""A step's responses, saved and loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.tools.command_line import parse
from harness.trainer.batch import Batch, from_sequences
from harness.trainer.saved_rollouts import SavedRollouts


def batch() -> Batch:
    made = from_sequences([[2], [3, 4]], [[5, 6], []], pad_id=0)
    truncated = torch.tensor([True, False])
    return made.replace(scores=torch.tensor([0.1, 0.2]), truncated=truncated, rollout_log_probs=torch.randn(2, 3))


def of(words: str, rank: int = 1) -> SavedRollouts:
    found = SavedRollouts.of(parse(words.split()).config, rank)
    assert found
    return found


def checked(words: str, first: int = 0) -> None:
    of(words).check(parse(words.split()).config, first)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    folder, made, steps = tmp_path / "new", batch(), (2, 99_999, 100_000)
    checked(f"--rollout.save {folder}")
    for step in steps:
        of(f"--rollout.save {folder}").save(step, made)
    # The learner's own settings are free.
    free = "--rollout.truncated mask --actor.learning_rate 1 --algorithm.advantage grpo --model.packed"
    for step in steps:
        loaded = of(f"--rollout.load {folder} {free}").load(step)
        assert loaded.tensors().keys() == made.tensors().keys()
        assert all(torch.equal(loaded.require(name), tensor) for name, tensor in made.tensors().items())
    names = {f"step{number}-rank0001.safetensors" for number in ("00002", "99999", "100000")}
    assert {file.name for file in folder.iterdir()} == names


def test_experts_are_loaded_where_they_are_needed_and_missing_ones_are_named(tmp_path: Path) -> None:
    routed = batch().replace(routed_experts=torch.arange(2 * 3 * 4 * 2, dtype=torch.int32).view(2, 3, 4, 2))
    of(f"--rollout.save {tmp_path} --rollout.routing record").save(0, routed)
    of(f"--rollout.save {tmp_path}").save(1, batch())
    loading = f"--rollout.load {tmp_path}"
    loaded = of(f"{loading} --rollout.routing replay").load(0).require("routed_experts")
    assert torch.equal(loaded, routed.require("routed_experts"))
    assert "routed_experts" not in of(loading).load(0).tensors(), "nobody carries them for nothing"
    with pytest.raises(ValueError, match=r'has no routed_experts, which rollout.routing = "replay" needs'):
        of(f"{loading} --rollout.routing replay").load(1)


def test_a_resumed_run_goes_on_in_its_folder_and_what_came_after_its_checkpoint_goes(tmp_path: Path) -> None:
    words = f"--rollout.save {tmp_path}"
    saved = of(words)
    for step in (2, 3, 4, 5):
        saved.save(step, batch())
    of(words, rank=0).save(5, batch())
    checked(words, first=3)
    with pytest.raises(ValueError, match='with model.name = "qwen2", but this run has "llama"'):
        checked(f"{words} --model.name llama", first=3)
    assert len(list(tmp_path.iterdir())) == 5, "until the step is made again"
    saved.save(3, batch())
    kept = {"step00002-rank0001", "step00003-rank0001", "step00005-rank0000"}
    assert {file.stem for file in tmp_path.iterdir()} == kept


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--parallel.dp 2 --parallel.tp 1", "with parallel.dp = 1, but this run has 2: use the saved value"),
        ("--parallel.rank_order dp,pp,tp", "with parallel.rank_order"),
        ("--model.name llama", "with model.name"),
        ("--model.overrides.num_hidden_layers 4", "with model.overrides"),
        ("--rollout.prompts_per_step 4 --rollout.responses_per_prompt 4", "with rollout.prompts_per_step = 8"),
        # The learner's log-probs are those of this temperature.
        ("--rollout.temperature 0.7", "with rollout.temperature = 1.0, but this run has 0.7"),
        ("--rollout.top_p 0.9", "with rollout.top_p"),
        ("--rollout.stop_token_ids 7", "with rollout.stop_token_ids"),
        ("--rollout.aborted mask", "with rollout.aborted"),
        # The scores are those of this reward, and a tiny model's weights those of this seed.
        ("--task.reward digits", "with task.reward"),
        ("--run.seed 1", "with run.seed"),
        ("--model.dtype bfloat16", "with model.dtype"),
        (
            "--run.steps 4",
            "has the rollouts of 3 steps, .*step00003-rank0001.safetensors is not there; use run.steps = 3",
        ),
    ],
)
def test_rollouts_of_another_run_are_refused(words: str, said: str, tmp_path: Path) -> None:
    for step in range(3):
        of(f"--rollout.save {tmp_path}").save(step, batch())
    with pytest.raises(ValueError, match=said):
        checked(f"--rollout.load {tmp_path} {words}")


def test_a_step_that_is_missing_is_found_before_the_first_one(tmp_path: Path) -> None:
    saved = of(f"--rollout.save {tmp_path}")
    for step in (0, 2):
        saved.save(step, batch())
    with pytest.raises(ValueError, match="step00001-rank0001.safetensors is not there"):
        checked(f"--rollout.load {tmp_path}")
    checked(f"--rollout.load {tmp_path}", first=2)


def test_neither_an_earlier_runs_rollouts_nor_a_file_that_is_cut_off_goes_unseen(tmp_path: Path) -> None:
    words = f"--rollout.save {tmp_path}"
    saved = of(words)
    saved.save(0, batch())
    for first in (0, 4):
        with pytest.raises(ValueError, match="holds rollouts of another run"):
            checked(words, first)
    file = saved.file(0)
    with pytest.raises(ValueError, match="cannot be made: Not a directory"):
        checked(f"--rollout.save {file}/inner")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        saved.load(0)
    save_file(batch().tensors(), file, metadata={"mesh": "dp 1, tp 2"})
    with pytest.raises(ValueError, match=r"with run.seed = \(not recorded\)"):
        saved.load(0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: tensors | {"model.norm.weight": torch.ones(2), "x": torch.ones(2)},
            "model.norm.weight, x are no part",
        ),
        (lambda tensors: {"model.norm.weight": torch.ones(2)}, "model.norm.weight is no part of a batch"),
        (lambda tensors: {"input_ids": tensors["input_ids"]}, "it lacks attention_mask, response_mask"),
        (lambda tensors: tensors | {"input_ids": torch.ones(2)}, r"input_ids must have the shape \[B, T\], got \[2\]"),
        (lambda tensors: tensors | {"scores": torch.ones(3)}, r"scores has the shape \[3\] and input_ids \[2, 3\]"),
    ],
)
def test_a_file_that_holds_something_else_is_named(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], said: str, tmp_path: Path
) -> None:
    saved = of(f"--rollout.save {tmp_path}")
    save_file(change(batch().tensors()), saved.file(2), metadata=saved.made_for)
    with pytest.raises(ValueError, match=f"step00002-rank0001.safetensors holds no rollouts: .*{said}"):
        saved.load(2)
