"""Tokenizer files: their content, the end-of-document token, and errors of missing, damaged and unsuitable files."""

from __future__ import annotations

import argparse
import base64
import json
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, processors

from megatron.config.data import DataConfig
from megatron.config.files import add_links_flag
from megatron.data.errors import DataError
from megatron.data.tokenizers.engine import choose_engine
from megatron.data.tokenizers.huggingface import (
    END_OF_DOCUMENT,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    HuggingFaceTokenizer,
    byte_tokenizer,
)
from megatron.data.tokenizers.tiktoken import TikTokenizer
from megatron.data.tokenizers.tokenizer import TOKENIZER_TYPES, TokenizerOptions, add_tokenizer_flags, build_tokenizer
from megatron.inference.text import InferenceError, open_codec
from tests.unit.data.made_tokenizers import gpt2, hugging_face, options_for, sentencepiece_model, tiktoken_file

HF = "HuggingFaceTokenizer"


def with_specials(*specials: str) -> tokenizers.Tokenizer:
    """Bytes, and these special tokens from id 257."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def save(folder: Path, tokenizer: tokenizers.Tokenizer, **beside: Any) -> Path:
    """A folder with the tokenizer and JSON files beside it: ``config={...}``, ``special={...}``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER_JSON).write_text(tokenizer.to_str())
    for name, content in beside.items():
        (folder / {"config": TOKENIZER_CONFIG, "special": SPECIAL_TOKENS_MAP}[name]).write_text(json.dumps(content))
    return folder


def test_nothing_is_added_cut_or_padded(tmp_path: Path) -> None:
    """The file asks for tokens around the text, at most 4 ids, and at least 16."""
    plain = with_specials("<s>")
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    plain.enable_truncation(4)
    plain.enable_padding(length=16)
    ours = HuggingFaceTokenizer(save(tmp_path, plain))
    assert plain.encode("abcdef").ids[0] == 257
    assert ours.encode("abcdef").tolist() == list(b"abcdef")
    assert ours.encode("").tolist() == []


def test_size_counts_added_tokens_and_gaps(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    ours = HuggingFaceTokenizer(save(tmp_path, tokenizer))
    assert (ours.vocab_size, ours.encode("a<extra>").tolist()) == (258, [97, 257])
    content = json.loads(tokenizer.to_str())
    content["added_tokens"][-1]["id"] = 900
    content["model"]["vocab"]["xyz"] = 900
    assert HuggingFaceTokenizer(save(tmp_path, tokenizers.Tokenizer.from_str(json.dumps(content)))).vocab_size == 901


@pytest.mark.parametrize(
    ("beside", "end"),
    [
        ({}, END_OF_DOCUMENT),
        ({"config": {"eos_token": "<a>"}}, "<a>"),
        ({"config": {"eos_token": None}, "special": {"eos_token": {"content": "<a>"}}}, "<a>"),
        ({"config": {"eos_token": {"content": "</s>"}}, "special": {"eos_token": "<a>"}}, "</s>"),
    ],
)
def test_end_of_document(tmp_path: Path, beside: dict[str, Any], end: str) -> None:
    tokenizer = with_specials("</s>", "<a>")
    folder = save(tmp_path, tokenizer, **beside)
    for path in (folder, folder / TOKENIZER_JSON):
        assert HuggingFaceTokenizer(path).eod == tokenizer.token_to_id(end)


def test_end_of_document_by_default(tmp_path: Path) -> None:
    ends = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    assert HuggingFaceTokenizer(save(tmp_path, ends)).eod == 1
    none = tokenizers.Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>"))
    with pytest.raises(DataError, match="names no eos_token"):
        HuggingFaceTokenizer(save(tmp_path, none))
    with pytest.raises(DataError, match="has no id for its eos_token '<z>'"):
        HuggingFaceTokenizer(save(tmp_path, byte_tokenizer(), config={"eos_token": "<z>"}))


def test_a_special_token_that_is_a_word_of_the_model_is_refused(tmp_path: Path) -> None:
    """A unigram model finds its own ``</s>`` in a text; the unknown token may be found."""
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0))
    unigram.add_special_tokens(["</s>"])
    given = TokenizerOptions(HF, str(save(tmp_path / "unigram", unigram)))
    with pytest.raises(DataError, match="'</s>' in plain text as the special token 1"):
        build_tokenizer(given)
    assert build_tokenizer(replace(given, parse_special_tokens=True)).encode("a</s>b").tolist() == [2, 1, 3]
    words = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    words.add_special_tokens(["<unk>"])
    given = TokenizerOptions(HF, str(save(tmp_path / "words", words)))
    assert build_tokenizer(given).encode("anything").tolist() == [0]


