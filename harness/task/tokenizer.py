"""A small byte-level BPE tokenizer, trained on the spot."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from harness.runtime.cpu_standins import make_transformers_importable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
_ALPHABET_SIZE = 256


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """A tokenizer of exactly `vocab_size` tokens: <pad> is 0, <eos> is 1, then 256 bytes, then merges found in `texts`.

    Any text encodes, and decodes back. Each digit is a token of its own. Where `texts` give too few merges,
    special tokens <unused0>, <unused1>, ... fill up, so that every id a model samples is a token.
    The same texts give the same tokenizer. Raises ValueError if vocab_size is too small for the bytes.
    """
    smallest = _ALPHABET_SIZE + 2
    if vocab_size < smallest:
        raise ValueError(f"vocab_size is {vocab_size}: it must be at least {smallest}, for {PAD}, {EOS} and every byte")

    make_transformers_importable()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<unused{i}>" for i in range(missing)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)
