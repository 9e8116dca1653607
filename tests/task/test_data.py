import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from harness.task.data import (
    ARITHMETIC_ROWS,
    Prompt,
    PromptSampler,
    Row,
    load_rows,
    tokenize_prompts,
)
from harness.tools.tiny_models import train_tokenizer

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
TEMPLATE = "Question: {question}\nAnswer: "
ROWS = [
    Row("How many?", "1", "first"),
    Row("How many are there, all in all?", "2", "second"),
]


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
    with pytest.raises(ValueError, match='task.split of source arithmetic must be one of train, test, got "dev"'):
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
    with pytest.raises(ValueError, match=r"bad\.parquet row 1 has a int as 'answer': it must be a text"):
        load_rows([str(tmp_path)], "bad")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{'question'\n", "is not JSON"),
        ("[1]\n", "is a list: it must be an object"),
        ({"answer": "#### 1"}, "has no field 'question'"),
        ({"question": "q"}, "has no field 'answer'"),
        ({"question": None, "answer": "#### 1"}, "has a NoneType as 'question'"),
        ({"question": "q", "answer": 1}, "has a int as 'answer'"),
        (
            {"prompt": "What?", "reward_model": {"ground_truth": "1"}},
            "has a str as 'prompt': it must be a list of messages",
        ),
        ({"prompt": [], "reward_model": {"ground_truth": "1"}}, "has an empty 'prompt'"),
        ({"prompt": [{"role": "user", "content": " "}]}, "has an empty 'prompt'"),
        ({"prompt": ["What?"]}, "has no fields in message 1 of 'prompt'"),
        ({"prompt": [{"role": "user", "content": "?"}, {"role": "user"}]}, "has a NoneType as 'content' in message 2"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "has a list as 'content' in message 1"),
        ({"prompt": [{"role": "user", "content": "?"}]}, "has no reward_model.ground_truth"),
        ({"prompt": [{"role": "user", "content": "?"}], "reward_model": "rule"}, "has no reward_model.ground_truth"),
        (
            {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": ""}},
            "has no reward_model.ground",
        ),
    ],
)
def test_a_bad_row_names_file_line_and_field(tmp_path, bad, message):
    path = write_jsonl(tmp_path, "train", [*records(2), bad])
    with pytest.raises(ValueError) as error:
        load_rows([str(tmp_path)], "train")
    assert str(error.value).startswith(f"{path} line 3 {message}")


def test_errors_of_the_source(tmp_path):
    with pytest.raises(
        ValueError,
        match="task.source must be arithmetic, an existing folder or file, or a hub id",
    ):
        load_rows([str(tmp_path / "missing")], "train")
    with pytest.raises(ValueError, match="there is no jsonl or parquet file"):
        load_rows([str(tmp_path)], "train")
    path = write_jsonl(tmp_path, "train", records(1))
    write_jsonl(tmp_path, "test", [])
    with pytest.raises(ValueError, match='task.split = "dev" has no file in .*: there is test, train'):
        load_rows([str(tmp_path)], "dev")
    with pytest.raises(ValueError, match='task.split = "test" of .* has no rows'):
        load_rows([str(tmp_path)], "test")
    assert load_rows([str(path)], "any split") == load_rows([str(tmp_path)], "train")
    (tmp_path / "rows.csv").touch()
    with pytest.raises(ValueError, match=r"is a file: it must end in \.jsonl or \.parquet, or be a folder"):
        load_rows([str(tmp_path / "rows.csv")], "train")
    (tmp_path / "train.parquet").touch()
    with pytest.raises(ValueError, match="must be one file, and .* has train.jsonl and train.parquet"):
        load_rows([str(tmp_path)], "train")


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
        'task.source = "no-such-owner/no-such-set" is no folder here, and as a hub id its split "train" cannot'
        in sentence
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


def test_numpy_arrays_in_a_row_are_read(monkeypatch):
    import datasets
    import numpy

    record = message_record(1)
    record["prompt"] = numpy.array(record["prompt"], dtype=object)
    record["reward_model"] = {"ground_truth": numpy.array(["1", "one"])}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [record])
    [row] = load_rows(["some/set"], "train")
    assert row.prompt == message_record(1)["prompt"] and row.ground_truth == ["1", "one"]


def test_several_sources_follow_each_other(tmp_path):
    first, second = write_jsonl(tmp_path, "a", records(3)), write_jsonl(tmp_path, "b", [message_record(7)])
    rows = load_rows([str(first), str(second)], "train")
    assert [row.where for row in rows] == [*(f"{first} line {n}" for n in (1, 2, 3)), f"{second} line 1"]
    assert [row.ground_truth for row in load_rows([str(second), str(first)], "train", 2)] == ["7", "0"]


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
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="train.jsonl line 1 is a list of messages, .* has no chat template"):
        tokenize_prompts(rows, tokenizer, TEMPLATE, 100, "error")


def test_prompts_in_order():
    prompts = tokenize_prompts(ROWS, Characters(), TEMPLATE, 100, "error")
    assert [(p.index, p.row) for p in prompts] == [*enumerate(ROWS)]
    texts = ["".join(map(chr, prompt.input_ids)) for prompt in prompts]
    assert texts == [f"Question: {row.prompt}\nAnswer: " for row in ROWS]


def test_long_prompts():
    length = len(TEMPLATE.format(question=ROWS[0].prompt))
    assert [prompt.index for prompt in tokenize_prompts(ROWS[::-1], Characters(), TEMPLATE, length, "filter")] == [1]
    with pytest.raises(
        ValueError,
        match=rf"the prompt of second has 50 tokens: task.max_prompt_tokens = {length} must be",
    ):
        tokenize_prompts(ROWS, Characters(), TEMPLATE, length, "error")
    with pytest.raises(ValueError, match="none of 2 prompts has at most task.max_prompt_tokens = 5 tokens"):
        tokenize_prompts(ROWS, Characters(), TEMPLATE, 5, "filter")


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


def test_sampler_with_as_many_prompts_as_a_step_takes():
    sampler = PromptSampler(prompts(4), 4, seed=0)
    for step in range(5):
        assert {prompt.index for prompt in sampler.batch(step)} == {0, 1, 2, 3}


def test_sampler_is_the_same_in_another_process():
    code = (
        "from tests.task.test_data import prompts; from harness.task.data import PromptSampler\n"
        "print([p.index for s in range(9) for p in PromptSampler(prompts(10), 3, 1).batch(s)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    sampler = PromptSampler(prompts(10), 3, 1)
    assert done.stdout.strip() == str([p.index for s in range(9) for p in sampler.batch(s)])


def test_sampler_needs_a_batch_of_prompts():
    with pytest.raises(ValueError, match="prompts_per_step must be 1 to 4, .* got 5"):
        PromptSampler(prompts(4), 5, seed=0)