def test_random_merges_are_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.model.dropout = 0.1
    with pytest.raises(DataError, match="drops merges at random"):
        HuggingFaceTokenizer(save(tmp_path, tokenizer))


# --- damage ---

HALF = b"half"  # the first half of the file
LINE = base64.b64encode(b"\0")


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        (HF, TOKENIZER_JSON, b"{}", "not a tokenizer.json"),
        (HF, TOKENIZER_JSON, None, "there is no .*tokenizer.json\n  fix: python -c .*from_pretrained"),
        (HF, TOKENIZER_CONFIG, b"[]", "tokenizer_config.json is not a JSON object"),
        (HF, TOKENIZER_CONFIG, b"{", "tokenizer_config.json is not a JSON object"),
        (HF, TOKENIZER_CONFIG, b'{"eos_token": 3}', "eos_token is 3, not a string"),
        ("GPT2BPETokenizer", "vocab.json", None, "there is no .*vocab.json"),
        ("GPT2BPETokenizer", "merges.txt", None, "there is no .*merges.txt"),
        ("GPT2BPETokenizer", "vocab.json", b"{", "vocab.json .* EOF while parsing an object at line 1"),
        ("GPT2BPETokenizer", "vocab.json", b"[]", "vocab.json .* Bad vocabulary json file"),
        ("GPT2BPETokenizer", "merges.txt", b"a b c\n", "merges.txt .* invalid at line 1"),
        ("GPT2BPETokenizer", "merges.txt", b"#version: 0.2\nnot there\n", "merges.txt .* out of vocabulary"),
        ("Llama2Tokenizer", "some.model", None, "there is no .*some.model"),
        ("Llama2Tokenizer", "some.model", b"", "some.model: this is not a SentencePiece model: it has no pieces"),
        ("Llama2Tokenizer", "some.model", b"vocab", "some.model: this is not a SentencePiece model"),
        ("Llama2Tokenizer", "some.model", HALF, "some.model: this is not a SentencePiece model"),
        ("Llama2Tokenizer", "some.model", b"\n\x05\n\x03abc", "some.model: not a model that SentencePiece can read"),
        ("TikTokenizer", "cl100k_base.tiktoken", None, "there is no .*cl100k_base.tiktoken"),
        ("TikTokenizer", "cl100k_base.tiktoken", LINE + b" 0\n", "lacks 255 of the 256 bytes, first 0x01"),
        ("TikTokenizer", "cl100k_base.tiktoken", LINE + b" 0\nAQ== 0\n", "has a duplicate token or rank"),
        ("TikTokenizer", "cl100k_base.tiktoken", LINE + b" 0\nxyz\n", "base.tiktoken:2 is not a base64 token and"),
    ],
)
def test_damage_is_named(tmp_path: Path, kind: str, name: str, content: bytes | None, message: str) -> None:
    given, file = options_for(kind, tmp_path), tmp_path / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if content == HALF else content)
    with pytest.raises(DataError, match=message):
        build_tokenizer(given)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not a list of"), ('{"vocab": []}', "is not a list of")]
    + [('[{"rank": 1, "token_bytes": "AA=="}]', "ranks of .*x.json are not 0, 1, 2")],
)
def test_damage_of_ranks_as_json(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError, match=message):
        TikTokenizer(tmp_path / "x.json")


