"""Ask a running SGLang server what its ranks hold: its arguments, and a hash of each parameter on each rank.

Nothing in the server changes. /server_info, /model_info and /v1/models only read. /weights_checker with the action "checksum" only
hashes, and the server stands still meanwhile; its other actions are not for us: "snapshot" and "compare" replace or
drop what somebody else has stored there, and "reset_tensors" overwrites the weights. /generate scores tokens.
A server does not say whether it has released its weights (release_memory_occupation), and would hash memory that is not
mapped: ask one with --enable-memory-saver only while it can serve.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.layers import ConfigError
from harness.runtime import redact
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.verify.http_api import Answer, Api, address_of, shown

INFO_SECONDS, CHECKSUM_SECONDS, SCORE_SECONDS = 60.0, 1800.0, 300.0
"""How long a server may take to tell its arguments, to hash its weights once, and to score all prompts. They are
generous: at 1 GB/s, about what one core hashes, 1800 s are 1.8 TB on each rank."""
TARGET, DRAFT = "target", "draft"
MOST_RANKS = 65536
_NAME = re.compile(r"[!-~]{1,500}")
OLD_RELEASES = "releases have it since 0.5.6, and its action checksum since 0.5.12"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRank:
    """What one rank of a server holds of one model."""

    role: str
    """target, or that of a draft model: draft, draft_step_0."""
    rank: int
    """Among the ranks of its engine. Data parallelism without DP attention is several engines, each with a rank 0."""
    tp_rank: int
    dp_rank: int
    pp_rank: int
    checksums: Mapping[str, str]
    """Name of each parameter and buffer in the engine -> 16 hex digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """What a server says about itself and its weights."""

    url: str
    release: str
    """Of sglang; "" if it does not say."""
    arguments: Mapping[str, Any]
    """Its server arguments, and what else /server_info tells. Secrets are replaced (redact.py)."""
    on_gpu: bool
    """Which hash: that of a Triton kernel on a GPU, else SHA-256."""
    weight_version: str
    """What whoever updates the weights calls them, as it may be printed; "" if the server does not say."""
    ranks: tuple[ServerRank, ...]
    """Each role and rank once."""
    architectures: tuple[str, ...]
    """Of its model, as config.json calls them; empty if it does not say."""
    missing: tuple[int, ...]
    """Ranks that do not tell: those of every pipeline stage but the first, and in 0.5.12 of every TP rank but the
    first."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that are loaded, as requests name them. Their weights are in no checksum."""


