"""Vocabulary size, end-of-document id and padding id, from the tokenizer records beside the data.

The records of all datasets must agree with one another and with the tokenizer that the flags name. No torch:
configuration checks use this file too.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron.config.data import DataConfig
from megatron.config.data_paths import data_sources
from megatron.config.files import SMALL_FILE_BYTES
from megatron.config.schemes import WEIGHTS_PREFIXES, split_scheme
from megatron.data.errors import DataError
from megatron.data.prefixes import local_prefix, use_data_store
from megatron.data.tokenizers.base import Tokenizer, read_tokenizer_file
from megatron.data.tokenizers.huggingface import CHAT_TEMPLATE, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, find_special_token
from megatron.data.tokenizers.tokenizer import (
    FILES_SUFFIX,
    TokenizerOptions,
    TokenizerRecord,
    build_tokenizer,
    have_same_ids,
    load_recorded_tokenizer,
    read_tokenizer_record,
    was_written_with,
)

NEEDS_VOCAB_SIZE = ("NullTokenizer", "TikTokenizer")
"""Tokenizers that need the vocabulary size as an argument."""

PAD_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "cls_token", "sep_token", "mask_token")
"""Other roles that the padding token may have."""


def resolve_vocab_size(data: DataConfig, vocab_size: int | None, weights: str | None = None) -> int:
    """Return the vocabulary size: ``vocab_size`` if given, as by the source of ``weights``, else that of the tokenizer.

    Raises:
        DataError: when the size is unknown or too small for the tokenizer, or when datasets were written with different
            tokenizers, or another than ``data`` names.
        UserError: when the data path options are invalid.
    """
    return check_vocab_size(find_tokenizer_info(data, vocab_size), vocab_size, weights)


def check_vocab_size(known: TokenizerRecord | None, vocab_size: int | None, weights: str | None = None) -> int:
    """Return the vocabulary size: ``vocab_size`` if given, else that of the ``known`` tokenizer."""
    size = known.vocab_size if vocab_size is None and known is not None else vocab_size
    if size is None:
        raise DataError("the vocabulary size is unknown", "--vocab-size 50257", "--tokenizer-type ByteTokenizer")
    if known is not None and size < known.vocab_size:
        seen = f"a vocabulary of {size} is too small for {known.tokenizer_type}, which has {known.vocab_size} ids"
        if weights is None:
            raise DataError(seen, f"--vocab-size {known.vocab_size}")
        seen += f": the weights in {weights} have no more entries"
        if not weights.startswith(WEIGHTS_PREFIXES):  # a checkpoint does not record the flags of its tokenizer
            other_data = "data written with the tokenizer of the weights"
            raise DataError(seen, other_data, "new weights: drop --load, --save ANOTHER")
        model = shlex.quote(split_scheme(weights)[1])
        command = (
            "python tools/preprocess_data.py --input TEXT.jsonl --output-prefix PREFIX "
            f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}"
        )
        raise DataError(seen, command, "new weights: drop --load")
    return size


def note_unused_entries(known: TokenizerRecord | None, vocab_size: int) -> str | None:
    """Return a note if the model's vocabulary is more than twice that of the data's tokenizer."""
    if known is None or vocab_size <= 2 * known.vocab_size:
        return None
    return (
        f"the vocabulary has {vocab_size:,} entries, but the data only the {known.vocab_size} ids of "
        f"{known.tokenizer_type}: the others cost memory and time (--vocab-size {known.vocab_size})"
    )


def note_missing_records(data: DataConfig) -> str | None:
    """Return a note if only some of the datasets have a tokenizer record; the others are trusted."""
    records = _records(data)
    missing = [prefix for prefix, record in records.items() if record is None]
    if not 0 < len(missing) < len(records):
        return None
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"no tokenizer is recorded beside {missing[0]}{more}; that of the other data is assumed"


def find_tokenizer_info(data: DataConfig, vocab_size: int | None) -> TokenizerRecord | None:
    """Return the record of the tokenizer beside the data, else of the one that the flags name; None without either.

    The record alone is enough. If flags name a tokenizer's files, that tokenizer is built and compared with the record.
    A padding id that has another role too is left out.

    Raises:
        DataError: when it cannot be built, or datasets were written with different tokenizers, or another than ``data``
            names.
        UserError: when the data path options are invalid.
    """
    records = [(prefix, record) for prefix, record in _records(data).items() if record is not None]
    for prefix, record in records[1:]:
        first, other = records[0]
        same = (record.fingerprint, record.vocab_size, record.eod) == (other.fingerprint, other.vocab_size, other.eod)
        if not same and not have_same_ids(first, prefix):
            raise DataError(
                f"{first} was written with {_describe(other)}, but {prefix} with {_describe(record)}: "
                "the same id means different text in them",
                "write one of them again with tools/preprocess_data.py",
            )
    named = tokenizer_from_flags(data, vocab_size) if _tokenizer_files(data) or not records else None
    if not records:
        return None if named is None else _without_shared_pad(TokenizerRecord.of(named), named.files)
    prefix, record = max(records, key=lambda item: item[1].special_ids is not None)  # older ones have fewer fields
    if named is not None and not was_written_with(prefix, named):
        given = _tokenizer_files(data)
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
        raise DataError(
            f"{prefix} was written with another {record.tokenizer_type} than that of {flags}: its ids are others",
            " ".join(f"--set data.{name}=null" for name in given),
            "write the dataset again with tools/preprocess_data.py",
        )
    folder = Path(f"{local_prefix(prefix)}.{FILES_SUFFIX}")
    paths = [folder / name for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)]  # they assign roles to special tokens
    return _without_shared_pad(record, {path.name: read_tokenizer_file(path) for path in paths if path.is_file()})


def _describe(record: TokenizerRecord) -> str:
    return f"{record.tokenizer_type} {record.fingerprint} of {record.vocab_size:,} ids, {record.eod} at the end"


def tokenizer_from_flags(data: DataConfig, vocab_size: int | None) -> Tokenizer | None:
    """Build the tokenizer that the flags name; None if they do not name its files."""
    has_no_files = data.tokenizer_type in ("ByteTokenizer", "NullTokenizer")
    if data.tokenizer_type is None or not (has_no_files or _tokenizer_files(data)):
        return None
    return build_tokenizer(TokenizerOptions.of(data, vocab_size if data.tokenizer_type in NEEDS_VOCAB_SIZE else None))


def find_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer | None:
    """Return the tokenizer recorded beside the data, else the one that the flags name; None without either."""
    recorded = next((prefix for prefix, record in _records(data).items() if record is not None), None)
    return tokenizer_from_flags(data, vocab_size) if recorded is None else load_recorded_tokenizer(recorded)


def tokenizer_files_to_save(data: DataConfig, vocab_size: int | None) -> Mapping[str, bytes]:
    """Return the tokenizer files, by name, that are saved with a model trained on the data; none for generated data."""
    recorded = next((prefix for prefix, record in _records(data).items() if record is not None), None)
    if recorded is not None and (tokenizer := load_recorded_tokenizer(recorded)) is not None:
        return tokenizer.hugging_face_files()
    named = None if data.mock_data else tokenizer_from_flags(data, vocab_size)
    files = {} if named is None else named.hugging_face_files()
    if files and data.chat_template is not None:
        files[CHAT_TEMPLATE] = read_tokenizer_file(Path(data.chat_template), limit=SMALL_FILE_BYTES)
    return files


def find_eod_id(data: DataConfig, known: TokenizerRecord | None, vocab_size: int) -> int | None:
    """Return the id that ends a document; None if unknown."""
    if data.eod_id is None:
        return None if known is None else known.eod
    if data.eod_id >= vocab_size:
        seen = f"--eod-id {data.eod_id}, but the vocabulary has ids 0..{vocab_size - 1}"
        raise DataError(seen, "--eod-id ID_THAT_ENDS_A_DOCUMENT")
    if known is not None and known.eod != data.eod_id:
        seen = f"--eod-id {data.eod_id}, but {known.tokenizer_type} of the data ends documents with {known.eod}"
        raise DataError(seen, f"--eod-id {known.eod}", "--set data.eod_id=null")
    return data.eod_id


def _tokenizer_files(data: DataConfig) -> dict[str, str]:
    """Return the fields that name the files of a tokenizer, with their values."""
    given = {name: getattr(data, name) for name in ("tokenizer_model", "vocab_file", "merge_file")}
    return {name: value for name, value in given.items() if value is not None}


def _records(data: DataConfig) -> dict[str, TokenizerRecord | None]:
    """Read the record beside each dataset, which must have the tokenizer type of the flags if they name only a type."""
    named = None if _tokenizer_files(data) else data.tokenizer_type
    prefixes = dict.fromkeys(prefix for source in data_sources(data).values() for prefix in source.blend.prefixes)
    use_data_store(data, prefixes)
    return {prefix: read_tokenizer_record(prefix, named) for prefix in prefixes}


def _without_shared_pad(record: TokenizerRecord, files: Mapping[str, bytes]) -> TokenizerRecord:
    """Return a record without its padding id if that ends documents, or by the ``files`` has another role too."""
    word = find_special_token(files, "pad_token")
    is_shared = word is not None and any(find_special_token(files, role) == word for role in PAD_TOKEN_ROLES)
    return replace(record, pad=None) if is_shared or record.pad == record.eod else record
