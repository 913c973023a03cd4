"""Train a SentencePiece tokenizer, as Llama's."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron.data.errors import DataError
from megatron.data.text.corpus import Document
from megatron.data.tokenizers.learnt import Learnt, Texts
from megatron.data.tokenizers.sentencepiece_model import MODEL, SentencePieceTokenizer

MODEL_TYPES = ("bpe", "unigram")
LONGEST = 10_000  # characters of a sentence; longer lines, which SentencePiece would skip, are split
THREADS = 16  # constant, because the result depends on it
SMALLEST = 259  # the 256 bytes, <unk>, <s> and </s>


class Sentences:
    """Uniform random sample of at most ``most`` lines of the texts.

    Source: algorithm R of Vitter, "Random sampling with a reservoir", 1985.
    """

    def __init__(self, texts: Iterable[str], most: int) -> None:
        generator = random.Random(0)
        reservoir: list[tuple[int, str]] = []
        self.seen = 0
        for line in _lines(texts):
            if self.seen < most:
                reservoir.append((self.seen, line))
            elif (place := generator.randrange(self.seen + 1)) < most:
                reservoir[place] = (self.seen, line)
            self.seen += 1
        self.kept = [line for _, line in sorted(reservoir)]  # in the order of the text


def train_sentencepiece(
    documents: Iterable[Document], vocab_size: int, model_type: str, max_sentences: int
) -> tuple[Learnt, Sentences]:
    """Train a tokenizer of at most ``vocab_size`` pieces, including the 256 bytes, so that every text can be encoded.

    Text is not normalized and no space is removed. Digits are separate pieces; runs of spaces may be pieces. Equal
    texts give equal files.

    Args:
        documents: read once.
        vocab_size: number of pieces.
        model_type: ``bpe`` or ``unigram``.
        max_sentences: number of lines to train on, kept in memory.

    Returns:
        The tokenizer, and the lines it was trained on.

    Raises:
        DataError: if ``vocab_size`` is too small or there is no text.
    """
    check_size(vocab_size)
    texts = Texts(documents)
    sentences = Sentences(texts, max_sentences)
    content = _run_trainer(sentences.kept, vocab_size, model_type)
    tokenizer = SentencePieceTokenizer.of(content, Path(MODEL))
    tokens = tokenizer.encode_batch(texts.sample).ids.size
    files = {MODEL: content, **tokenizer.hugging_face_files()}
    trained = Learnt(files, tokenizer.vocab_size, texts.documents, texts.text_bytes, texts.sample_bytes, tokens)
    return trained, sentences


def check_size(vocab_size: int) -> None:
    """Raise DataError if the vocabulary is too small for the 256 bytes and the special tokens."""
    if vocab_size < SMALLEST:
        seen = f"a vocabulary of {vocab_size} is too small for the 256 bytes, <unk>, <s> and </s>"
        raise DataError(seen, f"--vocab-size {SMALLEST} or more")


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            yield from (line[start : start + LONGEST] for start in range(0, len(line), LONGEST))


def _run_trainer(sentences: list[str], vocab_size: int, model_type: str) -> bytes:
    file = io.BytesIO()
    try:
        _import_sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=file,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=8 * LONGEST,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        needed = re.search(r"smaller than required_chars. \d+ vs (\d+)", str(error))
        if needed is None:
            raise DataError(f"SentencePiece cannot train on this text: {error}", "another --input") from error
        seen = f"a vocabulary of {vocab_size} is too small for the bytes and the frequent characters of the text"
        raise DataError(seen, f"--vocab-size {needed[1]} or more") from error
    return file.getvalue()


def _import_sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError("sentencepiece is needed for --type sentencepiece", "pip install sentencepiece") from error
    return sentencepiece
