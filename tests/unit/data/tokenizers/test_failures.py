"""Failures of the libraries that encode: what becomes an error of a text, and what ends the program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import LineBlock
from megatron.data.preprocess.encode import BlockEncoder, EncodeOptions
from megatron.data.tokenizers import engine as engine_module
from megatron.data.tokenizers.base import Tokenizer, convert_library_errors
from megatron.data.tokenizers.engine import build_engine
from megatron.data.tokenizers.huggingface import HuggingFaceTokenizer, make_tokenizer_files
from megatron.data.tokenizers.tokenizer import build_tokenizer
from tests.unit.data.made_tokenizers import options_for

FILE = Path("x.jsonl")


class PanicException(BaseException):
    """Called as that of the libraries written in Rust."""


class StoppedError(BaseException):
    """As the handler of a signal raises."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Exception("no such word\nat lib.rs"), "no such word"),
        (PanicException("index out of bounds"), "index out of bounds"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_failure_is_an_error_of_the_text(error: BaseException, said: str) -> None:
    message = f"^library cannot encode this text: {said}$"
    with (
        pytest.raises(ValueError, match=message),
        convert_library_errors(ValueError, "library cannot encode this text"),
    ):
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoppedError(), MemoryError(), SystemExit(3), GeneratorExit()])
def test_what_is_no_failure_goes_through(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, convert_library_errors(ValueError, "library cannot encode this text"):
        raise error
    assert caught.value is error


def without_unknown(folder: Path) -> HuggingFaceTokenizer:
    """Whole words only, and none for those that are not known."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, content in make_tokenizer_files(tokenizer).items():
        (folder / name).write_bytes(content)
    return HuggingFaceTokenizer(folder)


def encoded(tokenizer: Tokenizer, texts: list[str], engine: str = "hf") -> tuple[int, list[str]]:
    """How many of the documents were encoded, and what is told of the others."""
    job = EncodeOptions(("text",), None, tokenizer.fingerprint, append_eod=False)  # type: ignore[arg-type]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    done = BlockEncoder(job, tokenizer, build_engine(tokenizer, engine))(
        LineBlock(FILE, content, len(content), True, True)
    )
    return done.documents, [str(bad.of(0)) for bad in done.described]


def test_a_word_that_is_not_known_is_told_with_its_document(tmp_path: Path) -> None:
    count, printed = encoded(without_unknown(tmp_path), ["a b", "a zzz", "b"])
    assert count == 2
    assert len(printed) == 1
    assert printed[0].startswith("x.jsonl:2: tokenizers cannot encode this text: ")


@pytest.mark.parametrize("parse", [False, True])
def test_a_panic_is_told_with_its_document(parse: bool, tmp_path: Path) -> None:
    """The regular expressions of tiktoken overflow their stack at a million spaces."""
    tokenizer = build_tokenizer(options_for("TikTokenizer", tmp_path))
    tokenizer.settings = {"parse_special_tokens": parse}  # type: ignore[misc]
    count, printed = encoded(tokenizer, ["the cat", "x" + " " * 1_500_000 + "x", "sat"])
    assert count == 2
    assert len(printed) == 1
    assert printed[0].startswith("x.jsonl:2: tiktoken cannot encode this text: ")


def test_what_only_gigatoken_cannot_encode_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(layout: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(engine_module, "_from_ragged", panic)
    tokenizer = build_tokenizer(options_for("TikTokenizer", tmp_path))
    with pytest.raises(DataError, match="cannot encode these texts: index out of bounds\n  fix: --engine hf"):
        encoded(tokenizer, ["the cat"], "gigatoken")
