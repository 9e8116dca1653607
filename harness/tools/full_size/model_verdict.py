"""What was found out about one MODEL: the lines that are printed, the verdict, and the table that --json writes.

Import this file only after `command.prepare_import`, because torch and SGLang read their environment as they are
imported.
"""

import importlib.metadata
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from harness.config.layers import ConfigError
from harness.runtime.errors import UnsupportedEnvironment
from harness.runtime.events import working
from harness.tools.engine_class.absent_hardware import AssumedGpu
from harness.tools.engine_class.draft_model import DraftModel, examine_draft, mtp_layout
from harness.tools.engine_class.engine_answer import EngineAnswer, ask_engine
from harness.tools.engine_class.traced_ranks import EngineRank, EngineShape, RankFailed
from harness.tools.full_size.checkpoint_beside import CheckpointBeside, compare_checkpoint
from harness.tools.full_size.export_answer import ExportAnswer, ExportQuestion
from harness.tools.full_size.exported_names import Export, call_function
from harness.tools.full_size.gpu_stages import GpuMemory
from harness.tools.full_size.model_and_options import Options, Question
from harness.tools.full_size.trainer_names import TrainerNames, trainer_class, trainer_names
from harness.tools.full_size.whole_run import gpu_memory, measure_trainer
from harness.weights.findings import Finding, grouped, shown
from harness.weights.fp8_checkpoint import write_quantized_model
from harness.weights.fusing import fusing_groups
from harness.weights.tensor_view import TensorView

