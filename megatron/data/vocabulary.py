"""What the data say about the model, before there is one (no torch: configuration checks ask too)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.config.data_paths import data_sources
from megatron.config.run import HUGGING_FACE, DataConfig
from megatron.data.errors import DataError
from megatron.data.tokenizers.huggingface import CONFIG, SPECIAL, special_token
from megatron.data.tokenizers.tokenizer import (
    FOLDER,
    Tokenizer,
    TokenizerChoice,
    TokenizerRecord,
    build_tokenizer,
    read_record,
    same_ids,
    tokenizer_files,
    wrote,
)

FILES = ("tokenizer_model", "vocab_file", "merge_file")
"""Fields that name what a tokenizer is read from."""

TOLD_SIZE = ("NullTokenizer", "TikTokenizer")
"""Tokenizers to which the vocabulary's size is told."""

ROLES = ("bos_token", "eos_token", "unk_token", "cls_token", "sep_token", "mask_token")
"""What else the token that fills up a sample may stand for."""


@dataclass(frozen=True)
class Known:
    """What is known of the tokenizer that wrote the data.

    Attributes:
        tokenizer_type: its type.
        vocab_size: number of its ids.
        eod: the id that ends a document.
        pad: the id that fills up a sample and means nothing else; None without one.
        prefix: a dataset that has a record of it; None where the flags say it.
    """

    tokenizer_type: str
    vocab_size: int
    eod: int
    pad: int | None = None
    prefix: str | None = None


def prefixes(data: DataConfig) -> tuple[str, ...]:
    """Every dataset that the splits read, once; none for generated tokens.

    Raises:
        UserError: when what names them cannot be understood.
    """
    sources = {} if data.mock_data else data_sources(data)
    return tuple(dict.fromkeys(prefix for source in sources.values() for prefix in source.blend.prefixes))


def vocabulary(data: DataConfig, vocab_size: int | None, weights: str | None = None) -> int:
    """Entries of the vocabulary: ``vocab_size`` if given, else what the tokenizer of the data has.

    Args:
        data: which files, and what is said of their tokenizer.
        vocab_size: if it is known.
        weights: where the model comes from that has a vocabulary of that size; None for a new one.

    Raises:
        DataError: when nothing says it, when ``vocab_size`` is too small for the tokenizer, or when the data
            were written with other tokenizers than one another, or than ``data`` says.
        UserError: as `prefixes`.
    """
    return fitting(known_tokenizer(data, vocab_size), vocab_size, weights)


def fitting(known: Known | None, vocab_size: int | None, weights: str | None = None) -> int:
    """Entries of the vocabulary: ``vocab_size`` if given, else what the ``known`` tokenizer has.

    Raises:
        DataError: when neither says it, or ``vocab_size`` is too small for the tokenizer.
    """
    size = known.vocab_size if vocab_size is None and known is not None else vocab_size
    if size is None:
        raise DataError(
            "nothing says how large the vocabulary is", "--vocab-size 50257", "--tokenizer-type ByteTokenizer"
        )
    if known is not None and size < known.vocab_size:
        seen = f"a vocabulary of {size} is too small for {known.tokenizer_type}, which has {known.vocab_size} ids"
        if weights is None:
            raise DataError(seen, f"--vocab-size {known.vocab_size}")
        raise DataError(f"{seen}: the weights in {weights} know no others", *_same_words(weights))
    return size


def _same_words(weights: str) -> tuple[str, ...]:
    """What to do where the data have ids that the weights of a model do not know."""
    if not weights.startswith(HUGGING_FACE):  # a checkpoint does not say by which flags its tokenizer is built
        return ("data written with the tokenizer of the weights", "new weights: drop --load, --save ANOTHER")
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {shlex.quote(weights[len(HUGGING_FACE) :])}"
    command = f"python tools/preprocess_data.py --input TEXT.jsonl --output-prefix PREFIX {tokenizer}"
    return (command, "new weights: drop --load")


def unused_entries(known: Known | None, vocab_size: int) -> str | None:
    """A note where the model's vocabulary is more than twice what the tokenizer of the data can write."""
    if known is None or vocab_size <= 2 * known.vocab_size:
        return None
    return (
        f"the vocabulary has {vocab_size:,} entries, but the data only the {known.vocab_size} ids of "
        f"{known.tokenizer_type}: the others cost memory and time (--vocab-size {known.vocab_size})"
    )


def unrecorded(data: DataConfig) -> str | None:
    """A note where some of the datasets have a record of their tokenizer, and others, which are trusted, have none."""
    bare = [prefix for prefix, record in _records(data).items() if record is None]
    if not bare or len(bare) == len(prefixes(data)):
        return None
    more = f" and {len(bare) - 1} more" if len(bare) > 1 else ""
    return f"nothing beside {bare[0]}{more} says which tokenizer wrote it; it is taken to be that of the other data"


