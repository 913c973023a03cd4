"""The key-value store through which the replicas of a run meet: its server, and the messages of both sides.

It replaces torch's TCPStore, which neither knows its clients nor limits what they store. Server and client prove to
each other that they have the same secret: each message carries a MAC (HMAC-SHA256) under a key made of the secret and
of random numbers of both, over its direction, its number in the connection, and its content. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import resource
import secrets
import shlex
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from megatron.config.errors import Problem, UserError
from megatron.config.files import read_small
from megatron.config.text import counted, echo, format_bytes, printable

GREETING = b"megatron replica store 3\n"
NONCE_BYTES = MAC_BYTES = 32

SECRET_BYTES = 16

KEY_BYTES = 1 << 10
VALUE_BYTES = 1 << 18
"""Limit for one value; the largest are the options of a run and the members of an attempt."""

MESSAGE_BYTES = 2 * VALUE_BYTES + (1 << 16)
"""Limit for a message: a compare-and-set has two values, a check the keys of all ranks of a group."""

FIRST_MESSAGE_BYTES = 1 << 10
"""Limit before the client has proved that it knows the secret."""

STORE_BYTES = 1 << 28
ENTRY_BYTES = 200
"""Of memory per key, besides its text and its value."""

CONNECTIONS, OTHER_FILES = 4096, 64
"""Open files of a server. A new connection takes the place of the oldest one that has not proved anything."""
HELLO_SECONDS = 10.0
"""For a client to prove that it knows the secret."""

KEPT_ATTEMPTS = 100
"""Attempts whose keys are kept. No replica that counts as alive is so far behind."""


def read_secret(path: str | None, flags: str = "--diloco") -> bytes:
    """Return the secret in a file, without white space around it; empty without a file.

    Raises:
        UserError: if the file cannot be read, or holds less than ``SECRET_BYTES``.
    """
    if path is None:
        return b""
    try:
        secret = read_small(path).strip()
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"a secret has at least {SECRET_BYTES} characters, and this one has {len(secret)}")
    except (OSError, ValueError) as error:
        sentence = f"{flags}-secret-file {path}: {getattr(error, 'strerror', None) or error}"
        make = f"(umask 077 && openssl rand -hex 32 > {shlex.quote(path)})"
        raise UserError([Problem("E957", sentence, (make,))]) from error
    return secret


class AuthenticatedChannel:
    """The messages of one connection, as one side writes and reads them."""

    def __init__(self, secret: bytes, nonces: bytes, *, server: bool) -> None:
        """Derive the key of a connection from the secret and the random numbers of server and client."""
        self._key = hmac.digest(secret, GREETING + nonces, "sha256")
        self._directions = (b"s", b"c") if server else (b"c", b"s")
        self._sent = self._received = 0

    def _mac(self, direction: bytes, number: int, content: bytes) -> bytes:
        return hmac.digest(self._key, direction + struct.pack("!Q", number) + content, "sha256")

    def seal(self, fields: Iterable[bytes]) -> bytes:
        """Return the bytes of a message."""
        content = b"".join(struct.pack("!I", len(field)) + field for field in fields)
        mac = self._mac(self._directions[0], self._sent, content)
        self._sent += 1
        return struct.pack("!I", MAC_BYTES + len(content)) + mac + content

    def open(self, body: bytes) -> list[bytes]:
        """Return the fields of a message without its length; raise ValueError if the other side did not make it."""
        mac, content = body[:MAC_BYTES], body[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self._directions[1], self._received, content)):
            raise ValueError("it does not have the secret of this run")
        self._received += 1
        fields, at = [], 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 4])
            fields.append(content[at + 4 : at + 4 + size])
            at += 4 + size
        if at != len(content):
            raise ValueError("a message is cut off")
        return fields


def body_size(head: bytes, limit: int = MESSAGE_BYTES) -> int:
    """Return the size of a message from its first 4 bytes; raise ValueError if it is above ``limit``."""
    (size,) = struct.unpack("!I", head)
    if size > limit:
        raise ValueError(f"it sent a message of {format_bytes(size)}, more than {format_bytes(limit)}")
    return int(size)


def raise_file_limit() -> int:
    """Let this process open as many files as its connections need, and return the connections that it can accept."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite, wanted = resource.RLIM_INFINITY, CONNECTIONS + OTHER_FILES
    if soft != infinite and soft < wanted:
        soft = wanted if hard == infinite else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return CONNECTIONS if soft == infinite else min(CONNECTIONS, soft - OTHER_FILES)


