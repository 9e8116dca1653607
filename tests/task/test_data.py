import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.task.data import (
    ARITHMETIC_ROWS,
    Prompt,
    PromptSampler,
    Row,
    load_rows,
    tokenize_prompts,
)
from harness.task.tiny_models import train_tokenizer

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
TEMPLATE = "Question: {question}\nAnswer: "
ROWS = [
    Row("How many?", "1", "first"),
    Row("How many are there, all in all?", "2", "second"),
]


VERL = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "4"}}


def write_jsonl(folder, split, records):
    path = folder / f"{split}.jsonl"
    path.write_text(
        "".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records),
        encoding="utf-8",
    )
    return path


def records(count):
    return [{"question": f"What is {i}?", "answer": f"It is {i}.\n#### {i}", "extra": None} for i in range(count)]


class Characters:
    """A tokenizer of one token a character."""

    def encode(self, text):
        return [ord(character) for character in text]


def test_arithmetic():
    rows = load_rows(["arithmetic"], "train", 5)
    assert len(rows) == 5 and rows == load_rows(["arithmetic"], "train")[:5]
    assert len(load_rows(["arithmetic"], "test")) == ARITHMETIC_ROWS
    assert load_rows(["arithmetic"], "test", 5) != rows
    assert rows[2].where == "arithmetic/train row 3"
    with pytest.raises(ValueError, match='the split of source arithmetic must be one of train, test, got "dev"'):
        load_rows(["arithmetic"], "dev")


@pytest.mark.parametrize("rows", [0, 1, 3, 4])
def test_jsonl_keeps_order_and_line_numbers(tmp_path, rows):
    path = write_jsonl(tmp_path, "train", [*records(2), "\n", *records(1)])
    found = load_rows([str(tmp_path)], "train", rows)
    expected = [*records(2), *records(1)][: rows or None]
    assert [(row.prompt, row.extra_info["answer"]) for row in found] == [(r["question"], r["answer"]) for r in expected]
    assert [row.ground_truth for row in found] == ["0", "1", "0"][: rows or None]
    assert [row.where for row in found] == [f"{path} line {n}" for n in (1, 2, 4)][: rows or None]


def test_parquet(tmp_path):
    import datasets

    datasets.Dataset.from_list(records(3)).to_parquet(str(tmp_path / "dev.parquet"))
    rows = load_rows([str(tmp_path)], "dev", 2)
    assert [row.extra_info["answer"] for row in rows] == ["It is 0.\n#### 0", "It is 1.\n#### 1"]
    assert rows[1].where == f"{tmp_path / 'dev.parquet'} row 2"
    datasets.Dataset.from_list([{"question": "q", "answer": 3}]).to_parquet(str(tmp_path / "bad.parquet"))
    with pytest.raises(ValueError, match=r"bad\.parquet row 1: answer must be a text, got 3"):
        load_rows([str(tmp_path)], "bad")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{'question'\n", " is not JSON"),
        ("[1]\n", " must be an object with question and answer, or with prompt, got [1]"),
        ({"answer": "#### 1"}, ": question must be a text, got no such field"),
        ({"question": None, "answer": "#### 1"}, ": question must be a text, got null"),
        ({"question": "q", "answer": 1}, ": answer must be a text, got 1"),
        ({"prompt": "What?", "reward_model": {"ground_truth": "1"}}, ": prompt must be a list of messages"),
        ({"prompt": [], "reward_model": {"ground_truth": "1"}}, ": prompt must have at least one message"),
        ({"prompt": [{"role": "user", "content": " "}]}, ": prompt must have at least one message"),
        ({"prompt": [{"role": "user", "content": "?"}, {"role": "user"}]}, ": prompt must be a list of messages"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, ": prompt must be a list of messages"),
        ({"prompt": [{"role": "user", "content": "?"}]}, ": reward_model.ground_truth must be set"),
        ({"prompt": [{"role": "user", "content": "?"}], "reward_model": "rule"}, ": reward_model.ground_truth must"),
        ({"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": ""}}, ": reward_model.ground"),
        (VERL | {"extra_info": '{"answer": "4"}'}, ": extra_info must be an object, got "),
    ],
)
def test_a_bad_row_names_file_line_and_field(tmp_path, bad, message):
    path = write_jsonl(tmp_path, "train", [*records(2), bad])
    with pytest.raises(ValueError) as error:
        load_rows([str(tmp_path)], "train")
    assert str(error.value).startswith(f"{path} line 3{message}")


