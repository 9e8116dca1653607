"""The rows of a data set, the prompts made of them, and which prompts a step takes."""

import json
import random
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from harness.task.arithmetic import make_problems

ARITHMETIC_SEEDS = {"train": 0, "test": 1}
"""The splits of the source "arithmetic", and the seed of each."""
ARITHMETIC_ROWS = 1024
"""How many rows such a split has if no number is given."""
FILES = (".jsonl", ".parquet")

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data set."""

    prompt: str | list[dict[str, str]]
    """A question for task.template, or messages {role, content} for the tokenizer's chat template."""
    ground_truth: Any
    """What a reward compares a response with. For an answer that ends in "#### N" it is N."""
    where: str
    """File and line, or source and row, for error messages."""
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All text of the row, on which a tiny model's tokenizer is trained."""
        texts = [self.prompt] if isinstance(self.prompt, str) else [each["content"] for each in self.prompt]
        return "".join([*texts, str(self.extra_info.get("answer") or self.ground_truth)])


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt. `index` is the position of its row among the rows that were tokenized."""

    index: int
    input_ids: list[int]
    row: Row


def load_rows(sources: Sequence[str], split: str, rows: int = 0, seed: int = -1) -> list[Row]:
    """Load the first `rows` rows (0: all) of a split, from all sources one after the other.

    With a seed of at least 0 the rows are drawn from all of them instead: the rows that verl 0.6 and newer draws with
    this data.seed (verl/utils/dataset/rl_dataset.py).

    A source is "arithmetic", a folder with SPLIT.jsonl or SPLIT.parquet, one such file (whatever the split), or a hub
    id. A row has verl's fields (prompt, a list of messages; reward_model.ground_truth; data_source), or the texts
    question and answer. Raise ValueError for a source or split that is not there, for a split without rows, for a row
    with a wrong field (with file, line and field), and for a hub that does not answer.
    """
    records = (
        (record, where, source if source != "arithmetic" and is_hub_id(source) else "")
        for source in sources
        for where, record in read_records(source, split, rows if seed < 0 else 0)
    )
    found = [_row(*each) for each in islice(records, rows or None if seed < 0 else None)]
    if seed >= 0 and 0 < rows < len(found):
        import numpy  # --check reads rows with a Python that may have no packages

        found = [found[index] for index in numpy.random.default_rng(seed).choice(len(found), size=rows, replace=False)]
    if not found:
        raise ValueError(f'split "{split}" of {", ".join(sources)} has no rows; it must have at least one')
    return found


def is_hub_id(source: str) -> bool:
    """Return whether a source is the id of a data set on the hub: OWNER/NAME, and not an existing path.

    Raise ValueError if it cannot be a source at all.
    """
    if source == "arithmetic" or Path(source).expanduser().exists():
        return False
    if _HUB_ID.fullmatch(source):
        return True
    raise ValueError(
        f'a source of rows must be arithmetic, an existing folder or file, or a hub id, OWNER/NAME, got "{source}"'
    )


def tokenize_prompts(
    rows: list[Row], tokenizer: Any, template: str, max_prompt_tokens: int, long_prompts: Literal["filter", "error"]
) -> list[Prompt]:
    """Return one prompt for each row, in order, with at most max_prompt_tokens tokens, special tokens included.

    long_prompts: "filter" leaves longer prompts out, "error" raises ValueError for the first. Raise ValueError if no
    prompt is left, or if a row has messages and the tokenizer has no chat template that takes them.
    """
    prompts = []
    for index, row in enumerate(rows):
        if isinstance(row.prompt, str):
            input_ids = tokenizer.encode(_fill(template, row.prompt))
        else:
            input_ids = _apply_chat_template(row, tokenizer)
        if not input_ids:
            raise ValueError(f"the prompt of {row.where} has no token: give it a text, in task.template or in the row")
        if len(input_ids) <= max_prompt_tokens:
            prompts.append(Prompt(index, input_ids, row))
        elif long_prompts == "error":
            raise ValueError(
                f"the prompt of {row.where} has {len(input_ids)} tokens, more than task.max_prompt_tokens ="
                f' {max_prompt_tokens}: raise it, or set task.long_prompts = "filter"'
            )
    if not prompts:
        raise ValueError(
            f"all {len(rows)} prompts have more than task.max_prompt_tokens = {max_prompt_tokens} tokens: raise it"
        )
    return prompts


@dataclass(frozen=True, slots=True)
class PromptSampler:
    """The prompts of each step: a function of seed and step, so the same on every rank and after a restart.

    Each epoch is a new shuffle, cut into steps. A rest that is shorter than a step is dropped, so that no step has a
    prompt twice: GRPO compares the responses to one prompt with each other.
    """

    prompts: list[Prompt]
    prompts_per_step: int
    seed: int

    def __post_init__(self) -> None:
        if self.prompts_per_step > len(self.prompts):
            raise ValueError(
                f"rollout.prompts_per_step = {self.prompts_per_step} is more than the {len(self.prompts)} prompts there are"
            )

    def batch(self, step: int) -> list[Prompt]:
        """Return the prompts of a step; steps count from 0 without end."""
        epoch, place = divmod(step, len(self.prompts) // self.prompts_per_step)
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}:{epoch}").shuffle(order)
        start = place * self.prompts_per_step
        return [self.prompts[i] for i in order[start : start + self.prompts_per_step]]


def _apply_chat_template(row: Row, tokenizer: Any) -> list[int]:
    if not tokenizer.chat_template:
        raise ValueError(
            f"the prompt of {row.where} is a list of messages, but the tokenizer of model.name has no chat template: use an"
            " instruct model, or rows with question and answer"
        )
    try:
        found: list[int] = tokenizer.apply_chat_template(row.prompt, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # of jinja2: a template may refuse roles, or their order, or be no template
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        files = f"chat_template.jinja or tokenizer_config.json in {getattr(tokenizer, 'name_or_path', 'model.name')}"
        raise ValueError(
            f"the prompt of {row.where} does not fit the tokenizer's chat template ({files}): {cause}"
        ) from error
    return found


def _fill(template: str, question: str) -> str:
    """Return the prompt of a question. Raise ValueError that names task.template."""
    try:
        return template.format(question=question)
    except (ValueError, LookupError, AttributeError, MemoryError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"task.template = {template!r} cannot be filled with a question: {cause}") from error


def read_records(source: str, split: str, rows: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (where it is, the record as it is) for each record of one source; for "arithmetic" the first `rows`.

    Raise ValueError as load_rows does, but do not look at fields.
    """
    if source == "arithmetic":
        if split not in ARITHMETIC_SEEDS:
            splits = ", ".join(ARITHMETIC_SEEDS)
            raise ValueError(f'the split of source arithmetic must be one of {splits}, got "{split}"')
        problems = make_problems(rows or ARITHMETIC_ROWS, ARITHMETIC_SEEDS[split])
        return _numbered(problems, f"arithmetic/{split} row")
    if is_hub_id(source):
        return _numbered(_hub_records(source, split), f"{source}/{split} row")
    path = file_of(source, split)
    return _jsonl_records(path) if path.suffix == ".jsonl" else _numbered(_parquet_records(path), f"{path} row")


