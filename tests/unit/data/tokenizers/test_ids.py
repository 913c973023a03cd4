"""Ids of every kind of tokenizer, against the library that defines them; exports and gigatoken give the same ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, GPT2Tokenizer

from megatron.data.errors import DataError
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.engine import EDGE_CASE_TEXTS, EncodeEngine, build_engine, choose_engine
from megatron.data.tokenizers.huggingface import (
    END_OF_DOCUMENT,
    TOKENIZER_JSON,
    HuggingFaceTokenizer,
    NullTokenizer,
    bytes_to_unicode,
)
from megatron.data.tokenizers.tiktoken import ENCODINGS, PATTERNS, TikTokenizer
from megatron.data.tokenizers.tokenizer import TOKENIZER_TYPES, TokenizerOptions, build_tokenizer
from tests.unit.data.made_tokenizers import (
    TEXT,
    apart,
    gpt2,
    options_for,
    ranks,
    sentencepiece_model,
    tiktoken_file,
    write_files,
)

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.text(
    st.sampled_from("the CATs'LLd \t\n\r  12,.!/-<>[]{}|_\u00c5\u0301\u6771\u2167\u00a0\u2581\u200d\U0001f600")
)
TEXTS = [*EDGE_CASE_TEXTS, *TEXT]
ROOT = Path(__file__).parents[4]
DATA = ROOT.parent / "shared" / "data"  # beside this checkout, if it is there
DOCS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
SYMBOLS = {"user_defined_symbols": ["<|im_start|>", "[SEP]", "\n\n", "7"], "control_symbols": ["<ctl>"]}
# trainer flags; is there a tokenizer.json of equal ids; does gigatoken give equal ids
SENTENCEPIECE: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "llama": ({}, True, True),
    "unigram": ({"model_type": "unigram"}, False, False),
    "nfkc": ({"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}, False, False),
    "symbols": (SYMBOLS, False, False),
    "symbols-no-prefix": ({"add_dummy_prefix": False, **SYMBOLS}, True, True),
    "no-prefix": ({"add_dummy_prefix": False}, True, True),
    "pad": ({"pad_id": 3, "split_by_whitespace": False, "allow_whitespace_only_pieces": True}, True, True),
    "no-bytes": ({"byte_fallback": False}, True, False),
    "squeeze": ({"remove_extra_whitespaces": True}, True, False),
    "suffix": ({"treat_whitespace_as_suffix": True}, False, False),
}


@dataclass(frozen=True, repr=False)
class Case:
    """A tokenizer, its oracle, and what can be made of it."""

    ours: Tokenizer
    oracle: Callable[[str], list[int]]
    exported: bool = True
    fast: bool = True
    lossless: bool = True  # decoding gives the text


def sentencepiece_case(name: str, folder: Path) -> Case:
    flags, exported, fast = SENTENCEPIECE[name]
    path = sentencepiece_model(folder / "x.model", **flags)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = build_tokenizer(TokenizerOptions("SentencePieceTokenizer", str(path)))
    pad = theirs.pad_id() if theirs.pad_id() >= 0 else None
    assert (ours.vocab_size, ours.eod, ours.pad) == (theirs.get_piece_size(), theirs.eos_id(), pad)
    symbols = ["<ctl>", "<|im_start|>", "[SEP]"] if "symbols" in name else []
    marks = ["<s>", "</s>", *symbols, *["<pad>"] * bool(pad)]
    assert ours.special_ids == {mark: theirs.piece_to_id(mark) for mark in marks}
    return Case(ours, theirs.encode, exported, fast, name in ("llama", "unigram", "symbols", "no-prefix", "pad"))


def tiktoken_case(name: str, folder: Path) -> Case:
    if name in PATTERNS:  # Megatron-LM's: 20 special tokens come first
        theirs = tiktoken.Encoding("", pat_str=PATTERNS[name], mergeable_ranks=ranks(), special_tokens={})
        ours = TikTokenizer(tiktoken_file(folder / "vocab.json"), name, 20)
        assert (ours.vocab_size, ours.eod, ours.pad) == (len(ranks()) + 20, 2, 4)
        assert list(ours.special_ids)[4:8] == ["<pad>", "<cls>", "<sep>", "<SPECIAL_7>"]
        return Case(ours, lambda text: [i + 20 for i in theirs.encode_ordinary(text)], fast=name == "v2")
    with patch.object(openai_public, "load_tiktoken_bpe", lambda *where, **how: ranks()):
        official = openai_public.ENCODING_CONSTRUCTORS[name]()
    theirs = tiktoken.Encoding(**{key: value for key, value in official.items() if key != "explicit_n_vocab"})
    ours = TikTokenizer(tiktoken_file(folder / f"{name}.tiktoken"))
    assert (ours.special_ids, ours.eod) == (official["special_tokens"], theirs.eot_token)
    return Case(ours, theirs.encode_ordinary)


def case(name: str, folder: Path) -> Case:
    """The case of this name, with its files in ``folder``."""
    if name in SENTENCEPIECE:
        return sentencepiece_case(name, folder)
    if name in ENCODINGS or name in PATTERNS:
        return tiktoken_case(name, folder)
    ours = build_tokenizer(options_for(name, folder))
    if name == "ByteTokenizer":
        return Case(ours, lambda text: list(text.encode()), fast=False)
    if name == "GPT2BPETokenizer":
        vocab, merges = gpt2(folder)
        theirs = GPT2Tokenizer(vocab=str(vocab), merges=str(merges))
        assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.convert_tokens_to_ids(END_OF_DOCUMENT))
        return Case(ours, lambda text: theirs(text).input_ids)
    library = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_JSON))
    return Case(ours, lambda text: library.encode(text).ids)


CASES = ["HuggingFaceTokenizer", "GPT2BPETokenizer", "ByteTokenizer", *SENTENCEPIECE, *ENCODINGS, *PATTERNS]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {name: case(name, tmp_path_factory.mktemp("case")) for name in CASES}


def without_specials(texts: list[str], tokenizer: Tokenizer) -> list[str]:
    return [text for text in texts if not any(mark in text for mark in ("<unk>", *tokenizer.special_ids))]


@pytest.mark.parametrize("name", CASES)
def test_ids_match_the_library_the_export_and_gigatoken(cases: dict[str, Case], name: str, tmp_path: Path) -> None:
    ours, found = cases[name].ours, cases[name]
    texts = without_specials(TEXTS, ours)
    own = apart(ours.encode_batch(texts))
    assert own == [found.oracle(text) for text in texts]
    assert own == [ours.encode(text.encode()).tolist() for text in texts]
    files = ours.hugging_face_files()
    assert bool(files) == found.exported
    if files:
        theirs = AutoTokenizer.from_pretrained(write_files(tmp_path, files))
        assert theirs(texts, add_special_tokens=False).input_ids == own
        assert theirs.eos_token_id == ours.eod
        if ours.library == "sentencepiece":
            assert (len(theirs), theirs.pad_token_id) == (ours.vocab_size, ours.pad)
        special = {token: theirs.convert_tokens_to_ids(token) for token in ours.special_ids}
        assert special == ours.special_ids
        assert apart(HuggingFaceTokenizer(tmp_path).encode_batch(TEXTS)) == apart(ours.encode_batch(TEXTS))
    engine = choose_engine(ours, TEXT)
    assert engine.name.startswith("gigatoken ") == found.fast, engine.reason
    more: list[str | bytes] = [*TEXTS, b"bytes \xc3\xa9"]
    if name in ("HuggingFaceTokenizer", "llama", "cl100k_base"):
        more += [*DOCS, *(line for text in DOCS for line in text.splitlines())]
    own = apart(ours.encode_batch(more))
    assert apart(engine.encode_batch(more)) == own
    assert apart(build_engine(ours, engine.name).encode_batch(more)) == own


@pytest.mark.skipif(not (DATA / "gpt2-tokenizer").is_dir(), reason="GPT-2's files are not beside this checkout")
def test_gigatoken_on_gpt2s_own_file_and_real_text() -> None:
    tokenizer = HuggingFaceTokenizer(DATA / "gpt2-tokenizer")
    text = (DATA / "text" / "wikitext2-valid.txt").read_text(encoding="utf-8")
    engine = choose_engine(tokenizer, text.splitlines()[:500])
    lines = [*text.splitlines(keepends=True), text]
    assert engine.name.startswith("gigatoken")
    assert np.array_equal(engine.encode_batch(lines).ids, tokenizer.encode_batch(lines).ids)


@dataclass(frozen=True, repr=False)
class Encoders:
    """A case, the library's tokenizer of its export, and gigatoken."""

    case: Case
    exported: tokenizers.Tokenizer | None
    fast: EncodeEngine | None


