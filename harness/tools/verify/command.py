"""What launch/verify.py does: ask a server what its ranks hold, predict it, compare, and say why it differs."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config.layers import ConfigError
from harness.rollout.sglang_api import probe
from harness.rollout.sglang_api.source import installed
from harness.runtime.errors import UnsupportedEnvironment
from harness.runtime.fork_server import collecting_nothing
from harness.runtime.working import working
from harness.tools.environments import REPOSITORY
from harness.tools.full_size.command import check_written, prepare_import
from harness.tools.verify.http_api import read_key, shown
from harness.tools.verify.question import Options, check, is_sender, numbers_of
from harness.tools.verify.server import TARGET, Server, ask_server
from harness.weights.checkpoint_headers import Stored, read_headers

if TYPE_CHECKING:
    from harness.tools.verify.comparison import Engine
    from harness.tools.verify.verdict import Answer

SCRIPT = "launch/verify.py"
DECIDING = (
    "tp_size", "pp_size", "ep_size", "dp_size", "enable_dp_attention", "enable_dp_lm_head", "moe_dense_tp_size", "moe_dp_size",
    "attn_cp_size", "dtype", "quantization", "json_model_override_args", "enable_multimodal", "disable_shared_experts_fusion",
    "ep_num_redundant_experts", "init_expert_location", "kv_cache_dtype", "speculative_algorithm", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens",
)  # fmt: skip
"""Of SGLang's server arguments, those that decide which parameters a rank has."""


def run(options: Options, words: Sequence[str]) -> int:
    """Print the verdict and return the exit code. words: the command line.

    Raise ConfigError, UnsupportedEnvironment.
    """
    check(options)
    if options.json:
        check_written("--json", Path(options.json))
    key = read_key(options.api_key_file) if options.api_key_file else ""
    with working(f"asking {shown(options.server)} for the hashes of its weights"):
        server = ask_server(options.server, key, options.seconds)
    _check_predictable(server)
    here = installed("sglang").version()
    if options.release and server.release not in ("", here):
        return _with_release(server.release, words)
    with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
        answer = _answer(options, server, key, Path(scratch))
    if options.json:
        Path(options.json).write_text(json.dumps(answer.table(), indent=1))
    for line in answer.lines():
        print(line)
    print(f"VERDICT: {answer.verdict()}")
    return answer.code


def _with_release(release: str, words: Sequence[str]) -> int:
    """Do the same with another release of SGLang, and return its exit code."""
    from harness.tools.full_size.compare import environment_of

    print(f"the server has sglang {release}; installing it, to predict with it", flush=True)
    environment = environment_of(release)
    command = [environment.python, str(REPOSITORY / SCRIPT), *(word for word in words if word != "--release")]
    return subprocess.run(command, env=environment.variables(cpu_mode=True, imports_harness=True)).returncode


def _check_predictable(server: Server) -> None:
    """Raise UnsupportedEnvironment for an engine that rearranges weights as no one outside can follow."""
    if server.arguments.get("enable_eplb"):
        raise UnsupportedEnvironment(
            f"{server.url} moves experts between its ranks while it serves (--enable-eplb), so nobody outside knows which"
            " rank must hold which; start it without that."
        )