def file_of(source: str, split: str) -> Path:
    """Return a source that is a file, or the one file in its folder that has the split. Raise ValueError."""
    path = Path(source).expanduser()
    if not path.is_dir():
        if path.suffix not in FILES:
            raise ValueError(f"{source} must be a .jsonl or .parquet file, or a folder of such files")
        return path
    files = sorted(each for each in path.iterdir() if each.suffix in FILES)
    matching = [each for each in files if each.stem == split]
    if not matching:
        if not files:
            raise ValueError(f"{source} has no .jsonl or .parquet file")
        splits = ", ".join(each.stem for each in files)
        raise ValueError(f'{source} has no file for split "{split}"; its splits are {splits}')
    if len(matching) > 1:
        named = " and ".join(each.name for each in matching)
        raise ValueError(f'split "{split}" must be one file, but {source} has {named}')
    return matching[0]


def _numbered(records: Iterable[Any], unit: str) -> Iterator[tuple[str, Any]]:
    return ((f"{unit} {number}", record) for number, record in enumerate(records, 1))


def _jsonl_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the lines that are not blank. `datasets` would not name the line of a bad one."""
    with path.open("rb") as lines:
        for where, line in _numbered(lines, f"{path} line"):
            try:
                if line.strip():
                    yield where, json.loads(line.rstrip())
            except (ValueError, RecursionError) as error:  # also text that is not UTF-8
                at = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                raise ValueError(f"{where} is not JSON ({at}): it must be one object per line") from error


def _parquet_records(path: Path) -> Iterator[Any]:
    from pyarrow import ArrowException, parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error


def _hub_records(name: str, split: str) -> Iterator[Any]:
    import datasets

    try:
        try:
            yield from datasets.load_dataset(name, split=split)
        except ValueError as error:
            # GSM8K on the hub has two configs and no default; "main" is the plain one.
            if "Config name is missing" not in str(error):
                raise
            yield from datasets.load_dataset(name, "main", split=split)
    except Exception as error:  # of several libraries: no network, no such data set, no such split
        cause = " ".join(str(error).split())
        raise ValueError(
            f'{name} is not a folder here, and split "{split}" of this hub id cannot be loaded: '
            f"{type(error).__name__}: {cause}"
        ) from error


def _row(record: Any, where: str, data_source: str) -> Row:
    """Return a record as a Row. Raise ValueError that says which field is wrong and what it must be."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{where} must be an object with question and answer, or with prompt, got {_shown(record)}")
    data_source = record.get("data_source") or data_source
    if "prompt" in record:
        extra_info = record.get("extra_info") or {}
        if not isinstance(extra_info, Mapping):
            raise ValueError(f"{where}: extra_info must be an object, got {_shown(extra_info)}")
        return Row(_messages(record["prompt"], where), _ground_truth(record, where), where, data_source, extra_info)
    for name in ("question", "answer"):
        if not isinstance(record.get(name), str):
            got = _shown(record[name]) if name in record else "no such field"
            raise ValueError(f"{where}: {name} must be a text, got {got}")
    question, answer = record["question"], record["answer"]
    ground_truth = answer.rpartition("####")[2].strip()
    return Row(question, ground_truth, where, data_source, {"question": question, "answer": answer})


def _messages(prompt: Any, where: str) -> list[dict[str, str]]:
    messages = prompt if isinstance(prompt, list) else [prompt]
    for message in messages:
        fields = message if isinstance(message, Mapping) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise ValueError(
                f"{where}: prompt must be a list of messages with the texts role and content, got {_shown(message)}"
            )
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f"{where}: prompt must have at least one message with a content, got {_shown(prompt)}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _ground_truth(record: Mapping[str, Any], where: str) -> Any:
    outer = record.get("reward_model")
    found = outer.get("ground_truth") if isinstance(outer, Mapping) else None
    if found in (None, "", []):
        raise ValueError(f"{where}: reward_model.ground_truth must be set, for the reward to compare with")
    return found


def _shown(value: Any) -> str:
    """Return a value as JSON, cut to a length that fits into a sentence."""
    return textwrap.shorten(json.dumps(value, default=str), 80, placeholder="...")
