"""Findings of ``tools/doctor.py`` on a machine, and probes with a time limit that make them. Does not import torch."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

OK, NOTE, BAD = "ok", "note", "bad"
VERDICTS = (OK, NOTE, BAD)
"""The worst last. A note costs speed or safety; with something bad a run fails, or computes wrong numbers."""


@dataclass(frozen=True)
class Finding:
    """One line about a machine.

    Attributes:
        group: heading that it is printed below.
        name: what was looked at.
        verdict: of ``VERDICTS``.
        sentence: what was found.
        todo: what to do, as a command or in words; empty if nothing.
        facts: numbers behind the sentence, for ``--json``.
    """

    group: str
    name: str
    verdict: str
    sentence: str
    todo: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON."""
        return asdict(self)


class Probe(NamedTuple):
    """A part of the examination."""

    group: str
    name: str
    # Yields findings; it may block on a dead disk or driver.
    look: Callable[[], Iterable[Finding]]
    # Time limit.
    seconds: float = 4.0
    # It measures a speed, so no other probe runs meanwhile.
    alone: bool = False


def examine(probes: Sequence[Probe]) -> list[Finding]:
    """Run probes and return their findings in the order of the probes.

    Probes that only read run at the same time. One that does not end in time is left behind in its thread, which does
    not keep the process alive.
    """
    together = [(probe, *_start(probe)) for probe in probes if not probe.alone]
    results = {id(probe): _result(probe, thread, found) for probe, thread, found in together}
    for probe in (probe for probe in probes if probe.alone):
        results[id(probe)] = _result(probe, *_start(probe))
    return [finding for probe in probes for finding in results[id(probe)]]


def _start(probe: Probe) -> tuple[threading.Thread, list[Finding]]:
    found: list[Finding] = []

    def look() -> None:
        try:
            found.extend(probe.look())
        except Exception as error:  # of a driver, a file system or a parser: the other findings still count
            sentence = f"could not be read: {type(error).__name__}: {error}"
            found.append(Finding(probe.group, probe.name, NOTE, sentence))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread, found


def _result(probe: Probe, thread: threading.Thread, found: list[Finding]) -> list[Finding]:
    thread.join(probe.seconds)
    if not thread.is_alive():
        return found
    sentence = f"does not answer within {probe.seconds:g} s"
    return [*found, Finding(probe.group, probe.name, BAD, sentence, "look for a dead mount, driver or server")]


def output_of(*words: str, seconds: float = 3.0) -> str | None:
    """Return what a program prints; None if it is not installed, fails or takes longer than ``seconds``."""
    if shutil.which(words[0]) is None:
        return None
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # a program that blocks in the kernel is left to it
        return None
    return printed if process.returncode == 0 else None


def lines_of(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield the lines of findings below their groups."""
    group = None
    for finding in findings:
        if finding.group != group:
            group = finding.group
            yield from ("", group)
        yield f"  {finding.verdict:<5}{finding.name:<20} {finding.sentence}"
        if finding.todo:
            yield f"  {'':<5}{'':<20}   -> {finding.todo}"


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """Return the number of findings of each verdict."""
    verdicts = [finding.verdict for finding in findings]
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS}


def repeat_for(seconds: float, act: Callable[[], float]) -> tuple[float, float]:
    """Repeat ``act``, at least once, until ``seconds`` are over; return the sum of its results and the time taken."""
    begun, total = time.monotonic(), 0.0
    while True:
        total += act()
        if (taken := time.monotonic() - begun) >= seconds:
            return total, taken
