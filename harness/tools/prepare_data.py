"""GSM8K and MATH as parquet in the schema of verl's examples/data_preprocess: gsm8k.py and math_dataset.py.

Each row: data_source, prompt (one message of a user), ability, reward_model = {style, ground_truth}, extra_info.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.task.data import read_records

SPLITS = ("train", "test")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where a data set is, and what its rows become."""

    hub_id: str
    question: str
    """The field of a record that asks."""
    answer: str
    """The field that has the worked answer."""
    instruction: str
    """What follows the question in the prompt."""
    extract: Callable[[str], str | None]
    """The ground truth of a worked answer; None where there is none."""
    keeps_text: bool
    """Whether extra_info keeps question and answer."""


def number_after_mark(answer: str) -> str | None:
    """Return the number after the first `####`, without commas: "1,234" is "1234"."""
    found = re.search(r"#### (-?[0-9.,]+)", answer)
    return found[1].replace(",", "") if found else None


def last_boxed(solution: str) -> str | None:
    r"""Return what the last \\boxed{...} or \\fbox{...} holds, or what follows "\\boxed " up to a dollar sign."""
    *_, last = [None, *re.finditer(r"\\(?:boxed|fbox)\s*", solution)]
    if last is None:
        return None
    inside, depth = solution[last.end() :], 0
    if not inside.startswith("{"):
        return inside.split("$")[0].strip() or None
    for place, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[1:place].strip() or None
    return None


RECIPES = {
    "gsm8k": Recipe(
        "openai/gsm8k",
        "question",
        "answer",
        'Let\'s think step by step and output the final answer after "####".',
        number_after_mark,
        keeps_text=True,
    ),
    "math": Recipe(
        "DigitalLearningGmbH/MATH-lighteval",
        "problem",
        "solution",
        "Let's think step by step and output the final answer within \\boxed{}.",
        last_boxed,
        keeps_text=False,
    ),
}


def prepare(name: str, folder: Path, source: str = "") -> dict[str, int]:
    """Write train.parquet and test.parquet of a data set; return how many rows each has.

    source: a folder with the records of both splits, train.jsonl or train.parquet and so on; "": the hub. Both files are
    written beside, and renamed once both are whole. Raise ValueError for a record that cannot be read (it names the row).
    """
    import pyarrow
    from pyarrow import parquet

    recipe, beside = RECIPES[name], {split: folder / f"{split}.parquet.partial" for split in SPLITS}
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split, file in beside.items():
        records = read_records(source or recipe.hub_id, split)
        rows = [_row(recipe, split, index, *each) for index, each in enumerate(records)]
        if not rows:
            raise ValueError(f'split "{split}" of {source or recipe.hub_id} has no rows')
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        counts[split] = len(rows)
    for split, file in beside.items():
        file.rename(folder / f"{split}.parquet")
    return counts


def _row(recipe: Recipe, split: str, index: int, where: str, record: Any) -> dict[str, Any]:
    fields = record if isinstance(record, dict) else {}
    question, answer = fields.get(recipe.question), fields.get(recipe.answer)
    if not (isinstance(question, str) and isinstance(answer, str)):
        raise ValueError(f"{where} must have the texts {recipe.question} and {recipe.answer}")
    ground_truth = recipe.extract(answer)
    if ground_truth is None:
        kind = "number after ####" if recipe.extract is number_after_mark else r"\boxed{} that closes"
        raise ValueError(f"{where} has no {kind} in {recipe.answer!r}")
    kept = {"answer": answer, "question": question} if recipe.keeps_text else {}
    return {
        "data_source": recipe.hub_id,
        "prompt": [{"role": "user", "content": f"{question} {recipe.instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **kept},
    }
