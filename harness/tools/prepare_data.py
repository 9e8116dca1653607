"""GSM8K and MATH as parquet in the schema of verl's examples/data_preprocess: gsm8k.py and math_dataset.py.

Each row: data_source, prompt (one message of a user), ability, reward_model = {style, ground_truth}, extra_info. Beside
them two-digit additions, made here, as jsonl: data_source, question, answer.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.task.data import read_records
from harness.tools.tiny_models import save_tiny_model

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


def prepare_addition(folder: Path, held_out: int = 500) -> dict[str, int]:
    """Write all additions of two numbers of two digits: `held_out` as test.jsonl, the others as train.jsonl.

    The same pairs at each call, in an order drawn once, none in both files; return how many each has. The answer to
    47+85= is "1213 #### 132": the sum of the ones, then of the tens with the carry. data_source is addition/<split>.
    """
    numbers = range(10, 100)
    pairs = [(first, second) for first in numbers for second in numbers]
    random.Random(0).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": pairs[held_out:], "test": pairs[:held_out]}
    for split, some in parts.items():
        rows = [addition(*pair) | {"data_source": f"addition/{split}"} for pair in some]
        beside = folder / f"{split}.jsonl.partial"
        beside.write_text("".join(json.dumps(row) + "\n" for row in rows))
        beside.rename(folder / f"{split}.jsonl")
    return {split: len(some) for split, some in parts.items()}


def addition(first: int, second: int) -> dict[str, str]:
    """Return question and answer."""
    ones = first % 10 + second % 10
    tens = first // 10 + second // 10 + ones // 10
    return {"question": f"{first}+{second}=", "answer": f"{ones:02d}{tens:02d} #### {first + second}"}


def save_supervised_start(folder: Path, train: Path, seed: int, updates: int) -> float:
    """Save a tiny model in `folder` after so many supervised updates on the answers of `train`; return the last loss, nats.

    Few: it writes digits and adds a little, and PPO starts there. 128 rows an update, drawn from the seed, as the weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    texts = [row["question"] + row["answer"].partition(" ")[0] for row in rows]
    sizes = {"intermediate_size": 256, "vocab_size": 258}
    save_tiny_model("qwen2", folder, seed, overrides=sizes, texts=texts)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode(text) for text in texts])  # all of 10 tokens, 6 of them the question
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