def test_vocabularies_that_are_incomplete(tmp_path: Path) -> None:
    vocab, merges = gpt2(tmp_path)
    given = TokenizerOptions("GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))
    with pytest.raises(DataError, match="files are swapped") as caught:
        build_tokenizer(replace(given, vocab_file=str(merges), merge_file=str(vocab)))
    assert caught.value.fixes == (f"--vocab-file {vocab} --merge-file {merges}",)
    content = json.loads(vocab.read_text())
    for changes, message in (({"the": 5}, "duplicate id"), ({END_OF_DOCUMENT: None}, "lacks 1 of the 256 bytes and <")):
        changed = {word: number for word, number in (content | changes).items() if number is not None}
        vocab.write_text(json.dumps(changed))
        with pytest.raises(DataError, match=message):
            build_tokenizer(given)
    with pytest.raises(DataError, match="no end-of-sentence piece"):
        build_tokenizer(TokenizerOptions("Llama2Tokenizer", str(sentencepiece_model(tmp_path / "x.model", eos_id=-1))))


def test_other_places_of_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no .*gpt2\n  fix: hf download"):
        HuggingFaceTokenizer(tmp_path / "gpt2")
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(DataError, match=r"there is no .*tokenizer\.json") as caught:
        HuggingFaceTokenizer(tmp_path)
    assert caught.value.fixes[0] == f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {tmp_path}"
    with pytest.raises(DataError, match="holds 0 files"):
        TikTokenizer(tmp_path)
    tiktoken_file(tmp_path / "r50k_base.tiktoken")
    assert TikTokenizer(tmp_path).eod == 50256
    (tmp_path / "other.json").write_text(json.dumps([]))
    with pytest.raises(DataError, match="holds 2 files"):
        TikTokenizer(tmp_path)


# --- options ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("GPT2BPE",), "there is no GPT2BPE; tokenizers for text: HuggingFaceTokenizer, GPT2BPETokenizer, "),
        (("BertWordPieceCase",), "Megatron-LM's BertWordPieceCase is not supported: it serves BERT"),
        (("GPT2BPETokenizer",), "needs two files\n  fix: --vocab-file vocab.json --merge-file merges.txt"),
        (("TikTokenizer",), "needs --tokenizer-model\n  fix: --tokenizer-model FILE.tiktoken"),
        ((HF,), "needs --tokenizer-model"),
        (("NullTokenizer",), "needs --vocab-size"),
        (("NullTokenizer", None, None, None, 0), "needs --vocab-size"),
        (("ByteTokenizer", "m"), "ByteTokenizer does not use --tokenizer-model"),
        (("ByteTokenizer", None, None, "m"), "ByteTokenizer does not use --merge-file"),
        (("Llama2Tokenizer", "m", None, None, None, "v1"), "does not use --tiktoken-pattern"),
        (("GPT2BPETokenizer", "m", "v"), "either two files or a tokenizer.json, not both"),
        ((HF, "MODEL", None, None, 9999), r" ids, not 9999\n  fix: leave out --vocab-size"),
        (("TikTokenizer", "RANKS"), "has no pre-tokenization regex.*\n  fix: --tiktoken-pattern v1"),
        (("TikTokenizer", "RANKS", None, None, None, "v2", 6), "6 special tokens are too few for <unk> <s> </s>"),
        (
            ("TikTokenizer", "RANKS", None, None, 10**6, "v2"),
            r"make 1,\d+ ids, not 1,000,000\n  fix: --vocab-size 1\d+",
        ),
        (("TikTokenizer", "RANKS", None, None, 1100, "v2"), r"make 1,\d+ ids, not 1,100"),
        (("TikTokenizer", "RANKS", None, None, None, "v2", 1 << 17), r"keeps the first 2\*\*17\n.*--vocab-size 131072"),
        (("TikTokenizer", "NAMED", None, None, None, None, 7), "special tokens of cl100k_base is fixed"),
    ],
)
def test_options_that_cannot_be_used(given: tuple[Any, ...], message: str, tmp_path: Path) -> None:
    files = {
        "MODEL": lambda: hugging_face(tmp_path),
        "RANKS": lambda: tiktoken_file(tmp_path / "x.tiktoken"),
        "NAMED": lambda: tiktoken_file(tmp_path / "cl100k_base.tiktoken"),
    }
    values = [str(files[value]()) if isinstance(value, str) and value in files else value for value in given]
    with pytest.raises(DataError, match=message):
        build_tokenizer(TokenizerOptions(*values))


