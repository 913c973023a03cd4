"""The comparison that stands before the use of gigatoken, and failures of the libraries that encode."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import LineBlock
from megatron.data.preprocess.encode import BlockEncoder, PreprocessOptions
from megatron.data.tokenizers import engine as engine_module
from megatron.data.tokenizers.base import EncodedBatch, Tokenizer, convert_library_errors
from megatron.data.tokenizers.engine import EDGE_CASE_TEXTS, build_engine, choose_engine
from megatron.data.tokenizers.huggingface import (
    TOKENIZER_JSON,
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    make_tokenizer_files,
)
from megatron.data.tokenizers.tokenizer import TokenizerOptions, build_tokenizer
from tests.unit.data.made_tokenizers import TEXT, apart, bpe, options_for, sentencepiece_model, write_files

pytest.importorskip("awkward")  # from here on, small batches too are encoded as the large ones of a corpus


class PanicException(BaseException):
    """Same signature as in the Rust libraries."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(options_for("HuggingFaceTokenizer", tmp_path_factory.mktemp("hf")))


# --- added tokens ---

WORD = AddedToken("<tool>", single_word=True, normalized=False)
ACCENT = AddedToken("e\u0301<", normalized=True)
OVERLAPPING = (AddedToken("qvx", normalized=True), AddedToken("vxz", normalized=False))


def with_tokens(folder: Path, *tokens: AddedToken, nfc: bool = False) -> HuggingFaceTokenizer:
    """A byte-level BPE with added tokens that are not special."""
    tokenizer = tokenizers.Tokenizer.from_str(bpe().to_str())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(list(tokens))
    return HuggingFaceTokenizer(write_files(folder, make_tokenizer_files(tokenizer)))


@pytest.mark.parametrize(
    ("tokens", "nfc", "reason"),
    [
        ((WORD,), False, "this tokenizer matches '<tool>' as a whole word, which gigatoken does not"),
        ((ACCENT,), True, r"this tokenizer matches 'e\u0301<' in the normalized text, which gigatoken does not"),
        (OVERLAPPING, False, "gigatoken and tokenizers give different ids, first for "),
    ],
)
def test_added_tokens_that_gigatoken_matches_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: tuple[AddedToken, ...], nfc: bool, reason: str
) -> None:
    tokenizer = with_tokens(tmp_path, *tokens, nfc=nfc)
    engine = choose_engine(tokenizer, TEXT)
    assert engine.encode_batch == tokenizer.encode_batch
    assert engine.reason.startswith(reason)
    monkeypatch.setattr(engine_module, "_refuse_added_tokens", lambda file: None)
    assert "give different ids" in choose_engine(tokenizer, TEXT).reason, "the comparison finds each of them too"


def test_other_added_tokens_do_not_keep_gigatoken_out(tmp_path: Path) -> None:
    marks = [{}, {"normalized": False}, {"lstrip": True}, {"rstrip": True}]
    tokenizer = with_tokens(tmp_path, *(AddedToken(f"<t{number}>", **mark) for number, mark in enumerate(marks)))
    engine = choose_engine(tokenizer, TEXT)
    assert engine.name.startswith("gigatoken "), engine.reason
    texts = [f"{before}<t{number}>{after}" for number in range(4) for before in ("", "a", " \n ") for after in "b "]
    assert apart(engine.encode_batch(texts)) == apart(tokenizer.encode_batch(texts))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(tokens=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=5, unique=True))
def test_overlaps_are_complete(tokens: list[str]) -> None:
    brute = {
        one + other[shared:]
        for one in tokens
        for other in tokens
        for shared in range(1, min(len(one), len(other)))
        if one.endswith(other[:shared])
    }
    assert set(engine_module._overlaps(tokens)) == brute


# --- the choice ---


def other_last_id(encoded: EncodedBatch) -> EncodedBatch:
    return EncodedBatch(np.append(encoded.ids[:-1], encoded.ids[-1] ^ 1), encoded.lengths)


def other_last_boundary(encoded: EncodedBatch) -> EncodedBatch:
    return EncodedBatch(encoded.ids, encoded.lengths + np.array([0] * (len(encoded.lengths) - 2) + [1, -1]))


@pytest.mark.parametrize("change", [other_last_id, other_last_boundary])
def test_a_difference_is_found_and_shown(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, change: Callable[[EncodedBatch], EncodedBatch]
) -> None:
    honest = engine_module._encode_batch

    def faulty(fast: Any, texts: Sequence[str | bytes]) -> EncodedBatch:
        encoded = honest(fast, texts)
        return change(encoded) if "this is faulty" in texts else encoded

    monkeypatch.setattr(engine_module, "_encode_batch", faulty)
    sample = [*TEXT, "before it", "this is faulty"]
    engine = choose_engine(tokenizer, sample)
    assert engine.name.startswith("tokenizers ")
    assert "gigatoken and tokenizers give different ids, first for '" in engine.reason
    assert engine.encode_batch == tokenizer.encode_batch
    assert choose_engine(tokenizer, TEXT).name.startswith("gigatoken ")
    with pytest.raises(DataError, match=r"give different ids.*\n  fix: --engine auto \| --engine hf"):
        choose_engine(tokenizer, sample, "gigatoken")


