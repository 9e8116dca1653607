"""Rows of a data set, prompts made of them, and which prompts a step takes."""

import json
import logging
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import Any, Literal, Protocol

from harness.task.arithmetic import make_problems
from harness.task.rewards import extract_answer

logger = logging.getLogger(__name__)

ARITHMETIC_SEEDS = {"train": 0, "test": 1}
"""The splits of source "arithmetic", and the seed of each."""
ARITHMETIC_ROWS = 1024
"""Rows of such a split where no number is given."""

_FORMATS = {".jsonl": "json", ".parquet": "parquet"}
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row in GSM8K's schema; `where` says where it came from, for messages."""

    question: str
    answer: str
    where: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt; `index` is its row's position among the rows it was made of."""

    index: int
    text: str
    input_ids: list[int]
    answer: str
    where: str


class Encoder(Protocol):
    """What is needed of a tokenizer; every transformers tokenizer has it."""

    def encode(self, text: str) -> list[int]: ...


def load_rows(source: str, split: str, rows: int = 0) -> list[Row]:
    """The first `rows` rows (0: all) of a split.

    `source` is "arithmetic", a folder with one <split>.jsonl or <split>.parquet for each split, or a hub id.
    Each row must have the texts `question` and `answer`, the answer ending in "#### N". A jsonl file is
    checked to its end even where fewer rows are asked for.

    Raises ValueError: a missing folder or split (it names those there are), no rows, a row with a wrong field
    (it names file, line and field), or a hub that does not answer (the cause is chained).
    """
    if rows < 0:
        raise ValueError(f"rows is {rows}: it must be 0, for all rows, or more")
    if source == "arithmetic":
        found = _arithmetic_rows(split, rows or ARITHMETIC_ROWS)
    elif Path(source).is_dir():
        found = _folder_rows(Path(source), split, rows)
    elif Path(source).exists():
        raise ValueError(
            f"source {source!r} is a file: it must be the folder that holds it, with the file's stem as split"
        )
    elif _HUB_ID.fullmatch(source):
        found = _hub_rows(source, split, rows)
    else:
        raise ValueError(f"source {source!r} is no folder: it must be arithmetic, an existing folder or a hub id")
    if not found:
        raise ValueError(f"split {split!r} of {source!r} has no rows: it must have at least one")
    return found


def check_template(template: str) -> None:
    """ValueError unless {question} is the only field of the prompt template."""
    try:
        fields = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"template {template!r} has a lone brace: write {{{{ or }}}} for a literal one") from error
    if not fields or any(field != ("question", "", None) for field in fields):
        raise ValueError(f"template {template!r} must have the field {{question}} and no other")


def tokenize_prompts(
    rows: list[Row],
    tokenizer: Encoder,
    template: str,
    max_prompt_tokens: int,
    overlong: Literal["filter", "error"] = "filter",
) -> list[Prompt]:
    """One prompt a row, in order, each of at most `max_prompt_tokens` tokens (special tokens counted).

    overlong "filter" leaves longer ones out: len(rows) - len(prompts) of them, which is also logged.
    Raises ValueError: an overlong prompt where overlong is "error", a bad template, no prompts left.
    """
    check_template(template)
    if overlong not in ("filter", "error"):
        raise ValueError(f"overlong is {overlong!r}: it must be filter or error")
    prompts = []
    for index, row in enumerate(rows):
        text = template.format(question=row.question)
        input_ids = tokenizer.encode(text)
        if len(input_ids) <= max_prompt_tokens:
            prompts.append(Prompt(index, text, input_ids, row.answer, row.where))
        elif overlong == "error":
            raise ValueError(
                f"the prompt of {row.where} has {len(input_ids)} tokens: max_prompt_tokens = {max_prompt_tokens} "
                "must be at least that, or overlong = filter"
            )
    if not prompts:
        raise ValueError(
            f"none of {len(rows)} prompts has at most max_prompt_tokens = {max_prompt_tokens} tokens: raise it"
        )
    if len(prompts) < len(rows):
        logger.info(
            "left out %d of %d prompts, longer than %d tokens",
            len(rows) - len(prompts),
            len(rows),
            max_prompt_tokens,
        )
    return prompts


