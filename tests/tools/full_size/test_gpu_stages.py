"""The stages of a step against what was measured, and what each setting does to them."""

from pathlib import Path

import pytest

from harness.runtime import GIB
from harness.tools.command_line import parse
from harness.tools.full_size.gpu_stages import EngineShare, GpuMemory, Shares, TrainerShare

MEMORY_7B = str(Path(__file__).parents[3] / "configs/gpu/memory_7b.toml")
BUCKET = "sync: bucket, gathered and sent"
H200 = 139.8  # GiB that torch sees of one
COMPUTING = {"gathered layers, activations": 5_296_669_440}
ENGINE = EngineShare(stage=0, first_layer=0, last_layer=27, weights=3_808_114_688, kv_token=14_336)


def learner(parameters: int) -> TrainerShare:
    return TrainerShare(parameters=parameters, log_probs=COMPUTING, update={"AdamW's temporaries": parameters})


def of(*words: str, gib: float = H200) -> GpuMemory:
    """What launch/full_size.py executes of memory_7b.toml, on four ranks."""
    config = parse([MEMORY_7B, *words]).config
    wide = 2 if config.model.master_dtype == "float32" else 1
    trainers = {"actor": learner(3_807_808_256 * wide)}
    if config.algorithm.has_critic:
        trainers["critic"] = learner(3_535_316_736 * wide)
    if config.algorithm.kl_placement != "none":
        trainers["reference"] = TrainerShare(parameters=3_807_808_256, log_probs=COMPUTING, update={})
    shares = Shares(engine=[ENGINE], trainers=trainers, bucket_bytes=1_090_001_920)
    return GpuMemory(config, int(gib * GIB), shares)


@pytest.mark.parametrize(
    ("resume", "fraction", "passed"),
    [("staged", 0.9, True), ("all", 0.86, True), ("all", 0.9, False), ("all", 0.94, False)],
)
def test_the_verdict_is_what_4_h200_did(resume: str, fraction: float, passed: bool) -> None:
    """As README has it: configs/gpu/memory_7b.toml with sglang 0.5.17, which was then of bfloat16 throughout."""
    then = ["--model.master_dtype", "bfloat16", "--memory.offload_parameters", "actor"]
    found = of(MEMORY_7B, *then, "--memory.resume", resume, "--engine.args.mem_fraction_static", str(fraction))
    assert found.fits is passed, found.problems


def test_float32_masters_cost_what_they_are_and_the_config_still_fits() -> None:
    mixed, narrow = of(MEMORY_7B), of(MEMORY_7B, "--model.master_dtype", "bfloat16")
    assert mixed.fits and narrow.fits, mixed.problems
    assert not of(MEMORY_7B, "--memory.resume", "all").fits
    wide, thin = mixed.stages["update_actor"], narrow.stages["update_actor"]
    for part in ("actor: parameters", "actor: gradients", "actor: AdamW states"):
        assert wide[part] == 2 * thin[part]
    assert wide["reference: parameters"] == thin["reference: parameters"], "it does not learn"
    sync = mixed.stages["sync"]
    assert sync[BUCKET] == narrow.stages["sync"][BUCKET] == 2 * mixed.bucket_bytes, "what is sent is bfloat16"
    assert sync["sync: own rows, cast"] == mixed.bucket_bytes // 4
    assert "sync: own rows, cast" not in narrow.stages["sync"]


@pytest.mark.parametrize(
    ("words", "held"),
    [
        ("--weights.transport tensor", {BUCKET: 2}),
        ("--weights.transport disk", {"sync: bucket gathered": 1}),
        ("--weights.transport distributed --parallel.colocate false", {"sync: bucket gathered": 1}),
        ("--weights.transport pull", {}),
    ],
)
def test_a_transport_holds_its_buckets_during_the_sync_alone_and_a_pull_none(words: str, held: dict[str, int]) -> None:
    found = of(MEMORY_7B, *words.split())
    parts = {name: size for name, size in found.stages["sync"].items() if name.startswith("sync: ")}
    cast = {"sync: own rows, cast": found.bucket_bytes // 4} if held else {}
    assert parts == {name: times * found.bucket_bytes for name, times in held.items()} | cast
    others = (stage for stage in found.stages if stage not in ("sync", "engine's GPU"))
    assert not any(name.startswith("sync: ") for stage in others for name in found.stages[stage])


def test_at_once_fails_in_the_sync_and_says_which_fraction_would_do() -> None:
    found = of(MEMORY_7B, "--memory.resume", "all")
    [problem] = found.problems
    assert problem.startswith("sync needs 14")
    fraction = problem.split("up to ")[1].split(" ")[0]
    again = of(MEMORY_7B, "--memory.resume", "all", "--engine.args.mem_fraction_static", fraction)
    assert again.fits
    higher = str(float(fraction) + 0.002)
    assert not of(MEMORY_7B, "--memory.resume", "all", "--engine.args.mem_fraction_static", higher).fits


def test_what_is_offloaded_leaves_the_gpu() -> None:
    none, some = of(MEMORY_7B, "--memory.offload_parameters", "[]", "--memory.offload_optimizer", "[]"), of(MEMORY_7B)
    moved = none.stages["generate"]
    actor = some.stages["update_actor"]
    assert "actor: AdamW states" not in some.stages["update_critic"]
    assert "actor: parameters" not in some.stages["generate"]
    assert moved["actor: parameters"] == actor["actor: parameters"]


def test_roles_are_those_of_the_algorithm() -> None:
    names = {name for parts in of(MEMORY_7B).stages.values() for name in parts}
    assert {"critic: parameters", "reference: parameters"} <= names
    lean = of(
        MEMORY_7B,
        "--algorithm.advantage",
        "grpo",
        "--algorithm.kl_placement",
        "none",
        *["--memory.offload_parameters", "actor", "--memory.offload_optimizer", "actor"],
    )
    assert list(lean.stages) == ["sync", "generate", "log_probs", "update_actor"]
    assert not any("critic" in name or "reference" in name for parts in lean.stages.values() for name in parts)


def test_without_the_memory_saver_the_engine_is_always_there() -> None:
    found = of(MEMORY_7B, "--engine.args.enable_memory_saver", "false")
    assert all("engine: KV cache" in parts for name, parts in found.stages.items() if name != "sync")


def test_apart_engine_and_trainer_have_gpus_of_their_own() -> None:
    found = of(MEMORY_7B, "--parallel.colocate", "false")
    (name, engine), *trainer = found.stages.items()
    assert name == "engine's GPU"
    assert not any(part.startswith("actor") for part in engine)
    assert not any(part.startswith("engine") for _, parts in trainer for part in parts)


def test_weights_that_leave_no_room_keep_the_engine_from_starting() -> None:
    found = of(MEMORY_7B, "--engine.args.mem_fraction_static", "0.02")
    assert found.kv_tokens == 0
    assert found.problems[0].startswith("the engine has room for 0 tokens")
    assert (
        "its weights take 3.5 GiB of each GPU" in found.problems[0] and "set it to 0.026 or more" in found.problems[0]
    )
    assert "no value is enough" in of(gib=1).problems[0], "CUDA's own share fills it"
    few = of(MEMORY_7B, "--engine.args.max_total_tokens", "100")
    assert few.kv_tokens == 100
    assert "room for 100 tokens, but a prompt with its response may take 288:" in few.problems[0]
