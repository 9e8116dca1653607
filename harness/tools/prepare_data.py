"""GSM8K and MATH as parquet in the schema of verl's examples/data_preprocess (gsm8k.py, math_dataset.py); and
additions.

A row has data_source, prompt (one message of a user), ability, reward_model = {style, ground_truth} and extra_info. The
additions are made here, with a tiny model that can begin to learn them.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.task.data import read_records
from harness.task.tiny_models import save_tiny_model

SPLITS = ("train", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How the records of a data set on the hub become rows."""

    hub_id: str
    question: str
    """The field with the question."""
    answer: str
    """The field with the worked answer."""
    instruction: str
    """Text after the question in the prompt."""
    extract: Callable[[str], str | None]
    """Returns the ground truth in a worked answer, or None."""
    wanted: str
    """What `extract` looks for, for messages."""
    keeps_text: bool
    """Whether extra_info has question and answer."""


def number_after_mark(answer: str) -> str | None:
    """Return the number after the first "#### ", without commas, or None."""
    found = re.search(r"#### (-?[0-9.,]+)", answer)
    return found[1].replace(",", "") if found else None


def last_boxed(solution: str) -> str | None:
    r"""Return the content of the last \\boxed{...} or \\fbox{...}, or the text after "\\boxed " up to a dollar sign, or None."""
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
        hub_id="openai/gsm8k",
        question="question",
        answer="answer",
        instruction='Let\'s think step by step and output the final answer after "####".',
        extract=number_after_mark,
        wanted="number after ####",
        keeps_text=True,
    ),
    "math": Recipe(
        hub_id="DigitalLearningGmbH/MATH-lighteval",
        question="problem",
        answer="solution",
        instruction="Let's think step by step and output the final answer within \\boxed{}.",
        extract=last_boxed,
        wanted=r"\boxed{} that is closed",
        keeps_text=False,
    ),
}


def prepare(name: str, folder: Path, source: str = "") -> dict[str, int]:
    """Write train.parquet and test.parquet of a data set, and return the number of rows of each.

    source: a folder with train and test as jsonl or parquet; "" for the hub. Nothing is written unless both splits can
    be read. Raise ValueError for a record that cannot be a row, with its file and line.
    """
    import pyarrow
    from pyarrow import parquet

    recipe, tables = RECIPES[name], {}
    for split in SPLITS:
        records = read_records(source or recipe.hub_id, split)
        rows = [_row(recipe, split, index, *each) for index, each in enumerate(records)]
        if not rows:
            raise ValueError(f'split "{split}" of {source or recipe.hub_id} has no rows')
        tables[split] = pyarrow.Table.from_pylist(rows)
    folder.mkdir(parents=True, exist_ok=True)
    for split, table in tables.items():
        parquet.write_table(table, folder / f"{split}.parquet")
    return {split: table.num_rows for split, table in tables.items()}


def _row(recipe: Recipe, split: str, index: int, where: str, record: Any) -> dict[str, Any]:
    fields = record if isinstance(record, dict) else {}
    question, answer = fields.get(recipe.question), fields.get(recipe.answer)
    if not (isinstance(question, str) and isinstance(answer, str)):
        raise ValueError(f"{where} must have the texts {recipe.question} and {recipe.answer}")
    ground_truth = recipe.extract(answer)
    if ground_truth is None:
        raise ValueError(f"{where} has no {recipe.wanted} in {recipe.answer!r}")
    kept = {"answer": answer, "question": question} if recipe.keeps_text else {}
    return {
        "data_source": recipe.hub_id,
        "prompt": [{"role": "user", "content": f"{question} {recipe.instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **kept},
    }


def prepare_addition(folder: Path, held_out: int = 500) -> dict[str, int]:
    """Write all additions of two two-digit numbers: `held_out` of them to test.jsonl, the others to train.jsonl.

    The split is the same at each call. Return the number of rows of each file. The answer to 47+85= is "1213 #### 132":
    the sum of the ones, then the sum of the tens with the carry, then the result. data_source is addition/SPLIT.
    """
    numbers = range(10, 100)
    pairs = [(first, second) for first in numbers for second in numbers]
    random.Random(0).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": pairs[held_out:], "test": pairs[:held_out]}
    for split, some in parts.items():
        rows = [addition(*pair) | {"data_source": f"addition/{split}"} for pair in some]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {split: len(some) for split, some in parts.items()}


def addition(first: int, second: int) -> dict[str, str]:
    """Return the question and the worked answer of one addition."""
    ones = first % 10 + second % 10
    tens = first // 10 + second // 10 + ones // 10
    return {"question": f"{first}+{second}=", "answer": f"{ones:02d}{tens:02d} #### {first + second}"}


def save_supervised_start(folder: Path, train: Path, seed: int, updates: int) -> float:
    """Save a tiny model after a few supervised updates on the answers in `train`, and return the last loss in nats.

    The model then writes digits and adds a little, and PPO can start from it: a random model would never find a
    rewarded answer. Weights and the 128 rows of each update are drawn from the seed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    texts = [row["question"] + row["answer"].partition(" ")[0] for row in rows]
    sizes = {"intermediate_size": 256, "vocab_size": 258}
    save_tiny_model("qwen2", folder, seed, overrides=sizes, texts=texts)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    ids = torch.tensor([tokenizer.encode(text) for text in texts])  # each has 10 tokens; the first 6 are the question
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, betas=(0.9, 0.99))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=9)
    for _ in range(updates):
        some = ids[torch.randint(len(ids), (128,), generator=generator)]
        logits = model(some[:, :-1]).logits[:, 5:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), some[:, 6:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
    model.save_pretrained(folder)
    return float(loss.detach())
