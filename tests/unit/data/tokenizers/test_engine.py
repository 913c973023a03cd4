"""Engines: gigatoken against the tokenizers' own libraries, and the proof that stands before its use."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from megatron.data.errors import DataError
from megatron.data.tokenizers import engine as engine_module
from megatron.data.tokenizers.base import EncodedBatch, Tokenizer
from megatron.data.tokenizers.engine import EDGE_CASE_TEXTS, build_engine, choose_engine
from megatron.data.tokenizers.huggingface import (
    TOKENIZER_JSON,
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    make_tokenizer_files,
)
from megatron.data.tokenizers.sentencepiece import Llama2Tokenizer
from megatron.data.tokenizers.tokenizer import build_tokenizer
from tests.unit.data.made_tokenizers import TEXT, apart, bpe, options_for, sentencepiece_model

ROOT = Path(__file__).parents[4]
DATA = ROOT.parent / "shared" / "data"  # what a clone does not bring
CORPUS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
TYPES = ["HuggingFaceTokenizer", "GPT2BPETokenizer", "Llama2Tokenizer", "TikTokenizer"]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NEARLY_WORDS = st.text(
    st.sampled_from("the CATs'LLd \t\n\r  12,.!/\u00c5\u0301\u6771\u00a0\u2581<|>s_\u200d\U0001f600")
)


@pytest.fixture(scope="module")
def tokenizers_made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: build_tokenizer(options_for(name, tmp_path_factory.mktemp(name))) for name in TYPES}


# --- the same ids ---


@pytest.mark.parametrize("name", TYPES)
def test_whole_texts_have_the_same_ids(tokenizers_made: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers_made[name]
    engine = choose_engine(tokenizer, TEXT)
    assert engine.name == f"gigatoken {version('gigatoken')}", engine.reason
    texts: list[str | bytes] = [*CORPUS, *(line for text in CORPUS for line in text.splitlines()), b"bytes \xc3\xa9"]
    fast, own = engine.encode_batch(texts), tokenizer.encode_batch(texts)
    assert np.array_equal(fast.ids, own.ids)
    assert np.array_equal(fast.lengths, own.lengths)
    again = build_engine(tokenizer, engine.name).encode_batch(texts)
    assert np.array_equal(again.ids, own.ids)


@pytest.fixture(scope="module")
def pairs(tokenizers_made: dict[str, Tokenizer]) -> list[tuple[Tokenizer, Callable[..., EncodedBatch]]]:
    return [(tokenizer, build_engine(tokenizer, "gigatoken").encode_batch) for tokenizer in tokenizers_made.values()]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(texts=st.lists(ANY_TEXT | NEARLY_WORDS, max_size=6))
def test_any_text_has_the_same_ids(
    pairs: list[tuple[Tokenizer, Callable[..., EncodedBatch]]], texts: list[str]
) -> None:
    for tokenizer, encode_batch in pairs:
        assert apart(encode_batch(texts)) == apart(tokenizer.encode_batch(texts))


@pytest.mark.skipif(not (DATA / "gpt2-tokenizer").is_dir(), reason="GPT-2's files are not beside this checkout")
def test_gpt2s_own_file_and_real_text() -> None:
    tokenizer = HuggingFaceTokenizer(DATA / "gpt2-tokenizer")
    text = (DATA / "text" / "wikitext2-valid.txt").read_text(encoding="utf-8")
    engine = choose_engine(tokenizer, text.splitlines()[:500])
    lines = [*text.splitlines(keepends=True), text]
    fast, own = engine.encode_batch(lines), tokenizer.encode_batch(lines)
    assert engine.name.startswith("gigatoken")
    assert np.array_equal(fast.ids, own.ids)


@pytest.mark.parametrize("parse", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_special_tokens_are_what_the_tokenizer_says(name: str, parse: bool, tmp_path: Path) -> None:
    """Whether a token that is spelled out becomes its id is the tokenizer's to say, not the engine's."""
    tokenizer = build_tokenizer(replace(options_for(name, tmp_path), parse_special_tokens=parse))
    token, number = next((t, n) for t, n in tokenizer.special_ids.items() if n == tokenizer.eod)
    engine = choose_engine(tokenizer, TEXT)
    ids = engine.encode_batch([f"one{token} two {token}"]).ids.tolist()
    assert ids == tokenizer.encode(f"one{token} two {token}").tolist()
    assert ids.count(number) == (2 if parse else 0)


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
    for name, content in make_tokenizer_files(tokenizer).items():
        (folder / name).write_bytes(content)
    return HuggingFaceTokenizer(folder)


@pytest.mark.parametrize(
    ("token", "nfc", "reason"),
    [
        (WORD, False, "matches '<tool>' as a whole word, which gigatoken does not"),
        (ACCENT, True, r"matches 'e\u0301<' in the normalized text, which gigatoken does not"),
    ],
)
def test_added_tokens_that_are_found_elsewhere_are_refused(
    tmp_path: Path, token: AddedToken, nfc: bool, reason: str
) -> None:
    tokenizer = with_tokens(tmp_path, token, nfc=nfc)
    engine = choose_engine(tokenizer, TEXT)
    assert engine.encode_batch == tokenizer.encode_batch
    assert engine.reason == f"this tokenizer {reason}"
    with pytest.raises(DataError, match="this tokenizer matches"):
        build_engine(tokenizer, "gigatoken 0.10.0")


@pytest.mark.parametrize(("tokens", "nfc"), [((WORD,), False), ((ACCENT,), True), (OVERLAPPING, False)])
def test_the_proof_finds_added_tokens_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: tuple[AddedToken, ...], nfc: bool
) -> None:
    monkeypatch.setattr(engine_module, "_refuse_added_tokens", lambda file: None)
    engine = choose_engine(with_tokens(tmp_path, *tokens, nfc=nfc), TEXT)
    assert engine.reason.startswith("gigatoken and tokenizers give different ids, first for "), engine.reason


def test_other_added_tokens_do_not_keep_gigatoken_out(tmp_path: Path) -> None:
    marks = [{}, {"normalized": False}, {"lstrip": True}, {"rstrip": True}]
    tokenizer = with_tokens(tmp_path, *(AddedToken(f"<t{number}>", **mark) for number, mark in enumerate(marks)))
    engine = choose_engine(tokenizer, TEXT)
    assert engine.name.startswith("gigatoken "), engine.reason
    texts = [f"{before}<t{number}>{after}" for number in range(4) for before in ("", "a", " \n ") for after in "b "]
    assert apart(engine.encode_batch(texts)) == apart(tokenizer.encode_batch(texts))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tokens=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=5, unique=True))
def test_overlaps_are_all_there(tokens: list[str]) -> None:
    brute = {
        one + other[shared:]
        for one in tokens
        for other in tokens
        for shared in range(1, min(len(one), len(other)))
        if one.endswith(other[:shared])
    }
    assert set(engine_module._overlaps(tokens)) == brute


# --- the choice ---


def lying(change: Callable[[EncodedBatch], EncodedBatch]) -> Callable[[Any, Sequence[str | bytes]], EncodedBatch]:
    """An engine whose ids are changed wherever a text holds the word 'faulty'."""
    honest = engine_module._encode_batch

    def encode_batch(fast: Any, texts: Sequence[str | bytes]) -> EncodedBatch:
        encoded = honest(fast, texts)
        return change(encoded) if any("faulty" in str(text) for text in texts) else encoded

    return encode_batch


def last_is_another(encoded: EncodedBatch) -> EncodedBatch:
    ids = encoded.ids.copy()
    ids[-1] ^= 1
    return EncodedBatch(ids, encoded.lengths)


def last_two_are_cut_elsewhere(encoded: EncodedBatch) -> EncodedBatch:
    return EncodedBatch(encoded.ids, encoded.lengths + np.array([0] * (len(encoded.lengths) - 2) + [1, -1]))


@pytest.mark.parametrize("change", [last_is_another, last_two_are_cut_elsewhere])
def test_a_difference_is_found_and_shown(
    tokenizers_made: dict[str, Tokenizer],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[EncodedBatch], EncodedBatch],
) -> None:
    tokenizer = tokenizers_made["HuggingFaceTokenizer"]
    monkeypatch.setattr(engine_module, "_encode_batch", lying(change))
    sample = [*TEXT, "before it", "this is faulty"]
    engine = choose_engine(tokenizer, sample)
    assert engine.name.startswith("tokenizers ")
    assert "gigatoken and tokenizers give different ids, first for '" in engine.reason
    assert engine.encode_batch == tokenizer.encode_batch
    assert choose_engine(tokenizer, TEXT).name.startswith("gigatoken ")
    with pytest.raises(DataError, match=r"give different ids.*\n  fix: --engine auto \| --engine hf"):
        choose_engine(tokenizer, sample, "gigatoken")


def test_the_odd_texts_find_what_no_sample_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without leaving special tokens out of what gigatoken reads, it makes ids of the ones that are spelled out."""
    tokenizer = build_tokenizer(options_for("HuggingFaceTokenizer", tmp_path))
    monkeypatch.setattr(engine_module, "_without_special_tokens", lambda content: content)
    engine = choose_engine(tokenizer, ["nothing special"])
    assert engine.name.startswith("tokenizers ")
    assert "<|endoftext|>" in engine.reason