def _answer(options: Options, server: Server, key: str, scratch: Path) -> "Answer":
    started = time.monotonic()
    folder = _model_folder(options, server)
    _check_same_model(options, server, folder)
    has_draft = any(each.role != TARGET for each in server.ranks)
    with working("importing torch and SGLang's class of this model", importing=True), collecting_nothing():
        prepare_import(folder, has_draft)
        from harness.rollout.sglang_api import meta_model
        from harness.tools.verify import comparison, explanations, rank_predictions
        from harness.tools.verify.derived_tensors import Derived, look
        from harness.tools.verify.sender import write_checkpoint
        from harness.tools.verify.verdict import Answer, Different

        meta_model.import_all(folder)
    weights = Path(options.weights)
    if is_sender(options.weights):
        weights = write_checkpoint(options.weights, scratch)
    stored = _stored("--weights", weights, options)
    seconds = {"imports": time.monotonic() - started}
    wanted = _wanted(server, options)
    models = rank_predictions.EngineModels(
        folder=folder, arguments=_arguments(server), on_gpu=server.on_gpu, processes=len(os.sched_getaffinity(0))
    )
    try:
        engine = rank_predictions.predict(
            models, rank_predictions.layout_of(stored), {(each.role, each.rank) for each in wanted.ranks}
        )
    except rank_predictions.CannotPredict as error:
        raise UnsupportedEnvironment(
            f"sglang {installed('sglang').version()} cannot build what {server.url} serves from {folder}: {error}"
        ) from error
    seconds["prediction"] = time.monotonic() - started - sum(seconds.values())
    tensors, others = comparison.tensors_of(engine, _of_layers(wanted, options))
    _check_names(server, len(tensors), others, options)
    compared, read = comparison.compare(tensors, stored, server.on_gpu, models.processes)
    seconds["hashes"] = time.monotonic() - started - sum(seconds.values())
    wrong = [each for each in compared if each.wrong]
    explainer = explanations.Explainer(
        stored=stored,
        was=_stored("--was", Path(options.was), options) if options.was else None,
        on_gpu=server.on_gpu,
        elsewhere={
            known: f"{each.tensor.label} on rank {rank}" for each in compared for rank, known in each.digests.items()
        },
    )
    with working("looking for what explains the differences"):
        different = tuple(
            Different(compared=each, sources=explanations.sources_of(each), why=explainer.explain(each))
            for each in wrong
        )
    seconds["explanations"] = time.monotonic() - started - sum(seconds.values())
    unseen = tuple(dict.fromkeys(name for each in engine.values() for name in each.derived))
    derived = Derived() if different or not unseen else look(server, key, folder, weights, stored)
    seconds["log-probs"] = time.monotonic() - started - sum(seconds.values())
    return Answer(
        server=server,
        weights=options.weights,
        predicted_with=installed("sglang").version(),
        equal=len(compared) - len(wrong),
        different=different,
        unpredicted=others,
        ignored=_ignored_by_all(engine),
        refused=tuple(
            dict.fromkeys(f"{name}: {said}" for each in engine.values() for name, said in each.refused.items())
        ),
        part=_part(options),
        unseen=unseen,
        computed=derived.sentence,
        computed_wrong=derived.is_wrong,
        notes=tuple(_notes(server, stored, read, explainer.given_up, bool(different) and not options.was)),
        seconds=seconds,
    )


def _notes(server: Server, stored: Mapping[str, Stored], read: int, given_up: int, no_older: bool) -> list[str]:
    here = installed("sglang").version()
    sizes = [
        f"{word} {server.arguments.get(key)}" for word, key in (("tp", "tp_size"), ("pp", "pp_size"), ("ep", "ep_size"))
    ]
    sizes += [f"DP attention {server.arguments.get('dp_size')}"] if server.arguments.get("enable_dp_attention") else []
    notes = [
        f"server: sglang {server.release or 'of an unknown release'}, {', '.join(sizes)}, dtype"
        f" {shown(server.arguments.get('dtype'))}, on {'GPUs' if server.on_gpu else 'a CPU'}, weight version"
        f" {server.weight_version or 'unknown'}",
        f"predicted from {len(stored):,} checkpoint tensors ({read / 1e9:.2f} GB read) with the class of sglang {here}"
        + ("" if here == server.release else ", which is not the server's; --release predicts with the server's own"),
    ]
    if server.missing:
        notes.append(f"the server tells nothing about rank(s) {', '.join(map(str, server.missing))}")
    if given_up:
        notes.append(f"for {given_up} tensor(s) the time was too short to try every explanation")
    if no_older:
        notes.append("give --was FOLDER, the version before, to be told whether tensors are old")
    return notes


def _part(options: Options) -> str:
    chosen = [f"{word} {text}" for word, text in (("ranks", options.ranks), ("layers", options.layers)) if text]
    return f" ({', '.join(chosen)})" if chosen else ""


