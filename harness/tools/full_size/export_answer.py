"""What --names asks: an export's names, dtypes and shapes, given to the loaders of the engine that MODEL describes.

Import this file only after `command.prepare_import`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.config.layers import ConfigError
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.engine_class.draft_model import DraftModel, copies_in, examine_draft, mtp_layout
from harness.tools.engine_class.engine_answer import OF_PARAMETERS, EngineAnswer, ask_engine
from harness.tools.engine_class.traced_ranks import EngineShape, examine
from harness.tools.full_size.checkpoint_beside import is_of_mtp_layer, passed_over
from harness.tools.full_size.export_causes import Suspects, causes_of
from harness.tools.full_size.exported_names import Export
from harness.tools.full_size.model_and_options import read_fields
from harness.tools.full_size.name_lists import UNKNOWN_NAME, Expected, Fills, NameLists, fills_of, lists_of
from harness.tools.full_size.trainer_names import TrainerNames, trainer_class
from harness.weights.findings import Finding, grouped
from harness.weights.fusing import fusing_groups
from harness.weights.layer_names import one_layer_of_each_kind
from harness.weights.tensor_view import TensorView, without_numbers


@dataclass(frozen=True, kw_only=True)
class ExportAnswer:
    """What was found out about an export."""

    engine: EngineAnswer
    draft: DraftModel | None
    lists: NameLists
    causes: tuple[str, ...]
    without_shape: int = 0
    """Of how many names neither dtype nor shape is known."""

    def as_lines(self) -> Iterator[str]:
        """Yield the lists, and what is certain about their cause."""
        yield from self.lists.as_lines()
        yield from (f"cause: {cause}" for cause in self.causes)

    def verdict(self, source: str) -> str:
        """Return in one sentence what is wrong with the names of FILE."""
        told = f"; cause: {self.causes[0]}" if self.causes else ""
        return f"the names of {source} are not all those that the engine expects: {self.lists.counts()}{told}; first: {grouped(self.lists.wrong)[0]}"

    def table(self) -> dict[str, Any]:
        """Return it for the JSON."""
        return {**self.lists.table(), "causes": list(self.causes)}


@dataclass(frozen=True, kw_only=True)
class ExportQuestion:
    """An export, and what transformers knows of the model."""

    export: Export
    """With dtype and shape of transformers' class where it has the name alone."""
    names: TrainerNames | None
    """What transformers' class would send; None if there is no such class."""
    expected: Expected
    fields: Mapping[str, Any]
    """Of MODEL's config.json."""
    named_only: int
    """Of how many names FILE has neither dtype nor shape."""
    no_class: str = ""
    """Why transformers' names are not known."""

    @classmethod
    def of(cls, export: Export, folder: Path, names: TrainerNames | None, no_class: str = "") -> "ExportQuestion":
        """Return the question. folder: with MODEL's config.json."""
        fields = read_fields(folder)
        ignored = trainer_class(folder)[0]._keys_to_ignore_on_load_unexpected or () if names else ()
        tensors = {view.name: view for view in (*names.layout, *_mtp_layer(folder, names.layout))} if names else {}
        complete = export.completed(tensors)
        expected = Expected(
            tensors=tensors,
            by_design=passed_over((name for name, _ in export.tensors), fields, ignored),
            without_shape=complete.without_shape,
        )
        return cls(
            export=complete, names=names, expected=expected, fields=fields, no_class=no_class,
            named_only=len(export.without_shape),
        )  # fmt: skip

    def notes(self) -> Iterator[str]:
        """Yield what is known of the export, and of what it is compared with."""
        if self.named_only:
            taken = self.named_only - len(self.expected.without_shape)
            yield f"dtype and shape of {self.named_only:,} names are not known, as their files are not beside the index"
            if taken:
                yield f"  of {taken:,} of them those of transformers' class were taken"
            if self.expected.without_shape:
                first = min(self.expected.without_shape)
                yield f"  of {len(self.expected.without_shape):,}, such as {first}, it is only known whether a loader takes the name"
        if self.no_class:
            yield f"only the engine's side answers: {self.no_class}"

    def answer(self, shape: EngineShape, views: Sequence[TensorView], every_name: bool) -> ExportAnswer:
        """Give the names to the engine's loaders, and to those of its draft model if it has one.

        Raise RankFailed, UnsupportedEnvironment.
        """
        engine = self._examined(shape, views, every_name)
        draft = self._draft(shape, engine, views)
        fills = self._fills(shape, engine, draft)
        lists = lists_of(views, engine, self.expected, fills)
        if draft:
            to_draft = {view.name for view in draft.mtp}  # the target passes these over, and the draft model reads them
            lists = replace(lists, by_design=tuple(each for each in lists.by_design if each.tensor not in to_draft))
            copies = dict.fromkeys(copies_in(shape.folder, draft.mtp), "the draft model is served the target's own")
            of_layer = {
                name: each for name, each in self.expected.tensors.items() if is_of_mtp_layer(name, self.fields)
            }
            expected = replace(self.expected, tensors=of_layer, by_design=copies)
            lists += lists_of(draft.mtp, draft.answer, expected, fills)
        suspects = Suspects(
            sent=views,
            lists=lists,
            expected=self.expected.tensors,
            own={name for each in engine.ranks for name in each.held},
            live=self.names.tensors.keys() - self.expected.tensors.keys() if self.names else (),
            fields=self.fields,
        )

        def ask(others: Sequence[TensorView]) -> NameLists:
            return lists_of(others, self._examined(shape, others, False), self.expected, fills)

        return ExportAnswer(
            engine=self._without_what_is_not_known(engine),
            draft=draft,
            lists=lists,
            causes=causes_of(suspects, ask),
            without_shape=len(self.expected.without_shape),
        )

    def _without_what_is_not_known(self, engine: EngineAnswer) -> EngineAnswer:
        """Leave out what follows only from names having a shape that stands for one that is not known, as the lists
        do.
        """
        if not self.expected.without_shape:
            return engine
        return replace(
            engine,
            findings=tuple(
                each
                for each in engine.findings
                if each.kind not in OF_PARAMETERS and not {*self.expected.without_shape}.issuperset(each.every)
            ),
        )

    def _examined(self, shape: EngineShape, views: Sequence[TensorView], every_name: bool) -> EngineAnswer:
        """Give the names to the loaders; of those that they refuse as unknown only the first of each kind, as a refused
        call is made once more for each name.
        """
        refused, given, others = self._unknown_kinds(shape, views), dict[str, TensorView](), list[Finding]()
        for view in views:
            pattern = without_numbers(view.name)
            if pattern in refused and pattern in given:
                others.append(Finding(kind="refused", tensor=view.name, counts={"error": refused[pattern]}))
            else:
                given[pattern if pattern in refused else view.of] = view
        buffers = {view.name for view in self.names.layout if view.of in self.names.buffers} if self.names else ()
        answer = ask_engine(
            shape,
            fusing_groups(given.values()),
            every_name=every_name,
            passed_over=self.expected.by_design,
            buffers=buffers,
        )
        return replace(answer, findings=(*answer.findings, *others))

    def _unknown_kinds(self, shape: EngineShape, views: Sequence[TensorView]) -> dict[str, str]:
        """Return the names, without their numbers, that the loaders look up and do not find -> what they raise."""
        known = set(map(without_numbers, self.expected.tensors))
        strange = {pattern: view for view in reversed(views) if (pattern := without_numbers(view.name)) not in known}
        if not strange:
            return {}
        refusals = ask_engine(shape, fusing_groups(strange.values())).of_kinds("refused")
        found = {name: str(each.counts["error"]) for each in refusals for name in each.every}
        return {without_numbers(name): error for name, error in found.items() if error.startswith(UNKNOWN_NAME)}

    def _draft(self, shape: EngineShape, engine: EngineAnswer, views: Sequence[TensorView]) -> DraftModel | None:
        if not shape.arguments.get("speculative_algorithm"):
            return None
        mtp = [view for view in views if is_of_mtp_layer(view.name, self.fields)]
        return examine_draft(shape, engine.ranks, [view for view in views if view not in mtp], mtp)

    def _fills(self, shape: EngineShape, engine: EngineAnswer, draft: DraftModel | None) -> Fills:
        """Return which names fill what, from what was sent, and from transformers' names if something lacks one."""
        of_shape = [(shape, engine), *([(replace(shape, draft=True), draft.answer)] if draft else [])]
        found = fills_of(rank for _, answer in of_shape for rank in answer.ranks)
        sample = one_layer_of_each_kind(fusing_groups(self.expected.tensors.values()))
        for each, answer in of_shape if sample else ():
            if answer.of_kinds(*OF_PARAMETERS):
                for parameter, names in fills_of(examine(each, sample, False)).items():
                    found.setdefault(parameter, set()).update(names)
        return found


def _mtp_layer(folder: Path, layout: Sequence[TensorView]) -> tuple[TensorView, ...]:
    """Return the names of the MTP layer as published checkpoints have them; none where that is not known."""
    try:
        return mtp_layout(folder, layout)
    except (ConfigError, UnsupportedEnvironment):
        return ()
