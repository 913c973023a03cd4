"""A server that speaks as much of the protocol of Weights & Biases as its client needs to report a run."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTORY = "wandb-history.jsonl"


class Server(ThreadingHTTPServer):
    """Keeps the history of one run. While ``silent`` is set, it takes requests and does not answer them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows: list[dict[str, Any]] = []
        self.begun = self.finished = False
        self.silent = threading.Event()
        self.closing = threading.Event()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make the client report to it."""
        address = f"http://127.0.0.1:{self.server_address[1]}"
        return {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """To a question in GraphQL."""
        name = re.search(r"(?:query|mutation) (\w+)", query)
        address = self.environment["WANDB_BASE_URL"]
        files = [{"name": name, "uploadUrl": f"{address}/storage"} for name in variables.get("files", [])]
        answers: dict[str, dict[str, Any]] = {
            "RunResumeStatus": {"model": {"entity": {"name": "us"}, "bucket": self._bucket() if self.begun else None}},
            "UpsertBucket": {"upsertBucket": {"bucket": self._bucket(), "inserted": not self.begun}},
            "CreateRunFiles": {"createRunFiles": {"uploadHeaders": [], "files": files}},
            "ServerFeaturesQuery": {"serverInfo": {"features": []}},
        }
        return answers.get(name[1] if name else "", {})

    def _bucket(self) -> dict[str, Any]:
        tail = [json.dumps(row) for row in self.rows[-1:]]
        return {
            "id": "1",
            "name": "run",
            "displayName": "run",
            "project": {"name": "tests", "entity": {"name": "us"}},
            "historyLineCount": len(self.rows),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": json.dumps(tail),
            "eventsTail": "[]",
            "summaryMetrics": "{}",
            "config": "{}",
            "wandbConfig": '{"t": 1}',  # without it the client takes the run for one that has not begun
            "tags": [],
        }

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that were killed."""

    def stream(self, content: dict[str, Any]) -> None:
        """Take rows."""
        history = content.get("files", {}).get(HISTORY)
        if history:
            rows = [json.loads(line) for line in history["content"]]
            self.rows[history["offset"] :] = rows
        self.finished |= bool(content.get("complete"))


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Take a question, or rows."""
        body = self._body()
        if self.server.silent.is_set():
            self.server.closing.wait(120)
            return
        if self.path.endswith("/file_stream"):
            self.server.stream(json.loads(body))
            self._send({"exitcode": None, "limits": {}})
        elif self.path == "/graphql":
            content = json.loads(body)
            answer = self.server.answer(content["query"], content.get("variables", {}))
            self.server.begun |= "upsertBucket" in answer
            self._send({"data": answer})
        else:
            self._send({})

    def do_PUT(self) -> None:
        """Take a file; it is not kept."""
        self._body()
        self._send({})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b"".join(iter(self._chunk, b""))
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def _chunk(self) -> bytes:
        data = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return data

    def _send(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def running() -> Iterator[Server]:
    """A server at a free port of this machine."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
