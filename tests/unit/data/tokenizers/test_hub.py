"""Tokenizers by their name on a hub: from its cache, and from nowhere."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from megatron.data.errors import DataError
from megatron.data.tokenizers.huggingface import resolve_hub_name, resolve_tokenizer_path
from megatron.data.tokenizers.tokenizer import TokenizerOptions, build_tokenizer
from tests.unit.data.made_tokenizers import hugging_face

HF = "HuggingFaceTokenizer"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """The names that the hub is asked for and the patterns of files; it has nothing but the cache."""
    found: list[tuple[str, list[str]]] = []
    download = huggingface_hub.snapshot_download

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> Any:
        found.append((name, allow_patterns))
        return download(name, allow_patterns=allow_patterns)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    resolve_hub_name.cache_clear()
    return found


def test_a_name_is_downloaded_once_and_then_is_a_folder(tmp_path: Path, asked: list[tuple[str, list[str]]]) -> None:
    """The hub is asked once for a process and its workers, which are given the folder."""
    repository = tmp_path / "cache" / "models--org--name"
    folder = hugging_face(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    named = TokenizerOptions(HF, "org/name")
    tokenizer = build_tokenizer(named)
    assert (tokenizer.vocab_size, sorted(tokenizer.files)) == (400, ["tokenizer.json", "tokenizer_config.json"])
    assert named.local().tokenizer_model == str(folder)
    assert build_tokenizer(named.local()).fingerprint == tokenizer.fingerprint
    ((name, patterns),) = asked
    assert name == "org/name"
    assert all(any(fnmatch(file.name, pattern) for pattern in patterns) for file in folder.iterdir())
    assert not any(fnmatch("model.safetensors", pattern) for pattern in patterns)


def test_a_failed_download_is_reported_with_a_fix(asked: list[tuple[str, list[str]]]) -> None:
    with pytest.raises(DataError) as caught:
        resolve_tokenizer_path("org/other")
    assert caught.value.seen.startswith("org/other is not a local folder, and downloading it from the hub failed: ")
    assert "\n" not in caught.value.seen
    assert caught.value.fixes[0].startswith(
        "where there is a network: hf download org/other --include 'tokenizer.json'"
    )


def test_names_and_paths(tmp_path: Path, asked: list[tuple[str, list[str]]]) -> None:
    (tmp_path / "org" / "local").mkdir(parents=True)
    for path in ("org/local", "name", "./org/other", "../org/other", "/org/other", "a/b/c", "org/"):
        assert resolve_tokenizer_path(path) == Path(path)
    for given in (TokenizerOptions("TikTokenizer", "a/b"), TokenizerOptions("ByteTokenizer")):
        assert given.local() is given
    for name in ("org/unknown", "Org-1/name.v2_x"):
        with pytest.raises(DataError):
            TokenizerOptions(HF, name).local()
    assert [name for name, _ in asked] == ["org/unknown", "Org-1/name.v2_x"]
