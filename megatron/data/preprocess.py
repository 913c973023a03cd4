"""Documents to token files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.corpus import Document
from megatron.data.errors import DataError
from megatron.data.indexed import IndexedDatasetWriter, id_dtype
from megatron.data.tokenizer import RECORD, Tokenizer, TokenizerRecord


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
            writer = IndexedDatasetWriter(output_prefix(prefix, key), id_dtype(tokenizer.vocab_size))
            writer.add_file(RECORD, TokenizerRecord.of(tokenizer).to_bytes())
            writers.append(stack.enter_context(writer))
        for document in documents:
            for text, writer in zip(document.texts, writers):
                writer.add_document(_encode(tokenizer, text, append_eod, document.source))
            progress.documents += 1
            progress.input_bytes += document.num_bytes
            progress.tokens = sum(w.num_tokens for w in writers)
            report(progress)
        if not progress.tokens:
            raise DataError(f"the documents of the input are all empty ({progress.documents:,})", "another --input")
    return progress


def _encode(tokenizer: Tokenizer, text: str | bytes, append_eod: bool, source: str) -> NDArray[Any]:
    try:
        ids = tokenizer.encode(text)
    except ValueError as error:
        raise DataError(f"{source}: {error}") from error
    return np.append(ids, tokenizer.eod) if append_eod and ids.size else ids