@dataclass(frozen=True, slots=True)
class PromptSampler:
    """Which prompts a step takes: a pure function of (seed, step), so the same on every rank and after a restart.

    Each epoch is a new shuffle, cut into steps; what is left at its end, less than a step, waits for a later
    shuffle, so that no step holds a prompt twice (GRPO compares within a prompt's responses).
    """

    prompts: list[Prompt]
    prompts_per_step: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.prompts_per_step <= len(self.prompts):
            raise ValueError(
                f"prompts_per_step is {self.prompts_per_step}: it must be 1 to {len(self.prompts)}, as many prompts as "
                "there are"
            )

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of `step`, which counts from 0 and never runs out."""
        epoch, place = divmod(step, len(self.prompts) // self.prompts_per_step)
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}:{epoch}").shuffle(order)
        start = place * self.prompts_per_step
        return [self.prompts[i] for i in order[start : start + self.prompts_per_step]]


def _arithmetic_rows(split: str, count: int) -> list[Row]:
    if split not in ARITHMETIC_SEEDS:
        raise ValueError(f"split {split!r} is unknown: source arithmetic has {', '.join(ARITHMETIC_SEEDS)}")
    problems = make_problems(count, ARITHMETIC_SEEDS[split])
    return [_row(problem, f"arithmetic/{split} row {number}") for number, problem in enumerate(problems, 1)]


def _folder_rows(folder: Path, split: str, rows: int) -> list[Row]:
    files = sorted(path for path in folder.iterdir() if path.suffix in _FORMATS)
    matching = [path for path in files if path.stem == split]
    if not matching:
        splits = ", ".join(path.stem for path in files) or "no jsonl or parquet file"
        raise ValueError(f"split {split!r} has no file in {str(folder)!r}: there is {splits}")
    if len(matching) > 1:
        raise ValueError(
            f"split {split!r} must be one file, and {str(folder)!r} has {' and '.join(p.name for p in matching)}"
        )
    path = matching[0]
    if path.suffix == ".jsonl":
        places = [f"{path} line {number}" for number in _check_jsonl(path)]
        if not places:
            return []
        return [_row(record, where) for where, record in zip(places, _read(path, rows), strict=rows == 0)]
    return [_row(record, f"{path} row {number}") for number, record in enumerate(_read(path, rows), 1)]


def _read(path: Path, rows: int) -> Iterator[dict[str, Any]]:
    """Records of one file; streamed, so that no copy of it stays in the cache of `datasets`."""
    import datasets

    stream = datasets.load_dataset(_FORMATS[path.suffix], data_files=str(path), split="train", streaming=True)
    return _first(stream, rows)


def _check_jsonl(path: Path) -> list[int]:
    """The numbers of the file's lines that are not blank, each checked: `datasets` names neither line nor field."""
    numbers = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON ({error.msg}): it must be one object a line") from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"{where} is a JSON {type(record).__name__}: it must be an object with question and answer"
                )
            _row(record, where)
            numbers.append(number)
    return numbers


def _hub_rows(name: str, split: str, rows: int) -> list[Row]:
    import datasets

    try:
        try:
            records = datasets.load_dataset(name, split=split)
        except ValueError as error:
            # GSM8K on the hub has two configs, of which "main" is the plain one, and no default.
            if "Config name is missing" not in str(error):
                raise
            records = datasets.load_dataset(name, "main", split=split)
    except Exception as error:
        cause = " ".join(str(error).split())
        raise ValueError(
            f"source {name!r} is no folder here, and as a hub id its split {split!r} cannot be had: "
            f"{type(error).__name__}: {cause}"
        ) from error
    return [_row(record, f"{name}/{split} row {number}") for number, record in enumerate(_first(records, rows), 1)]


def _first(records: Iterable[dict[str, Any]], rows: int) -> Iterator[dict[str, Any]]:
    return islice(records, rows or None)


def _row(record: dict[str, Any], where: str) -> Row:
    for field in ("question", "answer"):
        if field not in record:
            raise ValueError(f"{where} has no field {field!r}: it must have question and answer")
        if not isinstance(record[field], str):
            kind = type(record[field]).__name__
            raise ValueError(f"{where} has a {kind} as {field!r}: it must be a text")
    if extract_answer(record["answer"]) is None:
        raise ValueError(f"{where} has no number after #### in 'answer': it must end in \"#### N\"")
    return Row(record["question"], record["answer"], where)
