"""SentencePiece models: ids against the library with the file as it is, and the files for Hugging Face against both."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megatron.data.errors import DataError
from megatron.data.tokenizers.engine import EDGE_CASE_TEXTS
from megatron.data.tokenizers.huggingface import TOKENIZER_JSON, HuggingFaceTokenizer
from megatron.data.tokenizers.sentencepiece import (
    MODEL_FILE,
    PieceType,
    SentencePieceTokenizer,
    parse_model,
    with_piece_types,
)
from tests.unit.data.made_tokenizers import TEXT, apart, sentencepiece_model

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NEARLY_WORDS = st.text(st.sampled_from("the cat\n\t  sat-12<>/s[]{}\u00e9\u6771\u2581|_im_start"))
UNIGRAM = {"model_type": "unigram"}
NFKC = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
SYMBOLS = {"user_defined_symbols": ["<|im_start|>", "[SEP]", "\n\n", "7"], "control_symbols": ["<ctl>"]}
PADS = {"pad_id": 3, "pad_piece": "<pad>"}


def raw(path: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(sentencepiece_model(tmp_path_factory.mktemp("llama") / "llama.model"))


@pytest.fixture(scope="module")
def llama_json(llama: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_buffer(llama.hugging_face_files()[TOKENIZER_JSON])
    tokenizer.encode_special_tokens = True
    return tokenizer


# --- ids ---


@pytest.mark.parametrize("flags", [{}, UNIGRAM, NFKC, SYMBOLS, PADS, {"byte_fallback": False}])
def test_ids_are_those_of_the_library(tmp_path: Path, flags: dict[str, Any]) -> None:
    path = sentencepiece_model(tmp_path / "x.model", **flags)
    ours, theirs = SentencePieceTokenizer(path), raw(path)
    texts = [text for text in [*EDGE_CASE_TEXTS, *TEXT] if "<|im_start|>" not in text]
    assert apart(ours.encode_batch(texts)) == theirs.encode(texts)
    assert (ours.vocab_size, ours.eod) == (theirs.get_piece_size(), theirs.eos_id())
    assert ours.pad == (theirs.pad_id() if theirs.pad_id() >= 0 else None)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=ANY_TEXT | NEARLY_WORDS)
@example(text="the cat's na\u00efve  fa\u00e7ade\n\n\t\u6771\u4eac \U0001f600")
def test_any_text_comes_back(llama: SentencePieceTokenizer, text: str) -> None:
    ids = llama.encode(text)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=llama.files[MODEL_FILE])
    assert ids.tolist() == llama.encode(text.encode()).tolist() == theirs.encode(text)
    assert llama.decode(ids) == text.replace("\u2581", " ")  # how SentencePiece writes a space


@pytest.mark.parametrize("flags", [SYMBOLS, SYMBOLS | UNIGRAM])
def test_symbols_that_are_spelled_out(tmp_path: Path, flags: dict[str, Any]) -> None:
    """Marks are text unless asked for; user-defined words are words always, as the library has it."""
    path = sentencepiece_model(tmp_path / "x.model", **flags)
    theirs, tokenizer = raw(path), SentencePieceTokenizer(path)
    parsing = SentencePieceTokenizer(path, parse_special_tokens=True)
    marks = ["<s>", "</s>", "<ctl>", "<|im_start|>", "[SEP]"]
    assert tokenizer.special_ids == {mark: theirs.piece_to_id(mark) for mark in marks}
    text = "a</s> 7\n\n<|im_start|>b [SEP]<ctl><s>"
    words = {theirs.piece_to_id(word) for word in ("7", "\n\n")}
    plain, parsed = tokenizer.encode(text).tolist(), parsing.encode(text).tolist()
    assert words <= set(plain)
    assert not set(plain) & set(tokenizer.special_ids.values())
    assert [number for number in parsed if number in tokenizer.special_ids.values()] == [
        theirs.piece_to_id(mark) for mark in ("</s>", "<|im_start|>", "[SEP]", "<ctl>", "<s>")
    ]
    assert tokenizer.decode(plain) == parsing.decode(parsed) == text


def test_unknown_ids_are_left_out_of_text(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model(tmp_path / "x.model"))
    ids = tokenizer.encode("the cat").tolist()
    assert tokenizer.decode([-1, *ids, tokenizer.vocab_size, 10**6]) == "the cat"


# --- files ---


def test_what_is_in_a_file(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path / "x.model", **SYMBOLS, **NFKC, **PADS)
    model, theirs = parse_model(path.read_bytes()), raw(path)
    numbers = range(theirs.get_piece_size())
    assert [piece.text for piece in model.pieces] == [theirs.id_to_piece(number) for number in numbers]
    assert [piece.score for piece in model.pieces] == [theirs.get_score(number) for number in numbers]
    for kind, is_kind in ((PieceType.CONTROL, theirs.is_control), (PieceType.BYTE, theirs.is_byte)):
        assert [piece.kind is kind for piece in model.pieces] == [is_kind(number) for number in numbers]
    assert (model.byte_fallback, model.squeeze_spaces, model.dummy_prefix) == (True, True, True)
    assert model.charsmap


def test_nothing_but_the_kinds_is_changed(tmp_path: Path) -> None:
    content = sentencepiece_model(tmp_path / "x.model", **SYMBOLS).read_bytes()
    assert with_piece_types(content, lambda piece: piece.kind) == content
    changed = with_piece_types(content, lambda piece: PieceType.UNUSED if piece.text == "7" else piece.kind)
    before, after = parse_model(content).pieces, parse_model(changed).pieces
    assert [(p.text, p.score) for p in before] == [(p.text, p.score) for p in after]
    assert [p.text for p, q in zip(before, after) if p.kind is not q.kind] == ["7"]


@pytest.mark.parametrize("damage", ["empty", "half", "text", "missing", "zeros"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    path = sentencepiece_model(tmp_path / "x.model")
    content = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case _:
            choices = {"empty": b"", "half": content[: len(content) // 2], "text": b"vocab", "zeros": bytes(100)}
            path.write_bytes(choices[damage])
    with pytest.raises(DataError, match=r"x\.model"):
        SentencePieceTokenizer(path)


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no end-of-sentence piece"):
        SentencePieceTokenizer(sentencepiece_model(tmp_path / "x.model", eos_id=-1))


# --- for Hugging Face ---

EXPRESSIBLE: list[dict[str, Any]] = [
    {},
    {"byte_fallback": False},
    {"add_dummy_prefix": False},
    {"remove_extra_whitespaces": True},
    {"add_dummy_prefix": False, **SYMBOLS},
    {"split_by_whitespace": False, "allow_whitespace_only_pieces": True, **PADS},
]


@pytest.mark.parametrize("flags", EXPRESSIBLE)
def test_transformers_gives_the_same_ids(tmp_path: Path, flags: dict[str, Any]) -> None:
    ours = SentencePieceTokenizer(sentencepiece_model(tmp_path / "x.model", **flags))
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, content in ours.hugging_face_files().items():
        (folder / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(folder)
    texts = [
        text for text in [*EDGE_CASE_TEXTS, *TEXT] if not any(mark in text for mark in ("<unk>", *ours.special_ids))
    ]
    assert theirs(texts, add_special_tokens=False).input_ids == apart(ours.encode_batch(texts))
    assert (len(theirs), theirs.eos_token_id, theirs.pad_token_id) == (ours.vocab_size, ours.eod, ours.pad)
    same = HuggingFaceTokenizer(folder)
    assert apart(same.encode_batch([*EDGE_CASE_TEXTS, *TEXT])) == apart(ours.encode_batch([*EDGE_CASE_TEXTS, *TEXT]))
    if "remove_extra_whitespaces" not in flags and "byte_fallback" not in flags:
        assert [theirs.decode(ids) for ids in theirs(texts, add_special_tokens=False).input_ids] == texts


@pytest.mark.parametrize("flags", EXPRESSIBLE)
def test_special_tokens_that_are_found_have_the_same_ids_or_no_files(tmp_path: Path, flags: dict[str, Any]) -> None:
    path = sentencepiece_model(tmp_path / "x.model", **flags)
    ours = SentencePieceTokenizer(path, parse_special_tokens=True)
    files = ours.hugging_face_files()
    assert bool(files) == (not flags.get("add_dummy_prefix", True))
    if files:
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        texts = ["a</s> b", "<s>the  cat</s>\n<s> sat", *TEXT]
        theirs = AutoTokenizer.from_pretrained(tmp_path)(texts, add_special_tokens=False)
        assert theirs.input_ids == apart(ours.encode_batch(texts))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(texts=st.lists(ANY_TEXT | NEARLY_WORDS | st.text(st.sampled_from("at \u2581"), max_size=60), max_size=8))
def test_any_text_has_the_same_ids_in_hugging_face(
    llama: SentencePieceTokenizer, llama_json: tokenizers.Tokenizer, texts: list[str]
) -> None:
    encoded = llama_json.encode_batch(texts, add_special_tokens=False)
    assert [one.ids for one in encoded] == apart(llama.encode_batch(texts))


@pytest.mark.parametrize("flags", [UNIGRAM, NFKC, SYMBOLS, {"treat_whitespace_as_suffix": True}])
def test_what_it_cannot_say_has_no_files(tmp_path: Path, flags: dict[str, Any]) -> None:
    assert SentencePieceTokenizer(sentencepiece_model(tmp_path / "x.model", **flags)).hugging_face_files() == {}


def test_of_two_joints_with_one_score_the_left_one_is_first_and_has_no_files(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path / "x.model")
    tokenizer = SentencePieceTokenizer(path)
    merges = json.loads(tokenizer.hugging_face_files()[TOKENIZER_JSON])["model"]["merges"]
    (first, second), pieces = ("".join(merge).encode() for merge in (merges[0], merges[-1])), path.read_bytes()
    score = next(p.score for p in parse_model(pieces).pieces if p.text.encode() == first)
    at = pieces.index(b"\x0a" + bytes((len(second),)) + second + b"\x15") + len(second) + 3
    path.write_bytes(pieces[:at] + struct.pack("<f", score) + pieces[at + 4 :])
    assert SentencePieceTokenizer(path).hugging_face_files() == {}
    assert SentencePieceTokenizer(path).files[MODEL_FILE] != pieces
