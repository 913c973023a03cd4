"""Tokenizers, and the record that ties a dataset to the one that wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.errors import DataError
from megatron.data.tokenizer import (
    RECORD,
    TOKENIZER_TYPES,
    ByteTokenizer,
    NullTokenizer,
    Tokenizer,
    TokenizerRecord,
    build_tokenizer,
    read_record,
    recorded_tokenizer,
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


@pytest.mark.parametrize("text", ["1 2 x", "1000", "-1", "1.5", b"7 \xff"])
def test_text_that_is_no_ids_is_refused(text: str | bytes) -> None:
    with pytest.raises(DataError, match=r"NullTokenizer reads ids 0\.\.999 with spaces between, not '"):
        NullTokenizer(1000).encode(text)


@pytest.mark.parametrize("name", TOKENIZER_TYPES)
def test_every_name_builds_a_tokenizer_of_that_name(name: str) -> None:
    tokenizer = build_tokenizer(name, 300)
    assert type(tokenizer).__name__ == name
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.encode("7 8").dtype.kind in "iu"


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("GPT2BPE", None, "there is no GPT2BPE: text is read by ByteTokenizer"),
        ("NullTokenizer", None, "must be told how many ids"),
        ("NullTokenizer", 0, "must be told how many ids"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, size: int | None, message: str) -> None:
    with pytest.raises(DataError) as caught:
        build_tokenizer(name, size)
    assert message in str(caught.value)


def test_fingerprints_tell_tokenizers_apart() -> None:
    tokenizers: list[Tokenizer] = [ByteTokenizer(), NullTokenizer(257), NullTokenizer(258)]
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
