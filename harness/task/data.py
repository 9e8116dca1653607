"""Rows of a data set, prompts made of them, and which prompts a step takes."""

import json
import logging
import random
import re
from collections.abc import Iterable, Iterator, Mapping
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
    """Load the first `rows` rows (0: all) of a split.

    `source` is "arithmetic", a folder with one <split>.jsonl or <split>.parquet for each split, or a hub id.
    Each row must have the texts `question` and `answer`, the answer ending in "#### N". A jsonl file is
    checked to its end even where fewer rows are asked for.
    Raise ValueError: a missing folder or split (it names those there are), no rows, a row with a wrong field
    (it names file, line and field), or a hub that does not answer (the cause is chained).
    """
    if rows < 0:
        raise ValueError(f"task.rows must be 0, for all rows, or more, got {rows}")
    if source == "arithmetic":
        problems = make_problems(rows or ARITHMETIC_ROWS, _arithmetic_seed(split))
        found = [_row(problem, f"arithmetic/{split} row {number}") for number, problem in enumerate(problems, 1)]
    elif is_hub_id(source):
        found = _numbered(_hub_records(source, split), f"{source}/{split}", rows)
    else:
        path = _file(source, split)
        if path.suffix == ".jsonl":
            found = _jsonl_rows(path)[: rows or None]
        else:
            batches = _open_parquet(path).iter_batches()
            found = _numbered((record for batch in batches for record in batch.to_pylist()), str(path), rows)
    if not found:
        raise ValueError(_no_rows(source, split))
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
    """Raise load_rows's ValueError as far as it can be known at once and without network, `datasets` or torch.

    Return how many rows there are; None where that is not known: of a hub id, or of a file that is large.
    """
    if source == "arithmetic":
        _arithmetic_seed(split)
        return rows or ARITHMETIC_ROWS
    if is_hub_id(source):
        return None
    path = _file(source, split)
    if path.suffix == ".parquet":
        try:
            file = _open_parquet(path)
        except ModuleNotFoundError:
            return None
        count = int(file.metadata.num_rows)
        if count:
            _row(next(file.iter_batches(batch_size=1)).to_pylist()[0], f"{path} row 1")
    elif path.stat().st_size > _LARGEST_CHECKED:
        return None
    else:
        count = len(_jsonl_rows(path))
    if count == 0:
        raise ValueError(_no_rows(source, split))
    return min(count, rows or count)


def check_template(template: str) -> None:
    """Raise ValueError unless {question} is the only field of the prompt template."""
    try:
        fields = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(
            f"task.template {template!r} has a lone brace: write {{{{ or }}}} for a literal one"
        ) from error
    if not fields or any(field != ("question", "", None) for field in fields):
        raise ValueError(f"task.template must have the field {{question}} and no other, got {template!r}")


def tokenize_prompts(
    rows: list[Row],
    tokenizer: Encoder,
    template: str,
    max_prompt_tokens: int,
    long_prompts: Literal["filter", "error"] = "filter",
) -> list[Prompt]:
    """Make one prompt a row, in order, each of at most `max_prompt_tokens` tokens (special tokens counted).

    long_prompts "filter" leaves longer ones out and logs their number, len(rows) - len(prompts).
    Raise ValueError: a longer prompt where long_prompts is "error", a bad template, no prompts left.
    """
    check_template(template)
    if long_prompts not in ("filter", "error"):
        raise ValueError(f"long_prompts must be filter or error, got {long_prompts!r}")
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
    if dropped := len(rows) - len(prompts):
        logger.info("left out %d of %d prompts, longer than %d tokens", dropped, len(rows), max_prompt_tokens)
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
        if not 0 < self.prompts_per_step <= len(self.prompts):
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


def _arithmetic_seed(split: str) -> int:
    if split not in ARITHMETIC_SEEDS:
        raise ValueError(f'task.split of source arithmetic must be one of {", ".join(ARITHMETIC_SEEDS)}, got "{split}"')
    return ARITHMETIC_SEEDS[split]


def _no_rows(source: str, split: str) -> str:
    return f'task.split = "{split}" of task.source = "{source}" has no rows: it must have at least one'


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


def _jsonl_rows(path: Path) -> list[Row]:
    """Read the file's lines that are not blank. `datasets` would name neither line nor field of a bad one."""
    rows = []
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
                kind = type(record).__name__
                raise ValueError(f"{where} is a JSON {kind}: it must be an object with question and answer")
            rows.append(_row(record, where))
    return rows


def _open_parquet(path: Path) -> Any:
    from pyarrow import ArrowException, parquet

    try:
        return parquet.ParquetFile(path)
    except ArrowException as error:
        raise ValueError(f"{path} is no parquet file: {error}") from error


def _hub_records(name: str, split: str) -> Iterator[Mapping[str, Any]]:
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


def _numbered(records: Iterable[Mapping[str, Any]], of: str, rows: int) -> list[Row]:
    return [_row(record, f"{of} row {number}") for number, record in enumerate(islice(records, rows or None), 1)]


def _row(record: Mapping[str, Any], where: str) -> Row:
    for field in ("question", "answer"):
        if field not in record:
            raise ValueError(f"{where} has no field {field!r}: it must have question and answer")
        if not isinstance(record[field], str):
            kind = type(record[field]).__name__
            raise ValueError(f"{where} has a {kind} as {field!r}: it must be a text")
    if extract_answer(record["answer"]) is None:
        raise ValueError(f"{where} has no number after #### in 'answer': it must end in \"#### N\"")
    return Row(record["question"], record["answer"], where)