def test_flags_and_configuration_give_the_same_options() -> None:
    parser = argparse.ArgumentParser()
    add_tokenizer_flags(parser)
    add_links_flag(parser)
    words = "--follow-links --tokenizer-type TikTokenizer --tokenizer-model m --tiktoken-pattern v1"
    from_flags = TokenizerOptions.from_args(
        parser.parse_args([*words.split(), "--tiktoken-num-special-tokens", "9", "--vocab-size", "500"])
    )
    given = {"tokenizer_type": "TikTokenizer", "tokenizer_model": "m", "tiktoken_pattern": "v1"}
    data = DataConfig(**given, tiktoken_num_special_tokens=9, follow_links=True)
    expected = TokenizerOptions("TikTokenizer", "m", None, None, 500, "v1", 9, follow_links=True)
    assert from_flags == TokenizerOptions.of(data, 500) == expected == pickle.loads(pickle.dumps(expected))
    with pytest.raises(DataError, match="tokenizer of the data is not specified"):
        TokenizerOptions.of(DataConfig(), None)
    (field,) = (f for f in fields(DataConfig) if f.name == "tokenizer_type")
    assert field.metadata["option"].choices == TOKENIZER_TYPES


def without(**parts: Any) -> dict[str, Any]:
    """The content of a tokenizer.json of bytes, with other parts."""
    return {**json.loads(byte_tokenizer().to_str()), **parts}


def replacements(count: int, content: str, pattern: dict[str, str]) -> dict[str, Any]:
    steps = [{"type": "Replace", "pattern": pattern, "content": content}] * count
    return {"type": "Sequence", "normalizers": steps}


NFC = {"type": "NFC"}
SPARSE = {"type": "BPE", "vocab": {"a": 0, "<|endoftext|>": 2**32 - 2}, "merges": []}
CHAIN = {"type": "Sequence", "normalizers": [*replacements(1, "b" * 100, {"String": "a"})["normalizers"], NFC]}
CHAIN["normalizers"] += replacements(1, "c" * 100, {"String": "b"})["normalizers"]
PREFIXED = {"type": "BPE", "vocab": {"a": 0, "\u0120": 1, "a\u0120": 2}, "merges": [["a", "\u0120"]]}
PREFIXED["continuing_subword_prefix"] = "##"
LIGATURES = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "NFKD"}, {"type": "NFKC"}]}
DECODERS = {"type": "Sequence", "decoders": replacements(3, "a" * 30, {"String": "a"})["normalizers"]}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (without(model=SPARSE, added_tokens=[]), r"a token with the id 4,294,967,294; ids are below 16,777,216"),
        (without(normalizer=replacements(5, "a" * 100, {"String": "a"})), r"a text up to 5e\+10 times as long"),
        (without(normalizer=replacements(20, "a", {"Regex": "(?=a)"})), r"a text up to 5\.24e\+06 times as long"),
        (without(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTES] * 9}), r"up to 1\.95e\+06 times as long"),
        (without(decoder=DECODERS), r"up to 2\.7e\+04 times as long"),
        (without(normalizer=CHAIN), r"up to 5e\+04 times as long"),
        (without(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "Precompiled"),
        (without(model=PREFIXED), "the second part of the merge .* does not begin with '##'"),
        (without(normalizer=LIGATURES), r"up to 2\.92e\+04 times as long"),
        (without(normalizer={"type": "Prepend", "prepend": "x" * 5000}), r"up to 2\.5e\+04 times as long"),
        ([[]] * 5, "not a tokenizer.json that the library can read"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_takes_any_amount_of_memory_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    (tmp_path / TOKENIZER_JSON).write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        build_tokenizer(TokenizerOptions(HF, str(tmp_path)))
    with pytest.raises(InferenceError, match=message):
        open_codec({TOKENIZER_JSON: (tmp_path / TOKENIZER_JSON).read_bytes()})


def replace_all(pairs: dict[str, str]) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in pairs.items()]


@pytest.mark.parametrize(
    "rules",
    [
        [
            {"type": "Prepend", "prepend": "\u2581"},
            *replace_all({" ": "\u2581"}),
            *replacements(5, '"', {"String": "``"})["normalizers"],
            *replacements(3, "\u2581", {"Regex": " {2,}"})["normalizers"],
            {"type": "NFKC"},
        ],
        replace_all(
            dict(zip("0123456789", ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]))
        ),
        replace_all({mark: f" {mark} " for mark in ".,;:!?"}),
        replace_all({" " * n: f"<|space{n}|>" for n in range(16, 1, -1)}),
    ],
    ids=["sentencepiece", "digits", "punctuation", "spaces"],
)
def test_rules_of_ordinary_tokenizers_are_accepted(tmp_path: Path, rules: list[dict[str, Any]]) -> None:
    content = without(normalizer={"type": "Sequence", "normalizers": rules})
    (tmp_path / TOKENIZER_JSON).write_text(json.dumps(content))
    assert build_tokenizer(TokenizerOptions(HF, str(tmp_path))).vocab_size == 257


