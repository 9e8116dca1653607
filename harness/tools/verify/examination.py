"""What launch/verify.py finds out about a server that has told its hashes.

Import this file only after full_size's `prepare_import`, because torch and SGLang read their environment as they are
imported.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from harness.config.layers import ConfigError
from harness.rollout.sglang_api import probe
from harness.rollout.sglang_api.probe import installed
from harness.runtime.errors import UnsupportedEnvironment
from harness.runtime.events import working
from harness.runtime.ranks import runs
from harness.tools.engine_class.checkpoint_headers import Stored, read_headers
from harness.tools.engine_class.engine_answer import KV_CACHE_SCALES
from harness.tools.engine_class.traced_ranks import EngineShape, RankFailed
from harness.tools.verify.comparison import UNKNOWN, UNTOLD, Compared, Engine, Tensor, Unpredicted, compare, tensors_of
from harness.tools.verify.derived_tensors import Derived, look
from harness.tools.verify.explanations import Explainer, sources_of
from harness.tools.verify.http_api import shown
from harness.tools.verify.question import SERVED, Options, is_sender, numbers_of
from harness.tools.verify.rank_predictions import layout_of, predict
from harness.tools.verify.sender import write_checkpoint
from harness.tools.verify.server import TARGET, Server, ServerRank
from harness.tools.verify.verdict import Answer, Different
from harness.weights.layer_names import NO_LAYER, layer_of

DECIDING = (
    "tp_size", "pp_size", "ep_size", "dp_size", "enable_dp_attention", "enable_dp_lm_head", "moe_dense_tp_size", "moe_dp_size",
    "attn_cp_size", "dtype", "quantization", "json_model_override_args", "enable_multimodal", "disable_shared_experts_fusion",
    "ep_num_redundant_experts", "init_expert_location", "kv_cache_dtype", "speculative_algorithm", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens",
)  # fmt: skip
"""Of SGLang's server arguments, those that decide which parameters a rank has."""
SAMPLED = 2
"""How many layers that others stand for are traced themselves once their tensors differ."""


