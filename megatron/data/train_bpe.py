"""A byte-level BPE tokenizer made from text, as GPT-2's was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import models, trainers

from megatron.data.corpus import Document, not_utf8
from megatron.data.errors import DataError
from megatron.data.huggingface import END_OF_DOCUMENT, byte_letters, byte_level_bpe, tokenizer_files

SMALLEST = 257  # the bytes and the end of a document
SAMPLE_BYTES = 2_000_000
FEWEST_PAIRS = 2  # a pair seen once is no pattern


@dataclass(frozen=True)
class Trained:
    """A tokenizer and the text it was made from.

    Attributes:
        tokenizer: of the library ``tokenizers``.
        documents: read.
        text_bytes: of their texts, in UTF-8.
        sample_bytes: of the first of them, up to `SAMPLE_BYTES`, which were encoded to see how well it compresses.
        sample_tokens: their ids.
    """

    tokenizer: tokenizers.Tokenizer
    documents: int
    text_bytes: int
    sample_bytes: int
    sample_tokens: int


class _Texts:
    """The texts of documents, one by one, and what went by."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = documents
        self.documents = self.text_bytes = self.sample_bytes = 0
        self.sample: list[str] = []

    def __iter__(self) -> Iterator[str]:
        for document in self._documents:
            self.documents += 1
            for text in document.texts:
                yield self._count(_unicode(text, document.source))

    def _count(self, text: str) -> str:
        size = len(text.encode())
        self.text_bytes += size
        if self.sample_bytes + size <= SAMPLE_BYTES or not self.sample:
            self.sample.append(text)
            self.sample_bytes += size
        return text


def train_bpe(documents: Iterable[Document], vocab_size: int, show_progress: bool = False) -> Trained:
    """A tokenizer of at most ``vocab_size`` entries: `END_OF_DOCUMENT`, the 256 bytes, and the most frequent merges.

    It depends on the texts alone, not on their order. Fewer entries come out where the text has no more pairs.

    Raises:
        DataError: when ``vocab_size`` is too small, a text is not Unicode, or there is no text.
    """
    check_size(vocab_size)
    tokenizer = byte_level_bpe(models.BPE(), words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=FEWEST_PAIRS,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=byte_letters(),
        show_progress=show_progress,
    )
    texts = _Texts(documents)
    tokenizer.train_from_iterator(iter(texts), trainer)
    if not texts.text_bytes:
        raise DataError(f"the documents of the input are all empty ({texts.documents:,})", "another --input")
    encoded = tokenizer.encode_batch_fast(texts.sample)
    tokens = sum(len(one.ids) for one in encoded)
    return Trained(tokenizer, texts.documents, texts.text_bytes, texts.sample_bytes, tokens)


def _unicode(text: str | bytes, source: str) -> str:
    try:
        if isinstance(text, bytes):
            return text.decode()
        text.encode()  # half of a surrogate pair is no character
        return text
    except UnicodeDecodeError as error:
        raise not_utf8(Path(source), error) from error
    except UnicodeEncodeError as error:
        raise DataError(f"{source}: {error}", "mend or remove this line") from error


def check_size(vocab_size: int) -> None:
    """Refuse a vocabulary that does not hold every byte.

    Raises:
        DataError: when it does not.
    """
    if vocab_size < SMALLEST:
        seen = f"a vocabulary of {vocab_size} does not hold the 256 bytes and {END_OF_DOCUMENT}"
        raise DataError(seen, f"--vocab-size {SMALLEST} or more")


def check_folder(folder: Path) -> None:
    """Refuse a folder that has something in it.

    Raises:
        DataError: when it has.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        seen = f"{folder} is there already"
        seen += ", with a tokenizer" if (folder / "tokenizer.json").exists() else " and not an empty folder"
        raise DataError(seen, "another --output", f"remove {folder}")


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Write the files of a tokenizer into a new folder, which appears when all are whole.

    Raises:
        DataError: when the folder is there and not empty.
        OSError: when the disk refuses.
    """
    check_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    growing = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    growing.mkdir()
    try:
        for name, content in tokenizer_files(tokenizer).items():
            with open(growing / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        os.replace(growing, folder)
    finally:
        shutil.rmtree(growing, ignore_errors=True)