SHOWN = 12
"""How many problems are printed; the JSON and the page have all."""
PACKAGES = ("sglang", "transformers", "torch")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found out. An engine that cannot be built has no ranks."""

    name: str
    """MODEL, as it was given."""
    options: Options
    question: Question
    started: float = 0.0
    imported: float = 0.0
    """Times of time.monotonic(): before and after the imports."""
    layout: tuple[TensorView, ...] = ()
    """What is sent: by transformers' class, or by the export of --names."""
    cannot_build: str = ""
    """SGLang's own words, if it cannot build the engine."""
    engine: EngineAnswer | None = None
    """About the target model; None if the engine cannot be built."""
    draft: DraftModel | None = None
    checkpoint: CheckpointBeside | None = None
    """How a checkpoint beside config.json differs, if there is one."""
    exported: ExportAnswer | None = None
    """How the names of --names differ from what the engine expects, if they were asked about."""
    memory: GpuMemory | None = None
    """What the fullest GPU of a whole run holds, if it was asked about."""
    seconds: float = 0.0
    """What the ranks took, imports included."""

    @property
    def ranks(self) -> tuple[EngineRank, ...]:
        """Of the target model."""
        return self.engine.ranks if self.engine else ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What does not arrive, of the draft model too, and how a checkpoint beside config.json differs."""
        of_checkpoint = self.checkpoint.findings if self.checkpoint else ()
        return (*of_checkpoint, *(each for model in self._models() for each in model.findings))

    @property
    def unfit(self) -> str:
        """Why the engine cannot serve, though it is built; "" if nothing is known."""
        return next((each.unfit for each in self.ranks if each.unfit), "")

    @property
    def untold(self) -> tuple[str, ...]:
        """Names that cannot be followed, of the draft model too."""
        return tuple(name for each in self._models() for name in each.untold)

    @property
    def passed_over(self) -> int:
        """How many names of --names the engine passes over as those of published checkpoints."""
        return len(self.exported.lists.by_design) if self.exported else 0

    @property
    def code(self) -> int:
        """The exit code."""
        wrong_names = self.exported and self.exported.lists.wrong
        unfitting = self.memory and not self.memory.fits
        return int(bool(self.cannot_build or self.unfit or self.findings or wrong_names or unfitting))

    @property
    def versions(self) -> dict[str, str]:
        return {package: importlib.metadata.version(package) for package in PACKAGES}

    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        if self.cannot_build:
            return f"the engine cannot be built: {self.cannot_build}"
        if self.exported and self.exported.lists.wrong:
            return self.exported.verdict(self.options.names)
        if count := len(self.findings):
            whose = (
                f"the names of {self.options.names}"
                if self.exported
                else "the trainer's weights, by the names that transformers' save_pretrained writes,"
            )
            return f"{count} problem(s): {whose} do not all arrive; first: {grouped(self.findings)[0]}"
        if self.unfit:
            return f"the engine is built, but cannot serve: {self.unfit}"
        if self.exported and self.exported.without_shape:
            return (
                "the engine's loaders take every name, and none is lacking; whether they arrive whole is not known, as"
                f" {self.exported.without_shape:,} have no known shape"
            )
        told = len(self.layout) - len(self.untold) - self.passed_over
        followed = f"every name that could be followed ({told:,})" if self.untold else "every name"
        if self.passed_over and not self.untold:
            followed = f"every name ({told:,}) but {self.passed_over:,} that the engine passes over as it should"
        arrives = f"{followed} arrives whole, and every parameter of the engine is filled{self._draft_verdict()}"
        if not self.memory:
            return arrives
        if not self.memory.fits:
            return f"{arrives}, but the run does not fit its GPUs; first: {self.memory.problems[0]}"
        return f"{arrives}; {self.memory.verdict()}"

    @property
    def shape(self) -> EngineShape:
        """The engine's ranks."""
        question = self.question
        return EngineShape(
            folder=question.engine_folder, arguments=question.arguments, tp=question.tp, pp=question.pp
        )  # fmt: skip

    def sent_line(self, whose: str) -> str:
        """Return what is sent, in one line."""
        return (
            f"{self.name}: {len(self.layout):,} names {whose}, {total_gb(self.layout):.1f} GB; imports"
            f" {self.imported - self.started:.1f} s"
        )

    def engine_lines(self) -> Iterator[str]:
        """Yield what was built."""
        largest = max(self.ranks, key=lambda each: each.nbytes)
        yield (
            f"engine: {len(self.ranks)} ranks, {len(largest.held):,} parameters and {largest.nbytes / 1e9:.2f} GB on rank"
            f" {largest.rank}; {_how_given(self.ranks, len(self.layout))}; {self.seconds:.1f} s, {_peak_gb():.2f} GB of memory"
            " for a process at most"
        )
        if self.draft:
            yield from _draft_lines(self.draft, with_names=bool(self.exported))

    def notes(self) -> Iterator[str]:
        """Yield what a reader should know besides problems and names that cannot be followed."""
        if asked := sorted(set().union(*(each.asked_of_gpu for each in self.ranks))):
            yield (
                f"SGLang asked torch.cuda for {', '.join(asked)} and was told those of an {AssumedGpu.name}, which is absent"
            )
        yield from dict.fromkeys(note for each in self.ranks for note in each.notes)
        yield from self.checkpoint.notes if self.checkpoint else ()
        if not self.engine:
            return
        if self.engine.kv_cache_scales:
            yield (
                "not filled, as published checkpoints lack them and SGLang sets them itself: scales of the attention's KV cache"
            )
        if widened := self.engine.widened:
            yield (
                f"sent in fewer bits than the engine holds, so what the trainer rounds off is lost: {widened[0]};"
                f" {len(widened)} such"
            )
        if padding := self.engine.padding:
            yield f"in every layer alike, as padding is: {padding[0]}; {len(padding)} such"

    def closing_lines(self) -> Iterator[str]:
        """Yield what is printed between the tables and the verdict."""
        yield from self.notes()
        yield from (f"  {line}" for line in shown(grouped(self.findings), SHOWN))
        if self.findings and self.unfit:
            yield f"  {self.unfit}"
        if self.untold:
            yield (
                f"not followed, as the loader computes with them: {len(self.untold)} names, such as {self.untold[0]}"
            )

    def table(self) -> dict[str, Any]:
        """Return what was found, for JSON: two such tables of two releases can be compared line by line."""
        table = {
            "model": self.question.folder.name,
            "arguments": dict(self.question.arguments),
            "arguments_left_out": [*self.question.passed_on.while_it_runs, *self.question.passed_on.not_counted],
            "sent": _names(self.layout),
            "versions": self.versions,
            "cannot_build": self.cannot_build,
            "verdict": self.verdict(),
            "ranks": _ranks(self.ranks),
            "held": _held(self.ranks),
            "problems": [str(each) for each in self.findings],
            "findings": [each.table() for each in self.findings],
            "not_followed": list(self.untold),
        }
        if self.draft:
            table["draft"] = {
                "sent": _names(self.draft.mtp),
                "ranks": _ranks(self.draft.answer.ranks),
                "filled_by_trainer": sorted(self.draft.filled_by_trainer),
            }
        if self.exported:
            table = {"names": self.exported.table(), **table}
        if self.memory:
            table["run"] = self.memory.table()
        return table

    def _models(self) -> list[EngineAnswer]:
        return [each for each in (self.engine, self.draft and self.draft.answer) if each]

    def _draft_verdict(self) -> str:
        if not self.draft:
            return ""
        if self.exported:
            return ", those of the draft model too"
        return (
            "; the draft model takes the MTP layer's names, but a trainer with transformers' class sends none of them"
        )