def _model_folder(options: Options, server: Server) -> Path:
    """Return the folder with the model's config.json. Raise ConfigError if there is none on this machine."""
    if options.model:
        return Path(options.model)
    if not is_sender(options.weights):
        return Path(options.weights)
    path = server.arguments.get("model_path")
    if isinstance(path, str) and (Path(path) / "config.json").is_file():
        return Path(path)
    raise ConfigError(
        f"{shown(path)}, which {server.url} was started with, is no folder with a config.json here; name one by --model."
    )


def _check_same_model(options: Options, server: Server, folder: Path) -> None:
    """Raise ConfigError if the server says that it serves another architecture."""
    ours = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    theirs = server.architectures
    if theirs and ours and not {*theirs} & {*ours}:
        raise ConfigError(
            f"{server.url} serves {', '.join(theirs)}, and {folder} is {', '.join(map(str, ours))}; give the weights of the"
            " model that it serves."
        )


def _check_names(server: Server, known: int, others: Mapping[str, Collection[str]], options: Options) -> None:
    """Raise ConfigError if the server's tensors are for the most part none that the model has."""
    from harness.tools.verify.comparison import UNKNOWN, UNTOLD

    unknown = len(others.get(UNKNOWN, ()))
    if unknown > known or (known == 0 and unknown) or len(others.get(UNTOLD, ())) > known:
        raise ConfigError(
            f"{server.url} and {options.weights} are not of one model: the server holds {known + unknown} tensors, and the class"
            f" that config.json names has {known} of them; give the weights of the model that it serves."
        )
    if not known:
        raise UnsupportedEnvironment(f"No tensor of {server.url} can be predicted, so nothing is known about it.")


def _stored(option: str, folder: Path, options: Options) -> dict[str, Stored]:
    """Return the tensors of a checkpoint, of the chosen layers. Raise ConfigError for what is not understood."""
    import torch

    from harness.tools.full_size.ranks_at_true_size import NO_LAYER, layer_of

    layers = numbers_of("--layers", options.layers)
    stored = read_headers(folder)
    if unknown := [each for each in stored.values() if not hasattr(torch, each.dtype)]:
        raise ConfigError(
            f"{option} {folder} has tensors of dtype {shown(unknown[0].dtype)}, which torch does not have."
        )
    return {
        name: each
        for name, each in stored.items()
        if layers is None or layer_of(name) == NO_LAYER or layer_of(name) in layers
    }


def _wanted(server: Server, options: Options) -> Server:
    """Return the server with the ranks that are asked about. Raise ConfigError if it tells about none of them."""
    chosen = numbers_of("--ranks", options.ranks)
    ranks = tuple(each for each in server.ranks if chosen is None or each.rank in chosen)
    if not ranks:
        told = sorted({each.rank for each in server.ranks})
        raise ConfigError(f"--ranks {options.ranks}: {server.url} tells about ranks {', '.join(map(str, told))}.")
    return replace(server, ranks=ranks)


def _of_layers(server: Server, options: Options) -> Any:
    """Return the ranks with the tensors of the chosen layers."""
    from harness.tools.full_size.ranks_at_true_size import NO_LAYER, layer_of

    layers = numbers_of("--layers", options.layers)
    if layers is None:
        return server.ranks
    return [
        replace(
            each,
            checksums={
                name: told
                for name, told in each.checksums.items()
                if layer_of(name) == NO_LAYER or layer_of(name) in layers
            },
        )
        for each in server.ranks
    ]


def _arguments(server: Server) -> dict[str, Any]:
    """Return the server's arguments that decide about parameters, as far as the installed release knows them."""
    known = probe().engine_arguments
    return {
        name: server.arguments[name]
        for name in DECIDING
        if name in known and server.arguments.get(name) not in (None, "", False)
    }


def _ignored_by_all(engine: "Engine") -> tuple[str, ...]:
    """Return the checkpoint names that every rank's loaders ignore."""
    ignored = [{*each.ignored} for each in engine.values()]
    return tuple(name for name in next(iter(engine.values())).ignored if all(name in each for each in ignored))
