import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

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


def test_size_special_tokens_and_merges_in_memory_and_from_a_folder(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    for tokenizer in (TOKENIZER, AutoTokenizer.from_pretrained(tmp_path)):
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, len(tokenizer)) == (
            0,
            1,
            None,
            512,
        )
        assert tokenizer.decode([0, *tokenizer.encode("a 1"), 1], skip_special_tokens=True) == "a 1"
        assert tokenizer.encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])
    text = "How many apples does Ana have?"
    assert len(TOKENIZER.encode(text)) < len(text) / 2
    assert len(TOKENIZER.encode("2024")) == 4, "digits stay apart"


def test_same_texts_same_tokenizer():
    same = train_tokenizer(iter(TEXTS), 512)
    assert same.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    other = train_tokenizer(["other words entirely"], 512)
    assert other.backend_tokenizer.to_str() != TOKENIZER.backend_tokenizer.to_str()


def test_few_texts_are_filled_up_with_special_tokens():
    small = train_tokenizer(["aab"], 300)
    assert len(small) == 300
    assert small.decode([299, *small.encode("aab 9")], skip_special_tokens=True) == "aab 9"


def test_vocabulary_too_small_for_the_bytes():
    with pytest.raises(ValueError, match="vocab_size must be at least 258, .* got 257"):
        train_tokenizer(TEXTS, 257)