def test_edge_cases_detect_differences_that_samples_miss(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If gigatoken read the special tokens, it would encode those spelled out in text."""
    monkeypatch.setattr(engine_module, "_without_special_tokens", lambda content: content)
    assert "<|endoftext|>" in choose_engine(tokenizer, ["nothing special"]).reason
    together = "".join(EDGE_CASE_TEXTS)
    for part in (" \n", "\r\n", "\t\t", "\u0301", "\u200d", "\u05e9", "\u0378", "\U0010fffd", "123456", "\x00", "</s>"):
        assert part in together
    assert max(len(word) for text in EDGE_CASE_TEXTS for word in text.split()) >= 3000


def test_requested_engines(tokenizer: Tokenizer) -> None:
    own = choose_engine(tokenizer, TEXT, "hf")
    assert own.name.startswith("tokenizers ")
    assert (own.reason, own.encode_batch) == ("requested", tokenizer.encode_batch)
    fast = choose_engine(tokenizer, TEXT, "gigatoken")
    assert fast.name == choose_engine(tokenizer, TEXT).name
    assert not fast.encode_batch(["the cat", "", "sat"]).ids.flags.owndata, "ids are not copied"
    assert build_engine(tokenizer, own.name).encode_batch == tokenizer.encode_batch


def test_a_small_batch_has_the_same_ids_before_awkward_is_imported(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = choose_engine(tokenizer, TEXT, "gigatoken").encode_batch
    texts = [*EDGE_CASE_TEXTS, *TEXT]
    for batch in (texts, [text.encode() for text in texts], [""], []):
        with monkeypatch.context() as context:
            context.delitem(sys.modules, "awkward")
            small = fast(batch)
            assert "awkward" not in sys.modules
        large = fast(batch)
        assert [array.tolist() for array in small] == [array.tolist() for array in large]
    monkeypatch.delitem(sys.modules, "awkward")
    with pytest.raises(UnicodeError):
        fast(["\ud800"])


def test_tokenizers_without_gigatoken(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for simple in (ByteTokenizer(), NullTokenizer(99)):
        engine = choose_engine(simple, ["7 8"])
        assert (engine.name, "needs no library" in engine.reason) == (type(simple).__name__, True)
    given = options_for("Llama2Tokenizer", tmp_path)
    sentencepiece_model(tmp_path / "some.model", model_type="unigram")
    reason = choose_engine(build_tokenizer(given), TEXT).reason
    assert reason == "gigatoken needs a tokenizer.json, and this tokenizer has none"
    odd = options_for("HuggingFaceTokenizer", tmp_path / "odd")
    file = tmp_path / "odd" / TOKENIZER_JSON
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": {"type": "WhitespaceSplit"}}))
    reason = choose_engine(build_tokenizer(odd), TEXT).reason
    assert reason.startswith("gigatoken ")
    assert "\n" not in reason
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert choose_engine(tokenizer, TEXT).reason == "gigatoken is not installed (pip install 'megatron-pretrain[fast]')"
    for call in (lambda: choose_engine(tokenizer, TEXT, "gigatoken"), lambda: build_engine(tokenizer, "gigatoken 1")):
        with pytest.raises(DataError, match=r"gigatoken is not installed \(pip install 'megatron-pretrain\[fast\]'\)"):
            call()


# --- failures of the libraries ---


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Exception("no such word\nat lib.rs"), "no such word"),
        (PanicException("index"), "index"),
        (RuntimeError(), "Run"),
    ],
)
def test_failures_become_errors_of_the_text(error: BaseException, message: str) -> None:
    with pytest.raises(ValueError, match=f"^it failed: {message}"), convert_library_errors(ValueError, "it failed"):
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BaseException("of a signal handler"), MemoryError()])
def test_other_exceptions_pass_through(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, convert_library_errors(ValueError, "it failed"):
        raise error
    assert caught.value is error


def encoded(tokenizer: Tokenizer, texts: list[str], engine: str = "hf") -> tuple[int, list[str]]:
    """The number of encoded documents, and the errors of the others."""
    job = PreprocessOptions((), ("text",), "", TokenizerOptions("ByteTokenizer"))  # not built
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    block = LineBlock(Path("x.jsonl"), content, len(content), True, True)
    done = BlockEncoder(job, tokenizer, build_engine(tokenizer, engine))(block)
    return done.documents, [str(bad.of(0)) for bad in done.described]


def test_an_unknown_word_is_an_error_of_its_document(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = write_files(tmp_path, make_tokenizer_files(words))
    count, (message,) = encoded(HuggingFaceTokenizer(folder), ["a b", "a zzz", "b"])
    assert count == 2
    assert message.startswith("x.jsonl:2: tokenizers cannot encode this text: ")


@pytest.mark.parametrize("parse", [False, True])
def test_a_panic_is_an_error_of_its_document(parse: bool, tmp_path: Path) -> None:
    """The regular expressions of tiktoken overflow their stack at a million spaces."""
    tokenizer = build_tokenizer(options_for("TikTokenizer", tmp_path))
    tokenizer.settings = {"parse_special_tokens": parse}  # type: ignore[misc]
    count, (message,) = encoded(tokenizer, ["the cat", "x" + " " * 1_500_000 + "x", "sat"])
    assert count == 2
    assert message.startswith("x.jsonl:2: tiktoken cannot encode this text: ")
    engine = choose_engine(tokenizer, [" " * 1_000_000 + "x"])
    assert engine.encode_batch == tokenizer.encode_batch
    assert engine.reason.startswith("tiktoken cannot encode this text: ")


def test_a_panic_of_gigatoken(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: BaseException) -> Callable[..., EncodedBatch]:
        def encode_batch(*_: object) -> EncodedBatch:
            raise error

        return encode_batch

    monkeypatch.setattr(engine_module, "_from_ragged", failing(PanicException("index out of bounds\nat lib.rs")))
    assert choose_engine(tokenizer, TEXT).reason == "gigatoken cannot encode these texts: index out of bounds"
    with pytest.raises(DataError, match="cannot encode these texts: index out of bounds\n  fix: --engine hf"):
        encoded(tokenizer, ["the cat"], "gigatoken")
    monkeypatch.setattr(engine_module, "_from_ragged", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        choose_engine(tokenizer, TEXT)