def test_the_odd_texts_are_odd() -> None:
    together = "".join(EDGE_CASE_TEXTS)
    for part in (" \n", "\r\n", "\t\t", "\u0301", "\u200d", "\u05e9", "\u0378", "\U0010fffd", "123456", "\x00", "</s>"):
        assert part in together
    assert max(len(word) for text in EDGE_CASE_TEXTS for word in text.split()) >= 3000


def test_what_is_wished_for(tokenizers_made: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_made["Llama2Tokenizer"]
    own = choose_engine(tokenizer, TEXT, "hf")
    assert own.name.startswith("sentencepiece ")
    assert (own.reason, own.encode_batch) == ("requested", tokenizer.encode_batch)
    assert choose_engine(tokenizer, TEXT, "gigatoken").name == choose_engine(tokenizer, TEXT).name
    assert build_engine(tokenizer, own.name).encode_batch == tokenizer.encode_batch
    with pytest.raises(DataError, match=r"there is no engine 'fast'\n  fix: --engine auto \| --engine gigatoken"):
        choose_engine(tokenizer, TEXT, "fast")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), NullTokenizer(99)])
def test_what_needs_no_library_gets_none(tokenizer: Tokenizer) -> None:
    engine = choose_engine(tokenizer, ["7 8"])
    assert engine.name == type(tokenizer).__name__
    assert "needs no library" in engine.reason


