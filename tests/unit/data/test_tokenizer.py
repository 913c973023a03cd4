"""Tokenizers, and the record that ties a dataset to the one that wrote it."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.run import DataConfig
from megatron.data import huggingface
from megatron.data.errors import DataError
from megatron.data.tokenizer import (
    FOLDER,
    RECORD,
    TOKENIZER_TYPES,
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    Tokenizer,
    TokenizerChoice,
    TokenizerRecord,
    build_tokenizer,
    read_record,
    recorded_tokenizer,
    tokenizer_files,
)


@settings(deadline=None)
@given(st.text())
def test_bytes_of_any_text_and_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text).tolist()
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(st.binary())
def test_bytes_that_are_no_text_are_encoded_too(data: bytes) -> None:
    assert bytes(ByteTokenizer().encode(data).tolist()) == data


def test_byte_tokenizer_shows_ends_and_bad_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.decode([104, 105, 256, 255]) == "hi<|endoftext|>\ufffd"


@settings(deadline=None)
@given(st.lists(st.integers(0, 999)))
def test_ids_written_out_and_back(ids: list[int]) -> None:
    tokenizer = NullTokenizer(1000)
    text = " ".join(map(str, ids))
    assert tokenizer.encode(text).tolist() == tokenizer.encode(text.encode()).tolist() == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod == 999


@pytest.mark.parametrize("text", ["1 2 x", "1000", "-1", "1.5", b"7 \xff", "\u00b2", "9" * 5000])
def test_text_that_is_no_ids_is_refused(text: str | bytes) -> None:
    with pytest.raises(DataError, match=r"NullTokenizer reads ids 0\.\.999 with spaces between, not '"):
        NullTokenizer(1000).encode(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of Hugging Face."""
    folder = tmp_path_factory.mktemp("model")
    for name, content in huggingface.tokenizer_files(huggingface.bytes_as_ids()).items():
        (folder / name).write_bytes(content)
    return folder


def choice(name: str, model: Path) -> TokenizerChoice:
    """The least that each type must be told."""
    size = 300 if name == "NullTokenizer" else None
    return TokenizerChoice(name, str(model) if name == "HuggingFaceTokenizer" else None, vocab_size=size)


@pytest.mark.parametrize("name", TOKENIZER_TYPES)
def test_every_name_builds_a_tokenizer_of_that_name(name: str, model: Path) -> None:
    tokenizer = build_tokenizer(choice(name, model))
    assert type(tokenizer).__name__ == name
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    ids = tokenizer.encode("7 8")
    assert ids.dtype.kind in "iu"
    batch = tokenizer.encode_batch(["7 8", b"", "3"])
    assert batch.lengths.tolist() == [len(ids), 0, 1]
    assert batch.ids.tolist() == [*ids.tolist(), *tokenizer.encode("3").tolist()]
    assert np.iinfo(batch.ids.dtype).max >= tokenizer.vocab_size - 1


def test_the_option_of_a_run_knows_the_same_names() -> None:
    (field,) = (f for f in fields(DataConfig) if f.name == "tokenizer_type")
    assert field.metadata["option"].choices == TOKENIZER_TYPES


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("GPT2BPE", None, "there is no GPT2BPE: text is read by HuggingFaceTokenizer or ByteTokenizer"),
        ("HuggingFaceTokenizer", None, "must be told where it is"),
        ("NullTokenizer", None, "must be told how many ids"),
        ("NullTokenizer", 0, "must be told how many ids"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, size: int | None, message: str) -> None:
    with pytest.raises(DataError) as caught:
        build_tokenizer(TokenizerChoice(name, vocab_size=size))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["ByteTokenizer", "NullTokenizer"])
def test_a_model_that_nobody_reads_is_refused(name: str, model: Path) -> None:
    with pytest.raises(DataError, match=f"{name} reads no file"):
        build_tokenizer(TokenizerChoice(name, str(model), vocab_size=300))


def test_fingerprints_tell_tokenizers_apart(model: Path) -> None:
    tokenizers: list[Tokenizer] = [
        ByteTokenizer(),
        NullTokenizer(257),
        NullTokenizer(258),
        HuggingFaceTokenizer(model),
    ]
    assert len({t.fingerprint for t in tokenizers}) == len(tokenizers)
    assert NullTokenizer(257).fingerprint == NullTokenizer(257).fingerprint


# --- the record beside a dataset ---


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / f"x.{RECORD}").write_bytes(TokenizerRecord.of(NullTokenizer(500)).to_bytes())
    return tmp_path / "x"


def test_the_recorded_tokenizer_is_built_again(prefix: Path) -> None:
    for name in (None, "NullTokenizer"):
        tokenizer = recorded_tokenizer(prefix, name)
        assert isinstance(tokenizer, NullTokenizer)
        assert tokenizer.vocab_size == 500


def test_no_record_is_no_error(tmp_path: Path) -> None:
    assert read_record(tmp_path / "x") is None
    assert recorded_tokenizer(tmp_path / "x", "ByteTokenizer") is None


def test_another_type_is_refused(prefix: Path) -> None:
    with pytest.raises(DataError, match="with NullTokenizer, not with ByteTokenizer\n  fix: --tokenizer-type N"):
        recorded_tokenizer(prefix, "ByteTokenizer")


@pytest.mark.parametrize(("field", "value"), [("fingerprint", "0" * 16), ("eod", 3)])
def test_a_tokenizer_that_changed_is_refused(prefix: Path, field: str, value: object) -> None:
    path = Path(f"{prefix}.{RECORD}")
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(DataError, match="but that tokenizer is now"):
        recorded_tokenizer(prefix, None)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"vocab_size": 5}', "null", "\udcff"])
def test_a_damaged_record_is_named(prefix: Path, content: str) -> None:
    Path(f"{prefix}.{RECORD}").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=rf"x\.{RECORD}: "):
        read_record(prefix)


# --- what goes with a model ---


def record(prefix: Path, tokenizer: Tokenizer) -> Path:
    Path(f"{prefix}.{RECORD}").write_bytes(TokenizerRecord.of(tokenizer).to_bytes())
    return prefix


def test_a_tokenizer_of_hugging_face_lies_beside_its_data(model: Path, tmp_path: Path) -> None:
    prefix = record(tmp_path / "x", HuggingFaceTokenizer(model))
    shutil.copytree(model, f"{prefix}.{FOLDER}")
    for name in (None, "HuggingFaceTokenizer"):
        tokenizer = recorded_tokenizer(prefix, name)
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        assert tokenizer.encode("hi").tolist() == [104, 105]
    assert tokenizer_files(prefix) == {file.name: file.read_bytes() for file in model.iterdir()}
    with open(f"{prefix}.{FOLDER}/{huggingface.TOKENIZER}", "a") as file:
        file.write(" ")
    with pytest.raises(DataError, match="but that tokenizer is now"):
        tokenizer_files(prefix)
    shutil.rmtree(f"{prefix}.{FOLDER}")
    with pytest.raises(DataError, match=rf"there is no {prefix}\.{FOLDER}"):
        recorded_tokenizer(prefix)


def test_bytes_become_a_tokenizer_of_hugging_face(model: Path, tmp_path: Path) -> None:
    prefix = record(tmp_path / "x", ByteTokenizer())
    assert tokenizer_files(prefix) == {file.name: file.read_bytes() for file in model.iterdir()}


def test_ids_that_are_nobodys_have_no_files(tmp_path: Path) -> None:
    assert tokenizer_files(record(tmp_path / "x", NullTokenizer(9))) == {}
    assert tokenizer_files(tmp_path / "no record") == {}
