"""Server of the page of a run: read-only, of one page and its news, for those who know its address.

The address has a random word, because other users of a shared machine reach the loopback interface, too. Nothing but
the page and its news is served: paths are compared, never opened.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from megatron.training.loggers.run_folder import CONFIG_FILE, INCIDENTS_FILE, METRICS_FILE

LOOPBACK = "127.0.0.1"
WATCHED = (METRICS_FILE, INCIDENTS_FILE, CONFIG_FILE)
REST = 4.0  # times as long as the last reading took passes before the next
SOCKET_SECONDS = 20.0


class LivePage:
    """The page of a run, read again when its files have changed."""

    def __init__(self, folder: Path, render: Callable[[], str], page: Callable[[str], str]) -> None:
        """Keep what to read: ``render`` returns the body, ``page`` the document around one."""
        self._folder, self._render, self._page = folder, render, page
        self._lock = threading.Lock()
        self._read, self._next_read = "", 0.0
        self._state, self._body, self._time = "", "", ""

    def _files(self) -> str:
        """Return sizes and times of the files that change."""
        found = []
        for name in WATCHED:
            try:
                stat = (self._folder / name).stat()
                found.append(f"{stat.st_ino}.{stat.st_size}.{stat.st_mtime_ns}")
            except OSError:
                found.append("none")
        return "-".join(found)

    def current(self) -> tuple[str, str, str]:
        """Return state, body, and the time of reading; the old ones while the folder cannot be read."""
        with self._lock:
            files, began = self._files(), time.monotonic()
            if began >= self._next_read and (files != self._read or not self._body):
                try:
                    self._body = self._render()
                    self._state, self._time = secrets.token_hex(8), time.strftime("%H:%M:%S UTC", time.gmtime())
                    self._read = files
                except Exception as error:  # the run folder is being replaced, or its records are malformed
                    self._time = f"{self._time}; now unreadable: {error}"[:200]
                self._next_read = time.monotonic() + REST * (time.monotonic() - began)
            return self._state, self._body, self._time

    def document(self) -> str:
        """Return the page."""
        return self._page(self.current()[1])

    def news(self, after: str) -> str:
        """Return JSON with the body, unless it is the one of the state ``after``."""
        state, body, read = self.current()
        return json.dumps({"state": state, "time": read, **({} if state == after else {"body": body})})


def make_server(live: LivePage, host: str, port: int) -> tuple[ThreadingHTTPServer, str]:
    """Return a server, and the address of the page. Raises OSError if the port is taken."""
    token = secrets.token_urlsafe(24)

    class PageHandler(BaseHTTPRequestHandler):
        """Answers GET of the two addresses that begin with the random word."""

        timeout = SOCKET_SECONDS
        server_version, sys_version = "report", ""

        def do_GET(self) -> None:
            """Answer a request."""
            parts = urlsplit(self.path)
            word, _, name = parts.path.removeprefix("/").partition("/")
            if not hmac.compare_digest(word.encode(), token.encode()) or name not in ("", "state.json"):
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "not here\n")
            elif name == "":
                self._answer(HTTPStatus.OK, "text/html", live.document())
            else:
                after = parse_qs(parts.query).get("after", [""])[0]
                self._answer(HTTPStatus.OK, "application/json", live.news(after))

        def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            for name, value in (
                ("Cache-Control", "no-store"),
                ("Referrer-Policy", "no-referrer"),
                ("X-Content-Type-Options", "nosniff"),
                ("X-Frame-Options", "DENY"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *values: object) -> None:
            """Log nothing: addresses have the random word."""

    server = ThreadingHTTPServer((host, port), PageHandler)
    server.daemon_threads = True
    return server, f"http://{host}:{server.server_address[1]}/{token}/"
