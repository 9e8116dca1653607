"""What is said of caches that are not the same for each layer, or not known."""

from pathlib import Path
from typing import Any

from harness.runtime import GIB
from harness.tools.command_line import parse
from harness.tools.full_size.gpu_stages import (
    KV_AT_MOST,
    KV_CACHE,
    STATES,
    EngineShare,
    GpuMemory,
    Shares,
    TrainerShare,
)

MEMORY_7B = str(Path(__file__).parents[3] / "configs/gpu/memory_7b.toml")


def with_engine(*engine: EngineShare, words: tuple[str, ...] = ()) -> GpuMemory:
    config = parse([MEMORY_7B, *words]).config
    actor = TrainerShare(parameters=7 * GIB, log_probs={}, update={})
    return GpuMemory(config, 140 * GIB, Shares(engine=list(engine), trainers={"actor": actor}, bucket_bytes=GIB))


def share(**changed: Any) -> EngineShare:
    fields: dict[str, Any] = {"stage": 0, "first_layer": 0, "last_layer": 9, "weights": 20 * GIB, "kv_token": 10_000}
    return EngineShare(**fields | changed)


def test_an_unknown_kv_cache_is_never_a_number() -> None:
    known, found = with_engine(share()), with_engine(share(kv_token=0, kv_unknown="it has a rule of its own"))
    text = " ".join("\n".join(found.as_lines()).split())
    assert "KV cache not known for this architecture (it has a rule of its own)" in text
    assert "bytes for each token" not in text and "room for" not in text
    assert "not known" in found.verdict()
    assert KV_CACHE not in found.stages["generate"]
    at_most, exact = found.stages["generate"][KV_AT_MOST], known.stages["generate"][KV_CACHE]
    assert at_most == found.static_bytes - 20 * GIB
    assert at_most - known.engine[0].kv_token < exact <= at_most


def test_an_engine_whose_weights_fill_its_share_does_not_fit_even_if_the_kv_cache_is_not_known() -> None:
    assert not with_engine(share(weights=139 * GIB, kv_token=0, kv_unknown="?")).fits


def test_states_of_linear_attention_take_their_share_of_what_the_weights_leave() -> None:
    plain, found = with_engine(share()), with_engine(share(state_ratio=0.9))
    parts, left = found.stages["generate"], found.static_bytes - 20 * GIB
    assert abs(parts[STATES] - left * 0.9 / 1.9) <= 1
    assert abs(parts[KV_CACHE] - left / 1.9) <= 10_000
    assert abs(found.kv_tokens - plain.kv_tokens / 1.9) <= 1
    assert "0.9 times the KV cache" in " ".join("\n".join(found.as_lines()).split())


def test_the_remedy_for_too_little_room_counts_the_states() -> None:
    config = parse([MEMORY_7B]).config
    usable = 140 * GIB - 2 * (GIB // 2)
    tight = (20 * GIB + 1) / usable
    words = ("--engine.args.mem_fraction_static", f"{tight:.6f}")
    found = with_engine(share(state_ratio=0.9, kv_token=2**20), words=words)
    tokens = config.task.max_prompt_tokens + config.rollout.max_response_tokens
    least = (20 * GIB + tokens * 2**20 * 1.9) / usable
    assert not found.fits and f"set it to {least:.3f} or more" in found.problems[0]


def test_a_model_without_a_kv_cache_has_a_verdict() -> None:
    found = with_engine(share(kv_token=0))
    assert found.stages["generate"][KV_CACHE] == 0 and found.verdict()
