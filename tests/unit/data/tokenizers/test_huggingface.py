"""Tokenizers of Hugging Face, against the libraries themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from megatron.data.errors import DataError
from megatron.data.tokenizers.huggingface import (
    END_OF_DOCUMENT,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    ByteTokenizer,
    HuggingFaceTokenizer,
    byte_level_bpe,
    byte_tokenizer,
    bytes_to_unicode,
    make_tokenizer_files,
)

TEXT = ["def f(x):\n    return x + 1\n", "the cat and the hat; the bat", "naïve façade über 東京"] * 4
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # all but halves of surrogate pairs


def trained(vocab_size: int = 320, specials: tuple[str, ...] = (END_OF_DOCUMENT,)) -> tokenizers.Tokenizer:
    tokenizer = byte_level_bpe(models.BPE(), words=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def save(folder: Path, tokenizer: tokenizers.Tokenizer, **beside: Any) -> Path:
    """A folder with the tokenizer and JSON files beside it: ``config={...}``, ``special={...}``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER_JSON).write_text(tokenizer.to_str())
    for name, content in beside.items():
        (folder / {"config": TOKENIZER_CONFIG, "special": SPECIAL_TOKENS_MAP}[name]).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tokenizer"), trained())


# --- ids ---


@settings(max_examples=60, deadline=None)
@given(text=ANY_TEXT)
@example(text="the cat's naïve  façade\n\n\t東京 \U0001f600")
def test_ids_are_those_of_the_library(folder: Path, text: str) -> None:
    ours, theirs = HuggingFaceTokenizer(folder), tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_JSON))
    ids = ours.encode(text).tolist()
    assert ids == ours.encode(text.encode()).tolist() == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == text


def test_a_batch_is_its_texts(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    texts = [*TEXT, "", b"bytes"]
    ids, lengths = tokenizer.encode_batch(texts)
    one_by_one = [tokenizer.encode(t).tolist() for t in texts]
    assert lengths.tolist() == [len(one) for one in one_by_one]
    assert ids.tolist() == [i for one in one_by_one for i in one]
    assert [array.tolist() for array in tokenizer.encode_batch([])] == [[], []]


def test_nothing_is_added_cut_or_padded(tmp_path: Path) -> None:
    """Whatever the file asks for: marks around the text, at most 4 ids, at least 16."""
    plain = trained(specials=("<s>", "</s>"))
    bare = HuggingFaceTokenizer(save(tmp_path / "bare", plain)).encode(TEXT[0]).tolist()
    plain.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    plain.enable_truncation(4)
    plain.enable_padding(length=16)
    dressed = HuggingFaceTokenizer(save(tmp_path / "dressed", plain))
    assert plain.encode(TEXT[0]).ids != bare
    assert dressed.encode(TEXT[0]).tolist() == bare
    assert len(bare) > 4
    assert dressed.encode("").tolist() == []


def test_special_tokens_spelled_out_stay_text(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    text = f"it ends with {END_OF_DOCUMENT}{END_OF_DOCUMENT} they say"
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eod]) == text + END_OF_DOCUMENT


@pytest.mark.parametrize("bad", [b"caf\xe9", "half a pair: \ud800"])
def test_what_is_no_unicode_is_refused(folder: Path, bad: str | bytes) -> None:
    with pytest.raises(UnicodeError):
        HuggingFaceTokenizer(folder).encode(bad)


# --- size and end ---


def test_added_tokens_count(tmp_path: Path) -> None:
    tokenizer = trained()
    before = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["<extra>"])
    ours = HuggingFaceTokenizer(save(tmp_path, tokenizer))
    assert ours.vocab_size == before + 1
    assert ours.encode("a<extra>").tolist()[-1] == before


def test_ids_with_gaps_count_to_the_largest(tmp_path: Path) -> None:
    content = json.loads(trained().to_str())
    content["model"]["vocab"]["Ġthe"] = 900
    tokenizer = HuggingFaceTokenizer(save(tmp_path, tokenizers.Tokenizer.from_str(json.dumps(content))))
    assert tokenizer.vocab_size == 901
    assert 900 in tokenizer.encode("and the hat").tolist()


