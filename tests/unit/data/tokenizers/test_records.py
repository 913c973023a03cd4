"""The record that ties a dataset to the tokenizer that wrote it, and fingerprints."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models
from transformers import GPT2Tokenizer

from megatron.data.dataset import fingerprint
from megatron.data.errors import DataError
from megatron.data.tokenizers.huggingface import (
    END_OF_DOCUMENT,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    ByteTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    byte_tokenizer,
    make_tokenizer_files,
)
from megatron.data.tokenizers.tiktoken import TikTokenizer
from megatron.data.tokenizers.tokenizer import (
    FILES_SUFFIX,
    RECORD_SUFFIX,
    TOKENIZER_TYPES,
    TokenizerRecord,
    build_tokenizer,
    have_same_ids,
    load_recorded_tokenizer,
    read_tokenizer_record,
    was_written_with,
)
from tests.unit.data.made_tokenizers import gpt2, options_for, record, tiktoken_file, write_files

TEXTUAL = [name for name in TOKENIZER_TYPES if name not in ("ByteTokenizer", "NullTokenizer")]


def change(prefix: str, **values: object) -> None:
    """Change fields of a record."""
    path = Path(f"{prefix}.{RECORD_SUFFIX}")
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of Hugging Face."""
    return write_files(tmp_path_factory.mktemp("model"), make_tokenizer_files(byte_tokenizer()))


@pytest.mark.parametrize("parse", [False, True])
@pytest.mark.parametrize("name", TOKENIZER_TYPES)
def test_every_type_is_rebuilt_from_the_files_beside_the_data(name: str, parse: bool, tmp_path: Path) -> None:
    given = options_for(name, tmp_path / "where it came from")
    written = build_tokenizer(replace(given, parse_special_tokens=parse and name in TEXTUAL))
    prefix = record(tmp_path / "x", written)
    shutil.rmtree(tmp_path / "where it came from", ignore_errors=True)
    again = load_recorded_tokenizer(prefix, name)
    assert again is not None
    assert TokenizerRecord.of(again) == TokenizerRecord.of(written) == read_tokenizer_record(prefix)
    text = "7 8" if name == "NullTokenizer" else "caf\u00e9 <|endoftext|> </s> 7"
    assert again.encode(text).tolist() == written.encode(text).tolist()
    assert again.hugging_face_files() == written.hugging_face_files()
    assert was_written_with(prefix, again)


def test_a_chat_template_stays_with_the_tokenizer(model: Path, tmp_path: Path) -> None:
    """And changes nothing of its ids or its fingerprint."""
    more = {"chat_template.jinja": b"{{ messages }}", "added_tokens.json": b"{}"}
    folder = write_files(tmp_path / "chat", make_tokenizer_files(byte_tokenizer()) | more)
    written = HuggingFaceTokenizer(folder)
    assert written.fingerprint == HuggingFaceTokenizer(model).fingerprint
    again = load_recorded_tokenizer(record(tmp_path / "x", written))
    assert again is not None
    assert more.items() <= again.hugging_face_files().items()


def test_fingerprints_match_earlier_versions() -> None:
    """The formulas are in the next test; these have no files."""
    assert [ByteTokenizer().fingerprint, NullTokenizer(300).fingerprint] == ["6ed9e52746c4633e", "b46b1f504b5461cd"]
    assert NullTokenizer(300).fingerprint != NullTokenizer(301).fingerprint


