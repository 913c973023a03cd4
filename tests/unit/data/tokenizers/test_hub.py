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

from megatron.data.tokenizers.base import is_hub_name
from megatron.data.tokenizers.tokenizer import TokenizerOptions
from tests.unit.data.made_tokenizers import hugging_face

ROOT = Path(__file__).parents[4]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
BUILD = (
    "import sys; from megatron.data.tokenizers.tokenizer import *; "
    "t = build_tokenizer(TokenizerOptions('HuggingFaceTokenizer', sys.argv[1])); print(t.vocab_size, *sorted(t.files))"
)


def build(name: str, cwd: Path, code: str = BUILD, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the tokenizer of a name in a new process, which reads the environment anew."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    there = clean | {"PYTHONPATH": str(ROOT), "HF_HOME": str(cwd / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", code, name]
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
    endpoint, handler = hub
    first = build("org/name", tmp_path, HF_ENDPOINT=endpoint)
    assert first.stdout.split() == ["400", "tokenizer.json", "tokenizer_config.json"], first.stderr
    assert not any("safetensors" in path for path in handler.asked)
    offline = build("org/name", tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout, offline.stderr


def test_what_the_hub_does_not_give_is_told_with_what_to_do(tmp_path: Path) -> None:
    done = build("org/other", tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-2:]
    assert "DataError: org/other is not a local folder, and downloading it from the hub failed: " in last[0]
    assert "fix: where there is a network: hf download org/other --include 'tokenizer.json'" in last[1]


LOCAL = (
    "import sys; from megatron.data.tokenizers.tokenizer import *; "
    "told = TokenizerOptions('HuggingFaceTokenizer', sys.argv[1]); t = build_tokenizer(told); "
    "print(told.local().tokenizer_model, build_tokenizer(told.local()).fingerprint == t.fingerprint)"
)


def test_the_hub_is_asked_once_for_all_processes(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    """What workers are given is a folder."""
    endpoint, handler = hub
    first = build("org/name", tmp_path, HF_ENDPOINT=endpoint)
    assert first.returncode == 0, first.stderr
    handler.asked.clear()
    build("org/name", tmp_path, HF_ENDPOINT=endpoint)
    once = len(handler.asked)
    handler.asked.clear()
    done = build("org/name", tmp_path, LOCAL, HF_ENDPOINT=endpoint)
    folder, same = done.stdout.split()
    assert (same, len(handler.asked)) == ("True", once), done.stderr
    assert once
    assert (Path(folder) / "tokenizer.json").is_file()


def test_other_choices_are_local() -> None:
    for printed in (TokenizerOptions("TikTokenizer", "a/b"), TokenizerOptions("ByteTokenizer")):
        assert printed.local() is printed
    assert TokenizerOptions("HuggingFaceTokenizer", "./a/b/c").local().tokenizer_model == "a/b/c"


def test_what_is_a_name_and_what_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("org/name")
    assert is_hub_name("Org-1/name.v2_x")
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").mkdir()
    for path in ("org/name", "name", "./org/other", "../org/other", "/org/other", "a/b/c", "org/"):
        assert not is_hub_name(path)
