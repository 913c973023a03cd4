"""What tokenizers are made from, and where they are put."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.data.errors import DataError
from megatron.data.text.corpus import Document

SAMPLE_BYTES = 2_000_000


@dataclass(frozen=True)
class Learnt:
    """A tokenizer and the text it was made from.

    Attributes:
        files: of the tokenizer, by name.
        entries: of its vocabulary.
        documents: read.
        text_bytes: of their texts, in UTF-8.
        sample_bytes: of the first of them, up to `SAMPLE_BYTES`, which were encoded to see how well it compresses.
        sample_tokens: their ids.
    """

    files: Mapping[str, bytes]
    entries: int
    documents: int
    text_bytes: int
    sample_bytes: int
    sample_tokens: int


class Texts:
    """The texts of documents, one by one, and what went by.

    Attributes:
        documents: seen so far.
        text_bytes: of their texts, in UTF-8.
        sample: the first of them, of up to `SAMPLE_BYTES`.
        sample_bytes: of the sample.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = documents
        self.documents = self.text_bytes = self.sample_bytes = 0
        self.sample: list[str] = []

    def __iter__(self) -> Iterator[str]:
        """The texts.

        Raises:
            DataError: at the end, when all were empty.
        """
        for document in self._documents:
            self.documents += 1
            for text in document.texts:
                yield self._count(text.decode() if isinstance(text, bytes) else text)
        if not self.text_bytes:
            raise DataError(f"the documents of the input are all empty ({self.documents:,})", "another --input")

    def _count(self, text: str) -> str:
        size = len(text.encode())
        self.text_bytes += size
        if self.sample_bytes + size <= SAMPLE_BYTES or not self.sample:
            self.sample.append(text)
            self.sample_bytes += size
        return text


def check_folder(folder: Path) -> None:
    """Refuse a folder that has something in it.

    Raises:
        DataError: when it has.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        seen = f"{folder} is there already"
        seen += ", with a tokenizer" if (folder / "tokenizer.json").exists() else " and not an empty folder"
        raise DataError(seen, "another --output", f"remove {folder}")


def save_files(files: Mapping[str, bytes], folder: Path) -> None:
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
        for name, content in files.items():
            with open(growing / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        os.replace(growing, folder)
    finally:
        shutil.rmtree(growing, ignore_errors=True)
