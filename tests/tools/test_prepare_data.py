"""GSM8K and MATH in verl's schema, from small local files that stand for the hub's rows; and additions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.task.data import load_rows
from harness.tools.prepare_data import last_boxed, number_after_mark
from harness.tools.rewards.more_rewards import check_reward, make_reward
from launch import prepare_data

GSM8K = [
    {"question": "Ana has 1,000 and 80?", "answer": "1,000 + 80 = <<1000+80=1080>>1,080\n#### 1,080"},
    {"question": "Ben owes 3?", "answer": "#### -3"},
]
MATH = [
    {"problem": "Half of one?", "solution": r"First $\boxed{1}$, then $\boxed{\frac{1}{2}}$.", "level": "Level 1"},
    {"problem": "One?", "solution": r"It is $\boxed 1$.", "level": "Level 1"},
]


def write(folder: Path, train: list[dict[str, str]], test: list[dict[str, str]]) -> Path:
    folder.mkdir(exist_ok=True)
    for split, records in (("train", train), ("test", test)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def test_gsm8k_has_the_schema_of_verl_and_is_read_back(tmp_path: Path) -> None:
    from pyarrow import parquet

    source, out = write(tmp_path / "raw", GSM8K, GSM8K[:1]), tmp_path / "deep" / "out"
    assert prepare_data.main(["gsm8k", str(out), "--source", str(source)]) == 0
    assert sorted(each.name for each in out.iterdir()) == ["test.parquet", "train.parquet"]
    first, _ = parquet.read_table(out / "train.parquet").to_pylist()
    assert first == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'Ana has 1,000 and 80? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1080"},
        "extra_info": {"split": "train", "index": 0, **GSM8K[0]},
    }
    rows = load_rows([str(out)], "train")
    check_reward("data_source", rows)
    assert [(row.ground_truth, row.extra_info["index"]) for row in rows] == [("1080", 0), ("-3", 1)]
    assert len(load_rows([str(out)], "test")) == 1


def test_math_has_the_last_boxed_answer(tmp_path: Path) -> None:
    source = write(tmp_path / "raw", MATH, MATH)
    assert prepare_data.main(["math", str(tmp_path), "--source", str(source)]) == 0
    rows = load_rows([str(tmp_path / "train.parquet")], "train")
    check_reward("data_source", rows)
    assert [row.ground_truth for row in rows] == [r"\frac{1}{2}", "1"]
    assert rows[0].prompt[0]["content"].endswith(r" output the final answer within \boxed{}.")
    assert rows[0].data_source == "DigitalLearningGmbH/MATH-lighteval" and rows[0].extra_info["split"] == "train"


@pytest.mark.parametrize(
    ("solution", "boxed"),
    [
        (r"\boxed{\text{a {b} c}} end", r"\text{a {b} c}"),
        (r"\fbox{3}", "3"),
        (r"\boxed{1} and \boxed {2}", "2"),
        (r"\boxed{1", None),
        (r"\boxed{}", None),
        ("none", None),
    ],
)
def test_last_boxed(solution: str, boxed: str | None) -> None:
    assert last_boxed(solution) == boxed


def test_numbers_after_the_mark() -> None:
    assert [number_after_mark(text) for text in ("#### 1,234.5", "#### -3 ####", "1234")] == ["1234.5", "-3", None]


def test_additions_are_held_out_and_scored_by_their_digits(tmp_path: Path) -> None:
    assert prepare_data.main(["addition", str(tmp_path), "--updates", "1"]) == 0
    train, test = (load_rows([str(tmp_path)], split) for split in ("train", "test"))
    questions = {row.prompt for row in train} | {row.prompt for row in test}
    assert len(train) == 7600 and len(test) == 500 and len(questions) == 90 * 90, "each pair once, in one file"
    assert all(sum(map(int, row.prompt.rstrip("=").split("+"))) == int(row.ground_truth) for row in train + test)
    score = make_reward("configs/cpu/addition_reward.py:score", train)
    row = replace(train[0], prompt="47+85=", ground_truth="132", extra_info={"answer": "1213 #### 132"})
    assert [score(text, row) for text in ("1213", "1203", "0213", "21", "")] == [1, 0.75, 0.75, 0, 0]
    held_out = replace(row, data_source=test[0].data_source)
    assert [score(text, held_out) for text in ("1213", "0213", "1203", "12130", "")] == [1, 1, 0, 0, 0]
    assert train[0].data_source != test[0].data_source


@pytest.mark.slow
def test_the_supervised_start_is_a_folder_that_the_seed_decides(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert prepare_data.main(["addition", str(tmp_path / name), "--seed", seed, "--updates", "2"]) == 0
    first, again, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in "abc")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
