"""Named faults of a weight sync, each put into a real run and caught, with the parameters named; and each one's healthy
control, which must not be. The programs behind the fixtures are tests/weights/faults_*.py.

Of what is refused the first sentence is the error, and what names tensors follows; of what is found after a push the
tensors that were read back come first, then the statistics of the log-probs that are too large.
"""

from typing import Any

import pytest

pytestmark = pytest.mark.slow

Seen = dict[str, Any]

LAYERS = ("model.layers.0", "model.layers.1")
EXPERTS = "model.layers.1.mlp.experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
NOT_FILLED = "a parameter of the engine that nothing sent would fill"
NOT_KNOWN = "the engine knows no such parameter and would ignore it"

CASES = {
    "deepseek_v3": (
        "one_bit_of_w_kc",
        "one_bit_of_w_vc",
        "one_tensor_a_call",
        "lost_correction_bias",
        "dropped_expert",
        "expert_dropped_from_the_plan",
        "a_region_shifted_by_a_row",
        "swapped_experts",
        "experts_swapped_in_the_plan",
        "partial_update",
        "payloads_of_two_ranks_swapped",
        "unknown_parameter",
        "too_few_rows",
        "too_many_columns",
        "wrong_dtype",
        "not_a_number",
        "missing_shard",
    ),
    "llama": (
        "sync_that_does_nothing",
        "last_bucket_dropped",
        "one_rank_stale",
        "stale_prefix_cache",
        "shards_changed_before_they_are_read",
        "two_syncs_at_once",
        "pull_out_of_turn",
        "move_that_nobody_sees",
        "memory_that_cannot_be_opened",
    ),
    "qwen3_moe": (
        "live_names",
        "live_names_that_nobody_asked_about",
        "tied_embeddings_sent_once",
        "outside_a_session",
        "a_copy_that_a_router_keeps",
    ),
}
HEALTHY = {
    "deepseek_v3": (
        "live_names_that_the_engine_knows",
        "no_shard_is_padding",
        "no_bit_is_missed",
        "two_hundred_updates",
    ),
    "llama": (
        "tied_embeddings_are_sent_once",
        "one_tensor_a_call_where_nothing_fuses",
        "moved_shards_are_pulled_from_where_they_are",
    ),
    "qwen3_moe": ("has_sessions", "no_shard_is_padding", "no_bit_is_missed"),
}


def read_back(sentences: list[str]) -> set[str]:
    """Names of the tensors whose elements are not the trainer's."""
    return {text.split(": ")[0] for text in sentences if " elements on rank " in text}


def has_wrong_log_probs(sentences: list[str]) -> bool:
    return any(text.startswith("log-probs: ") and "in the mean (allowed" in text for text in sentences)


@pytest.mark.parametrize(("program", "case"), [(program, case) for program in CASES for case in CASES[program]])
def test_a_healthy_twin_is_not_caught_and_the_engine_serves_on(
    program: str, case: str, request: pytest.FixtureRequest
) -> None:
    """The same without its fault; and after the fault and after the control a sync of changed weights, read back, and
    the engine's log-probs of what it generates."""
    seen = request.getfixturevalue(program)[case]
    assert seen["fault"]
    assert {name: seen[name] for name in ("after fault", "control", "after control")} == {
        "after fault": [],
        "control": [],
        "after control": [],
    }


@pytest.mark.parametrize(("program", "check"), [(program, each) for program in HEALTHY for each in HEALTHY[program]])
def test_what_is_healthy_is_not_caught(program: str, check: str, request: pytest.FixtureRequest) -> None:
    assert request.getfixturevalue(program)[check]["control"] == []


def test_live_names_are_refused(qwen3_moe: Seen) -> None:
    sent = [f"{layer}.mlp.experts.{name}: {NOT_KNOWN}" for layer in LAYERS for name in ("gate_up_proj", "down_proj")]
    theirs = [f"{layer}.mlp.experts.{name}: {NOT_FILLED}" for layer in LAYERS for name in ("w13_weight", "w2_weight")]
    refusal, *found = qwen3_moe["live_names"]["fault"]
    assert sorted(found) == sorted([*sent, *theirs])
    assert refusal == f"WeightsRefused: {'; '.join(found)}"