@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel"])
def test_texts_that_need_an_unknown_token_are_invalid_documents(tmp_path: Path, kind: str) -> None:
    """Not an error of a tokenizer that knows all the words of its texts."""
    model = {"type": kind, "vocab": {"a": 0}, "unk_token": "[UNK]"}
    if kind == "WordPiece":
        model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    end = {"id": 1, "content": "</s>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = without(model=model, pre_tokenizer=None, decoder=None, added_tokens=[end])
    (tmp_path / TOKENIZER_JSON).write_text(json.dumps(content))
    tokenizer = build_tokenizer(TokenizerOptions(HF, str(tmp_path)))
    assert tokenizer.encode("a").tolist() == [0]
    with pytest.raises(ValueError, match=r"cannot encode this text: .*UNK"):
        tokenizer.encode("b")
    codec = open_codec({TOKENIZER_JSON: (tmp_path / TOKENIZER_JSON).read_bytes()})
    with pytest.raises(InferenceError, match=r"cannot encode this prompt: .*UNK"):
        codec.encode("b")


@pytest.mark.parametrize("rank", [-1, 2**24, 10**30])
def test_ranks_have_limits(tmp_path: Path, rank: int) -> None:
    file = tiktoken_file(tmp_path / "cl100k_base.tiktoken")
    file.write_text(file.read_text() + f"{base64.b64encode(b'new word').decode()} {rank}\n")
    with pytest.raises(DataError, match="has a rank that is not from 0 to 16,777,215"):
        TikTokenizer(file)


def test_ranks_of_json_are_whole_numbers(tmp_path: Path) -> None:
    file = tiktoken_file(tmp_path / "x.json")
    entries = json.loads(file.read_text())
    entries[0]["rank"], entries[1]["rank"], entries[2]["rank"] = False, True, 2.0
    file.write_text(json.dumps(entries))
    expected = TikTokenizer(tiktoken_file(tmp_path / "y.json")).encode("a\0")
    assert TikTokenizer(file).encode("a\0").tolist() == expected.tolist()


def test_many_long_added_tokens_are_not_compared() -> None:
    """All their beginnings would take a square of their length."""
    tokenizer = with_specials("x" * 20_000)
    files = {TOKENIZER_JSON: tokenizer.to_str().encode(), TOKENIZER_CONFIG: b'{"eos_token": "<|endoftext|>"}'}
    engine = choose_engine(HuggingFaceTokenizer("x", files=files), ["a text"])
    assert "too many or too long added tokens to compare" in engine.reason


def test_links_out_of_the_folder_of_a_tokenizer(tmp_path: Path) -> None:
    """Links are refused: their targets would be copied beside datasets and into checkpoints."""
    secret = tmp_path / "secret.json"
    secret.write_text('{"eos_token": "<|endoftext|>", "key": "password"}')
    folder = save(tmp_path / "x", with_specials("<s>"))
    (folder / TOKENIZER_CONFIG).symlink_to("../secret.json")
    for given in (folder, folder / TOKENIZER_JSON):
        with pytest.raises(DataError, match=r"links lead out of .* -> \.\./secret\.json\n  fix: --follow-links"):
            build_tokenizer(TokenizerOptions(HF, str(given)))
        tokenizer = build_tokenizer(TokenizerOptions(HF, str(given), follow_links=True))
        assert b"password" in tokenizer.files[TOKENIZER_CONFIG]
    (folder / TOKENIZER_CONFIG).unlink()
    (folder / "model.safetensors").symlink_to("../weights")  # which no tokenizer reads
    build_tokenizer(TokenizerOptions(HF, str(folder)))
    (folder / TOKENIZER_JSON).rename(tmp_path / "named.json")
    (folder / TOKENIZER_JSON).symlink_to("../named.json")
    build_tokenizer(TokenizerOptions(HF, str(folder / TOKENIZER_JSON)))  # named by the user
