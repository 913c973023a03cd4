"""What the data say about the model, before there is one (no torch: configuration checks ask too)."""

from __future__ import annotations

from megatron.config.run import DataConfig
from megatron.data.errors import DataError
from megatron.data.tokenizer import Tokenizer, build_tokenizer, recorded_tokenizer


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
    tokenizer = _tokenizer(data, vocab_size)
    needed = None if tokenizer is None else tokenizer.vocab_size
    size = needed if vocab_size is None else vocab_size
    if size is None:
        raise DataError(
            "nothing says how large the vocabulary is", "--vocab-size 50257", "--tokenizer-type ByteTokenizer"
        )
    if needed is not None and size < needed:
        raise DataError(
            f"a vocabulary of {size} is too small for {type(tokenizer).__name__}, which has {needed} ids",
            f"--vocab-size {needed}",
        )
    return size


def unused_entries(data: DataConfig, vocab_size: int) -> str | None:
    """A note where the model's vocabulary is more than twice what the tokenizer of the data can write.

    Raises:
        DataError: when the record beside the data is damaged or names another tokenizer than ``data`` does.
    """
    tokenizer = None if data.mock_data else _tokenizer(data, vocab_size)
    if tokenizer is None or vocab_size <= 2 * tokenizer.vocab_size:
        return None
    return (
        f"the vocabulary has {vocab_size:,} entries, but the data only the {tokenizer.vocab_size} ids of "
        f"{type(tokenizer).__name__}: the others cost memory and time (--vocab-size {tokenizer.vocab_size})"
    )


def _tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer | None:
    """The one recorded beside the data, else the one named; None when neither says."""
    recorded = None if data.mock_data else recorded_tokenizer(dataset_prefix(data), data.tokenizer_type)
    if recorded is None and data.tokenizer_type is not None:
        return build_tokenizer(data.tokenizer_type, vocab_size)
    return recorded
