"""Rows of a data set, prompts made of them, and which prompts a step takes."""

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from harness.task.arithmetic import make_problems

ARITHMETIC_SEEDS = {"train": 0, "test": 1}
"""The splits of source "arithmetic", and the seed of each."""
ARITHMETIC_ROWS = 1024
"""Rows of such a split where no number is given."""

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True, slots=True)
class Row:
    """One row; `where` says where it came from, for messages."""

    prompt: str | list[dict[str, str]]
    """A question, for task.template, or messages {role, content}, for the tokenizer's chat template."""
    ground_truth: Any
    """What a reward compares a response with: of an answer that ends in "#### N", the N."""
    where: str
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All its text: what a tiny model's tokenizer is trained on."""
        texts = [self.prompt] if isinstance(self.prompt, str) else [each["content"] for each in self.prompt]
        return "".join([*texts, self.extra_info.get("answer") or str(self.ground_truth)])


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt; `index` is its row's position among the rows it was made of."""

    index: int
    input_ids: list[int]
    row: Row


def load_rows(sources: Sequence[str], split: str, rows: int = 0) -> list[Row]:
    """Load the first `rows` rows (0: all) of a split of all sources, one after the other.

    A source is "arithmetic", a folder with one <split>.jsonl or <split>.parquet for each split, such a file, whatever the
    split, or a hub id. A row is verl's (`prompt`, a list of messages, `reward_model.ground_truth`, `data_source`), or has
    the texts `question` and `answer`.
    Raise ValueError: a missing folder or split (it names those there are), no rows, a row with a wrong field
    (it names file, line and field), or a hub that does not answer (the cause is chained).
    """
    found = list(islice(chain.from_iterable(_rows(source, split, rows) for source in sources), rows or None))
    if not found:
        raise ValueError(
            f'task.split = "{split}" of task.source = {_shown(sources)} has no rows: it must have at least one'
        )
    return found


def is_hub_id(source: str) -> bool:
    """Return whether a `source` is the id of a data set on the hub: OWNER/NAME, where nothing here has this path.

    Raise ValueError where it is nothing at all.
    """
    if source == "arithmetic" or Path(source).expanduser().exists():
        return False
    if _HUB_ID.fullmatch(source):
        return True
    raise ValueError(
        f'task.source must be arithmetic, an existing folder or file, or a hub id, OWNER/NAME, got "{source}"'
    )


@contextmanager
def of_validation() -> Iterator[None]:
    """Raise a ValueError of load_rows in here with the keys of [validation] in place of [task]'s."""
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"\btask\.(source|split)\b", r"validation.\1", str(error))) from error


def tokenize_prompts(
    rows: list[Row], tokenizer: Any, template: str, max_prompt_tokens: int, long_prompts: Literal["filter", "error"]
) -> list[Prompt]:
    """Make one prompt a row, in order, each of at most `max_prompt_tokens` tokens (special tokens counted).

    long_prompts "filter" leaves longer ones out. Raise ValueError: a longer prompt where it is "error", no prompts left,
    messages for which the tokenizer has no chat template.
    """
    prompts = []
    for index, row in enumerate(rows):
        if isinstance(row.prompt, str):
            input_ids = tokenizer.encode(template.format(question=row.prompt))
        else:
            input_ids = _apply_chat_template(row, tokenizer)
        if len(input_ids) <= max_prompt_tokens:
            prompts.append(Prompt(index, input_ids, row))
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


def _apply_chat_template(row: Row, tokenizer: Any) -> list[int]:
    if not tokenizer.chat_template:
        raise ValueError(
            f"the prompt of {row.where} is a list of messages, and the tokenizer of model.name has no chat template: give a"
            " model whose tokenizer has one, such as an instruct model, or rows with question and answer"
        )
    try:
        found: list[int] = tokenizer.apply_chat_template(row.prompt, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # jinja2's; a template may refuse roles, or their order
        cause = " ".join(str(error).split())
        raise ValueError(f"the prompt of {row.where} does not fit the tokenizer's chat template: {cause}") from error
    return found


def _shown(sources: Sequence[str]) -> str:
    return ", ".join(f'"{source}"' for source in sources)


def read_records(source: str, split: str, rows: int = 0) -> Iterator[tuple[str, Any]]:
    """Return where each record of one source is from, and the record as it is; of "arithmetic", the first `rows`.

    Raise load_rows's ValueError, but for fields of a row.
    """
    if source == "arithmetic":
        if split not in ARITHMETIC_SEEDS:
            splits = ", ".join(ARITHMETIC_SEEDS)
            raise ValueError(f'task.split of source arithmetic must be one of {splits}, got "{split}"')
        return _numbered(make_problems(rows or ARITHMETIC_ROWS, ARITHMETIC_SEEDS[split]), f"arithmetic/{split}")
    if is_hub_id(source):
        return _numbered(_hub_records(source, split), f"{source}/{split}")
    path = file_of(source, split)
    return _jsonl_records(path) if path.suffix == ".jsonl" else _numbered(_parquet_records(path), str(path))


def _rows(source: str, split: str, rows: int) -> Iterator[Row]:
    records = read_records(source, split, rows)
    data_source = source if source != "arithmetic" and is_hub_id(source) else ""
    return (_row(record, where, data_source) for where, record in records)


def file_of(source: str, split: str) -> Path:
    """Return the source, where it is a file, or the one file of a folder that has the split."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if folder.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f'task.source = "{source}" is a file: it must end in .jsonl or .parquet, or be a folder')
        return folder
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


def _row(record: Any, where: str, data_source: str) -> Row:
    if not isinstance(record, Mapping):
        raise ValueError(
            f"{where} is a {type(record).__name__}: it must be an object with question and answer, or with prompt"
        )
    data_source = record.get("data_source") or data_source
    if "prompt" in record:
        return Row(
            _messages(record, where), _ground_truth(record, where), where, data_source, record.get("extra_info") or {}
        )
    for name in ("question", "answer"):
        if name not in record:
            raise ValueError(f"{where} has no field {name!r}: it must have question and answer, or prompt")
        if not isinstance(record[name], str):
            raise ValueError(f"{where} has a {type(record[name]).__name__} as {name!r}: it must be a text")
    number = record["answer"].rpartition("####")[2].strip()
    return Row(record["question"], number, where, data_source, {name: record[name] for name in ("question", "answer")})


def _messages(record: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    found = _plain(record["prompt"])
    if not isinstance(found, list):
        raise ValueError(
            f"{where} has a {type(found).__name__} as 'prompt': it must be a list of messages, role and content"
        )
    for number, message in enumerate(found, 1):
        for name in ("role", "content"):
            text = message.get(name) if isinstance(message, Mapping) else None
            if not isinstance(text, str):
                what = f"a {type(text).__name__} as {name!r}" if isinstance(message, Mapping) else "no fields"
                raise ValueError(f"{where} has {what} in message {number} of 'prompt': role and content must be texts")
    if not any(message["content"].strip() for message in found):
        raise ValueError(f"{where} has an empty 'prompt': at least one message must have a content")
    return [{"role": message["role"], "content": message["content"]} for message in found]


def _ground_truth(record: Mapping[str, Any], where: str) -> Any:
    outer = record.get("reward_model")
    found = _plain(outer.get("ground_truth")) if isinstance(outer, Mapping) else None
    if found is None or found in ("", []):
        raise ValueError(
            f"{where} has no reward_model.ground_truth: it must have what a reward compares a response with"
        )
    return found


def _plain(value: Any) -> Any:
    """Return lists and numbers for numpy's."""
    return value.tolist() if hasattr(value, "tolist") else value