def test_errors_of_the_source(tmp_path):
    given, empty, double = (tmp_path / name for name in ("given", "empty", "double"))
    for folder in (given, empty, double):
        folder.mkdir()
    path = write_jsonl(given, "train", records(1))
    assert load_rows([str(path)], "any split") == load_rows([str(given)], "train")
    write_jsonl(given, "test", [])
    write_jsonl(double, "train", records(1))
    for file in (double / "train.parquet", tmp_path / "rows.csv"):
        file.touch()
    for source, split, said in (
        (tmp_path / "missing", "train", "must be arithmetic, an existing folder or file, or a hub id"),
        (empty, "train", "has no .jsonl or .parquet file"),
        (given, "dev", 'has no file for split "dev"; its splits are test, train'),
        (given, "test", 'split "test" of .* has no rows'),
        (tmp_path / "rows.csv", "train", r"rows.csv must be a \.jsonl or \.parquet file"),
        (double, "train", "must be one file, but .* has train.jsonl and train.parquet"),
    ):
        with pytest.raises(ValueError, match=said):
            load_rows([str(source)], split)


def test_a_hub_that_cannot_be_asked_is_one_sentence_with_its_cause():
    code = (
        "from harness.task.data import load_rows\n"
        "try:\n    load_rows(['no-such-owner/no-such-set'], 'train')\n"
        "except ValueError as error:\n    print(error); print(type(error.__cause__).__mro__)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    sentence, cause = done.stdout.splitlines()
    assert (
        'no-such-owner/no-such-set is not a folder here, and split "train" of this hub id cannot be loaded' in sentence
    )
    assert "Exception" in cause and "NoneType" not in cause


def test_hub_falls_back_to_config_main(monkeypatch):
    """No hub can be reached here: load_dataset is a fake that fails as the real one does for openai/gsm8k."""
    import datasets

    asked = []

    def fake_load_dataset(*args, split):
        asked.append((*args, split))
        if len(args) == 1:
            raise ValueError(
                "Config name is missing.\nPlease pick one among the available configs: ['main', 'socratic']"
            )
        return datasets.Dataset.from_list(records(3))

    monkeypatch.setattr(datasets, "load_dataset", fake_load_dataset)
    rows = load_rows(["openai/gsm8k"], "test", 2)
    assert asked == [("openai/gsm8k", "test"), ("openai/gsm8k", "main", "test")]
    assert [row.where for row in rows] == [
        "openai/gsm8k/test row 1",
        "openai/gsm8k/test row 2",
    ]


@pytest.mark.skipif(
    not GSM8K.is_dir(),
    reason="GSM8K is not beside the repository, in ../shared/data/gsm8k",
)
def test_real_gsm8k():
    assert len(load_rows([str(GSM8K)], "test")) == 1319
    assert load_rows([str(GSM8K)], "train", 1)[0].ground_truth == "72"


def message_record(number, source="openai/gsm8k"):
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"What is {number}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"split": "train", "index": number},
    }


def test_rows_in_the_schema_of_verl_from_parquet_as_pandas_and_datasets_write_it(tmp_path):
    import datasets
    import pandas

    wanted = [message_record(i) for i in range(2)]
    datasets.Dataset.from_list(wanted).to_parquet(str(tmp_path / "by_datasets.parquet"))
    pandas.DataFrame(wanted).to_parquet(tmp_path / "by_pandas.parquet")
    for name in ("by_datasets", "by_pandas"):
        rows = load_rows([str(tmp_path)], name)
        assert [row.prompt for row in rows] == [record["prompt"] for record in wanted]
        assert [(row.ground_truth, row.data_source, row.extra_info["index"]) for row in rows] == [
            ("0", "openai/gsm8k", 0),
            ("1", "openai/gsm8k", 1),
        ]


def test_several_sources_follow_each_other(tmp_path):
    first, second = write_jsonl(tmp_path, "a", records(3)), write_jsonl(tmp_path, "b", [message_record(7)])
    rows = load_rows([str(first), str(second)], "train")
    assert [row.where for row in rows] == [*(f"{first} line {n}" for n in (1, 2, 3)), f"{second} line 1"]
    assert [row.ground_truth for row in load_rows([str(second), str(first)], "train", 2)] == ["7", "0"]