def known_tokenizer(data: DataConfig, vocab_size: int | None) -> Known | None:
    """The tokenizer recorded beside the data, else the one that the flags name; None when neither is there.

    A run needs no more than the record: the tokenizer itself is built where flags name what it is read from, and
    compared with the record.

    Raises:
        DataError: when it cannot be built, or the data were written with other tokenizers than one another, or than
            ``data`` says.
        UserError: as `prefixes`.
    """
    records = {prefix: record for prefix, record in _records(data).items() if record is not None}
    _must_agree(records)
    named = named_tokenizer(data, vocab_size) if _has_files(data) or not records else None
    if not records:
        return None if named is None else _known(TokenizerRecord.of(named), named.files)
    prefix, record = max(records.items(), key=lambda item: item[1].special_ids is not None)  # older ones say less
    if named is not None and not wrote(prefix, named):
        flags = " ".join(f"--{name.replace('_', '-')} {getattr(data, name)}" for name in FILES if getattr(data, name))
        raise DataError(
            f"{prefix} was written with another {record.tokenizer_type} than that of {flags}: its ids are others",
            " ".join(f"--set data.{name}=null" for name in FILES if getattr(data, name)),
            "write the dataset anew with tools/preprocess_data.py",
        )
    return _known(record, {} if record.pad is None else _role_files(prefix), prefix)


def named_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer | None:
    """The tokenizer that the flags name; None where they do not say what it is read from.

    Raises:
        DataError: when it cannot be built.
    """
    if data.tokenizer_type is None:
        return None
    told = vocab_size if data.tokenizer_type in TOLD_SIZE else None
    if data.tokenizer_type not in ("ByteTokenizer", "NullTokenizer") and not _has_files(data):
        return None
    return build_tokenizer(TokenizerChoice.of(data, told))


def carried_tokenizer(data: DataConfig, vocab_size: int | None) -> Mapping[str, bytes]:
    """Contents by name of the files that a model trained on the data carries; none for generated tokens.

    See `tokenizer_files`.

    Raises:
        DataError: when the tokenizer cannot be built, or is not what was recorded.
        UserError: as `prefixes`.
    """
    recorded = next((prefix for prefix, record in _records(data).items() if record is not None), None)
    if recorded is not None:
        return tokenizer_files(recorded)
    named = None if data.mock_data else named_tokenizer(data, vocab_size)
    return {} if named is None else named.hugging_face_files()


def end_of_document(data: DataConfig, known: Known | None, vocab_size: int) -> int | None:
    """The id that ends a document; None where nothing says it.

    Raises:
        DataError: when ``eod_id`` is beyond the vocabulary, or not that of the tokenizer.
    """
    if data.eod_id is None:
        return None if known is None else known.eod
    if data.eod_id >= vocab_size:
        seen = f"--eod-id {data.eod_id}, but the vocabulary has ids 0..{vocab_size - 1}"
        raise DataError(seen, "--eod-id ID_THAT_ENDS_A_DOCUMENT")
    if known is not None and known.eod != data.eod_id:
        seen = f"--eod-id {data.eod_id}, but {known.tokenizer_type} of the data ends documents with {known.eod}"
        raise DataError(seen, f"--eod-id {known.eod}", "--set data.eod_id=null")
    return data.eod_id


def _has_files(data: DataConfig) -> bool:
    return any(getattr(data, name) is not None for name in FILES)


def _records(data: DataConfig) -> dict[str, TokenizerRecord | None]:
    """What is recorded beside each dataset, all of the type that the flags name where they name no more."""
    named = None if _has_files(data) else data.tokenizer_type
    return {prefix: read_record(prefix, named) for prefix in prefixes(data)}


def _must_agree(records: Mapping[str, TokenizerRecord]) -> None:
    """Raises DataError where two datasets were written with different tokenizers."""
    for prefix, record in records.items():
        first, other = next(iter(records.items()))
        same = (record.fingerprint, record.vocab_size, record.eod) == (other.fingerprint, other.vocab_size, other.eod)
        if not same and not same_ids(first, prefix):
            raise DataError(
                f"{first} was written with {_shown(other)}, but {prefix} with {_shown(record)}: "
                "the same id means different text in them",
                "write one of them anew with tools/preprocess_data.py",
            )


def _shown(record: TokenizerRecord) -> str:
    return f"{record.tokenizer_type} {record.fingerprint} of {record.vocab_size:,} ids, {record.eod} at the end"


def _known(record: TokenizerRecord, files: Mapping[str, bytes], prefix: str | None = None) -> Known:
    """What a record says; the files of its tokenizer say what its padding means besides."""
    pad = record.pad
    word = special_token(files, "pad_token")
    if pad == record.eod or (word is not None and any(special_token(files, role) == word for role in ROLES)):
        pad = None
    return Known(record.tokenizer_type, record.vocab_size, record.eod, pad, prefix)


def _role_files(prefix: str) -> dict[str, bytes]:
    """The files beside a dataset that give special tokens their roles, as far as there are any."""
    paths = [Path(f"{prefix}.{FOLDER}") / name for name in (CONFIG, SPECIAL)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}
