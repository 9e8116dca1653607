import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.task.arithmetic import make_problems
from harness.task.tiny_models import train_tokenizer

TEXTS = [problem["question"] + "\n" + problem["answer"] for problem in make_problems(100, seed=0)]
TOKENIZER = train_tokenizer(TEXTS, 512)


@settings(max_examples=25, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])).filter(lambda text: "<" not in text))
def test_any_text_decodes_back(text):
    ids = TOKENIZER.encode(text)
    assert all(0 <= i < 512 for i in ids)
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text


def test_special_tokens_and_size():
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.bos_token_id) == (
        0,
        1,
        None,
    )
    assert len(TOKENIZER) == 512
    assert TOKENIZER.decode([0, *TOKENIZER.encode("a 1"), 1], skip_special_tokens=True) == "a 1"


def test_merges_are_used_and_digits_stay_apart():
    text = "How many apples does Ana have?"
    assert len(TOKENIZER.encode(text)) < len(text) / 2
    assert len(TOKENIZER.encode("2024")) == 4


def test_same_texts_same_tokenizer():
    same = train_tokenizer(iter(TEXTS), 512)
    assert same.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    other = train_tokenizer(["other words entirely"], 512)
    assert other.backend_tokenizer.to_str() != TOKENIZER.backend_tokenizer.to_str()


def test_few_texts_are_filled_up_with_special_tokens():
    small = train_tokenizer(["aab"], 300)
    assert len(small) == 300
    assert small.decode([299, *small.encode("aab 9")], skip_special_tokens=True) == "aab 9"


def test_round_trip_through_a_folder(tmp_path):
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])
    assert (loaded.pad_token_id, loaded.eos_token_id, len(loaded)) == (0, 1, 512)


def test_vocabulary_too_small_for_the_bytes():
    with pytest.raises(ValueError, match="vocab_size must be at least 258, .* got 257"):
        train_tokenizer(TEXTS, 257)