@pytest.fixture(scope="module")
def encoders(cases: dict[str, Case]) -> dict[str, Encoders]:
    found = {}
    for name, one in cases.items():
        files = one.ours.hugging_face_files()
        exported = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_JSON]) if files else None
        if exported is not None:
            exported.encode_special_tokens = True
        found[name] = Encoders(one, exported, build_engine(one.ours, "gigatoken") if one.fast else None)
    return found


@settings(max_examples=50, deadline=None, derandomize=True)
@given(text=ANY_TEXT)
@example(text="the cat's na\u00efve  fa\u00e7ade\n\n\t\u6771\u4eac \U0001f600 </s><|endoftext|>")
def test_any_text(encoders: dict[str, Encoders], text: str) -> None:
    for name, encoder in encoders.items():
        ours = encoder.case.ours
        ids = ours.encode(text).tolist()
        if END_OF_DOCUMENT not in text:
            assert ids == encoder.case.oracle(text), name
        if encoder.exported is not None and not (name == "squeeze" and "\u2581" in text):
            assert ids == encoder.exported.encode(text, add_special_tokens=False).ids, name
        if encoder.fast is not None:
            assert ids == encoder.fast.encode_batch([text]).ids.tolist(), name
        if encoder.case.lossless:
            written = text.replace("\u2581", " ") if ours.library == "sentencepiece" else text
            assert ours.decode(ids) == written, name


