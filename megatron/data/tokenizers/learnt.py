"""Texts that tokenizers are trained on, and the folder they are saved in."""

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
    """Trained tokenizer and statistics of its text."""

    files: Mapping[str, bytes]  # of the tokenizer, by name
    entries: int  # vocabulary size
    documents: int
    text_bytes: int  # UTF-8 bytes of all texts
    sample_bytes: int  # UTF-8 bytes of the first texts, up to `SAMPLE_BYTES`, encoded to measure the compression
    sample_tokens: int  # ids of the sample


class Texts:
    """Iterator over the texts of documents that collects statistics."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = documents
        self.documents = 0
        self.text_bytes = 0  # in UTF-8
        self.sample: list[str] = []  # the first texts, up to `SAMPLE_BYTES`
        self.sample_bytes = 0

    def __iter__(self) -> Iterator[str]:
        """Yield the texts.

        Raises:
            DataError: at the end, if all were empty.
        """
        for document in self._documents:
            self.documents += 1
            for text in document.texts:
                if isinstance(text, bytes):
                    text = text.decode()
                size = len(text.encode())
                self.text_bytes += size
                if self.sample_bytes + size <= SAMPLE_BYTES or not self.sample:
                    self.sample.append(text)
                    self.sample_bytes += size
                yield text
        if not self.text_bytes:
            raise DataError(f"the documents of the input are all empty ({self.documents:,})", "another --input")


def check_folder(folder: Path) -> None:
    """Raise DataError if a folder exists and is not empty."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        content = "holds a tokenizer" if (folder / "tokenizer.json").exists() else "is not an empty folder"
        raise DataError(f"{folder} already exists and {content}", "another --output", f"remove {folder}")


def save_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files of a tokenizer into a new folder, atomically.

    Raises:
        DataError: if the folder exists and is not empty.
        OSError: if it cannot be written.
    """
    check_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    temporary.mkdir()
    try:
        for name, content in files.items():
            with open(temporary / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
