"""How large the vocabulary is, and who says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from megatron.config.run import DataConfig
from megatron.data.dataset_info import (
    TokenizerInfo,
    dataset_prefixes,
    find_eod_id,
    find_tokenizer_info,
    note_missing_records,
    note_unused_entries,
    resolve_vocab_size,
    tokenizer_files_to_save,
)
from megatron.data.errors import DataError
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.huggingface import ByteTokenizer, HuggingFaceTokenizer, NullTokenizer, byte_tokenizer
from megatron.data.tokenizers.huggingface import make_tokenizer_files as files_of
from megatron.data.tokenizers.tokenizer import FILES_SUFFIX, RECORD_SUFFIX, TokenizerRecord


@pytest.fixture
def recorded(tmp_path: Path) -> DataConfig:
    (tmp_path / f"x.{RECORD_SUFFIX}").write_bytes(TokenizerRecord.of(NullTokenizer(500)).to_bytes())
    return DataConfig(data_path=(str(tmp_path / "x"),))


def test_the_record_says_it_and_a_larger_size_may_be_asked_for(recorded: DataConfig) -> None:
    assert [resolve_vocab_size(recorded, size) for size in (None, 500, 512)] == [500, 500, 512]
    with pytest.raises(DataError, match=r"499 is too small for NullTokenizer.*\n  fix: --vocab-size 500"):
        resolve_vocab_size(recorded, 499)


def test_names_of_one_tokenizer_and_how_texts_were_read_do_not_matter(tmp_path: Path) -> None:
    for name, other, settings in (
        ("a", "SentencePieceTokenizer", {}),
        ("b", "Llama2Tokenizer", {"parse_special_tokens": True}),
    ):
        record = TokenizerRecord(other, 500, 2, "same", None, {"</s>": 2}, settings)
        (tmp_path / f"{name}.{RECORD_SUFFIX}").write_bytes(record.to_bytes())
    for named in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        data = DataConfig(data_path=(str(tmp_path / "a"), str(tmp_path / "b")), tokenizer_type=named)
        assert resolve_vocab_size(data, None) == 500
    with pytest.raises(DataError, match="was written with SentencePieceTokenizer, not with GPT2BPETokenizer"):
        resolve_vocab_size(replace(data, tokenizer_type="GPT2BPETokenizer"), None)


def test_entries_that_no_text_can_use(recorded: DataConfig) -> None:
    """Padding and a few ids for later are meant; most of a vocabulary is not."""
    known = find_tokenizer_info(recorded, None)
    assert [note_unused_entries(known, size) for size in (500, 512, 1000)] == [None, None, None]
    assert "1,001 entries, but the data only the 500 ids of NullTokenizer" in (note_unused_entries(known, 1001) or "")
    assert note_unused_entries(None, 10**6) is None


@pytest.mark.parametrize("mock", [True, False])
def test_without_a_record_the_flags_say_it(tmp_path: Path, mock: bool) -> None:
    path = () if mock else (str(tmp_path / "x"),)
    bare = DataConfig(mock_data=mock, data_path=path)
    assert resolve_vocab_size(bare, 77) == 77
    assert resolve_vocab_size(DataConfig(mock_data=mock, data_path=path, tokenizer_type="ByteTokenizer"), None) == 257
    assert resolve_vocab_size(DataConfig(mock_data=mock, data_path=path, tokenizer_type="NullTokenizer"), 99) == 99
    with pytest.raises(DataError, match="vocabulary size is unknown"):
        resolve_vocab_size(bare, None)
    with pytest.raises(DataError, match="needs --vocab-size"):
        resolve_vocab_size(DataConfig(mock_data=mock, data_path=path, tokenizer_type="NullTokenizer"), None)


# --- several datasets ---


def record(prefix: Path, tokenizer: Tokenizer) -> str:
    """Leave the record of a tokenizer beside a dataset that need not be there."""
    Path(f"{prefix}.{RECORD_SUFFIX}").write_bytes(TokenizerRecord.of(tokenizer).to_bytes())
    return str(prefix)


def test_every_dataset_is_named_once() -> None:
    assert dataset_prefixes(DataConfig(data_path=("3", "b", "1", "a", "2", "b"))) == ("b", "a")
    per_split = DataConfig(train_data_path=("a", "b"), valid_data_path=("c",), test_data_path=("a",))
    assert dataset_prefixes(per_split) == ("a", "b", "c")
    assert dataset_prefixes(DataConfig(mock_data=True)) == ()


def test_datasets_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    a, b, c = (
        record(tmp_path / n, t) for n, t in (("a", ByteTokenizer()), ("b", ByteTokenizer()), ("c", NullTokenizer(9)))
    )
    assert resolve_vocab_size(DataConfig(data_path=(a, b)), None) == 257
    sentence = (
        f"{a} was written with ByteTokenizer .* of 257 ids, 256 at the end, but {c} with NullTokenizer .* of 9 ids"
    )
    for data in (DataConfig(data_path=("1", a, "1", b, "1", c)), DataConfig(train_data_path=(a,), test_data_path=(c,))):
        with pytest.raises(DataError, match=sentence):
            resolve_vocab_size(data, 300)


def test_a_dataset_without_a_record_is_trusted_and_told(tmp_path: Path) -> None:
    a, b, c = record(tmp_path / "a", ByteTokenizer()), str(tmp_path / "b"), str(tmp_path / "c")
    assert resolve_vocab_size(DataConfig(data_path=(b, a, c)), None) == 257
    assert f"no tokenizer is recorded beside {b} and 1 more" in (
        note_missing_records(DataConfig(data_path=(b, a, c))) or ""
    )
    assert note_missing_records(DataConfig(data_path=(a,))) is None
    assert note_missing_records(DataConfig(data_path=(b, c))) is None, "nobody has one"


# --- flags and records ---


@pytest.fixture
def models(tmp_path: Path) -> tuple[str, str]:
    """Two Hugging Face tokenizers of 257 ids: bytes in their order, and turned round."""
    folders = []
    for name, ids in (("straight", byte_tokenizer()), ("turned", _turned())):
        folder = tmp_path / name
        folder.mkdir()
        for file, content in files_of(ids).items():
            (folder / file).write_bytes(content)
        folders.append(str(folder))
    return folders[0], folders[1]


def _turned() -> tokenizers.Tokenizer:
    """`byte_tokenizer` with the ids of a and b exchanged."""
    tree = json.loads(byte_tokenizer().to_str())
    words = tree["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    return tokenizers.Tokenizer.from_str(json.dumps(tree))


def test_the_tokenizer_that_flags_name_is_compared_with_the_record(tmp_path: Path, models: tuple[str, str]) -> None:
    straight, turned = models
    prefix = record(tmp_path / "x", HuggingFaceTokenizer(straight))
    data = DataConfig(data_path=(prefix,), tokenizer_type="HuggingFaceTokenizer", tokenizer_model=straight)
    assert resolve_vocab_size(data, 300) == 300
    with pytest.raises(
        DataError, match=f"{prefix} was written with another HuggingFaceTokenizer than that of"
    ) as printed:
        resolve_vocab_size(replace(data, tokenizer_model=turned), 300)
    assert "fix: --set data.tokenizer_model=null | " in str(printed.value)
    assert resolve_vocab_size(replace(data, tokenizer_model=None), 300) == 300


def test_without_a_record_the_named_tokenizer_says_everything(tmp_path: Path, models: tuple[str, str]) -> None:
    bare = DataConfig(data_path=(str(tmp_path / "x"),))
    data = replace(bare, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=models[0])
    assert resolve_vocab_size(data, None) == 257
    assert find_tokenizer_info(data, None) == TokenizerInfo("HuggingFaceTokenizer", 257, 256)
    assert tokenizer_files_to_save(data, None) == {file.name: file.read_bytes() for file in Path(models[0]).iterdir()}
    assert (find_tokenizer_info(bare, None), dict(tokenizer_files_to_save(bare, None))) == (None, {})
    assert tokenizer_files_to_save(DataConfig(mock_data=True, tokenizer_type="ByteTokenizer"), None) == {}


def test_the_end_of_a_document() -> None:
    """From the flag or from the tokenizer, which must not say different things."""
    known, message = TokenizerInfo("ByteTokenizer", 257, 256), DataConfig(data_path=("x",), eod_id=256)
    assert find_eod_id(DataConfig(data_path=("x",)), None, 300) is None
    assert find_eod_id(DataConfig(data_path=("x",)), known, 300) == 256
    assert find_eod_id(message, None, 300) == find_eod_id(message, known, 300) == 256
    with pytest.raises(DataError, match=r"--eod-id 256, but the vocabulary has ids 0\.\.99"):
        find_eod_id(message, None, 100)
    with pytest.raises(
        DataError, match=r"ByteTokenizer of the data ends documents with 256\n  fix: --eod-id 256 \| --set"
    ):
        find_eod_id(replace(message, eod_id=0), known, 300)


@pytest.mark.parametrize(("pad", "meant"), [(None, None), (256, None), (7, 7)])
def test_padding_that_is_also_the_end_of_a_document_is_none(tmp_path: Path, pad: int | None, meant: int | None) -> None:
    facts = TokenizerRecord("HuggingFaceTokenizer", 257, 256, "0" * 16, pad=pad)
    (tmp_path / f"x.{RECORD_SUFFIX}").write_bytes(facts.to_bytes())
    prefix = str(tmp_path / "x")
    assert find_tokenizer_info(DataConfig(data_path=(prefix,)), None) == TokenizerInfo(
        "HuggingFaceTokenizer", 257, 256, meant
    )


@pytest.mark.parametrize(("role", "meant"), [("unk_token", None), ("bos_token", None), ("made_up", 7)])
def test_padding_that_has_another_role_is_none(tmp_path: Path, role: str, meant: int | None) -> None:
    facts = TokenizerRecord("HuggingFaceTokenizer", 257, 256, "0" * 16, pad=7)
    (tmp_path / f"x.{RECORD_SUFFIX}").write_bytes(facts.to_bytes())
    folder = tmp_path / f"x.{FILES_SUFFIX}"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": "<p>"}, role: "<p>"}))
    known = find_tokenizer_info(DataConfig(data_path=(str(tmp_path / "x"),)), None)
    assert known is not None
    assert known.pad == meant


def test_weights_that_know_fewer_ids_are_not_made_larger(recorded: DataConfig) -> None:
    with pytest.raises(DataError, match=r"499 is too small for .*: the weights in hf:theirs") as error:
        resolve_vocab_size(recorded, 499, "hf:theirs")
    assert "--vocab-size" not in str(error.value)
    assert "--output-prefix PREFIX --tokenizer-type HuggingFaceTokenizer --tokenizer-model theirs" in str(error.value)
    with pytest.raises(DataError, match="fix: data written with the tokenizer of the weights"):
        resolve_vocab_size(recorded, 499, "runs/a/checkpoints")
