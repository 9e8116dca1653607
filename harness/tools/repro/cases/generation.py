"""Answers of an engine that are wrong or late: a token id, missing routed experts, a prefix cache or a draft of old
weights."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.tools.repro.case import Case
from harness.tools.repro.predictable_drafts import (
    ENGINE_ARGUMENTS,
    forget_mtp_layer,
    is_of_mtp_layer,
    make_predictable,
)
from harness.tools.repro.tiny_engine import (
    NEW_TOKENS,
    PROMPT,
    SAME_BELOW,
    TinyEngine,
    checkpoint_tensors,
    tiny_engine,
)

GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}


@Case(
    broken="a prompt with the last id of the vocabulary",
    healthy="a prompt with the id before it",
    signature=(r"given token \d+, answered token 0",),
    failure="last-token-id-zero",
    engine=True,
)
def last_token_id_zero(broken: bool) -> None:
    """SGLang reports the last id of the vocabulary as token 0 among the log-probs of a prompt."""
    with tiny_engine() as engine:
        import json

        vocabulary = json.loads((engine.folder / "config.json").read_text())["vocab_size"]
        given = [*PROMPT[:4], vocabulary - 1 if broken else vocabulary - 2, *PROMPT[4:8]]
        scored = engine.engine.generate(
            input_ids=[given], sampling_params=GREEDY, return_logprob=True, logprob_start_len=0
        )[0]["meta_info"]["input_token_logprobs"]
        changed = [(token, entry[1]) for token, entry in zip(given, scored, strict=True) if entry[1] != token]
        for token, answered in changed:
            print(f"given token {token}, answered token {answered}", flush=True)


@Case(
    broken="the engine was built without enable_return_routed_experts",
    healthy="the engine was built with it",
    signature=(r"the answer has no routed_experts",),
    failure="routed-experts-missing",
    engine=True,
    requires=("sglang>=0.5.13",),
)
def routed_experts_missing(broken: bool) -> None:
    """A request for the experts of each token is answered without them if the engine was not built for it."""
    arguments: dict[str, Any] = {} if broken else {"enable_return_routed_experts": True}
    with tiny_engine("qwen3_moe", **arguments) as engine:
        answer = engine.engine.generate(input_ids=[PROMPT], sampling_params=GREEDY, return_routed_experts=True)[0]
        found = answer["meta_info"].get("routed_experts")
        print("the answer has routed_experts" if found else "the answer has no routed_experts", flush=True)


@Case(
    broken="pause_generation in_place: keys and values are kept",
    healthy="pause_generation retract: they are computed again",
    signature=(r"the prefix cache answers from other weights: \S+",),
    failure="stale-cache-after-pause",
    engine=True,
    requires=("sglang>=0.5.13",),
)
def stale_cache_after_pause(broken: bool) -> None:
    """After a pause in place and an update, the prefix cache holds keys and values of the old weights."""
    from harness.rollout import sglang_api
    from harness.rollout.sglang_api.probe import IO_STRUCT, load

    pause, go_on = (load(IO_STRUCT, f"{name}GenerationReqInput") for name in ("Pause", "Continue"))
    with tiny_engine() as engine:
        tensors = checkpoint_tensors(engine.trainer(seed=1))
        sampling = {"temperature": 0.0, "max_new_tokens": 10 * NEW_TOKENS, "ignore_eos": True}
        wait, manager = engine.engine.loop.run_until_complete, engine.engine.tokenizer_manager
        answer = wait(engine.engine.async_generate(input_ids=PROMPT, sampling_params=sampling, stream=True))
        wait(_chunks(answer, 1))
        wait(manager.pause_generation(pause(mode="in_place" if broken else "retract")))
        engine.update(tensors, flush_cache=not broken)  # a frozen request forbids a flush
        wait(manager.continue_generation(go_on()))
        wait(_chunks(answer))
        cached = _log_probs(engine)
        sglang_api.call(engine.engine, "flush_cache")
        gap = max(abs(a - b) for a, b in zip(cached, _log_probs(engine), strict=True))
        same = "the same weights" if gap < 1e-3 else "other weights"
        print(f"the prefix cache answers from {same}: {gap:.1e}", flush=True)


@Case(
    broken="an update without the checkpoint's MTP layer, as transformers' class has none",
    healthy="an update with it",
    signature=(r"accept length after the update: \S+ \(the draft is stale\)",),
    failure="mtp-draft-stale",
    engine=True,
    requires=("sglang>=0.5.23",),
)
def mtp_draft_left_behind(broken: bool) -> None:
    """After an update without the MTP layer the draft model keeps its weights, and none of its tokens are accepted."""
    sent: dict[str, Any] = {}

    def prepare(folder: Path) -> None:
        sent.update(make_predictable(folder))
        forget_mtp_layer(folder)

    with tiny_engine("deepseek_v3", prepare=prepare, **ENGINE_ARGUMENTS) as engine:
        print(f"accept length before the update: {_accept_length(engine):.2f}", flush=True)
        engine.update([(name, each) for name, each in sent.items() if not (broken and is_of_mtp_layer(name))])
        after = _accept_length(engine)
        print(
            f"accept length after the update: {after:.2f} (the draft is {'stale' if after < 1.5 else 'new'})",
            flush=True,
        )


async def _chunks(answer: AsyncIterator[Any], number: int | None = None) -> None:
    """Wait for so many parts of a streamed answer, or for all."""
    taken = 0
    async for _ in answer:
        taken += 1
        if taken == number:
            return


def _accept_length(engine: TinyEngine) -> float:
    """Return how many tokens of a greedy answer each verification of a draft brought; the first token comes of the
    prompt."""
    answer = engine.generate()
    return (len(answer["output_ids"]) - 1) / float(answer["meta_info"]["spec_verify_ct"])


def _log_probs(engine: TinyEngine) -> list[float]:
    """Return log-probs of the prompt's last tokens; what comes before them may be taken from the prefix cache."""
    answers: Any = engine.engine.generate(
        input_ids=[[*PROMPT, 7, 8, 9, 10]],
        sampling_params=GREEDY,
        return_logprob=True,
        logprob_start_len=len(PROMPT),
    )
    scored = answers[0]["meta_info"]["input_token_logprobs"]
    return [entry[0] for entry in scored if entry[0] is not None]