def test_a_machine_without_gigatoken_uses_the_other(
    tokenizers_made: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokenizer = tokenizers_made["GPT2BPETokenizer"]
    engine = choose_engine(tokenizer, TEXT)
    assert engine.reason == "gigatoken is not installed (pip install gigatoken)"
    with pytest.raises(DataError, match=r"gigatoken is not installed \(pip install gigatoken\)"):
        choose_engine(tokenizer, TEXT, "gigatoken")
    with pytest.raises(DataError, match="gigatoken is not installed"):
        build_engine(tokenizer, "gigatoken 0.10.0")


def test_what_gigatoken_does_not_read_is_told(tmp_path: Path) -> None:
    unigram = Llama2Tokenizer(sentencepiece_model(tmp_path / "u.model", model_type="unigram"))
    assert choose_engine(unigram, TEXT).reason == "gigatoken needs a tokenizer.json, and this tokenizer has none"
    folder = tmp_path / "odd"
    printed = options_for("HuggingFaceTokenizer", folder)
    content = json.loads((folder / TOKENIZER_JSON).read_text())
    content["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (folder / TOKENIZER_JSON).write_text(json.dumps(content))
    reason = choose_engine(build_tokenizer(printed), TEXT).reason
    assert reason.startswith("gigatoken ")
    assert "\n" not in reason


def test_a_panic_of_its_code_is_a_reason(
    tokenizers_made: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """Called as that of the libraries written in Rust."""

    def failing(error: BaseException) -> Callable[..., EncodedBatch]:
        def encode_batch(*_: object) -> EncodedBatch:
            raise error

        return encode_batch

    tokenizer = tokenizers_made["TikTokenizer"]
    monkeypatch.setattr(engine_module, "_from_ragged", failing(PanicException("index out of bounds\nat lib.rs")))
    assert choose_engine(tokenizer, TEXT).reason == "gigatoken cannot encode these texts: index out of bounds"
    with pytest.raises(DataError, match=r"gigatoken cannot encode these texts: .*\n  fix: --engine hf"):
        build_engine(tokenizer, "gigatoken 0.10.0").encode_batch(["one"])
    monkeypatch.setattr(engine_module, "_from_ragged", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        choose_engine(tokenizer, TEXT)


def test_what_the_tokenizer_cannot_encode_proves_nothing(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(options_for("TikTokenizer", tmp_path))
    engine = choose_engine(tokenizer, [" " * 1_000_000 + "x"])
    assert engine.encode_batch == tokenizer.encode_batch
    assert engine.reason.startswith("tiktoken cannot encode this text: ")


@pytest.mark.parametrize("bad", [b"caf\xe9", "half a pair: \ud800"])
def test_what_is_no_unicode_is_refused(tokenizers_made: dict[str, Tokenizer], bad: str | bytes) -> None:
    encode_batch = build_engine(tokenizers_made["TikTokenizer"], "gigatoken").encode_batch
    with pytest.raises(UnicodeError):
        encode_batch(["good", bad])


def test_ids_are_not_copied_into_lists(tokenizers_made: dict[str, Tokenizer]) -> None:
    encoded = build_engine(tokenizers_made["HuggingFaceTokenizer"], "gigatoken").encode_batch(["the cat", "", "sat"])
    assert not encoded.ids.flags.owndata
    assert encoded.lengths.tolist()[1] == 0
    assert encoded.lengths.sum() == encoded.ids.size