def find_answer(
    name: str, options: Options, question: Question, export: Export | None, started: float, imported: float
) -> Answer:
    """Build both sides, print what they are, and return what was found. started, imported: times of time.monotonic().

    export: what --names has, unless it is a function. Raise ConfigError, UnsupportedEnvironment.
    """
    dtype = getattr(torch, question.dtype)
    if question.quantized:
        write_quantized_model(str(question.folder), question.quantized, dtype, weights=False)
    print(
        f"{name}: SGLang and transformers are imported ({imported - started:.1f} s); building the trainer's class",
        flush=True,
    )
    answer = Answer(name=name, options=options, question=question, started=started, imported=imported)
    return _about_export(answer, export, dtype) if options.names else _about_trainer(answer, dtype)


def _about_trainer(answer: Answer, dtype: torch.dtype) -> Answer:
    """Return what the engine does with the names that transformers' class would save."""
    question, options = answer.question, answer.options
    with working("building the trainer's class"):
        names = _names_sent(question, dtype)
    layout = names.layout
    mtp = mtp_layout(question.folder, layout) if question.has_draft else ()
    groups, shape = fusing_groups(layout), answer.shape
    answer = replace(answer, layout=layout, checkpoint=_checkpoint(question, names, dtype))
    print(answer.sent_line("as transformers' save_pretrained writes them"), flush=True)
    for line in question.passed_on.as_lines():
        print(line)
    with working("measuring the trainer's memory"):
        peaks = measure_trainer(question.folder, question.run, shape.processes) if question.run else {}
    try:
        engine = ask_engine(shape, groups, every_name=options.all_ranks, buffers=names.buffers)
        draft = examine_draft(shape, engine.ranks, layout, mtp) if mtp else None
    except RankFailed as error:
        return replace(answer, cannot_build=str(error))
    answer = replace(answer, engine=engine, draft=draft, seconds=time.monotonic() - answer.started)
    print("\n".join(answer.engine_lines()))
    if not question.run:
        return answer
    memory = gpu_memory(question.run, options.gpu_memory_gib, names, groups, engine.ranks, peaks)
    print("\n".join(memory.as_lines()))
    return replace(answer, memory=memory)


def _about_export(answer: Answer, export: Export | None, dtype: torch.dtype) -> Answer:
    """Return what the engine does with the names of an export; without one, those of a function, which is called."""
    question, options = answer.question, answer.options
    export = export or call_function(options.names)
    names, no_class = None, ""
    with working("building the trainer's class"):
        try:
            names = _names_sent(question, dtype)
        except UnsupportedEnvironment as error:
            no_class = str(error)
    asked = ExportQuestion.of(export, question.folder, names, no_class)
    answer = replace(answer, layout=asked.export.views())
    try:
        found = asked.answer(answer.shape, answer.layout, options.all_ranks)
    except RankFailed as error:
        return replace(answer, cannot_build=str(error))
    answer = replace(
        answer, engine=found.engine, draft=found.draft, exported=found, seconds=time.monotonic() - answer.started
    )  # fmt: skip
    print(
        "\n".join((*found.as_lines(), answer.sent_line(f"of {options.names}"), *asked.notes(), *answer.engine_lines()))
    )
    return answer


