"""What the data say about the model, before there is one (no torch: configuration checks ask too)."""

from __future__ import annotations

from typing import NamedTuple

from megatron.config.run import DataConfig
from megatron.data.errors import DataError
from megatron.data.tokenizer import TokenizerChoice, build_tokenizer, read_record


class _Known(NamedTuple):
    """What is known of the data's tokenizer."""

    tokenizer_type: str
    vocab_size: int


def dataset_prefix(data: DataConfig) -> str:
    """Path of the dataset's files without ``.bin``.

    Raises:
        DataError: when ``data`` does not name exactly one.
    """
    if len(data.data_path) != 1:
        seen = f"--data-path names {len(data.data_path)} datasets, and a run reads one"
        raise DataError(seen, "--data-path PREFIX", "--mock-data")
    return data.data_path[0]


def vocabulary(data: DataConfig, vocab_size: int | None) -> int:
    """Entries of the vocabulary: ``vocab_size`` if given, else what the tokenizer of the data has.

    Raises:
        DataError: when nothing says it, when ``vocab_size`` is too small for the tokenizer, or when the data
            were written with another tokenizer than ``data`` says.
    """
    known = _known(data, vocab_size)
    needed = None if known is None else known.vocab_size
    size = needed if vocab_size is None else vocab_size
    if size is None:
        raise DataError(
            "nothing says how large the vocabulary is", "--vocab-size 50257", "--tokenizer-type ByteTokenizer"
        )
    if known is not None and size < known.vocab_size:
        raise DataError(
            f"a vocabulary of {size} is too small for {known.tokenizer_type}, which has {known.vocab_size} ids",
            f"--vocab-size {known.vocab_size}",
        )
    return size


def unused_entries(data: DataConfig, vocab_size: int) -> str | None:
    """A note where the model's vocabulary is more than twice what the tokenizer of the data can write.

    Raises:
        DataError: when the record beside the data is damaged or names another tokenizer than ``data`` does.
    """
    known = None if data.mock_data else _known(data, vocab_size)
    if known is None or vocab_size <= 2 * known.vocab_size:
        return None
    return (
        f"the vocabulary has {vocab_size:,} entries, but the data only the {known.vocab_size} ids of "
        f"{known.tokenizer_type}: the others cost memory and time (--vocab-size {known.vocab_size})"
    )


def _known(data: DataConfig, vocab_size: int | None) -> _Known | None:
    """The tokenizer recorded beside the data, else the one named if its name says its size; None when neither does.

    A run needs no more than that: the tokenizer itself need not be there.
    """
    record = None if data.mock_data else read_record(dataset_prefix(data), data.tokenizer_type)
    if record is not None:
        return _Known(record.tokenizer_type, record.vocab_size)
    if data.tokenizer_type in (None, "HuggingFaceTokenizer"):
        return None
    size = vocab_size if data.tokenizer_type == "NullTokenizer" else None
    tokenizer = build_tokenizer(TokenizerChoice(data.tokenizer_type, vocab_size=size))
    return _Known(data.tokenizer_type, tokenizer.vocab_size)
