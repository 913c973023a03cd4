"""Render chat templates: a program for a child process, since a template is a program that a stranger may have written.

It reads requests and writes answers, one JSON object per line each (see `Request`), until its input ends. A sandbox
alone does not bound a template: one operation of jinja can take any time and memory. So the process has at most
`MEMORY_BYTES`, and the kernel ends it if a request takes longer than it may. `megatron.data.chat_template` starts it.
It imports nothing of this package, and starts in a tenth of a second.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, TypedDict

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30  # of the address space
MAX_TEXT = 1 << 22  # characters of a rendered conversation
MAX_RENDERED = 500_000  # messages that are rendered to find the answers of a conversation
BEGIN, END = "\ufdd0", "\ufdd1"  # around a generation block: code points that no text has

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


class Request(TypedDict):
    """A conversation to render."""

    template: str
    variables: dict[str, Any]
    messages: list[dict[str, Any]]
    answers: bool  # whether to find the answers
    eos: str  # token that may end every conversation


class RenderingError(Exception):
    """A conversation that cannot be rendered, as a sentence without its subject."""


class _Generation(Extension):
    """``{% generation %}``, which marks what the assistant writes, as transformers defines it."""

    tags = {"generation"}  # noqa: RUF012, as jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a call of `_mark` with the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return BEGIN + caller() + END if _Environment.marks else caller()


class _Environment(ImmutableSandboxedEnvironment):
    """The environment in which transformers renders chat templates."""

    marks = False  # whether generation blocks are marked
    now = datetime.now()  # the same in all renderings of a request

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise, "strftime_now": lambda form: self.now.strftime(form)}


def _to_json(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise TemplateError(message)


@lru_cache
def _compile(template: str) -> Any:
    environment: Environment = _Environment()
    return environment.from_string(template)


@lru_cache
def _has_blocks(template: str) -> bool:
    """Return True if a template has generation blocks; what only looks like one is in a comment or a string."""
    return _Environment().parse(template).find(nodes.ExtensionAttribute) is not None


class Rendering:
    """A conversation with its template, rendered in parts and as a whole."""

    def __init__(self, request: Request) -> None:
        """Choose the form of its messages that the template renders, see `_fit`; ``weight`` is not among their keys."""
        self.template, self.variables, self.eos = request["template"], request["variables"], request["eos"]
        self._weights = [message.pop("weight", None) for message in request["messages"]]
        self.messages: Messages = request["messages"]
        self.text = ""
        self._fit()
        self.marked = _has_blocks(self.template)

    def render(self, messages: Messages, marks: bool = False, **variables: object) -> str:
        """Return the text of messages."""
        _Environment.marks = marks
        try:
            text: str = _compile(self.template).render({**self.variables, **variables, "messages": messages})
        except MemoryError:
            raise
        except Exception as error:
            message = (str(error) or type(error).__name__).partition("\n")[0]
            raise RenderingError(f" does not fit the chat template: {message[:500]}") from error
        if len(text) > MAX_TEXT:
            raise RenderingError(f" is a text of {len(text):,} characters; the limit is {MAX_TEXT:,}")
        return text

    def _fit(self) -> None:
        """Render the messages as they are, or with contents as strings if the template only renders those.

        A template that expects strings refuses a list of parts or a null, or prints them as Python does. Raise
        RenderingError if it leaves out the tool calls.
        """
        plain = [_plain(message) for message in self.messages]
        texts = [self._attempt(form) for form in ((self.messages, plain) if plain != self.messages else (plain,))]
        as_given, as_plain = texts[0], texts[-1]
        if isinstance(as_given, RenderingError) and isinstance(as_plain, RenderingError):
            raise as_given
        if isinstance(as_plain, str) and (isinstance(as_given, RenderingError) or self._literals(as_given, as_plain)):
            self.messages, self.text = plain, as_plain
        elif isinstance(as_given, str):
            self.text = as_given
        if any(message.get("tool_calls") for message in self.messages):
            without = [{key: message[key] for key in message if key != "tool_calls"} for message in self.messages]
            if self._attempt(without) == self.text:
                raise RenderingError(" has tool calls, which the chat template does not render")

    def _attempt(self, messages: Messages) -> str | RenderingError:
        try:
            return self.render(messages)
        except RenderingError as error:
            return error

    def _literals(self, text: str, plain: str) -> bool:
        """Return True if the text has more literals of contents that are no strings than the plain one."""
        odd = [m["content"] for m in self.messages if "content" in m and not isinstance(m["content"], str)]
        literals = {form(content) for content in odd for form in (str, _to_json)}
        return any(text.count(literal) > plain.count(literal) for literal in literals)

    def answers(self) -> list[Span]:
        """Return where in the text the answers are, without those of weight 0."""
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        left_out = [i for i in turns if self._weights[i] == 0]
        if not self.marked:
            return self._additions([i for i in turns if i not in left_out])
        others = self._additions(left_out)
        return [(a, b) for a, b in self._blocks() if not any(a < end and begin < b for begin, end in others)]

    def _blocks(self) -> list[Span]:
        """Return the spans of the generation blocks."""
        marked = self.render(self.messages, marks=True)
        spans, depth, place, start = list[Span](), 0, 0, 0
        for part in re.split(f"([{BEGIN}{END}])", marked):
            if part == BEGIN:
                start = start if depth else place
                depth += 1
            elif part == END:
                depth -= 1
                if depth == 0:
                    spans.append((start, place))
            else:
                place += len(part)
        if marked.replace(BEGIN, "").replace(END, "") != self.text or depth or (BEGIN in self.text or END in self.text):
            raise RenderingError(": the chat template changes the text of its {% generation %} blocks afterwards")
        return spans

    def _additions(self, answers: Sequence[int]) -> list[Span]:
        """Return what each of some messages adds to those before it and to the generation prompt."""
        marks = "" if self.marked else "mark answers in the chat template with {% generation %}"
        if len(answers) * len(self.messages) > MAX_RENDERED:
            seen = f" has {len(answers):,} answers in {len(self.messages):,} messages, each rendered with those before"
            raise RenderingError(f"{seen} it; split it" + (marks and f", or {marks}"))
        spans = []
        for i in answers:
            after = self.render(self.messages[: i + 1])
            before = self.render(self.messages[: i or 1], add_generation_prompt=True)
            if i == 0:  # transformers renders no empty conversation: the prompt is what follows the message
                prompt = before[shared_length(before, after) :]
                before = after[: after.find(prompt) + len(prompt)] if prompt in after else ""
            if not self.text.startswith(after):  # it may end every conversation
                after = after.removesuffix(self.eos)
            if not (self.text.startswith(before) and self.text.startswith(after)):
                seen = f": the chat template renders the messages up to {i + 1} differently within the conversation"
                raise RenderingError(f"{seen}; {marks or 'an answer of weight 0 cannot be left out of it'}")
            spans.append((len(before), len(after)))
        return spans


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content is a string: its parts joined, or an empty one."""
    content = message.get("content")
    if isinstance(content, str):
        return message
    return {**message, "content": "".join(part["text"] for part in content or ())}


def shared_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the number of first items that two sequences have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def answer(line: str) -> dict[str, Any]:
    """Return the text of a request and the spans of its answers, or what is wrong with it."""
    _Environment.now = datetime.now()
    try:
        request: Request = json.loads(line)
        rendering = Rendering(request)
        spans = rendering.answers() if request["answers"] else []
        return {"text": rendering.text, "spans": spans, "marked": rendering.marked}
    except RenderingError as error:
        return {"error": str(error)}
    except RecursionError:
        return {"error": " is nested too deeply"}
    except MemoryError:
        return {"error": f" takes more than {MEMORY_BYTES >> 20:,} MiB to be rendered by the chat template"}


def main(cpu_seconds: float) -> None:
    """Answer the requests of standard input, each within ``cpu_seconds``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the input
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # ends the process, also within an operation
        sys.stdout.write(json.dumps(answer(line)) + "\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]))
