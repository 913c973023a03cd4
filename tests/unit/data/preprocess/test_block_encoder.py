"""A block of text to a block of ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import FileBlock, LineBlock
from megatron.data.preprocess.encode import MAX_DESCRIBED, BlockEncoder, EncodeOptions
from megatron.data.tokenizers.base import EncodedBatch, Tokenizer
from megatron.data.tokenizers.engine import EncodeEngine
from megatron.data.tokenizers.huggingface import ByteTokenizer, NullTokenizer
from megatron.data.tokenizers.tokenizer import TokenizerOptions

BYTES = ByteTokenizer()
JOB = EncodeOptions(("text",), TokenizerOptions("ByteTokenizer"), BYTES.fingerprint, append_eod=False)
FILE = Path("x.jsonl")


def lines(*records: object) -> LineBlock:
    content = "".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records).encode()
    return LineBlock(FILE, content, len(content), first=True, last=True)


def encoder(job: EncodeOptions = JOB, tokenizer: Tokenizer = BYTES, engine: EncodeEngine | None = None) -> BlockEncoder:
    return BlockEncoder(job, tokenizer, engine or EncodeEngine("numpy", "", tokenizer.encode_batch))


def apart(encoded: EncodedBatch) -> list[list[int]]:
    return [part.tolist() for part in np.split(encoded.ids, np.cumsum(encoded.lengths))[:-1]]


def test_every_key_has_its_column_and_empty_texts_get_no_end() -> None:
    block = lines({"a": "xy", "b": ""}, {"a": "", "b": "é"}, {"a": "z", "b": "w"})
    done = encoder(replace(JOB, keys=("b", "a"), append_eod=True))(block)
    assert [apart(column) for column in done.columns] == [
        [[], [0xC3, 0xA9, 256], [119, 256]],
        [[120, 121, 256], [], [122, 256]],
    ]
    assert all(column.ids.dtype == np.uint16 for column in done.columns)
    assert (done.lines, done.documents, done.empty, done.text_bytes, done.bad) == (3, 3, 2, 6, 0)


def test_a_bad_line_is_bad_under_all_keys() -> None:
    block = lines({"a": "x", "b": "y"}, {"a": "x"}, "\n", {"a": 1, "b": "y"}, {"a": "v", "b": "w"})
    done = encoder(replace(JOB, keys=("a", "b")))(block)
    assert [apart(column) for column in done.columns] == [[[120], [118]], [[121], [119]]]
    assert (done.lines, done.documents, done.bad) == (5, 2, 2)
    assert [str(bad.of(10)).splitlines()[0] for bad in done.described] == [
        "x.jsonl:12 has no key 'b'; its keys: a",
        "x.jsonl:14: 'a' is a number, not a string",
    ]


def test_what_the_tokenizer_refuses_is_bad_too() -> None:
    null = NullTokenizer(10)
    block = lines({"text": "1 2"}, {"text": "x"}, "not JSON\n", {"text": "12"}, {"text": "9"})
    done = encoder(tokenizer=null)(block)
    assert apart(done.columns[0]) == [[1, 2], [9]]
    assert [bad.line for bad in done.described] == [2, 3, 4]
    assert "NullTokenizer reads ids 0..9 separated by spaces, not 'x'" in str(done.described[0].of(0))


def test_a_block_without_a_document() -> None:
    for block in (lines(), lines("\n\n"), lines("{")):
        done = encoder()(block)
        assert done.documents == done.columns[0].ids.size == len(done.columns[0].lengths) == 0


def test_many_bad_documents_are_counted_and_few_are_told() -> None:
    done = encoder()(lines(*["{\n"] * 1000))
    assert (done.bad, len(done.described), done.lines) == (1000, MAX_DESCRIBED, 1000)


def test_plain_files(tmp_path: Path) -> None:
    contents = {"a": b"caf\xc3\xa9", "b": b"caf\xe9", "c": b"", "d": b"nul\0"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    block = FileBlock(tuple(tmp_path / name for name in contents), 0)
    done = encoder()(block)
    assert apart(done.columns[0]) == [list(contents[name]) for name in "abc"]  # bytes may be any
    assert [bad.file.name for bad in done.described] == ["d"]
    unicode = NullTokenizer(300)  # not so for other tokenizers
    (tmp_path / "a").write_text("7 8")
    done = encoder(tokenizer=unicode)(block)
    assert apart(done.columns[0]) == [[7, 8], []]
    assert [bad.file.name for bad in done.described] == ["b", "d"]


@pytest.mark.parametrize("wrong", [-1, 257])
def test_an_id_that_the_tokenizer_does_not_have_is_refused(wrong: int) -> None:
    def encode(texts: Sequence[str | bytes]) -> EncodedBatch:
        return EncodedBatch(np.full(len(texts), wrong), np.ones(len(texts), np.int64))

    with pytest.raises(DataError, match="but its vocab_size is 257"):
        encoder(engine=EncodeEngine("numpy", "", encode))(lines({"text": "a"}))


def test_an_engine_that_differs_is_found() -> None:
    """One wrong id in a hundred, somewhere in every text."""

    def encode(texts: Sequence[str | bytes]) -> EncodedBatch:
        ids, lengths = BYTES.encode_batch(texts)
        ids[::100] ^= 1
        return EncodedBatch(ids, lengths)

    block = lines("{\n", {"text": "a" * 9000}, {"text": "b" * 9000})
    done = encoder(engine=EncodeEngine("gigatoken 0", "", encode))(block)
    assert done.differs is not None
    message = str(done.differs.of(5))
    assert message.startswith(("x.jsonl:7: gigatoken 0 and numpy give different ids", "x.jsonl:8: gigatoken 0"))
    assert message.endswith("fix: --engine hf")
    assert encoder(engine=EncodeEngine("gigatoken 0", "", BYTES.encode_batch))(block).differs is None


def test_blocks_are_checked_in_different_places() -> None:
    pieces: list[str] = []

    def encode(texts: Sequence[str | bytes]) -> EncodedBatch:
        pieces.extend(text for text in texts if isinstance(text, str))
        return BYTES.encode_batch(texts)

    encode_block = encoder(engine=EncodeEngine("gigatoken 0", "", encode))
    for number in range(100, 130):
        encode_block(lines(*({"text": f"{document}: {number}"} for document in range(8))))
    assert len(pieces) == 30
    assert {piece[0] for piece in pieces} == set("01234567")
