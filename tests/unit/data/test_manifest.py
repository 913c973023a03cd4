"""Manifests of token files, against checksums of the files themselves."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megatron.data import manifest as manifest_module
from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.manifest import DatasetManifest, InputRecords
from megatron.data.preprocess.encode import PreprocessOptions
from megatron.data.tokenizers.huggingface import ByteTokenizer
from tests.unit.data.pairs import write
from tools import preprocess_data
from tools.inspect_dataset import main as inspect
from tools.merge_datasets import main as merge
from tools.preprocess_data import main as preprocess

BLOCK = 1000
"""Bytes under one checksum in these tests."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr("megatron.data.indexed_writer.BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(preprocess_data, "PreprocessOptions", partial(PreprocessOptions, block_bytes=2000))


def preprocessed(folder: Path, name: str, count: int = 100) -> Path:
    lines = folder / f"{name}.jsonl"
    texts = [json.dumps({"text": f"{name} {number} " * 5}) for number in range(count)]
    lines.write_text("\n".join([*texts, "{"]) + "\n")
    flags = ["--output-prefix", str(folder / name), "--tokenizer-type", "ByteTokenizer", "--on-bad-line", "skip"]
    assert preprocess(["--input", str(lines), *flags]) == 0
    return folder / f"{name}_text_document"


def blocks(path: Path) -> list[str]:
    content = path.read_bytes()
    return [xxhash.xxh3_64_hexdigest(content[i : i + BLOCK]) for i in range(0, len(content), BLOCK)]


def check(prefix: Path) -> DatasetManifest:
    """Compare a manifest with the files beside it."""
    manifest, data = DatasetManifest.read(prefix), IndexedDataset(prefix)
    assert manifest is not None
    for suffix in ("bin", "idx", "origins"):
        path = Path(f"{prefix}.{suffix}")
        assert manifest.files[suffix].bytes == path.stat().st_size
        assert list(manifest.files[suffix].xxh3) == blocks(path)
    assert manifest.fingerprint == data.fingerprint
    assert manifest.counts["documents"] == data.num_documents
    assert manifest.counts["tokens"] == manifest.counts["text_bytes"] == data.num_tokens
    return manifest


def test_it_describes_what_was_read_and_written(tmp_path: Path) -> None:
    manifest = check(preprocessed(tmp_path, "a"))
    lines = (tmp_path / "a.jsonl").read_bytes()
    assert manifest.facts["dropped"] == {"invalid": 1}
    assert manifest.facts["tokenizer"]["fingerprint"] == ByteTokenizer().fingerprint
    (record,) = manifest.facts["inputs"]
    assert (record["file"], record["bytes"]) == (str(tmp_path / "a.jsonl"), len(lines))


def test_inputs_have_checksums_of_their_blocks(tmp_path: Path) -> None:
    changed = preprocessed(tmp_path, "a")
    before = DatasetManifest.read(changed)
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(lines.read_bytes().replace(b"a 99", b"b 99", 1))
    flags = ["--output-prefix", str(tmp_path / "a"), "--tokenizer-type", "ByteTokenizer", "--overwrite"]
    assert preprocess(["--input", str(lines), *flags, "--on-bad-line", "skip"]) == 0
    after = DatasetManifest.read(changed)
    assert before is not None
    assert after is not None
    assert before.facts["inputs"][0]["xxh3"] != after.facts["inputs"][0]["xxh3"]
    one = tmp_path / "one.txt"
    one.write_bytes(b"a text")
    assert preprocess(["--input", str(one), *flags[2:], "--output-prefix", str(tmp_path / "one")]) == 0
    found = DatasetManifest.read(tmp_path / "one_text_document")
    assert found is not None
    digest = xxhash.xxh3_64_hexdigest(xxhash.xxh3_64_digest(b"a text"))
    assert found.facts["inputs"] == [{"file": str(one), "bytes": 6, "xxh3": digest}]


def test_many_inputs_are_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "MAX_INPUTS", 3)
    records = InputRecords()
    for file in range(10):
        for stored in (2, 3):
            records.add(file, stored, bytes([file, stored]))
    described = [*records.describe([*"abcdefghij"])]
    assert [(each["file"], each.get("files"), each["bytes"]) for each in described] == [
        ("a", None, 5),
        ("b", None, 5),
        ("c", 8, 40),
    ]


