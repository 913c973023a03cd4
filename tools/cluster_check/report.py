"""Results of a cluster check, as a Markdown page and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.durable_files import publish_file
from megatron.config.privacy import redact, redact_json
from megatron.config.text import printable

OK, WARNING, SKIPPED, FAILED = "ok", "warning", "skipped", "FAILED"
SEVERITY = (SKIPPED, OK, WARNING, FAILED)
"""Verdicts, the worst last."""

MARKDOWN, JSON = "acceptance.md", "acceptance.json"
REPORT_VERSION = 1  # of the JSON: increased when a key is removed or changes its meaning


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    what: str  # name
    verdict: str  # OK; WARNING: a run can live with it; FAILED; SKIPPED: ``detail`` has the reason
    detail: str  # what was measured, and what it means


@dataclass
class CheckSection:
    """The results of one part of the cluster check."""

    name: str  # one word
    checks: list[CheckResult] = field(default_factory=list)  # in the order of execution
    # rows of cells by title; the first row is the header
    tables: dict[str, list[Sequence[str]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # everything as data, only for the JSON
    seconds: float = 0.0
    log: str = ""  # end of the launched programs' output, if something failed

    @property
    def verdict(self) -> str:
        """The worst verdict of its checks."""
        return max((check.verdict for check in self.checks), key=SEVERITY.index, default=SKIPPED)

    def add(self, what: str, good: bool, detail: str, otherwise: str = FAILED) -> bool:
        """Record a check, with verdict ``otherwise`` if it is not ``good``; return ``good``."""
        self.checks.append(CheckResult(what, OK if good else otherwise, detail))
        return good


@dataclass(frozen=True)
class ClusterReport:
    """The results of all parts."""

    about: str  # one line about the cluster
    command: str  # the command line
    parts: Sequence[CheckSection]  # finished parts
    left: Sequence[str] = ()  # names of parts still to run
    unasked: Sequence[str] = ()  # names of parts not selected

    @property
    def failed(self) -> bool:
        """True if a check failed."""
        return any(part.verdict == FAILED for part in self.parts)

    @property
    def without(self) -> list[str]:
        """Names of parts that did not run."""
        return [*(part.name for part in self.parts if part.verdict == SKIPPED), *self.unasked]

    @property
    def verdict(self) -> str:
        """The overall verdict; that of an unfinished check names the parts to come."""
        if self.left:
            so_far = f", {FAILED} already" if self.failed else ""
            return f"unfinished, {', '.join(self.left)} still to come{so_far}"
        if self.failed:
            return FAILED
        return f"passed, without {', '.join(self.without)}" if self.without else "passed"

    def write(self, folder: Path) -> None:
        """Write both files, each atomically."""
        values = {"version": REPORT_VERSION, "verdict": self.verdict, "failed": self.failed, "over": not self.left}
        values |= {"without": self.without, "about": self.about, "command": self.command}
        parts = []
        for part in self.parts:
            results = [{"what": check.what, "verdict": check.verdict, "told": check.detail} for check in part.checks]
            parts.append({"verdict": part.verdict} | asdict(part) | {"checks": results})
        publish_file(folder / JSON, (json.dumps(redact_json(values | {"parts": parts}), indent=1) + "\n").encode())
        publish_file(folder / MARKDOWN, self.markdown().encode())

    def markdown(self) -> str:
        """Return the page: the verdict, a table of the parts, then each part's checks; without credentials."""
        return printable(redact("\n".join(self._lines()) + "\n"))

    def _lines(self) -> Iterator[str]:
        yield f"# Cluster acceptance: {self.verdict}"
        yield from ("", self.about, "", f"Started as `{self.command}`.", "")
        rows: list[Sequence[str]] = [("part", "verdict", "seconds", "")]
        rows += [(part.name, part.verdict, f"{part.seconds:.0f}", section_summary(part)) for part in self.parts]
        yield from markdown_table(rows)
        for part in self.parts:
            yield from ("", f"## {part.name}", "")
            yield from (f"- **{c.verdict}** {c.what}: {_line(c.detail)}" for c in part.checks)
            for title, content in part.tables.items():
                yield from ("", *([f"{title}:", ""] if title else []), *markdown_table(content))
            if part.log:
                yield from ("", "The end of its output:", "", "```", *part.log.splitlines(), "```")


def section_summary(part: CheckSection) -> str:
    """Return the first check with the part's verdict, or the number of checks if all passed."""
    if part.verdict == OK:
        count = len(part.checks)
        return f"{count} check{'' if count == 1 else 's'}"
    return next((f"{check.what}: {check.detail}" for check in part.checks if check.verdict == part.verdict), "")


def markdown_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; the first row is its header."""
    header, *body = rows
    for cells in (header, ["---"] * len(header), *body):
        yield "| " + " | ".join(_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _line(text: str) -> str:
    return " ".join(text.split())  # errors may have several lines
