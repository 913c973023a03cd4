"""Chat templates: what a line of data may pass to one, and a child process that renders them within limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from megatron.data import chat_rendering
from megatron.data.chat_rendering import MEMORY_BYTES, Request, Span
from megatron.data.errors import DataError
from megatron.data.preprocess.corpus import JSON_TYPE_NAMES, BadDocumentError
from megatron.data.tokenizers.base import convert_library_errors

CPU_SECONDS = 10.0  # per request
MAX_REQUEST = 1 << 25  # bytes of JSON; what the process makes of them takes several times as much
MAX_FAILURES = 3  # requests that end the process, until no more are made
OTHER_TEMPLATE = "--chat-template FILE.jinja"
ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")
RESERVED = frozenset(
    {"messages", "conversation", "tools", "documents", "tokenize", "padding", "truncation", "max_length", "self"}
    | {"add_generation_prompt", "continue_final_message", "tokenizer_kwargs", "raise_exception", "strftime_now"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "bos_token", "eos_token", "unk_token"}
    | {"sep_token", "pad_token", "cls_token", "mask_token"}
)
"""Arguments of ``apply_chat_template`` and names of a template that a line cannot set."""


def template_options(record: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of the chat template in a JSON object: ``tools`` and ``chat_template_kwargs``, as in TRL.

    Raises:
        BadDocumentError: if they have another form. ``chat_template`` is checked where the names are known.
    """
    tools, options = record.get("tools"), record.get("chat_template_kwargs")
    if isinstance(tools, str):
        with convert_library_errors(BadDocumentError, ": 'tools' is not JSON"):
            tools = json.loads(tools)
    if not isinstance(tools, list | None) or not all(isinstance(tool, dict) for tool in tools or ()):
        raise BadDocumentError(": 'tools' is not an array of objects")
    if not isinstance(options, dict | None):
        raise BadDocumentError(": 'chat_template_kwargs' is not an object")
    for name, value in (options or {}).items():
        if name in RESERVED or not name.isidentifier() or name.startswith("_"):
            raise BadDocumentError(f": 'chat_template_kwargs' cannot set '{name[:80]}'")
        if not isinstance(value, str | int | float | None):
            what = JSON_TYPE_NAMES[type(value)]
            seen = f": '{name[:80]}' in 'chat_template_kwargs' is {what}; it has texts, numbers and booleans"
            raise BadDocumentError(seen)
    return {"tools": tools, **(options or {})}


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: list[Span]  # the answers
    marked: bool  # whether generation blocks of the template mark them


class TemplateRenderer:
    """A process with `megatron.data.chat_rendering`, started with the first request and again if one ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0

    def render(self, request: Request) -> Rendered:
        """Return the text of a request.

        Raises:
            BadDocumentError: if the template refuses it, or takes too much time or memory.
            DataError: if the template did so with several.
        """
        try:
            line = json.dumps(request).encode()
        except RecursionError as error:
            raise BadDocumentError(" is nested too deeply") from error
        if len(line) > MAX_REQUEST:
            seen = f" has {len(line):,} bytes of messages and chat template; the limit is {MAX_REQUEST:,}"
            raise BadDocumentError(seen)
        found = self._answer(line + b"\n")
        if "error" in found:
            raise BadDocumentError(found["error"])
        return Rendered(found["text"], [(begin, end) for begin, end in found["spans"]], found["marked"])

    def _answer(self, line: bytes) -> Mapping[str, Any]:
        process = self._process = self._process or self._start()
        stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        try:
            stdin.write(line)
            stdin.flush()
            found = stdout.readline()
        except BrokenPipeError:
            found = b""
        if found.endswith(b"\n"):
            answer: Mapping[str, Any] = json.loads(found)
            return answer
        self._process = None
        status = process.wait()
        self._failures += 1
        why = f"takes more than {CPU_SECONDS:g} s" if status == -signal.SIGPROF else f"failed with status {status}"
        seen = f" cannot be rendered: the chat template {why} (limits: {CPU_SECONDS:g} s, {MEMORY_BYTES >> 20:,} MiB)"
        if self._failures >= MAX_FAILURES:
            raise DataError(f"the chat template {why}, for {self._failures} conversations", OTHER_TEMPLATE)
        raise BadDocumentError(seen)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(chat_rendering.__file__)), str(CPU_SECONDS)],  # -P: without its folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and close its pipes."""
    process.kill()
    process.communicate()