@pytest.mark.parametrize("parse", [False, True])
@pytest.mark.parametrize("name", TEXTUAL)
def test_a_record_with_an_earlier_fingerprint_is_of_the_same_tokenizer(name: str, parse: bool, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(replace(options_for(name, tmp_path / "files"), parse_special_tokens=parse))
    prefix, today = record(tmp_path / "x", tokenizer), record(tmp_path / "y", tokenizer)
    (content,) = (c for n, c in tokenizer.files.items() if n != TOKENIZER_CONFIG)
    facts = [content.decode() if name in ("HuggingFaceTokenizer", "GPT2BPETokenizer") else sha256(content).hexdigest()]
    if name == "TikTokenizer":
        facts = list(tokenizer._identity())  # its facts are many
    elif "Sentence" in name or name == "Llama2Tokenizer":
        assert tokenizer.fingerprint == fingerprint(*facts)
    change(prefix, fingerprint=fingerprint(*facts, *(["parse_special_tokens"] if parse else [])))
    again = load_recorded_tokenizer(prefix)
    assert again is not None
    assert again.settings == tokenizer.settings
    assert have_same_ids(prefix, today)
    assert have_same_ids(today, prefix)
    assert was_written_with(prefix, build_tokenizer(options_for(name, tmp_path / "files")))
    assert not was_written_with(prefix, ByteTokenizer())
    assert not have_same_ids(prefix, record(tmp_path / "z", ByteTokenizer()))


def test_gpt2_has_one_fingerprint_in_each_of_its_forms(tmp_path: Path) -> None:
    vocab, merges = gpt2(tmp_path / "two")
    GPT2Tokenizer(vocab=str(vocab), merges=str(merges)).save_pretrained(tmp_path / "one")
    two, one = GPT2BPETokenizer(None, False, vocab, merges), HuggingFaceTokenizer(tmp_path / "one")
    assert two.fingerprint == one.fingerprint
    assert set(two.legacy_fingerprints).isdisjoint(one.legacy_fingerprints)
    content = json.loads(one.files[TOKENIZER_JSON])
    for changed in (
        {"pre_tokenizer": content["pre_tokenizer"] | {"add_prefix_space": True}},
        {"normalizer": {"type": "NFC"}},
        {"model": content["model"] | {"merges": content["model"]["merges"][1:]}},
        {"added_tokens": [content["added_tokens"][0] | {"lstrip": True}]},
    ):
        (tmp_path / "one" / TOKENIZER_JSON).write_text(json.dumps(content | changed))
        assert HuggingFaceTokenizer(tmp_path / "one").fingerprint != two.fingerprint


def test_ranks_have_one_fingerprint_whatever_their_file(tmp_path: Path) -> None:
    """Llama 3's ``tokenizer.model`` is a file of ranks; the record keeps it with a suffix for it."""
    one = TikTokenizer(tiktoken_file(tmp_path / "tokenizer.model"), "v2")
    two = TikTokenizer(tiktoken_file(tmp_path / "vocab.json"))
    assert one.fingerprint == two.fingerprint != TikTokenizer(tmp_path / "vocab.json", "v1").fingerprint
    assert two.settings == {"tiktoken_pattern": "v2", "tiktoken_num_special_tokens": 1000}
    assert load_recorded_tokenizer(record(tmp_path / "x", one)) is not None


@pytest.mark.parametrize("name", ["HuggingFaceTokenizer", "ByteTokenizer", "NullTokenizer"])
def test_an_older_record_has_fewer_fields(name: str, tmp_path: Path) -> None:
    prefix = record(tmp_path / "x", build_tokenizer(options_for(name, tmp_path / "files")))
    path = Path(f"{prefix}.{RECORD_SUFFIX}")
    older = {key: json.loads(path.read_text())[key] for key in ("tokenizer_type", "vocab_size", "eod", "fingerprint")}
    path.write_text(json.dumps(older))
    found = read_tokenizer_record(prefix)
    assert found is not None
    assert (found.pad, found.special_ids, found.settings) == (None, None, None)
    assert load_recorded_tokenizer(prefix) is not None


def test_older_data_of_a_tokenizer_that_is_refused_today_are_read(tmp_path: Path) -> None:
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0)], unk_id=0))
    unigram.add_special_tokens(["</s>"])
    unigram.save(str(tmp_path / TOKENIZER_JSON))
    assert load_recorded_tokenizer(record(tmp_path / "x", HuggingFaceTokenizer(tmp_path))) is not None


def test_no_record_is_no_error(tmp_path: Path) -> None:
    assert read_tokenizer_record(tmp_path / "x") is None
    assert load_recorded_tokenizer(tmp_path / "x", "ByteTokenizer") is None


