"""Rows of a data set, prompts made of them, and which prompts a step takes."""

import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from harness.task.arithmetic import make_problems
from harness.task.rewards import extract_answer

ARITHMETIC_SEEDS = {"train": 0, "test": 1}
"""The splits of source "arithmetic", and the seed of each."""
ARITHMETIC_ROWS = 1024
"""Rows of such a split where no number is given."""

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_LARGEST_CHECKED = 16 << 20
"""Bytes of a file that check_rows reads."""


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
    input_ids: list[int]
    answer: str


def load_rows(source: str, split: str, rows: int = 0) -> list[Row]:
    """Load the first `rows` rows (0: all) of a split.

    `source` is "arithmetic", a folder with one <split>.jsonl or <split>.parquet for each split, or a hub id.
    Each row must have the texts `question` and `answer`, the answer ending in "#### N".
    Raise ValueError: a missing folder or split (it names those there are), no rows, a row with a wrong field
    (it names file, line and field), or a hub that does not answer (the cause is chained).
    """
    if source == "arithmetic":
        if split not in ARITHMETIC_SEEDS:
            splits = ", ".join(ARITHMETIC_SEEDS)
            raise ValueError(f'task.split of source arithmetic must be one of {splits}, got "{split}"')
        problems = make_problems(rows or ARITHMETIC_ROWS, ARITHMETIC_SEEDS[split])
        records = _numbered(problems, f"arithmetic/{split}")
    elif is_hub_id(source):
        records = _numbered(_hub_records(source, split), f"{source}/{split}")
    else:
        path = _file(source, split)
        records = _jsonl_records(path) if path.suffix == ".jsonl" else _numbered(_parquet_records(path), str(path))
    found = [_row(record, where) for where, record in islice(records, rows or None)]
    if not found:
        raise ValueError(f'task.split = "{split}" of task.source = "{source}" has no rows: it must have at least one')
    return found


def is_hub_id(source: str) -> bool:
    """Return whether a `source` is the id of a data set on the hub: OWNER/NAME, where nothing here has this path.

    Raise ValueError where it is nothing at all.
    """
    if source == "arithmetic" or Path(source).exists():
        return False
    if _HUB_ID.fullmatch(source):
        return True
    raise ValueError(f'task.source must be arithmetic, an existing folder or a hub id, OWNER/NAME, got "{source}"')


def check_rows(source: str, split: str, rows: int) -> int | None:
    """Raise load_rows's ValueError as far as it can be known at once and without network.

    Return how many rows there are; None where that is not known: of a hub id, of a file that is large or needs pyarrow.
    """
    if is_hub_id(source) or (source != "arithmetic" and _file(source, split).stat().st_size > _LARGEST_CHECKED):
        return None
    try:
        return len(load_rows(source, split, rows))
    except ModuleNotFoundError:
        return None


def tokenize_prompts(
    rows: list[Row], tokenizer: Any, template: str, max_prompt_tokens: int, long_prompts: Literal["filter", "error"]
) -> list[Prompt]:
    """Make one prompt a row, in order, each of at most `max_prompt_tokens` tokens (special tokens counted).

    long_prompts "filter" leaves longer ones out. Raise ValueError: a longer prompt where it is "error", no prompts left.
    """
    prompts = []
    for index, row in enumerate(rows):
        input_ids = tokenizer.encode(template.format(question=row.question))
        if len(input_ids) <= max_prompt_tokens:
            prompts.append(Prompt(index, input_ids, row.answer))
        elif long_prompts == "error":
            raise ValueError(
                f"the prompt of {row.where} has {len(input_ids)} tokens: task.max_prompt_tokens = {max_prompt_tokens} "
                "must be at least that, or task.long_prompts = filter"
            )
    if not prompts:
        raise ValueError(
            f"none of {len(rows)} prompts has at most task.max_prompt_tokens = {max_prompt_tokens} tokens: raise it"
        )
    return prompts


@dataclass(frozen=True, slots=True)
class PromptSampler:
    """Which prompts a step takes: a pure function of (seed, step), so the same on every rank and after a restart.

    Each epoch is a new shuffle, cut into steps; what is left at its end, less than a step, waits for a later
    shuffle, so that no step has a prompt twice (GRPO compares within a prompt's responses).
    """

    prompts: list[Prompt]
    prompts_per_step: int
    seed: int

    def __post_init__(self) -> None:
        if self.prompts_per_step > len(self.prompts):
            raise ValueError(
                f"rollout.prompts_per_step must be 1 to {len(self.prompts)}, the number of prompts, got"
                f" {self.prompts_per_step}"
            )

    def batch(self, step: int) -> list[Prompt]:
        """Return the prompts of `step`, which counts from 0 and never runs out."""
        epoch, place = divmod(step, len(self.prompts) // self.prompts_per_step)
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}:{epoch}").shuffle(order)
        start = place * self.prompts_per_step
        return [self.prompts[i] for i in order[start : start + self.prompts_per_step]]


def _file(source: str, split: str) -> Path:
    """Return the one file of a folder that has the split."""
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(
            f'task.source = "{source}" is a file: it must be the folder of that file, with its stem as task.split'
        )
    files = sorted(path for path in folder.iterdir() if path.suffix in (".jsonl", ".parquet"))
    matching = [path for path in files if path.stem == split]
    if not matching:
        splits = ", ".join(path.stem for path in files) or "no jsonl or parquet file"
        raise ValueError(f'task.split = "{split}" has no file in task.source = "{source}": there is {splits}')
    if len(matching) > 1:
        named = " and ".join(path.name for path in matching)
        raise ValueError(f'task.split = "{split}" must be one file, and task.source = "{source}" has {named}')
    return matching[0]


def _numbered(records: Iterable[Any], of: str) -> Iterator[tuple[str, Any]]:
    return ((f"{of} row {number}", record) for number, record in enumerate(records, 1))


def _jsonl_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the file's lines that are not blank. `datasets` would name neither line nor field of a bad one."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path} line {number}"
            try:
                if line.strip():
                    yield where, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON ({error.msg}): it must be one object a line") from error


def _parquet_records(path: Path) -> Iterator[Any]:
    from pyarrow import ArrowException, parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path} is no parquet file: {error}") from error


def _hub_records(name: str, split: str) -> Iterator[Any]:
    import datasets

    try:
        try:
            yield from datasets.load_dataset(name, split=split)
        except ValueError as error:
            # GSM8K on the hub has two configs, of which "main" is the plain one, and no default.
            if "Config name is missing" not in str(error):
                raise
            yield from datasets.load_dataset(name, "main", split=split)
    except Exception as error:
        cause = " ".join(str(error).split())
        raise ValueError(
            f'task.source = "{name}" is no folder here, and as a hub id its split "{split}" cannot be loaded: '
            f"{type(error).__name__}: {cause}"
        ) from error


def _row(record: Any, where: str) -> Row:
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a {type(record).__name__}: it must be an object with question and answer")
    for field in ("question", "answer"):
        if field not in record:
            raise ValueError(f"{where} has no field {field!r}: it must have question and answer")
        if not isinstance(record[field], str):
            raise ValueError(f"{where} has a {type(record[field]).__name__} as {field!r}: it must be a text")
    if extract_answer(record["answer"]) is None:
        raise ValueError(f"{where} has no number after #### in 'answer': it must end in \"#### N\"")
    return Row(record["question"], record["answer"], where)