def ask_server(url: str, key: str = "", seconds: float = CHECKSUM_SECONDS) -> Server:
    """Return what a server holds. It is asked twice, so that an update meanwhile shows.

    key: as read_key() returns it. seconds: how long it may take to hash its weights once. Raise ConfigError if no
    SGLang server answers there, or if it wants another key; UnsupportedEnvironment for a server that cannot tell its
    checksums, or that is being updated.
    """
    api = Api(address_of(url), tuple(key.split()))
    arguments = _server_info(api)
    release = _release(arguments)
    name = f"{api.address} (sglang {release or 'of an unknown release'})"
    on_gpu = arguments.get("device") == "cuda"
    model = _version_and_architectures(api)
    ranks, missing = told = _checksums(api, name, on_gpu, seconds)
    if told != _checksums(api, name, on_gpu, seconds) or model != _version_and_architectures(api):
        raise _updated(api)
    return Server(
        url=api.address,
        release=release,
        arguments=redact.values(arguments),
        on_gpu=on_gpu,
        weight_version=model[0],
        ranks=ranks,
        architectures=model[1],
        missing=missing,
        adapters=_adapters(api),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """What a server answered to a prompt, and the log-probs by which it did."""

    tokens: tuple[int, ...]
    """Prompt and answer."""
    log_probs: tuple[float, ...]
    """Of each token but the first, in nats, at temperature 1: the prompt's as it computes them by prefill, the
    answer's as it decodes. NaN where the server's is."""


def generate(
    url: str, key: str, prompts: Sequence[Sequence[int]], new_tokens: int, seconds: float = SCORE_SECONDS
) -> list[Answered]:
    """Have a server generate so many tokens after each prompt, at temperature 1.

    Raise UnsupportedEnvironment for a server that does not answer, as a paused one does not, or scores other tokens.
    """
    api = Api(address_of(url), tuple(key.split()))
    asked = {
        "input_ids": [list(each) for each in prompts],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = api.ask("/generate", seconds, asked)
    scored = answer.content if answer.status == 200 and isinstance(answer.content, list) else []
    try:
        return [_answered(each["meta_info"], prompt) for each, prompt in zip(scored, prompts, strict=True)]
    except (LookupError, TypeError, ValueError):
        raise UnsupportedEnvironment(
            f"{api.address} did not answer the {len(prompts)} prompts that it was given: {answer}. Its log may say why."
        ) from None


def _answered(said: Mapping[str, Any], prompt: Sequence[int]) -> Answered:
    """Return what was answered to one prompt. Raise LookupError, TypeError or ValueError unless it is about its tokens.

    0 may be any large id, as in engine_scores.changed_token().
    """
    scored, new = said["input_token_logprobs"], said["output_token_logprobs"]
    if any(each[1] not in (token, 0) for each, token in zip(scored, prompt, strict=True)):
        raise ValueError("other tokens")
    log_probs = [float("nan") if each[0] is None else float(each[0]) for each in (*scored[1:], *new)]
    return Answered(tokens=(*prompt, *(int(each[1]) for each in new)), log_probs=tuple(log_probs))


def _server_info(api: Api) -> Mapping[str, Any]:
    """Return what a server tells about itself; releases before /weights_checker by another name."""
    for path in ("/server_info", "/get_server_info"):
        answer = api.ask(path, INFO_SECONDS)
        if type(answer.table.get("tp_size")) is int:
            return answer.table
        if answer.status != 404:
            break
    raise ConfigError(
        f"{api.address} is not an SGLang server: it does not tell its arguments ({answer}). Give the address of "
        "sglang.launch_server itself, not of a router."
    )


def _release(arguments: Mapping[str, Any]) -> str:
    release = arguments.get("version")
    return release if isinstance(release, str) and re.fullmatch(r"[\w.+!-]{1,64}", release, re.ASCII) else ""


def _version_and_architectures(api: Api) -> tuple[str, tuple[str, ...]]:
    said = api.ask("/model_info", INFO_SECONDS).table
    version, found = said.get("weight_version"), said.get("architectures")
    return "" if version is None else shown(version), tuple(map(shown, found)) if isinstance(found, list) else ()


def _adapters(api: Api) -> tuple[str, ...]:
    """Return the LoRA adapters that are loaded now, whether it was at the start or since."""
    listed = api.ask("/v1/models", INFO_SECONDS).table.get("data")
    models = listed if isinstance(listed, list) else ()
    return tuple(shown(each.get("id")) for each in models if isinstance(each, dict) and each.get("parent"))


def _updated(api: Api) -> UnsupportedEnvironment:
    return UnsupportedEnvironment(
        f"{api.address} is being updated meanwhile: asked twice, it gave other checksums, or another weight version. "
        "Ask it when no update runs."
    )


def _checksums(api: Api, name: str, on_gpu: bool, seconds: float) -> tuple[tuple[ServerRank, ...], tuple[int, ...]]:
    """Return what the ranks hold by one answer of /weights_checker, and the ranks that do not tell."""
    answer = api.ask("/weights_checker", seconds, {"action": "checksum"})
    entries = answer.table.get("ranks") if answer.table.get("success") is True else None
    if not isinstance(entries, list) or not entries:
        raise _no_checksums(name, on_gpu, answer)
    found: dict[tuple[str, int, int], ServerRank] = {}
    sizes = set()
    try:
        for entry in entries:
            for rank, size in _ranks_in(entry):
                sizes.add(size)
                # With DP attention each attention rank's leader tells about all ranks.
                if found.setdefault((rank.role, rank.dp_rank, rank.rank), rank) != rank:
                    raise _updated(api)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedEnvironment(
            f"{name} answers /weights_checker in a form that is not known: {shown(error)}. "
            "The forms of 0.5.12 to 0.5.23 are."
        ) from None
    told = {each.rank for each in found.values()}
    ranks = tuple(found[each] for each in sorted(found, key=lambda key: (key[0] != TARGET, *key)))
    return ranks, tuple(sorted(set(range(max(sizes, default=1))) - told))


def _no_checksums(name: str, on_gpu: bool, answer: Answer) -> UnsupportedEnvironment:
    """Return the error of a server that gave no checksums. name: its address and release."""
    said = answer.content.get("message") if isinstance(answer.content, dict) else None
    if answer.status == 404:
        return UnsupportedEnvironment(f"{name} has no /weights_checker: {OLD_RELEASES}.")
    if "Unsupported action" in str(said) or answer.table.get("success") is True:
        return UnsupportedEnvironment(f"{name} has a /weights_checker without checksums: {OLD_RELEASES}.")
    on_cpu = "" if on_gpu else " On a CPU, releases before 0.5.23 cannot."
    return UnsupportedEnvironment(f"{name} did not compute its checksums: {shown(said) if said else answer}.{on_cpu}")


def _ranks_in(entry: Mapping[str, Any]) -> Iterator[tuple[ServerRank, int]]:
    """Yield what an entry tells, role by role, with the number of ranks of the engine.

    Since 0.5.21 parallelism_info is a list, with a role in each; before that it is one table. Names of draft models'
    parameters have the role before them. Raise AttributeError, KeyError, TypeError or ValueError for any other form.
    """
    infos = entry["parallelism_info"]
    names = dict(_checked(name, value) for name, value in entry["checksums"].items())
    if isinstance(infos, dict):
        roles = [TARGET, DRAFT] if any(name.startswith(f"{DRAFT}.") for name in names) else [TARGET]
        infos = [infos | {"role": role} for role in roles]
    for info in sorted(infos, key=lambda each: each["role"] == TARGET):  # what the drafts leave is the target's
        role, size = info["role"], info["size"]
        if not re.fullmatch(r"[a-z]\w{0,40}", role, re.ASCII):
            raise ValueError("a role that is no word")
        before = "" if role == TARGET else f"{role}."
        mine = {name.removeprefix(before): names.pop(name) for name in list(names) if name.startswith(before)}
        places = {name: info[name] for name in ("rank", "tp_rank", "dp_rank", "pp_rank")}
        if not all(type(each) is int and 0 <= each < MOST_RANKS for each in (*places.values(), size)):
            raise ValueError("ranks that are no numbers")
        yield ServerRank(role=role, checksums=mine, **places), size
    if names:
        raise ValueError("checksums of no role")


def _checked(name: str, checksum: str) -> tuple[str, str]:
    """Return both, the checksum without 0x. Raise TypeError or ValueError unless they are what they should be."""
    if not _NAME.fullmatch(name) or not re.fullmatch(r"(0x)?[0-9a-f]{16}", checksum):
        raise ValueError("a name or a checksum that is none")
    return name, checksum.removeprefix("0x")