class StoreServer:
    """Values of one run in memory, up to ``STORE_BYTES``."""

    def __init__(self, secret: bytes = b"") -> None:
        """Store values for clients that have the ``secret``."""
        self._secret = secret
        self._values: dict[bytes, bytes] = {}
        self._writers: dict[bytes, str] = {}  # machine that wrote a value
        self._bytes: Counter[str] = Counter()  # by machine
        self._connections, self._limit = 0, raise_file_limit()
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # connections that have proved nothing, oldest first
        self._arriving = 0  # bytes of messages that are being received
        self._noted: Counter[str] = Counter()
        self._waiting: list[tuple[list[bytes], asyncio.Future[None]]] = []  # keys that a client waits for

    def start(self, listener: socket.socket) -> None:
        """Serve in a thread of its own."""

        async def run() -> None:
            server = await asyncio.start_server(self._serve, sock=listener)
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
            async with server:
                await self._ended.wait()

        threading.Thread(target=lambda: asyncio.run(run()), name="replica store", daemon=True).start()

    def stop(self) -> None:
        """Close all connections, and listen no more."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended.set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = str(writer.get_extra_info("peername")[0])
        bound: list[bytes] = []  # keys to set when the connection ends
        self._connections += 1
        try:
            if self._connections > self._limit:
                if not self._strangers:
                    raise ValueError(f"there are {counted(self._limit, 'connection')}, and more are not accepted")
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.transport.abort()
            self._strangers[writer] = None
            mine = secrets.token_bytes(NONCE_BYTES)
            writer.write(GREETING + mine)
            channel, limit = None, FIRST_MESSAGE_BYTES
            patience: float | None = HELLO_SECONDS
            while True:
                async with asyncio.timeout(patience):
                    if channel is None:
                        theirs = await reader.readexactly(NONCE_BYTES)
                        channel = AuthenticatedChannel(self._secret, mine + theirs, server=True)
                    body = await self._receive(reader, body_size(await reader.readexactly(4), limit))
                fields = channel.open(body)
                limit, patience = MESSAGE_BYTES, None
                self._strangers.pop(writer, None)
                if fields[:1] == [b"wait"]:
                    await self._wait(fields[2:], float(fields[1]) / 1000)
                bound += fields[1:] if fields[:1] == [b"bind"] else []
                writer.write(channel.seal(self._answer(host, fields)))
                await writer.drain()
        except ValueError as error:
            self._note(host, f"closed a connection: {error}")
        except TimeoutError:
            self._note(host, f"closed a connection: it was silent for {HELLO_SECONDS:g} seconds")
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            pass  # it has ended, or the server does
        finally:
            self._connections -= 1
            self._strangers.pop(writer, None)
            for key in bound:
                self._store(host, key, b"1")
            writer.close()

    async def _wait(self, keys: list[bytes], seconds: float) -> None:
        """Return when all keys are there, or after ``seconds``."""
        if all(key in self._values for key in keys):
            return
        entry = keys, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(entry[1], seconds)
        finally:
            self._waiting.remove(entry)

    async def _receive(self, reader: asyncio.StreamReader, size: int) -> bytes:
        """Return the body of a message; raise ValueError if too many are received at once."""
        if self._arriving + size > STORE_BYTES:
            raise ValueError(f"messages of {format_bytes(self._arriving)} are arriving, and more are not accepted")
        self._arriving += size
        try:
            return await reader.readexactly(size)
        finally:
            self._arriving -= size

    def _note(self, host: str, text: str) -> None:
        """Print what a machine has done, the first times."""
        self._noted[host] += 1
        if self._noted[host] <= 3 and len(self._noted) <= 1000:
            echo(f"{host}: {text}", flush=True)

    def _answer(self, host: str, fields: list[bytes]) -> list[bytes]:
        """Return the answer to a request: ``ok`` and values, ``none``, or ``refused`` and a sentence."""
        try:
            match fields:
                case [b"hello"] | [b"bind", _]:
                    return [b"ok"]
                case [b"read", *keys]:
                    return [b"ok", *(self._values.get(key, b"") for key in keys)]
                case [b"check", *keys]:
                    return [b"ok" if all(key in self._values for key in keys) else b"none"]
                case [b"wait", _, *keys]:
                    found = [self._values[key] for key in keys if key in self._values]
                    return [b"ok", *found] if len(found) == len(keys) else [b"none"]
            return self._change(host, fields)
        except ValueError as error:
            self._note(host, f"refused a request: {error}")
            return [b"refused", str(error).encode()]

    def _change(self, host: str, fields: list[bytes]) -> list[bytes]:
        """Answer a request that changes a value; raise ValueError if it is refused."""
        match fields:
            case [b"set", key, value]:
                self._store(host, key, value)
                return [b"ok"]
            case [b"compare_set", key, expected, value]:
                if self._values.get(key, b"") == expected:
                    self._store(host, key, value)
                return [b"ok", self._values.get(key, expected)]
            case [b"add", key, amount]:
                self._store(host, key, str(int(self._values.get(key, b"0")) + int(amount)).encode())
                return [b"ok", self._values[key]]
            case [b"delete", key]:
                was_there = key in self._values
                self._forget([key])
                return [b"ok" if was_there else b"none"]
        raise ValueError("it sent an unknown request")

    def _store(self, host: str, key: bytes, value: bytes) -> None:
        """Keep a value; raise ValueError above a limit."""
        if len(key) > KEY_BYTES or len(value) > VALUE_BYTES:
            sizes = f"a key of {format_bytes(len(key))} and a value of {format_bytes(len(value))}"
            limits = f"{format_bytes(KEY_BYTES)} and {format_bytes(VALUE_BYTES)}"
            raise ValueError(f"{sizes} from {host}: the limits are {limits}")
        size, before = _size(key, value), _size(key, self._values[key]) if key in self._values else 0
        if self._bytes.total() + size - before > STORE_BYTES:
            most, held = self._bytes.most_common(1)[0]
            sentence = (
                f"the store has its limit of {format_bytes(STORE_BYTES)}, of which {format_bytes(held)} from {most}"
            )
            raise ValueError(f"{sentence}; no room for {printable(key.decode(errors='replace'))} from {host}")
        self._forget([key])
        self._values[key], self._writers[key] = value, host
        self._bytes[host] += size
        for keys, future in self._waiting:
            if key in keys and not future.done() and all(each in self._values for each in keys):
                future.set_result(None)
        if key == b"latest" and value.isdigit():
            oldest = int(value[:20]) - KEPT_ATTEMPTS
            attempts = ((old.partition(b"/")[0], old) for old in self._values)
            self._forget([old for number, old in attempts if number.isdigit() and int(number[:20]) < oldest])

    def _forget(self, keys: list[bytes]) -> None:
        for key in keys:
            if key in self._values:
                self._bytes[self._writers.pop(key)] -= _size(key, self._values.pop(key))


def _size(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + ENTRY_BYTES


def serve(host: str, port: int, secret: bytes = b"") -> tuple[StoreServer, int]:
    """Host the store of a run in a thread; return it and its port, which 0 picks.

    Raises:
        OSError: if the address cannot be used.
    """
    listener = socket.create_server((host, port), backlog=1024)
    server = StoreServer(secret)
    server.start(listener)
    return server, listener.getsockname()[1]
