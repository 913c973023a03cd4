"""Train a byte-level BPE tokenizer, as GPT-2's."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import models, trainers

from megatron.data.errors import DataError
from megatron.data.text.corpus import Document
from megatron.data.tokenizers.huggingface import END_OF_DOCUMENT, byte_letters, byte_level_bpe, tokenizer_files
from megatron.data.tokenizers.learnt import Learnt, Texts

SMALLEST = 257  # the bytes and the end-of-document token
FEWEST_PAIRS = 2  # minimum frequency of a merge


def train_bpe(documents: Iterable[Document], vocab_size: int) -> Learnt:
    """Train a tokenizer of at most ``vocab_size`` entries: the 256 bytes, `END_OF_DOCUMENT` and frequent merges.

    The result depends on the texts but not on their order. It is smaller if the text has no more pairs to merge.

    Raises:
        DataError: if ``vocab_size`` is too small or there is no text.
    """
    check_size(vocab_size)
    tokenizer = byte_level_bpe(models.BPE(), words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=FEWEST_PAIRS,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=byte_letters(),
        show_progress=False,
    )
    texts = Texts(documents)
    tokenizer.train_from_iterator(iter(texts), trainer)
    encoded = tokenizer.encode_batch_fast(texts.sample)
    tokens = sum(len(one.ids) for one in encoded)
    files, entries = tokenizer_files(tokenizer), tokenizer.get_vocab_size()
    return Learnt(files, entries, texts.documents, texts.text_bytes, texts.sample_bytes, tokens)


def check_size(vocab_size: int) -> None:
    """Raise DataError if the vocabulary is too small for the 256 bytes and the end-of-document token."""
    if vocab_size < SMALLEST:
        seen = f"a vocabulary of {vocab_size} is too small for the 256 bytes and {END_OF_DOCUMENT}"
        raise DataError(seen, f"--vocab-size {SMALLEST} or more")
