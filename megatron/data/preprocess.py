"""Documents to token files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.corpus import Document, not_utf8
from megatron.data.errors import DataError
from megatron.data.indexed import IndexedDatasetWriter, id_dtype
from megatron.data.tokenizer import FOLDER, RECORD, Tokenizer, TokenizerRecord

BATCH_BYTES = 1 << 20  # input that is encoded at once: enough to keep all threads of a tokenizer busy


@dataclass
class Progress:
    """What has been read and written so far: input bytes, and tokens over all keys."""

    documents: int = 0
    input_bytes: int = 0
    tokens: int = 0


def output_prefix(prefix: str, key: str) -> str:
    """Where Megatron-LM's preprocessing puts the documents of a JSON key."""
    return f"{prefix}_{key}_document"


def write_dataset(
    documents: Iterable[Document],
    keys: Sequence[str],
    prefix: str,
    tokenizer: Tokenizer,
    append_eod: bool,
    report: Callable[[Progress], None],
) -> Progress:
    """Write ``<prefix>_<key>_document.{bin,idx,tokens.json}`` for every key; ``report`` is called after every document.

    The files of a tokenizer that has any are copied to ``<prefix>_<key>_document.tokenizer/``.
    An empty text stays a document, of no sequence, and gets no end-of-document id.

    Raises:
        DataError: when there is no document, or one cannot be encoded; no file is left under its name.
    """
    if len(set(keys)) < len(keys):
        raise DataError(f"a key is named twice: {', '.join(keys)}", "--json-keys text")
    progress = Progress()
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writers = []
        for key in keys:
            writers.append(stack.enter_context(_open(output_prefix(prefix, key), tokenizer)))
        for batch in _batches(documents):
            encoded = [_encode(tokenizer, batch, column, append_eod) for column in range(len(keys))]
            for document, *texts in zip(batch, *encoded):
                for writer, ids in zip(writers, texts):
                    writer.add_document(ids)
                progress.documents += 1
                progress.input_bytes += document.num_bytes
                progress.tokens = sum(w.num_tokens for w in writers)
                report(progress)
        if not progress.tokens:
            raise DataError(f"the documents of the input are all empty ({progress.documents:,})", "another --input")
    return progress


def _open(prefix: str, tokenizer: Tokenizer) -> IndexedDatasetWriter:
    """A writer that will also leave what is needed to know the tokenizer."""
    writer = IndexedDatasetWriter(prefix, id_dtype(tokenizer.vocab_size))
    writer.add_file(RECORD, TokenizerRecord.of(tokenizer).to_bytes())
    for name, content in tokenizer.files.items():
        writer.add_file(f"{FOLDER}/{name}", content)
    return writer


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents in runs that took about `BATCH_BYTES` of input."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.num_bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def _encode(tokenizer: Tokenizer, batch: Sequence[Document], column: int, append_eod: bool) -> list[NDArray[Any]]:
    try:
        ids, lengths = tokenizer.encode_batch([document.texts[column] for document in batch])
    except ValueError:
        _blame(tokenizer, batch, column)
        raise
    texts = np.split(ids, np.cumsum(lengths))[:-1]
    return [np.append(text, tokenizer.eod) if append_eod and text.size else text for text in texts]


def _blame(tokenizer: Tokenizer, batch: Sequence[Document], column: int) -> None:
    """Encode one by one what could not be encoded together, and name the document that is at fault."""
    for document in batch:
        try:
            tokenizer.encode(document.texts[column])
        except UnicodeDecodeError as error:
            raise not_utf8(Path(document.source), error) from error
        except ValueError as error:
            raise DataError(f"{document.source}: {error}") from error
