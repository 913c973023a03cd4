"""Tokenizers by their name on a hub: from its cache, from a server of the test's own, and from nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron.data.errors import DataError
from megatron.data.tokenizers.huggingface import resolve_tokenizer_path
from megatron.data.tokenizers.tokenizer import TokenizerOptions
from tests.unit.data.made_tokenizers import hugging_face

ROOT = Path(__file__).parents[4]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CODE = (
    "import sys; from megatron.data.tokenizers.tokenizer import *; "
    "given = TokenizerOptions('HuggingFaceTokenizer', sys.argv[1]); t = build_tokenizer(given); "
    "local = build_tokenizer(given.local()); "
    "print(given.local().tokenizer_model, t.fingerprint == local.fingerprint, t.vocab_size, *sorted(t.files))"
)


def build(name: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the tokenizer of a name in a new process, which reads the environment again."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    there = clean | {"PYTHONPATH": str(ROOT), "HF_HOME": str(cwd / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", CODE, name]
    return subprocess.run(command, cwd=cwd, env=there | environment, capture_output=True, text=True, check=False)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as listing a model's files and giving them takes."""

    files: dict[str, bytes]
    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        self.asked.append(self.path)
        name = self.path.rsplit("/", 1)[-1].split("?")[0]
        if self.path.startswith("/api/models/org/name/tree"):
            sizes = {name: len(file) for name, file in self.files.items()}
            tree = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
            content = json.dumps(tree).encode()
        elif self.path.startswith("/api/models/org/name"):
            names = [{"rfilename": name} for name in self.files]
            content = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": names}).encode()
        elif self.path.startswith("/org/name/resolve/") and name in self.files:
            content = self.files[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"', "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, type[Hub]]]:
    folder = hugging_face(tmp_path / "files")
    served = {file.name: file.read_bytes() for file in folder.iterdir()} | {"model.safetensors": b"large"}
    handler = type("Served", (Hub,), {"files": served, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_name_is_downloaded_once_and_then_in_the_cache(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    """The hub is asked once for a process and its workers, which are given a folder."""
    endpoint, handler = hub
    first = build("org/name", tmp_path, HF_ENDPOINT=endpoint)
    folder, *rest = first.stdout.split()
    assert rest == ["True", "400", "tokenizer.json", "tokenizer_config.json"], first.stderr
    assert (Path(folder) / "tokenizer.json").is_file()
    assert not any("safetensors" in path for path in handler.asked)
    assert sum(path.startswith("/api/models/org/name/revision") for path in handler.asked) == 1, handler.asked
    offline = build("org/name", tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout, offline.stderr


def test_a_failed_download_is_reported_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **how: object) -> str:
        raise OSError("no route\nto host")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(DataError) as caught:
        resolve_tokenizer_path("org/other")
    assert caught.value.seen == "org/other is not a local folder, and downloading it from the hub failed: no route"
    assert caught.value.fixes[0].startswith(
        "where there is a network: hf download org/other --include 'tokenizer.json'"
    )


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **how: asked.append(name) or "there")
    (tmp_path / "org" / "local").mkdir(parents=True)
    for path in ("org/local", "name", "./org/other", "../org/other", "/org/other", "a/b/c", "org/"):
        assert resolve_tokenizer_path(path) == Path(path)
    for name in ("org/unknown", "Org-1/name.v2_x"):
        assert TokenizerOptions("HuggingFaceTokenizer", name).local().tokenizer_model == "there"
    assert asked == ["org/unknown", "Org-1/name.v2_x"]
    for given in (TokenizerOptions("TikTokenizer", "a/b"), TokenizerOptions("ByteTokenizer")):
        assert given.local() is given
