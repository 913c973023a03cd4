"""An object store on this machine that speaks as much of S3 as checkpoints need, and fails on request.

Objects are bytes in memory. Signatures are not looked at. Buckets exist from the first write to them, but
those called ``missing...`` never are.
"""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Lock, Thread
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import xxhash

PAGE = 3
"""Entries of a listing in one answer: few, so that going on is part of every test."""

Fault = Callable[["Request"], str | None]
"""A fault of a request: None, a status such as ``503``, ``reset``, ``truncated``, ``corrupt`` or ``slow``."""


@dataclass(frozen=True)
class Request:
    """A request: ``number`` counts all from 0, ``kind`` is such as ``PUT``, ``UploadPart``, ``List``."""

    number: int
    kind: str
    key: str


@dataclass
class Store:
    """The contents of a server, and its behaviour."""

    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    fault: Fault = lambda request: None
    requests: list[Request] = field(default_factory=list)
    largest: int = 0
    lock: Lock = field(default_factory=Lock)
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def kinds(self) -> Counter[str]:
        """Return the number of requests of each kind."""
        return Counter(request.kind for request in self.requests)


class Handler(BaseHTTPRequestHandler):
    """One request after the other of a connection."""

    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def handle_one(self) -> None:
        """Answer a request of any method, or make it fail."""
        method, url = self.command, urlsplit(self.path)
        key, query = unquote(url.path).strip("/"), {k: v[0] for k, v in parse_qs(url.query, True).items()}
        body = self.body()
        kind = self.kind(method, key, query)
        with self.store.lock:
            request = Request(next(self.store.numbers), kind, key)
            self.store.requests.append(request)
            self.store.largest = max(self.store.largest, len(body))
        fault = self.store.fault(request)
        if fault == "slow":
            time.sleep(0.3)
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        elif fault is not None and fault.isdigit():
            if kind == "DeleteMany":  # which no store does all at once
                names = sorted(re.findall(rb"<Key>([^<]+)</Key>", body))
                self.delete(key, names[len(names) // 2 :])
            code = {"403": "AccessDenied", "503": "SlowDown"}.get(fault, "InternalError")
            self.error(int(fault), code, method == "HEAD")
            return
        with self.store.lock:
            status, headers, content = self.answer(kind, key, query, body)
        if fault == "corrupt" and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.reply(status, headers, content, method == "HEAD", cut=fault == "truncated")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one  # noqa: N815

    def kind(self, method: str, key: str, query: dict[str, str]) -> str:
        if method == "POST":
            return "Create" if "uploads" in query else "Complete" if "uploadId" in query else "DeleteMany"
        if "uploadId" in query:
            return "UploadPart" if method == "PUT" else "Abort"
        return "List" if method == "GET" and "/" not in key else method

    def answer(self, kind: str, key: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of what went well."""
        s = self.store
        if key.startswith("missing"):
            return 404, {}, b"<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message></Error>"
        if kind == "List":
            return 200, {}, self.listing(key, query)
        if kind in ("GET", "HEAD"):
            return self.content(key)
        if kind in ("Create", "UploadPart", "Complete", "Abort"):
            return self.upload(kind, key, query, body)
        if kind == "PUT":
            s.objects[key] = body
        elif kind == "DeleteMany":
            self.delete(key, re.findall(rb"<Key>([^<]+)</Key>", body))
            return 200, {}, b"<DeleteResult></DeleteResult>"
        elif kind == "DELETE":
            s.objects.pop(key, None)
        return 204 if kind == "DELETE" else 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""

    def delete(self, bucket: str, names: list[bytes]) -> None:
        """Remove these objects."""
        for name in names:
            self.store.objects.pop(f"{bucket}/{unescape(name.decode())}", None)

    def upload(self, kind: str, key: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Answer a request of an upload in parts."""
        s = self.store
        if kind == "Create":
            upload = f"upload{next(s.numbers)}"
            s.uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return 200, {}, text.encode()
        if kind == "UploadPart":
            s.uploads[query["uploadId"]][int(query["partNumber"])] = body
        elif kind == "Complete":
            parts = s.uploads.pop(query["uploadId"])
            s.objects[key] = b"".join(parts[int(n)] for n in re.findall(rb"<PartNumber>(\d+)<", body))
            return 200, {}, b'<CompleteMultipartUploadResult><ETag>"x"</ETag></CompleteMultipartUploadResult>'
        elif kind == "Abort":
            s.uploads.pop(query["uploadId"], None)
        return 204 if kind == "Abort" else 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""

    def content(self, key: str) -> tuple[int, dict[str, str], bytes]:
        found = self.store.objects.get(key)
        if found is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>"
        headers = {"ETag": etag(found), "Last-Modified": "Sun, 01 Nov 2026 00:00:00 GMT"}
        if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
            return 412, {}, b"<Error><Code>PreconditionFailed</Code><Message>pre-conditions</Message></Error>"
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            return 200, headers, found
        first, last = int(asked[1]), min(int(asked[2]), len(found) - 1)
        if first > last:
            return 416, {}, b"<Error><Code>InvalidRange</Code><Message>range</Message></Error>"
        return 206, headers | {"Content-Range": f"bytes {first}-{last}/{len(found)}"}, found[first : last + 1]

    def listing(self, bucket: str, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        names: dict[str, bytes | None] = {}
        for name, content in sorted(self.store.objects.items()):
            key = name.partition("/")[2]
            if name.startswith(f"{bucket}/{prefix}"):
                rest = key[len(prefix) :]
                inner = bool(delimiter) and delimiter in rest
                names[prefix + rest.split(delimiter)[0] + delimiter if inner else key] = None if inner else content
        later = [item for item in names.items() if item[0] > query.get("continuation-token", "")]
        rows = [self.row(name, content) for name, content in later[:PAGE]]
        more = len(later) > PAGE
        token = f"<NextContinuationToken>{escape(later[PAGE - 1][0])}</NextContinuationToken>" if more else ""
        head = f"<Name>{bucket}</Name><KeyCount>{len(rows)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
        return f"<ListBucketResult>{head}{token}{''.join(rows)}</ListBucketResult>".encode()

    def row(self, name: str, content: bytes | None) -> str:
        if content is None:
            return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        dates = "<LastModified>2026-11-01T00:00:00.000Z</LastModified>"
        facts = f"<ETag>{etag(content)}</ETag><Size>{len(content)}</Size>"
        return f"<Contents><Key>{escape(name)}</Key>{dates}{facts}</Contents>"

    def body(self) -> bytes:
        """Return the body of a request; S3's libraries may send it in signed pieces."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        else:
            raw = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                raw += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return raw
        plain = b""
        while raw:
            line, _, raw = raw.partition(b"\r\n")
            size = int(line.split(b";")[0], 16)
            plain, raw = plain + raw[:size], raw[size + 2 :]
            if not size:
                break
        return plain

    def error(self, status: int, code: str, head: bool) -> None:
        content = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self.reply(status, {}, content, head)

    def reply(self, status: int, headers: dict[str, str], content: bytes, head: bool, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/xml")
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if head:
            return
        if cut and content:
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(content)


def etag(content: bytes) -> str:
    """Return a name of a content."""
    return f'"{xxhash.xxh3_64_hexdigest(content)}"'


@contextmanager
def serving() -> Iterator[tuple[str, Store]]:
    """A server on a free port of this machine: its address and its store."""
    store = Store()
    handler = type("Bound", (Handler,), {"store": store})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", store
    finally:
        server.shutdown()
        server.server_close()


def settings(address: str) -> dict[str, object]:
    """Return s3fs's settings for a server: that address and no other, meaningless keys, no unseen repetition."""
    quick = {"retries": {"max_attempts": 0}, "connect_timeout": 5, "read_timeout": 5}
    return {"endpoint_url": address, "key": "none", "secret": "none", "config_kwargs": quick}