def test_types_of_a_record(tmp_path: Path) -> None:
    prefix = record(tmp_path / "x", build_tokenizer(options_for("Llama2Tokenizer", tmp_path / "files")))
    for name in (None, "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        assert read_tokenizer_record(prefix, name) is not None
    with pytest.raises(DataError, match="with Llama2Tokenizer, not with HuggingFaceTokenizer"):
        load_recorded_tokenizer(prefix, "HuggingFaceTokenizer")


@pytest.mark.parametrize(
    ("field", "value"),
    [("fingerprint", "0" * 16), ("eod", 3), ("pad", 7), ("special_ids", {"</s>": 3}), ("settings", {"colour": 1})],
)
def test_a_record_of_something_else_is_refused(model: Path, tmp_path: Path, field: str, value: object) -> None:
    prefix = record(tmp_path / "x", HuggingFaceTokenizer(model))
    change(prefix, **{field: value})
    with pytest.raises(DataError, match=r"but that tokenizer is now|there is no setting colour 1"):
        load_recorded_tokenizer(prefix)


def test_files_beside_the_data_may_change_their_form_only(model: Path, tmp_path: Path) -> None:
    prefix = record(tmp_path / "x", HuggingFaceTokenizer(model))
    again = load_recorded_tokenizer(prefix)
    assert again is not None
    assert again.hugging_face_files() == {file.name: file.read_bytes() for file in model.iterdir()}
    file = Path(f"{prefix}.{FILES_SUFFIX}", TOKENIZER_JSON)
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content, indent=7))
    assert load_recorded_tokenizer(prefix) is not None
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="but that tokenizer is now"):
        load_recorded_tokenizer(prefix)
    shutil.rmtree(f"{prefix}.{FILES_SUFFIX}")
    with pytest.raises(DataError, match=rf"there is no {prefix}\.{FILES_SUFFIX}"):
        load_recorded_tokenizer(prefix)


def test_a_pad_that_is_the_end_of_a_document_is_recorded(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "pads")
    config = tmp_path / "pads" / TOKENIZER_CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token": END_OF_DOCUMENT}))
    pads = [TokenizerRecord.of(HuggingFaceTokenizer(folder)).pad for folder in (tmp_path / "pads", model)]
    assert pads == [256, None]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 10**12), ("vocab_size", 0), ("vocab_size", "257"), ("vocab_size", None), ("vocab_size", 257.0),
        ("vocab_size", True), ("eod", 257), ("eod", -1), ("eod", None), ("eod", 1.5), ("pad", 300), ("pad", "x"),
        ("special_ids", []), ("special_ids", {"x": 10**9}), ("special_ids", {"x": None}), ("settings", [1]),
        ("settings", {"parse_special_tokens": "yes"}), ("settings", {"vocab_file": "/etc/passwd"}),
        ("settings", {"files": {}}), ("settings", {"tiktoken_num_special_tokens": 1e300}), ("tokenizer_type", 3),
        ("tokenizer_type", None), ("fingerprint", 5), ("extra", 1),
    ],
)  # fmt: skip
def test_a_record_with_values_that_no_tokenizer_has_is_refused(tmp_path: Path, field: str, value: object) -> None:
    """Before anything of that size is made."""
    prefix = record(tmp_path / "x", ByteTokenizer())
    change(prefix, **{field: value})
    for read in (read_tokenizer_record, load_recorded_tokenizer, partial(have_same_ids, prefix)):
        with pytest.raises(DataError, match=r"x\.tokens\.json: .*\n  fix: rewrite the dataset"):
            read(prefix)


@pytest.mark.parametrize("content", ["", "[]", "{}", "5", "null", "[" * 5000, '{"vocab_size": 1', "\xff"])
def test_a_damaged_record_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.tokens.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"x\.tokens\.json: .*\n  fix: rewrite the dataset"):
        read_tokenizer_record(tmp_path / "x")


def test_links_out_of_recorded_files_are_refused(model: Path, tmp_path: Path) -> None:
    prefix = record(tmp_path / "x", HuggingFaceTokenizer(model))
    (tmp_path / "secret").write_text("password")
    (tmp_path / "x.tokenizer" / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=r"links lead out of .*x\.tokenizer"):
        load_recorded_tokenizer(prefix)
