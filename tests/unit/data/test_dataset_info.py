"""The size of the vocabulary and its sources."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from megatron.config.data import DataConfig
from megatron.data.dataset_info import (
    find_eod_id,
    find_tokenizer_info,
    note_missing_records,
    note_unused_entries,
    resolve_vocab_size,
    tokenizer_files_to_save,
)
from megatron.data.errors import DataError
from megatron.data.tokenizers.huggingface import ByteTokenizer, HuggingFaceTokenizer, NullTokenizer, byte_tokenizer
from megatron.data.tokenizers.huggingface import make_tokenizer_files as files_of
from megatron.data.tokenizers.tokenizer import FILES_SUFFIX, TokenizerRecord
from tests.unit.data.made_tokenizers import record, write_files

HF = "HuggingFaceTokenizer"
FACTS = TokenizerRecord(HF, 257, 256, "0" * 16)


@pytest.fixture
def recorded(tmp_path: Path) -> DataConfig:
    return DataConfig(data_path=(record(tmp_path / "x", NullTokenizer(500)),))


def test_the_record_gives_the_vocabulary_size_and_flags_can_enlarge_it(recorded: DataConfig) -> None:
    assert [resolve_vocab_size(recorded, size) for size in (None, 500, 512)] == [500, 500, 512]
    with pytest.raises(DataError, match=r"499 is too small for NullTokenizer.*\n  fix: --vocab-size 500"):
        resolve_vocab_size(recorded, 499)


def test_weights_with_fewer_ids_are_not_enlarged(recorded: DataConfig) -> None:
    with pytest.raises(DataError, match=r"499 is too small for .*: the weights in hf:theirs") as error:
        resolve_vocab_size(recorded, 499, "hf:theirs")
    assert "--vocab-size" not in str(error.value)
    assert f"--output-prefix PREFIX --tokenizer-type {HF} --tokenizer-model theirs" in str(error.value)
    with pytest.raises(DataError, match="fix: data written with the tokenizer of the weights"):
        resolve_vocab_size(recorded, 499, "runs/a/checkpoints")


def test_names_of_one_tokenizer_and_how_texts_were_read_do_not_matter(tmp_path: Path) -> None:
    names = {"a": ("SentencePieceTokenizer", {}), "b": ("Llama2Tokenizer", {"parse_special_tokens": True})}
    paths = tuple(
        record(tmp_path / name, TokenizerRecord(kind, 500, 2, "same", None, {"</s>": 2}, settings))
        for name, (kind, settings) in names.items()
    )
    for named in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        assert resolve_vocab_size(DataConfig(data_path=paths, tokenizer_type=named), None) == 500
    with pytest.raises(DataError, match="was written with SentencePieceTokenizer, not with GPT2BPETokenizer"):
        resolve_vocab_size(DataConfig(data_path=paths, tokenizer_type="GPT2BPETokenizer"), None)


def test_entries_that_no_text_can_use(recorded: DataConfig) -> None:
    """Padding and a few ids for later are meant; most of a vocabulary is not."""
    known = find_tokenizer_info(recorded, None)
    assert [note_unused_entries(known, size) for size in (500, 512, 1000)] == [None, None, None]
    assert "1,001 entries, but the data only the 500 ids of NullTokenizer" in (note_unused_entries(known, 1001) or "")
    assert note_unused_entries(None, 10**6) is None


@pytest.mark.parametrize("mock", [True, False])
def test_without_a_record_flags_give_the_vocabulary_size(tmp_path: Path, mock: bool) -> None:
    bare = DataConfig(mock_data=mock, data_path=() if mock else (str(tmp_path / "x"),))
    null = replace(bare, tokenizer_type="NullTokenizer")
    assert resolve_vocab_size(bare, 77) == 77
    assert resolve_vocab_size(replace(bare, tokenizer_type="ByteTokenizer"), None) == 257
    assert resolve_vocab_size(null, 99) == 99
    for data, message in ((bare, "vocabulary size is unknown\n  fix: --vocab-size"), (null, "needs --vocab-size")):
        with pytest.raises(DataError, match=message):
            resolve_vocab_size(data, None)


# --- several datasets ---


def test_datasets_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    a, b = (record(tmp_path / name, ByteTokenizer()) for name in "ab")
    c = record(tmp_path / "c", NullTokenizer(9))
    assert resolve_vocab_size(DataConfig(data_path=(a, b)), None) == 257
    sentence = f"{a} was written with ByteTokenizer .* of 257 ids, 256 at the end, but {c} with NullTokenizer .* of 9"
    for data in (DataConfig(data_path=("1", a, "1", b, "1", c)), DataConfig(train_data_path=(a,), test_data_path=(c,))):
        with pytest.raises(DataError, match=sentence):
            resolve_vocab_size(data, 300)


def test_a_dataset_without_a_record_is_accepted_with_a_note(tmp_path: Path) -> None:
    a, b, c = record(tmp_path / "a", ByteTokenizer()), str(tmp_path / "b"), str(tmp_path / "c")
    mixed = DataConfig(train_data_path=("1", b, "1", a, "1", b), test_data_path=(c,))
    assert resolve_vocab_size(mixed, None) == 257
    assert f"no tokenizer is recorded beside {b} and 1 more" in (note_missing_records(mixed) or "")
    assert note_missing_records(DataConfig(data_path=(a,))) is None
    assert note_missing_records(DataConfig(data_path=(b, c))) is None, "no dataset has one"


# --- flags and records ---


@pytest.fixture
def straight(tmp_path: Path) -> str:
    """A Hugging Face tokenizer whose ids are bytes."""
    return str(write_files(tmp_path / "straight", files_of(byte_tokenizer())))


def test_the_tokenizer_that_flags_name_is_compared_with_the_record(tmp_path: Path, straight: str) -> None:
    tree = json.loads(byte_tokenizer().to_str())
    words = tree["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    turned = write_files(tmp_path / "turned", files_of(tokenizers.Tokenizer.from_str(json.dumps(tree))))
    prefix = record(tmp_path / "x", HuggingFaceTokenizer(straight))
    data = DataConfig(data_path=(prefix,), tokenizer_type=HF, tokenizer_model=straight)
    assert resolve_vocab_size(data, 300) == 300
    with pytest.raises(DataError, match=f"{prefix} was written with another {HF} than that of") as printed:
        resolve_vocab_size(replace(data, tokenizer_model=str(turned)), 300)
    assert "fix: --set data.tokenizer_model=null | " in str(printed.value)
    assert resolve_vocab_size(replace(data, tokenizer_model=None), 300) == 300


def test_without_a_record_the_named_tokenizer_is_used(tmp_path: Path, straight: str) -> None:
    bare = DataConfig(data_path=(str(tmp_path / "x"),))
    data = replace(bare, tokenizer_type=HF, tokenizer_model=straight)
    assert resolve_vocab_size(data, None) == 257
    assert find_tokenizer_info(data, None) == TokenizerRecord.of(HuggingFaceTokenizer(straight))
    assert tokenizer_files_to_save(data, None) == {file.name: file.read_bytes() for file in Path(straight).iterdir()}
    assert (find_tokenizer_info(bare, None), dict(tokenizer_files_to_save(bare, None))) == (None, {})
    assert tokenizer_files_to_save(DataConfig(mock_data=True, tokenizer_type="ByteTokenizer"), None) == {}


def test_the_end_of_a_document() -> None:
    """From the flag or from the tokenizer, which must agree."""
    known, silent = TokenizerRecord.of(ByteTokenizer()), DataConfig(data_path=("x",))
    stated = replace(silent, eod_id=256)
    assert [find_eod_id(silent, who, 300) for who in (None, known)] == [None, 256]
    assert [find_eod_id(stated, who, 300) for who in (None, known)] == [256, 256]
    with pytest.raises(DataError, match=r"--eod-id 256, but the vocabulary has ids 0\.\.99"):
        find_eod_id(stated, None, 100)
    message = r"ByteTokenizer of the data ends documents with 256\n  fix: --eod-id 256 \| --set"
    with pytest.raises(DataError, match=message):
        find_eod_id(replace(stated, eod_id=0), known, 300)


@pytest.mark.parametrize(
    ("pad", "role", "meant"),
    [
        (None, None, None),
        (256, None, None),  # the end of a document
        (7, None, 7),
        (7, "unk_token", None),
        (7, "bos_token", None),
        (7, "made_up", 7),
    ],
)
def test_padding_that_has_another_role_is_none(
    tmp_path: Path, pad: int | None, role: str | None, meant: int | None
) -> None:
    prefix = record(tmp_path / "x", replace(FACTS, pad=pad))
    if role is not None:
        config = json.dumps({"pad_token": {"content": "<p>"}, role: "<p>"}).encode()
        write_files(Path(f"{prefix}.{FILES_SUFFIX}"), {"tokenizer_config.json": config})
    assert find_tokenizer_info(DataConfig(data_path=(prefix,)), None) == replace(FACTS, pad=meant)