@pytest.mark.parametrize(
    ("beside", "end"),
    [
        ({}, END_OF_DOCUMENT),
        ({"config": {"eos_token": "<a>"}}, "<a>"),
        ({"config": {"eos_token": {"content": "<a>", "lstrip": False}}}, "<a>"),
        ({"config": {"eos_token": None}, "special": {"eos_token": "<a>"}}, "<a>"),
        ({"special": {"eos_token": {"content": "<a>"}}}, "<a>"),
        ({"config": {"eos_token": "</s>"}, "special": {"eos_token": "<a>"}}, "</s>"),
    ],
)
def test_what_ends_a_document(tmp_path: Path, beside: dict[str, Any], end: str) -> None:
    tokenizer = trained(specials=("</s>", "<a>", END_OF_DOCUMENT))
    folder = save(tmp_path, tokenizer, **beside)
    for path in (folder, folder / TOKENIZER_JSON):
        assert HuggingFaceTokenizer(path).eod == tokenizer.token_to_id(end)


def test_without_a_word_the_usual_end_is_looked_for(tmp_path: Path) -> None:
    assert HuggingFaceTokenizer(save(tmp_path, trained(specials=("<s>", "</s>")))).eod == 1
    with pytest.raises(DataError, match="names no eos_token"):
        HuggingFaceTokenizer(save(tmp_path, trained(specials=("<s>",))))
    with pytest.raises(DataError, match="has no id for its eos_token '<z>'"):
        HuggingFaceTokenizer(save(tmp_path, trained(), config={"eos_token": "<z>"}))


# --- files ---


def test_files_are_kept_and_tell_tokenizers_apart(folder: Path, tmp_path: Path) -> None:
    copy = save(tmp_path / "copy", trained(), config={"eos_token": END_OF_DOCUMENT})
    one, same, other = (
        HuggingFaceTokenizer(f) for f in (folder, copy, save(tmp_path / "other", trained(vocab_size=260)))
    )
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert set(one.files) == {TOKENIZER_JSON}
    assert same.files == {name: (copy / name).read_bytes() for name in (TOKENIZER_JSON, TOKENIZER_CONFIG)}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (TOKENIZER_JSON, "{}", "not a tokenizer.json"),
        (TOKENIZER_JSON, "", "not a tokenizer.json"),
        (TOKENIZER_JSON, None, "there is no .*tokenizer.json\n  fix: python -c .*from_pretrained"),
        (TOKENIZER_CONFIG, "[]", "tokenizer_config.json is not a JSON object"),
        (TOKENIZER_CONFIG, "{", "tokenizer_config.json is not a JSON object"),
        (TOKENIZER_CONFIG, '{"eos_token": 3}', "eos_token is 3, not a string"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    save(tmp_path, trained())
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        HuggingFaceTokenizer(tmp_path)


def test_a_name_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no .*gpt2\n  fix: hf download"):
        HuggingFaceTokenizer(tmp_path / "gpt2")


def test_random_merges_are_refused(tmp_path: Path) -> None:
    tokenizer = trained()
    tokenizer.model.dropout = 0.1
    with pytest.raises(DataError, match="drops merges at random"):
        HuggingFaceTokenizer(save(tmp_path, tokenizer))


# --- bytes as a tokenizer of theirs ---


def test_letters_of_bytes_are_those_of_the_library() -> None:
    assert sorted(bytes_to_unicode()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for byte in range(128):
        ((word, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(byte))
        assert word == bytes_to_unicode()[byte]


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    for name, content in make_tokenizer_files(byte_tokenizer()).items():
        (folder / name).write_bytes(content)
    return folder


@settings(max_examples=60, deadline=None)
@given(text=ANY_TEXT)
@example(text="  the  cat 's\r\n\t" + "".join(map(chr, range(400))) + " 東京 \U0001f600")
@example(text="<|endoftext")
def test_transformers_reads_bytes_as_we_do(bytes_folder: Path, text: str) -> None:
    theirs = AutoTokenizer.from_pretrained(bytes_folder)
    ids = ByteTokenizer().encode(text).tolist()
    assert theirs(text, add_special_tokens=False).input_ids == ids
    assert theirs(text).input_ids == ids
    assert theirs.decode(ids) == text
    assert HuggingFaceTokenizer(bytes_folder).encode(text).tolist() == ids


def test_end_and_size_of_the_bytes(bytes_folder: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(bytes_folder), HuggingFaceTokenizer(bytes_folder)
    assert (theirs.eos_token, theirs.eos_token_id, len(theirs)) == (END_OF_DOCUMENT, 256, 257)
    assert (ours.eod, ours.vocab_size) == (ByteTokenizer.eod, ByteTokenizer.vocab_size)
    assert theirs.decode([104, 105, 256]) == ours.decode([104, 105, 256]) == f"hi{END_OF_DOCUMENT}"
    assert theirs(END_OF_DOCUMENT).input_ids == [256]
    assert theirs(END_OF_DOCUMENT, split_special_tokens=True).input_ids == list(END_OF_DOCUMENT.encode())