@Case(
    needs="several_gpus",
    requires=("sglang<0.5.21",),
    broken="SGLANG_SHARED_EXPERT_TP1=1",
    healthy="the variable is not set",
    signature=(r"log-probs with DP attention and experts in parallel: \S+ from the trainer's \(wrong\)",),
    engine=True,
)
def shared_expert_summed(broken: bool) -> None:
    """DP attention with experts in parallel adds a shared expert once for each rank that holds a copy of it."""
    os.environ["SGLANG_SHARED_EXPERT_TP1"] = "1" if broken else "0"
    with tiny_engine("deepseek_v3", tp_size=2, dp_size=2, ep_size=2, enable_dp_attention=True) as engine:
        apart = fmean(engine.log_prob_gaps(engine.trainer(seed=0)))
    verdict = "right" if apart < SAME_BELOW else "wrong"
    print(
        f"log-probs with DP attention and experts in parallel: {apart:.1e} from the trainer's ({verdict})", flush=True
    )


@Case(
    needs="several_gpus",
    broken="a draft model",
    healthy="none",
    signature=(r"'EagleVerifyInput' object has no attribute 'kv_indptr'",),
    engine=True,
)
def idle_dp_rank_with_draft(broken: bool) -> None:
    """A rank of DP attention without a request dies while the other one verifies a draft."""
    arguments = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, **(ENGINE_ARGUMENTS if broken else {})}
    with tiny_engine("deepseek_v3", prepare=make_predictable, **arguments) as engine:
        engine.generate()
        print("one request was answered while the other rank was idle", flush=True)
