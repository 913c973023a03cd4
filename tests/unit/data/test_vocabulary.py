"""How large the vocabulary is, and who says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.run import DataConfig
from megatron.data.errors import DataError
from megatron.data.tokenizer import RECORD, NullTokenizer, TokenizerRecord
from megatron.data.vocabulary import dataset_prefix, unused_entries, vocabulary


@pytest.fixture
def recorded(tmp_path: Path) -> DataConfig:
    (tmp_path / f"x.{RECORD}").write_bytes(TokenizerRecord.of(NullTokenizer(500)).to_bytes())
    return DataConfig(data_path=(str(tmp_path / "x"),))


def test_the_record_says_it_and_a_larger_size_may_be_asked_for(recorded: DataConfig) -> None:
    assert [vocabulary(recorded, size) for size in (None, 500, 512)] == [500, 500, 512]
    with pytest.raises(DataError, match=r"499 is too small for NullTokenizer.*\n  fix: --vocab-size 500"):
        vocabulary(recorded, 499)


def test_entries_that_no_text_can_use(recorded: DataConfig, tmp_path: Path) -> None:
    """Padding and a few ids for later are meant; most of a vocabulary is not."""
    assert [unused_entries(recorded, size) for size in (500, 512, 1000)] == [None, None, None]
    assert "1,001 entries, but the data only the 500 ids of NullTokenizer" in (unused_entries(recorded, 1001) or "")
    assert unused_entries(DataConfig(data_path=(str(tmp_path / "no record"),)), 10**6) is None
    assert unused_entries(DataConfig(mock_data=True, tokenizer_type="ByteTokenizer"), 10**6) is None  # uses them all


@pytest.mark.parametrize("mock", [True, False])
def test_without_a_record_the_flags_say_it(tmp_path: Path, mock: bool) -> None:
    path = () if mock else (str(tmp_path / "x"),)
    bare = DataConfig(mock_data=mock, data_path=path)
    assert vocabulary(bare, 77) == 77
    assert vocabulary(DataConfig(mock_data=mock, data_path=path, tokenizer_type="ByteTokenizer"), None) == 257
    assert vocabulary(DataConfig(mock_data=mock, data_path=path, tokenizer_type="NullTokenizer"), 99) == 99
    with pytest.raises(DataError, match="nothing says how large"):
        vocabulary(bare, None)
    with pytest.raises(DataError, match="must be told"):
        vocabulary(DataConfig(mock_data=mock, data_path=path, tokenizer_type="NullTokenizer"), None)


def test_training_needs_the_record_and_not_the_tokenizer(tmp_path: Path) -> None:
    facts = TokenizerRecord("HuggingFaceTokenizer", 50257, 50256, "0" * 16)
    (tmp_path / f"x.{RECORD}").write_bytes(facts.to_bytes())
    data = DataConfig(data_path=(str(tmp_path / "x"),), tokenizer_type="HuggingFaceTokenizer")
    assert vocabulary(data, None) == 50257
    with pytest.raises(DataError, match="50000 is too small for HuggingFaceTokenizer, which has 50257 ids"):
        vocabulary(data, 50000)
    bare = DataConfig(data_path=(str(tmp_path / "y"),), tokenizer_type="HuggingFaceTokenizer")
    assert vocabulary(bare, 77) == 77
    with pytest.raises(DataError, match="nothing says how large the vocabulary is\n  fix: --vocab-size"):
        vocabulary(bare, None)


@pytest.mark.parametrize("paths", [(), ("a", "b")])
def test_a_run_reads_one_dataset(paths: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=f"names {len(paths)} datasets"):
        dataset_prefix(DataConfig(data_path=paths))