def test_live_names_that_nobody_asked_about_show_in_the_log_probs(qwen3_moe: Seen) -> None:
    assert has_wrong_log_probs(qwen3_moe["live_names_that_nobody_asked_about"]["fault"])


@pytest.mark.parametrize("name", ["w_kc", "w_vc"])
def test_one_bit_of_what_the_engine_derives(name: str, deepseek_v3: Seen) -> None:
    found = deepseek_v3[f"one_bit_of_{name}"]["fault"]
    [sentence] = [text for text in found if text.startswith("reloaded: ")]
    assert (
        f"self_attn.{name} (" in sentence and "kv_b_proj" in sentence and " 1 of " in sentence and "rank 1" in sentence
    )
    assert len([text for text in found if f".{name} (" in text]) == 2, "and reading back says so too"


def test_one_tensor_a_call(deepseek_v3: Seen) -> None:
    found = deepseek_v3["one_tensor_a_call"]["fault"]
    halves = ("q_a_proj", "kv_a_proj_with_mqa")
    assert read_back(found) == {f"{layer}.self_attn.{half}.weight" for layer in LAYERS for half in halves}
    assert has_wrong_log_probs(found)


def test_a_lost_correction_bias(deepseek_v3: Seen) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    expected = f"{name}: {NOT_FILLED}"
    assert deepseek_v3["lost_correction_bias"]["fault"] == [f"WeightsRefused: {expected}", expected]


def test_a_dropped_expert(deepseek_v3: Seen) -> None:
    found = deepseek_v3["dropped_expert"]["fault"]
    assert read_back(found) == {f"{EXPERTS}.0.{name}.weight" for name in PROJECTIONS}
    assert has_wrong_log_probs(found)


def test_a_region_shifted_by_a_row(deepseek_v3: Seen) -> None:
    found = deepseek_v3["a_region_shifted_by_a_row"]["fault"]
    assert read_back(found) == {O_PROJ}
    assert has_wrong_log_probs(found)
    assert fingerprints(found) == {O_PROJ}


def test_swapped_experts(deepseek_v3: Seen) -> None:
    found = deepseek_v3["swapped_experts"]["fault"]
    assert read_back(found) == {f"{EXPERTS}.{expert}.{name}.weight" for expert in (0, 4) for name in PROJECTIONS}
    assert has_wrong_log_probs(found)


@pytest.mark.parametrize("case", ["expert_dropped_from_the_plan", "experts_swapped_in_the_plan"])
def test_a_plan_that_is_wrong_itself_is_caught(case: str, deepseek_v3: Seen) -> None:
    found = deepseek_v3[case]["fault"]
    assert has_wrong_log_probs(found) or found[0].startswith(f"WeightsRefused: {EXPERTS}")


def test_tied_embeddings_sent_once_to_an_engine_that_does_not_tie(qwen3_moe: Seen) -> None:
    expected = f"lm_head.weight: {NOT_FILLED}"
    assert qwen3_moe["tied_embeddings_sent_once"]["fault"] == [f"WeightsRefused: {expected}", expected]


def test_shards_changed_before_they_are_read(llama: Seen) -> None:
    """What was read before is of the old values; the other half is right."""
    found = llama["shards_changed_before_they_are_read"]["fault"]
    assert set() < read_back(found) < set(llama["names"])


def test_two_syncs_at_once(llama: Seen) -> None:
    """The second is refused on every rank, in the same words, and the first is whole."""
    said = "RuntimeError: a sync must have ended before the next begins, got two at once"
    assert llama["two_syncs_at_once"]["fault"] == [said]


def test_a_pull_out_of_turn(llama: Seen) -> None:
    found = llama["pull_out_of_turn"]["fault"]
    for rank, text in enumerate(found):
        assert f"the scheduler of rank {rank}: RuntimeError: the number of a pull must be " in text
    assert len(found) == 2


def test_a_move_that_nobody_sees(llama: Seen) -> None:
    found = llama["move_that_nobody_sees"]["fault"]
    moved = {text.removeprefix("moved: ") for text in found if text.startswith("moved: ")}
    assert moved and read_back(found) == moved


def test_memory_that_cannot_be_opened(llama: Seen) -> None:
    found = llama["memory_that_cannot_be_opened"]["fault"]
    for rank, text in enumerate(found):
        said = f"SchedulerFailed: the scheduler of rank {rank}: RuntimeError: "
        assert text.startswith(f"{said}the memory of trainer rank 1 cannot be opened: [Errno 2] "), text
    assert len(found) == 2