@dataclass(kw_only=True)
class Seconds:
    """What each part took."""

    of: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def taken_by(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.of[part] = self.of.get(part, 0.0) + time.monotonic() - began


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the server told, and what its ranks must hold."""

    server: Server
    ranks: tuple[ServerRank, ...]
    """Those that are asked about, with the tensors that are."""
    stored: Mapping[str, Stored]
    shape: EngineShape

    def predict(self, traced: Collection[int] | None = None) -> Engine:
        """Return what the ranks must hold. traced: as in rank_predictions.predict."""
        try:
            wanted = {(each.role, each.rank) for each in self.ranks}
            return predict(self.shape, layout_of(self.stored), wanted, traced)
        except RankFailed as error:
            raise UnsupportedEnvironment(
                f"sglang {installed('sglang').version()} cannot build what {self.server.url} serves from"
                f" {self.shape.folder}: {error}"
            ) from error

    def compare(self, tensors: Sequence[Tensor]) -> tuple[list[Compared], int]:
        return compare(tensors, self.stored, self.server.on_gpu, self.shape.processes)


def examine(options: Options, server: Server, key: str, folder: Path, scratch: Path) -> Answer:
    """Return what was found out. folder: with config.json. scratch: for what a sender yields.

    Raise ConfigError, UnsupportedEnvironment.
    """
    seconds = Seconds()
    weights = write_checkpoint(options.weights, scratch) if is_sender(options.weights) else Path(options.weights)
    asked = Asked(
        server=server,
        ranks=_ranks(server, options),
        stored=_stored("--weights", weights, options),
        shape=_shape(server, folder),
    )
    with seconds.taken_by("prediction"):
        engine = asked.predict()
    tensors, others = tensors_of(engine, asked.ranks)
    _check_names(asked, engine, len(tensors), others, options.weights)
    with seconds.taken_by("hashes"):
        compared, read = asked.compare(tensors)
    with seconds.taken_by("prediction"):
        again = _traced_themselves(asked, engine, compared)
    if again:
        with seconds.taken_by("hashes"):
            compared = _compared_again(asked, again, compared)
    wrong = [each for each in compared if each.wrong]
    explainer = Explainer(
        stored=asked.stored,
        was=_stored("--was", Path(options.was), options) if options.was else None,
        on_gpu=server.on_gpu,
        elsewhere=_holders(compared),
    )
    with seconds.taken_by("explanations"), working("looking for what explains the differences"):
        different = tuple(
            Different(compared=each, sources=sources_of(each), why=explainer.explain(each)) for each in wrong
        )
    unseen = tuple(
        dict.fromkeys(name for each in engine.values() for name in each.derived if _is_chosen(name, options))
    )
    with seconds.taken_by("log-probs"):
        derived = Derived() if different or not unseen else look(server, key, folder, weights, asked.stored)
    return Answer(
        server=server,
        weights=options.weights,
        predicted_with=installed("sglang").version(),
        ranks=sum(each.role == TARGET for each in asked.ranks),
        equal=len(compared) - len(wrong),
        different=different,
        unpredicted=others,
        # A rank that is not asked about, such as one of the next pipeline stage, may take them.
        ignored=() if server.missing or options.ranks else _ignored_by_all(engine),
        refused=tuple({str(said): said for each in engine.values() for said in each.refused}.values()),
        part=_part(options),
        unseen=unseen,
        computed=derived.sentence,
        computed_wrong=derived.is_wrong,
        notes=tuple(_notes(server, asked.stored, read, explainer.given_up, bool(different) and not options.was)),
        seconds=seconds.of,
    )


def _traced_themselves(asked: Asked, engine: Engine, compared: Sequence[Compared]) -> Engine | None:
    """Return a prediction in which the layers of tensors that differ were traced themselves; None if that says the same.

    At true size one layer of each kind stands for its like. A few of the layers that differ are traced first; if their
    loaders do what that layer's does, those of the others do too.
    """
    doubtful: dict[str, set[int]] = {}
    for each in compared:
        for prediction in engine.values() if each.wrong else ():
            if one := prediction.like.get(each.tensor.name):
                doubtful.setdefault(one, set()).add(layer_of(each.tensor.name))
    if not doubtful:
        return None
    sample = {layer for layers in doubtful.values() for layer in sorted(layers)[:SAMPLED]}
    found = asked.predict(sample)
    like = {key: prediction.like for key, prediction in engine.items()}
    same = all(
        found[key].held(name) == engine[key].held(name)
        for key, names in like.items()
        for name in names
        if layer_of(name) in sample
    )
    return None if same else asked.predict({layer for layers in doubtful.values() for layer in layers})


def _compared_again(asked: Asked, engine: Engine, compared: Sequence[Compared]) -> list[Compared]:
    """Compare the tensors that differed once more, and return them with the rest."""
    wrong = {(each.tensor.role, each.tensor.name) for each in compared if each.wrong}
    tensors, _ = tensors_of(engine, asked.ranks)
    anew, _ = asked.compare([each for each in tensors if (each.role, each.name) in wrong])
    return [*(each for each in compared if not each.wrong), *anew]


def _holders(compared: Sequence[Compared]) -> dict[str, dict[int, str]]:
    """Return the hash of what each tensor of each rank must hold -> the rank -> the tensor."""
    found: dict[str, dict[int, str]] = {}
    for each in compared:
        for rank, known in each.digests.items():
            found.setdefault(known, {}).setdefault(rank, each.tensor.label)
    return found


def _ranks(server: Server, options: Options) -> tuple[ServerRank, ...]:
    """Return the ranks that are asked about, with the tensors of the chosen layers. Raise ConfigError if the server
    does not tell about one of these layers.
    """
    chosen, layers = numbers_of("--ranks", options.ranks), numbers_of("--layers", options.layers)
    ranks = [each for each in server.ranks if chosen is None or each.rank in chosen]
    told = {layer_of(name) for each in ranks for name in each.checksums} - {NO_LAYER}
    if absent := sorted((layers or set()) - told):
        raise ConfigError(
            f"--layers {options.layers}: {server.url} tells nothing about layer {absent[0]}; it tells about"
            f" {runs(sorted(told))}."
        )
    return tuple(
        replace(each, checksums={name: told for name, told in each.checksums.items() if _is_chosen(name, options)})
        for each in ranks
    )


def _stored(option: str, folder: Path, options: Options) -> dict[str, Stored]:
    """Return the tensors of a checkpoint, of the chosen layers. Raise ConfigError for a dtype that torch lacks."""
    stored = read_headers(folder)
    for name, each in stored.items():
        if not isinstance(getattr(torch, each.dtype, None), torch.dtype):
            raise ConfigError(
                f"{option} {folder}: {shown(name)} is of dtype {shown(each.dtype)}, which torch does not have; give a"
                " checkpoint in bfloat16, float16, float32 or blocks of float8."
            )
    return {name: each for name, each in stored.items() if _is_chosen(name, options)}


def _is_chosen(name: str, options: Options) -> bool:
    """Return whether a tensor is of the chosen layers, or of none."""
    layers = numbers_of("--layers", options.layers)
    return layers is None or layer_of(name) == NO_LAYER or layer_of(name) in layers


def _arguments(server: Server) -> dict[str, Any]:
    """Return the server's arguments that decide about parameters, as far as the installed release knows them."""
    known = probe().engine_arguments
    return {
        name: server.arguments[name]
        for name in DECIDING
        if name in known and server.arguments.get(name) not in (None, "", False)
    }


def _shape(server: Server, folder: Path) -> EngineShape:
    """Return the server's engine. folder: with config.json."""
    arguments = _arguments(server)
    tp, pp = (arguments.get(name) or 1 for name in ("tp_size", "pp_size"))
    return EngineShape(folder=folder, arguments=arguments, tp=tp, pp=pp, on_gpu=server.on_gpu)


def _check_names(asked: Asked, engine: Engine, known: int, others: Unpredicted, weights: str) -> None:
    """Raise ConfigError if the names show that the weights are of another model than the server's.

    known: how many tensors can be compared. Raise UnsupportedEnvironment if none can for another reason.
    """
    if not known:
        _check_that_names_are_taken(asked, engine, weights)
        raise UnsupportedEnvironment(f"no tensor of {asked.server.url} can be predicted, so nothing is known about it.")
    if why := _why_another_model(asked.server, engine, known, others):
        raise ConfigError(f"{asked.server.url} and {weights} are not of one model: {why}; {SERVED}")


def _check_that_names_are_taken(asked: Asked, engine: Engine, weights: str) -> None:
    """Raise ConfigError if each rank's loaders ignore or refuse every name."""
    if all(
        {*asked.stored} <= {*each.ignored, *(name for said in each.refused for name in said.every)}
        for each in engine.values()
    ):
        raise ConfigError(
            f"none of the {len(asked.stored)} names in {weights} is one that the server's class takes; first:"
            f" {shown(next(iter(asked.stored)))}. Give the names that checkpoints of the model have."
        )


def _why_another_model(server: Server, engine: Engine, known: int, others: Unpredicted) -> str:
    """Return what only the server or only the weights have, if that tells two models apart; otherwise ""."""
    unknown, untold = others.get(UNKNOWN, ()), others.get(UNTOLD, ())
    if max(len(unknown), len(untold)) > known:
        return (
            f"{known} tensors have the same name, {len(unknown)} are the server's alone and {len(untold)} the other's"
        )
    if server.release != installed("sglang").version():
        return ""  # another release may call them otherwise
    if lacked := [name for name in untold if not name.endswith(KV_CACHE_SCALES)]:
        more = f" (and {len(lacked) - 1} more like it)" if len(lacked) > 1 else ""
        return f"the server has no {lacked[0]}{more}"
    layers = {layer_of(name) for each in engine.values() for name in each.nbytes}
    beyond = sorted({layer_of(name) for name in unknown} - layers - {NO_LAYER})
    return f"the server has layer {runs(beyond)} too" if beyond else ""


def _ignored_by_all(engine: Engine) -> tuple[str, ...]:
    """Return the checkpoint names that every rank's loaders ignore."""
    first, *others = engine.values()
    ignored = [{*each.ignored} for each in others]
    return tuple(name for name in first.ignored if all(name in each for each in ignored))


def _notes(server: Server, stored: Mapping[str, Stored], read: int, given_up: int, no_older: bool) -> Iterator[str]:
    arguments, here = server.arguments, installed("sglang").version()
    sizes = [f"{word} {arguments.get(f'{word}_size')}" for word in ("tp", "pp", "ep")]
    sizes += [f"DP attention {arguments.get('dp_size')}"] if arguments.get("enable_dp_attention") else []
    other = "" if here == server.release else ", which is not the server's; --release predicts with the server's own"
    yield (
        f"server: sglang {server.release or 'of an unknown release'}, {', '.join(sizes)}, dtype {shown(arguments.get('dtype'))},"
        f" on {'GPUs' if server.on_gpu else 'a CPU'}, weight version {server.weight_version or 'unknown'}"
    )
    yield f"predicted from {len(stored):,} checkpoint tensors ({read / 1e9:.2f} GB read) with the class of sglang {here}{other}"
    if server.missing:
        yield f"the server tells nothing about rank(s) {', '.join(map(str, server.missing))}"
    if given_up:
        yield f"for {given_up} tensor(s) the time was too short to try every explanation"
    if no_older:
        yield "give --was FOLDER, the version before, to be told whether tensors are old"


def _part(options: Options) -> str:
    chosen = [f"{word} {text}" for word, text in (("ranks", options.ranks), ("layers", options.layers)) if text]
    return f" ({', '.join(chosen)})" if chosen else ""