@pytest.mark.parametrize("name", TOKENIZER_TYPES)
def test_every_type_encodes_batches(name: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(options_for(name, tmp_path))
    assert type(tokenizer).__name__ == name
    assert version(tokenizer.library)
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    ids, other = tokenizer.encode("7 8"), tokenizer.encode("3").tolist()
    batch = tokenizer.encode_batch(["7 8", b"", "3"])
    assert batch.lengths.tolist() == [len(ids), 0, len(other)]
    assert batch.ids.tolist() == [*ids.tolist(), *other]
    assert np.iinfo(batch.ids.dtype).max >= tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "7 8"
    assert apart(tokenizer.encode_batch([])) == []


TEXTUAL = [name for name in TOKENIZER_TYPES if name not in ("ByteTokenizer", "NullTokenizer")]


@pytest.mark.parametrize("name", TEXTUAL)
def test_special_tokens_in_text_stay_text_unless_parsed(name: str, tmp_path: Path) -> None:
    given = options_for(name, tmp_path)
    tokenizer, parsing = build_tokenizer(given), build_tokenizer(replace(given, parse_special_tokens=True))
    assert tokenizer.fingerprint == parsing.fingerprint  # the same id means the same text
    engines = [choose_engine(one, TEXT) for one in (tokenizer, parsing)]
    for token, number in tokenizer.special_ids.items():
        text = f"so {token}{token} it is"
        ids, parsed = tokenizer.encode(text).tolist(), parsing.encode(text).tolist()
        assert not set(ids) & set(tokenizer.special_ids.values())
        assert parsed.count(number) == 2
        assert tokenizer.decode(ids) == parsing.decode(parsed) == text
        assert [engine.encode_batch([text]).ids.tolist() for engine in engines] == [ids, parsed]
    assert tokenizer.special_ids[tokenizer.decode([tokenizer.eod])] == tokenizer.eod
    for bad in (b"caf\xe9", "half a pair: \ud800"):
        for encode_batch in (tokenizer.encode_batch, engines[0].encode_batch):
            with pytest.raises(UnicodeError):
                encode_batch(["good", bad])


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_parsed_special_tokens_of_sentencepiece(name: str, tmp_path: Path) -> None:
    """User-defined words are pieces always; the export restarts normalization at a special token."""
    flags = SENTENCEPIECE[name][0]
    path = sentencepiece_model(tmp_path / "x.model", **flags)
    ours = build_tokenizer(TokenizerOptions("SentencePieceTokenizer", str(path), parse_special_tokens=True))
    text = "a</s> 7\n\n<s>b [SEP]<ctl>"
    ids = ours.encode(text).tolist()
    marks = ["</s>", "<s>", "[SEP]", "<ctl>"] if "symbols" in name else ["</s>", "<s>"]
    assert [i for i in ids if i in ours.special_ids.values()] == [ours.special_ids[mark] for mark in marks]
    if "symbols" in name:
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
        assert {theirs.piece_to_id(word) for word in ("7", "\n\n")} <= set(ids)
    assert ours.decode([-1, *ids, ours.vocab_size, 10**6]) == ours.decode(ids)
    files = ours.hugging_face_files()
    assert bool(files) == (not flags.get("add_dummy_prefix", True))
    if files:
        theirs = AutoTokenizer.from_pretrained(write_files(tmp_path, files))
        assert theirs(text, add_special_tokens=False).input_ids == ids


def test_two_merges_of_one_score_have_no_export(tmp_path: Path) -> None:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    path = sentencepiece_model(tmp_path / "x.model")
    model = ModelProto.FromString(path.read_bytes())
    words = [piece for piece in model.pieces if piece.type == piece.NORMAL and len(piece.piece) > 1]
    words[0].score = words[1].score
    path.write_bytes(model.SerializeToString())
    assert build_tokenizer(TokenizerOptions("Llama2Tokenizer", str(path))).hugging_face_files() == {}


def test_patterns_and_sizes_of_tiktoken(tmp_path: Path) -> None:
    """v1 keeps ``theC`` whole, v2 splits where the case changes; both split digits. A size keeps the first ids."""
    words = [*(bytes((byte,)) for byte in range(256)), b"th", b"the", b"theC", b"42", b"zqzq"]
    file = tiktoken_file(tmp_path / "x.tiktoken", {word: number for number, word in enumerate(words)})
    split = {"v1": [b"theC", b"4", b"2"], "v2": [b"the", b"C", b"4", b"2"]}
    for pattern, expected in split.items():
        ours = TikTokenizer(file, pattern, 7)
        assert ours.encode("theC42").tolist() == [words.index(word) + 7 for word in expected]
    exported = tokenizers.Tokenizer.from_buffer(ours.hugging_face_files()[TOKENIZER_JSON])
    assert ours.encode("zqzq").tolist() == exported.encode("zqzq").ids == [words.index(b"zqzq") + 7], "without merges"
    assert ours.encode("zqzqz").tolist() == exported.encode("zqzqz").ids
    small = TikTokenizer(file, "v2", 7, vocab_size=7 + 257)
    assert small.encode("the").tolist() == [256 + 7, ord("e") + 7]
    words.append(b"</s>")
    file = tiktoken_file(tmp_path / "y.tiktoken", {word: number for number, word in enumerate(words)})
    assert TikTokenizer(file, "v2", 7).hugging_face_files() == {}, "a special token is also a word"


def test_byte_level_letters_match_the_library() -> None:
    assert sorted(bytes_to_unicode()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for byte in range(128):
        ((word, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(byte))
        assert word == bytes_to_unicode()[byte]


def test_ids_written_out(cases: dict[str, Case]) -> None:
    tokenizer = NullTokenizer(1000)
    assert tokenizer.encode("7 0\n999 ").tolist() == tokenizer.encode(b"7 0 999").tolist() == [7, 0, 999]
    assert (tokenizer.decode([7, 0, 999]), tokenizer.eod) == ("7 0 999", 999)
    for text in ("1 2 x", "1000", "-1", "1.5", b"7 \xff", "\u00b2", "9" * 5000):
        with pytest.raises(DataError, match=r"NullTokenizer reads ids 0\.\.999 separated by spaces, not '"):
            tokenizer.encode(text)
    byte = cases["ByteTokenizer"].ours
    assert bytes(byte.encode(bytes(range(256))).tolist()) == bytes(range(256)), "any bytes"
    assert byte.decode([104, 105, 256, 255]) == "hi<|endoftext|>\ufffd"