def _names_sent(question: Question, dtype: torch.dtype) -> TrainerNames:
    """Return what the trainer sends.

    Raise UnsupportedEnvironment, and ConfigError for fields that transformers refuses.
    """
    try:
        return trainer_names(question.folder, dtype, question.precision)
    except StrictDataclassError as error:
        cause = " ".join(str(error).split())
        raise ConfigError(f"transformers refuses {question.folder}/config.json: {cause}.") from None


def _checkpoint(question: Question, names: TrainerNames, dtype: torch.dtype) -> CheckpointBeside | None:
    """Return how the checkpoint in MODEL's folder differs from what the trainer's class loads."""
    loaded = trainer_names(question.folder, dtype) if question.quantized else names
    trainer, _ = trainer_class(question.folder)
    return compare_checkpoint(question.folder, loaded.layout, trainer._keys_to_ignore_on_load_unexpected or ())


def total_gb(layout: Sequence[TensorView]) -> float:
    """Return the GB of tensors."""
    return sum(view.nbytes for view in layout) / 1e9


def _draft_lines(draft: DraftModel, with_names: bool) -> Iterator[str]:
    """Yield the lines about the draft model, and what a sync does for it. with_names: the names are an export's."""
    largest = max(draft.answer.ranks, key=lambda each: each.nbytes)
    filled = (
        f"{len(draft.filled_by_trainer)} of its parameters" if draft.filled_by_trainer else "none of its parameters"
    )
    yield (
        f"draft model: {largest.built} on {len(draft.answer.ranks)} ranks, {len(largest.held):,} parameters and"
        f" {largest.nbytes / 1e9:.2f} GB on rank {largest.rank}, besides the target's embedding and head; given"
        f" {len(draft.mtp):,} names of the MTP layer" + ("" if with_names else ", as published checkpoints have them")
    )
    if with_names:
        return
    yield (
        f"  transformers' class has no MTP layer: what such a trainer sends fills {filled}, so a sync leaves the draft"
        " model's weights as they were"
    )


def _how_given(ranks: Sequence[EngineRank], names: int) -> str:
    if all(each.given == names for each in ranks):
        return f"each was given all {names:,} names"
    most = max(each.given for each in ranks)
    built = sum(1 for each in ranks if each.given)
    others = (
        f"{built} of them were built, as the others differ from these in their number alone; "
        if built < len(ranks)
        else ""
    )
    return f"{others}each was given up to {most:,} of {names:,} names: one layer of each kind, and a part of the layers that are alike"


def _peak_gb() -> float:
    """Return the peak memory of this process and of its largest child, whichever is more, in GB."""
    users = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(user).ru_maxrss for user in users) * 1024 / 1e9


def _names(layout: Sequence[TensorView]) -> dict[str, list[Any]]:
    return {view.name: [str(view.dtype).removeprefix("torch."), list(view.shape)] for view in layout}


def _held(ranks: Sequence[EngineRank]) -> list[dict[str, Any]]:
    """Return the parameters by name, once for all ranks that hold the same."""
    alike: list[dict[str, Any]] = []
    for each in ranks:
        same = next((group for group in alike if group["parameters"] == each.held), None)
        if same is None:
            alike.append(same := {"ranks": [], "parameters": each.held})
        same["ranks"].append(each.rank)
    return alike


def _ranks(ranks: Sequence[EngineRank]) -> list[dict[str, int]]:
    return [{"rank": each.rank, "parameters": len(each.held), "bytes": each.nbytes} for each in ranks]