def test_rows_are_drawn_by_a_seed_as_verl_draws_them(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write_jsonl(folder, "train", records(50))
    every = load_rows([str(folder) for folder in folders], "train")
    drawn = load_rows([str(folder) for folder in folders], "train", 10, seed=7)
    # verl/utils/dataset/rl_dataset.py: default_rng(data.seed).choice(rows of all files, train_max_samples,
    # replace=False)
    assert drawn == [every[index] for index in np.random.default_rng(7).choice(100, size=10, replace=False)]
    assert len({row.where for row in drawn}) == 10 and drawn != every[:10]
    assert load_rows([str(folders[0])], "train", 80, seed=7) == every[:50]


def test_messages_go_through_the_chat_template(tmp_path):
    tokenizer = train_tokenizer(["What is 1?"], 300)
    path = write_jsonl(tmp_path, "train", [message_record(5)])
    rows = load_rows([str(path)], "train")
    [prompt] = tokenize_prompts(rows, tokenizer, TEMPLATE, 100, "error")
    assert tokenizer.decode(prompt.input_ids) == "system: Add.\nuser: What is 5?\nassistant: "
    assert prompt.row == rows[0]
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match="the prompt of .*train.jsonl line 1 does not fit .*: no system role"):
        tokenize_prompts(rows, tokenizer, TEMPLATE, 100, "error")
    tokenizer.chat_template = "{% if %}"
    with pytest.raises(ValueError, match=r"line 1 does not fit .*chat_template.jinja or .*: TemplateSyntaxError"):
        tokenize_prompts(rows, tokenizer, TEMPLATE, 100, "error")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="train.jsonl line 1 is a list of messages, .* no chat template"):
        tokenize_prompts(rows, tokenizer, TEMPLATE, 100, "error")


def test_prompts_fill_the_template_in_order_and_are_neither_empty_nor_too_long():
    prompts = tokenize_prompts(ROWS, Characters(), TEMPLATE, 100, "error")
    assert [(p.index, p.row) for p in prompts] == [*enumerate(ROWS)]
    texts = ["".join(map(chr, prompt.input_ids)) for prompt in prompts]
    assert texts == [f"Question: {row.prompt}\nAnswer: " for row in ROWS]
    length = len(texts[0])
    assert [prompt.index for prompt in tokenize_prompts(ROWS[::-1], Characters(), TEMPLATE, length, "filter")] == [1]
    for rows, template, most, what, said in (
        ([replace(ROWS[1], prompt="")], "{question}", 100, "error", "the prompt of second has no token"),
        (ROWS, TEMPLATE, length, "error", f"second has 50 tokens, more than task.max_prompt_tokens = {length}"),
        (ROWS, TEMPLATE, 5, "filter", "all 2 prompts have more than task.max_prompt_tokens = 5 tokens"),
        (ROWS, "{question:d}", 100, "error", "task.template = '{question:d}' cannot be filled .*: ValueError"),
    ):
        with pytest.raises(ValueError, match=said):
            tokenize_prompts(rows, Characters(), template, most, what)


@pytest.mark.parametrize("answer", [4, ["4"], None, "4"])
def test_the_text_of_a_row_has_its_answer_of_whatever_type(tmp_path, answer):
    write_jsonl(tmp_path, "train", [VERL | {"extra_info": {"answer": answer}}])
    (row,) = load_rows([str(tmp_path)], "train")
    assert row.text.startswith("?") and "4" in row.text


def prompts(count):
    return [Prompt(i, [i], ROWS[0]) for i in range(count)]


def test_sampler_is_a_function_of_seed_and_step():
    one, other = (
        PromptSampler(prompts(10), 3, seed=5),
        PromptSampler(prompts(10), 3, seed=5),
    )
    assert [one.batch(step) for step in range(12)] == [other.batch(step) for step in reversed(range(12))][::-1]
    assert one.batch(0) != PromptSampler(prompts(10), 3, seed=6).batch(0)


def test_sampler_takes_each_prompt_at_most_once_an_epoch_and_reshuffles():
    sampler = PromptSampler(prompts(10), 3, seed=0)
    epochs = [[p.index for step in range(3) for p in sampler.batch(3 * epoch + step)] for epoch in range(40)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 40
    seen = Counter(index for epoch in epochs for index in epoch)
    assert set(seen) == set(range(10)) and min(seen.values()) > 25


def test_sampler_needs_a_batch_of_prompts():
    with pytest.raises(ValueError, match="prompts_per_step = 5 is more than the 4 prompts"):
        PromptSampler(prompts(4), 5, seed=0)