def test_a_merged_pair_has_the_manifest_of_one_preprocessing(tmp_path: Path) -> None:
    parts = [preprocessed(tmp_path, name) for name in "ab"]
    flags = ["--output-prefix", str(tmp_path / "w"), "--tokenizer-type", "ByteTokenizer", "--on-bad-line", "skip"]
    assert preprocess(["--input", *(str(tmp_path / f"{name}.jsonl") for name in "ab"), *flags]) == 0
    assert merge(["--input", *map(str, parts), "--output-prefix", str(tmp_path / "m")]) == 0
    check(tmp_path / "m")
    whole = tmp_path / "w_text_document.manifest.json"
    assert (tmp_path / "m.manifest.json").read_bytes() == whole.read_bytes()
    Path(f"{parts[0]}.manifest.json").unlink()
    assert merge(["--input", *map(str, parts), "--output-prefix", str(tmp_path / "n")]) == 0
    partly = DatasetManifest.read(tmp_path / "n")
    assert partly is not None
    assert partly.facts == {}
    assert (tmp_path / "n.bin").read_bytes() == (tmp_path / "m.bin").read_bytes()


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_wrong_bytes_are_named_by_merging_and_inspecting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = preprocessed(tmp_path, "a")
    assert inspect([str(prefix), "--verify"]) == 0
    assert "1 input file; dropped: 1 invalid; checksums of all files are right" in capsys.readouterr().out
    flip(Path(f"{prefix}.bin"), 2 * BLOCK + 4)
    place = f"{prefix}.bin: bytes 2,000 to 3,000 are not those of its manifest"
    assert inspect([str(prefix), "--verify"]) == 1
    assert place in capsys.readouterr().err
    assert merge(["--input", str(prefix), "--output-prefix", str(tmp_path / "m")]) == 1
    assert place in capsys.readouterr().err
    assert not (tmp_path / "m.idx").exists()


def test_another_pair_under_the_name_is_named_before_training(tmp_path: Path) -> None:
    prefix, other = (preprocessed(tmp_path, name) for name in "ab")
    Path(f"{prefix}.bin").write_bytes(Path(f"{other}.bin").read_bytes())  # of the same size
    with pytest.raises(DataError, match=r"a_text_document\.bin and \.idx are not the files of .*manifest\.json"):
        _ = IndexedDataset(prefix).fingerprint
    Path(f"{prefix}.manifest.json").unlink()
    assert len(IndexedDataset(prefix).fingerprint) == 16


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1]])
    for content in ("{", "[]", '{"format": "other"}', '{"format": "megatron-pretrain-data", "version": 1}'):
        Path(f"{prefix}.manifest.json").write_text(content)
        with pytest.raises(DataError, match=r"manifest\.json is damaged"):
            DatasetManifest.read(prefix)


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"bin": {"bytes": 2 * BLOCK + 1, "xxh3": []}}},
        {"files": {"bin": {"bytes": 1, "xxh3": ["0" * 16, "0" * 16]}}},
        {"files": {"bin": {"bytes": 1, "xxh3": ["0" * 15]}}},
        {"files": {"bin": {"bytes": 1, "xxh3": [0]}}},
        {"files": {"bin": {"bytes": -1, "xxh3": []}}},
        {"files": {"bin": {"bytes": "1", "xxh3": ["0" * 16]}}},
        {"files": {"tokenizer/../../zero": {"bytes": 0, "xxh3": []}}},
        {"files": {"bin": None}},
        {"files": []},
        {"fingerprint": 1},
        {"counts": {"tokens": "1"}},
        {"counts": []},
        {"dropped": {"invalid": None}},
        {"dropped": []},
        {"shard": 1},
        {"shard": [1, 1]},
        {"inputs": [1]},
        {"inputs": [{"file": "a", "bytes": 1, "xxh3": "a"}]},
    ],
    ids=str,
)
def test_a_manifest_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    whole = {"bytes": 0, "xxh3": []}
    right = {"format": "megatron-pretrain-data", "version": 1, "counts": {}, "fingerprint": "0" * 16}
    right |= {"files": {"bin": whole, "idx": whole}, "dropped": {}, "shard": [0, 2], "inputs": []}
    DatasetManifest.parse(json.dumps(right).encode(), "it")
    changed = right | change
    if isinstance(change.get("files"), dict):
        changed["files"] = right["files"] | change["files"]
    with pytest.raises(DataError, match=r"it is damaged"):
        DatasetManifest.parse(json.dumps(changed).encode(), "it")
