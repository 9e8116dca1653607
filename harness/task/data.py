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
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_LARGEST_CHECKED = 16 << 20
"""Bytes of a jsonl file that check_rows reads to its end."""


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
        raise ValueError(f"task.rows = {rows}: it must be 0, for all rows, or more")
    if source == "arithmetic":
        found = _arithmetic_rows(split, rows or ARITHMETIC_ROWS)
    elif is_hub_id(source):
        found = _hub_rows(source, split, rows)
    else:
        found = _folder_rows(_file(source, split), rows)
    if not found:
        raise ValueError(f'task.split = "{split}" of {_shown(source)} has no rows: it must have at least one')
    return found


def is_hub_id(source: str) -> bool:
    """Whether a `source` is the id of a data set on the hub: OWNER/NAME, and nothing here has this path.

    Raises ValueError where it is nothing at all.
    """
    if source == "arithmetic" or Path(source).exists():
        return False
    if _HUB_ID.fullmatch(source):
        return True
    raise ValueError(
        f"{_shown(source)} is no folder: it must be arithmetic, an existing folder or a hub id, OWNER/NAME"
    )


def check_rows(source: str, split: str, rows: int) -> int | None:
    """Raise load_rows's ValueError as far as it can be known at once and without network, `datasets` or torch.

    Returns how many rows there are; None where that is not known: of a hub id, or of a file that is large.
    """
    if source == "arithmetic":
        _check_arithmetic_split(split)
        return rows or ARITHMETIC_ROWS
    if is_hub_id(source):
        return None
    path = _file(source, split)
    if path.suffix == ".parquet":
        count = _check_parquet(path)
    elif path.stat().st_size > _LARGEST_CHECKED:
        return None
    else:
        count = len(_check_jsonl(path))
    if count == 0:
        raise ValueError(f'task.split = "{split}" of {_shown(source)} has no rows: it must have at least one')
    return count if count is None else min(count, rows or count)


def check_template(template: str) -> None:
    """ValueError unless {question} is the only field of the prompt template."""
    try:
        fields = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(
            f"task.template {template!r} has a lone brace: write {{{{ or }}}} for a literal one"
        ) from error
    if not fields or any(field != ("question", "", None) for field in fields):
        raise ValueError(f"task.template {template!r} must have the field {{question}} and no other")


def tokenize_prompts(
    rows: list[Row],
    tokenizer: Encoder,
    template: str,
    max_prompt_tokens: int,
    long_prompts: Literal["filter", "error"] = "filter",
) -> list[Prompt]:
    """One prompt a row, in order, each of at most `max_prompt_tokens` tokens (special tokens counted).

    long_prompts "filter" leaves longer ones out and logs their number, len(rows) - len(prompts).
    Raises ValueError: a longer prompt where long_prompts is "error", a bad template, no prompts left.
    """
    check_template(template)
    if long_prompts not in ("filter", "error"):
        raise ValueError(f"long_prompts is {long_prompts!r}: it must be filter or error")
    prompts = []
    for index, row in enumerate(rows):
        text = template.format(question=row.question)
        input_ids = tokenizer.encode(text)
        if len(input_ids) <= max_prompt_tokens:
            prompts.append(Prompt(index, text, input_ids, row.answer, row.where))
        elif long_prompts == "error":
            raise ValueError(
                f"the prompt of {row.where} has {len(input_ids)} tokens: task.max_prompt_tokens = {max_prompt_tokens} "
                "must be at least that, or task.long_prompts = filter"
            )
    if not prompts:
        raise ValueError(
            f"none of {len(rows)} prompts has at most task.max_prompt_tokens = {max_prompt_tokens} tokens: raise it"
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
                f"rollout.prompts_per_step is {self.prompts_per_step}: it must be 1 to {len(self.prompts)}, as many prompts as "
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
    _check_arithmetic_split(split)
    problems = make_problems(count, ARITHMETIC_SEEDS[split])
    return [_row(problem, f"arithmetic/{split} row {number}") for number, problem in enumerate(problems, 1)]


def _check_arithmetic_split(split: str) -> None:
    if split not in ARITHMETIC_SEEDS:
        raise ValueError(f'task.split = "{split}" is unknown: source arithmetic has {", ".join(ARITHMETIC_SEEDS)}')


def _shown(source: str) -> str:
    return f'task.source = "{source}"'


def _file(source: str, split: str) -> Path:
    """The one file of a folder that holds the split."""
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(
            f"{_shown(source)} is a file: it must be the folder that holds it, with its stem as task.split"
        )
    files = sorted(path for path in folder.iterdir() if path.suffix in _FORMATS)
    matching = [path for path in files if path.stem == split]
    if not matching:
        splits = ", ".join(path.stem for path in files) or "no jsonl or parquet file"
        raise ValueError(f'task.split = "{split}" has no file in {_shown(source)}: there is {splits}')
    if len(matching) > 1:
        named = " and ".join(path.name for path in matching)
        raise ValueError(f'task.split = "{split}" must be one file, and {_shown(source)} has {named}')
    return matching[0]


def _folder_rows(path: Path, rows: int) -> list[Row]:
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


def _check_parquet(path: Path) -> int | None:
    """How many rows it has; None without pyarrow, which reads it. Raises ValueError for a column that is not there."""
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        return None
    try:
        file = parquet.ParquetFile(path)
    except ArrowException as error:
        raise ValueError(f"{path} is no parquet file: {error}") from error
    if file.metadata.num_rows:
        first = next(file.iter_batches(batch_size=1)).to_pylist()[0]
        _row(first, f"{path} row 1")
    return int(file.metadata.num_rows)


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
            f'{_shown(name)} is no folder here, and as a hub id its split "{split}" cannot be loaded: '
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
