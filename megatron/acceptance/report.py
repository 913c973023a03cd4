"""What the acceptance of a cluster found, as a page to read and as JSON to attach."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.acceptance.filesystem import write_whole

OK, WARNING, SKIPPED, FAILED = "ok", "warning", "skipped", "FAILED"
SEVERITY = (SKIPPED, OK, WARNING, FAILED)
"""Verdicts, the worst last: a part has that of its worst check."""

MARKDOWN, JSON = "acceptance.md", "acceptance.json"
VERSION = 1
"""Of the JSON: raised when a name in it goes or gets another meaning."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        what: it.
        verdict: ``OK``; ``WARNING`` for what a run can live with; ``FAILED``; ``SKIPPED``, where ``told`` says why.
        told: what was seen, and what it means.
    """

    what: str
    verdict: str
    told: str


@dataclass
class Part:
    """One part of the acceptance.

    Attributes:
        name: a word.
        checks: what was found, in the order in which it was looked at.
        tables: titles, and rows of cells of which the first is the head.
        facts: everything as data, for the JSON alone.
        seconds: it took.
        log: end of what the launched programs wrote, where something failed.
    """

    name: str
    checks: list[Check] = field(default_factory=list)
    tables: dict[str, list[Sequence[str]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    log: str = ""

    @property
    def verdict(self) -> str:
        """That of the worst check."""
        return max((check.verdict for check in self.checks), key=SEVERITY.index, default=SKIPPED)

    def add(self, what: str, good: bool, told: str, otherwise: str = FAILED) -> bool:
        """Note a check, which has the verdict ``otherwise`` where it is not ``good``; returns ``good``."""
        self.checks.append(Check(what, OK if good else otherwise, told))
        return good


@dataclass(frozen=True)
class Report:
    """All of it.

    Attributes:
        about: the line that says of what.
        command: how it was started.
        parts: so far.
        left: names of parts that are still to come.
        unasked: names of parts that nobody asked for.
    """

    about: str
    command: str
    parts: Sequence[Part]
    left: Sequence[str] = ()
    unasked: Sequence[str] = ()

    @property
    def failed(self) -> bool:
        """Whether something is not as it must be."""
        return any(part.verdict == FAILED for part in self.parts)

    @property
    def without(self) -> list[str]:
        """Names of parts that say nothing of the cluster."""
        return [*(part.name for part in self.parts if part.verdict == SKIPPED), *self.unasked]

    @property
    def verdict(self) -> str:
        """In a word, or what keeps it from being one: a page that was cut short must not look like a good one."""
        if self.left:
            so_far = f", {FAILED} already" if self.failed else ""
            return f"not over, {', '.join(self.left)} still to come{so_far}"
        if self.failed:
            return FAILED
        return f"passed, without {', '.join(self.without)}" if self.without else "passed"

    def write(self, folder: Path) -> None:
        """Write both files, each whole or not at all."""
        told = {"version": VERSION, "verdict": self.verdict, "failed": self.failed, "over": not self.left}
        told |= {"without": self.without, "about": self.about, "command": self.command}
        parts = [{"verdict": part.verdict} | asdict(part) for part in self.parts]
        write_whole(folder / JSON, json.dumps(told | {"parts": parts}, indent=1) + "\n")
        write_whole(folder / MARKDOWN, self.markdown())

    def markdown(self) -> str:
        """The page: the verdict, what is not well, then part by part."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"# Cluster acceptance: {self.verdict}"
        yield from ("", self.about, "", f"Started as `{self.command}`.", "")
        rows: list[Sequence[str]] = [("part", "verdict", "seconds", "")]
        rows += [(part.name, part.verdict, f"{part.seconds:.0f}", headline(part)) for part in self.parts]
        yield from table(rows)
        for part in self.parts:
            yield from ("", f"## {part.name}", "")
            yield from (f"- **{c.verdict}** {c.what}: {_line(c.told)}" for c in part.checks)
            for title, content in part.tables.items():
                yield from ("", *([f"{title}:", ""] if title else []), *table(content))
            if part.log:
                yield from ("", "The end of what it wrote:", "", "```", *part.log.splitlines(), "```")


def headline(part: Part) -> str:
    """The first check that has the part's verdict, or how many there are where all is well."""
    if part.verdict == OK:
        count = len(part.checks)
        return f"{count} check{'' if count == 1 else 's'}"
    return next((f"{check.what}: {check.told}" for check in part.checks if check.verdict == part.verdict), "")


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown; the first row is its head."""
    head, *body = rows
    for cells in (head, ["---"] * len(head), *body):
        yield "| " + " | ".join(_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _line(text: str) -> str:
    """In one line: errors may have more."""
    return " ".join(text.split())