def test_payloads_of_two_ranks_swapped(deepseek_v3: Seen) -> None:
    found = deepseek_v3["payloads_of_two_ranks_swapped"]["fault"]
    assert read_back(found) == {O_PROJ}
    assert "elements on rank 0, " in found[0]
    assert found[0].endswith("elements on rank 1")
    assert has_wrong_log_probs(found)


def fingerprints(sentences: list[str]) -> set[str]:
    """Names of the tensors whose fingerprints, which the default level takes, are not the trainer's."""
    return {text.removeprefix("fingerprint: ") for text in sentences if text.startswith("fingerprint: ")}


@pytest.mark.parametrize("case", ["sync_that_does_nothing", "one_rank_stale"])
def test_what_no_log_prob_shows_is_seen_by_fingerprint(case: str, llama: Seen) -> None:
    """One bit of one element of each tensor: of every tensor that is sharded over two ranks."""
    assert fingerprints(llama[case]["fault"]) == set(llama["names"])


def test_a_dropped_bucket_is_seen_by_fingerprint(llama: Seen) -> None:
    found = llama["last_bucket_dropped"]["fault"]
    dropped = {text.removeprefix("dropped: ") for text in found if text.startswith("dropped: ")}
    assert dropped and fingerprints(found) == dropped < set(llama["names"])


def test_a_stale_prefix_cache(llama: Seen) -> None:
    """Every weight arrived: the log-probs alone tell."""
    found = llama["stale_prefix_cache"]["fault"]
    assert read_back(found) == set()
    assert has_wrong_log_probs(found)


def test_an_update_outside_a_session(qwen3_moe: Seen) -> None:
    found = qwen3_moe["outside_a_session"]["fault"]
    for way in ("pull", "bucket", "tensor"):
        said = [text for text in found if text.startswith(f"{way}: ")]
        assert any("EngineRefused: update_weights_from_tensor: the engine refused: " in text for text in said)
    assert read_back(found) == set(qwen3_moe["names"])


def test_a_partial_update(deepseek_v3: Seen) -> None:
    found = deepseek_v3["partial_update"]["fault"]
    unsent = {text.removeprefix("unsent: ") for text in found if text.startswith("unsent: ")}
    assert {"lm_head.weight", NORM} <= unsent < set(deepseek_v3["names"])
    assert read_back(found) == unsent
    assert has_wrong_log_probs(found)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("unknown_parameter", f"model.layers.1.self_attn.sinks.weight: {NOT_KNOWN}"),
        (
            "too_few_rows",
            f"{O_PROJ}: the engine's loader refuses it: AssertionError: param_data.shape=torch.Size([64, 64])"
            " loaded_weight.shape=torch.Size([63, 64])",
        ),
        (
            "too_many_columns",
            f"{O_PROJ}: of its 16384 elements ([64, 256]) the engine would read 8192; its shape is not the engine's",
        ),
        ("wrong_dtype", f"{NORM}: sent as float64, but the engine holds float32: it would be rounded; send float32"),
    ],
)
def test_what_the_engine_cannot_take_is_refused_before_it_is_touched(
    case: str, sentence: str, deepseek_v3: Seen
) -> None:
    """Its digests of all that it holds, taken before and after, are the same: else the list would be longer."""
    assert deepseek_v3[case]["fault"] == [f"WeightsRefused: {sentence}", sentence]


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("not_a_number", f"WeightsRefused: 1 tensor(s) hold a NaN or an infinity: {NORM} (rank 1); nothing was sent."),
        ("missing_shard", f"WeightsRefused: {O_PROJ}: rank 1 holds 20 of the 32 rows of its shard"),
    ],
)
def test_what_the_trainer_must_not_send_is_refused_on_every_rank(case: str, error: str, deepseek_v3: Seen) -> None:
    """One rank alone has the fault; the text of every rank is kept, and there is one."""
    assert deepseek_v3[case]["fault"] == [error]


def test_a_copy_that_a_router_keeps(qwen3_moe: Seen) -> None:
    gate = "model.layers.0.mlp.gate"
    assert qwen3_moe["a_copy_that_a_router_keeps"]["fault"] == [f"{gate}.kept_weight, a copy of {gate}.weight"]
