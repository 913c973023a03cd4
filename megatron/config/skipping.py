"""Options that leave out samples, documents or updates, and the lists that they take.

A list is given in words, in files (``@FILE``, a word per line, after ``#`` comments), or both. An entry that names
places, or such a file, may begin with ``PHASE/``: then it holds in that phase only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar

from megatron.config.errors import Problem, UserError
from megatron.config.files import TABLE_FILE_BYTES, read_small
from megatron.config.option import Need, Run, option
from megatron.config.text import flag

Data: TypeAlias = Any
"""The data, a :class:`megatron.config.data.DataConfig`, which inherits the class of options."""

T = TypeVar("T")

TOKEN_FILES = Need("not mock_data and not plugin_dataset and not chat_data_path", "files of tokens")
TRAINING_STEPS = Need("not skip_train", "training steps (--skip-train takes none)")

LARGEST_PLACE = 2**62
"""Bound of places and tokens, far above any stream's."""

MANY = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)", re.IGNORECASE)


def parse_samples(word: str) -> tuple[int, int]:
    """Parse ``A:B``, places from A up to B - 1; raise ValueError for another word."""
    match = re.fullmatch(r"(\d+):(\d+)", word)
    begin, end = map(int, match.groups()) if match else (0, 0)
    if not begin < end <= LARGEST_PLACE:
        raise ValueError(f"{word!r} is not A:B, such as 0:64 for the first 64 samples, with A below B")
    return begin, end


def parse_tokens(word: str) -> tuple[int, int]:
    """Parse ``A:B``, numbers of tokens with K, M, B or T; raise ValueError for another word."""
    sides = [MANY.fullmatch(side) for side in word.split(":")]
    ends = [round(float(side[1]) * 1000 ** " KMBT".index(side[2].upper() or " ")) for side in sides if side]
    if len(sides) != 2 or len(ends) != 2 or not ends[0] < ends[1] <= LARGEST_PLACE:
        raise ValueError(f"{word!r} is not A:B, such as 1.2B:1.3B, with A below B")
    return ends[0], ends[1]


def parse_documents(word: str) -> tuple[str, range]:
    """Parse ``PREFIX:ID`` or ``PREFIX:A-B``, documents from A to B inclusive; raise ValueError for another word."""
    match = re.fullmatch(r"(.+):(\d+)(?:-(\d+))?", word)
    if match is None or int(match[3] or match[2]) < int(match[2]):
        raise ValueError(f"{word!r} is not PREFIX:ID or PREFIX:A-B, such as data/web:17 or data/web:17-20")
    return match[1], range(int(match[2]), int(match[3] or match[2]) + 1)


def of_phase(word: str) -> tuple[str | None, str]:
    """Return the phase that a word begins with, ``PHASE/``, if any, and the rest of the word."""
    match = re.match(r"([^\s:/@][^\s:/]*)/", word)
    return (match[1], word[match.end() :]) if match else (None, word)


def in_phase(parse: Callable[[str], T]) -> Callable[[str], tuple[str | None, T]]:
    """Return a parser of words that may begin with ``PHASE/``: of the phase and the entry."""

    def parse_word(word: str) -> tuple[str | None, T]:
        phase, entry = of_phase(word)
        return phase, parse(entry)

    return parse_word


def _check_word(parse: Callable[[str], object], word: str) -> None:
    if not word.startswith("@"):
        parse(word)


def _check_place(parse: Callable[[str], object], word: str) -> None:
    _check_word(parse, of_phase(word)[1])


def read_places(name: str, words: Sequence[str], parse: Callable[[str], T]) -> list[tuple[str | None, T]]:
    """Return the entries of an option that names places as :func:`read_list` does, each with the phase it names."""
    entries = list[tuple[str | None, T]]()
    for phase, word in map(of_phase, words):
        entries += [(each or phase, entry) for each, entry in read_list(name, [word], in_phase(parse))]
    return entries


def read_list(name: str, words: Sequence[str], parse: Callable[[str], T]) -> list[T]:
    """Return the entries of an option's words and of the files that they name.

    Raises:
        UserError: if a file cannot be read, or a line of it is no entry.
    """
    entries: list[T] = []
    for word in words:
        if not word.startswith("@"):
            entries.append(parse(word))
            continue
        try:
            lines = read_small(word[1:], TABLE_FILE_BYTES).decode().splitlines()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            sentence = f"{flag(name)} {word}: the file cannot be read: {reason}"
            raise UserError([Problem("E541", sentence, (f"{flag(name)} @ANOTHER",))]) from error
        for number, line in enumerate(lines, 1):
            if text := line.partition("#")[0].strip():
                try:
                    entries.append(parse(text))
                except ValueError as error:
                    sentence = f"{flag(name)} {word}: line {number}: {error}"
                    raise UserError([Problem("E541", sentence, (f"correct line {number} of {word[1:]}",))]) from error
    return entries


@dataclass(frozen=True, init=False, eq=False, repr=False)
class SkippingOptions:
    """Samples, documents and updates that are left out of training."""

    skip_samples: tuple[str, ...] = option((), role="start", check=partial(_check_place, parse_samples))
    """A:B ... or @FILE: leave out the training samples at places A to B - 1 of the order of the data. The samples after
    them move up, so the run still takes as many. Places count all samples, skipped ones too, so another range never
    changes what a range means. A resumed run may skip what lies ahead, not what it has consumed. PHASE/A:B holds in one
    of several phases."""
    skip_tokens: tuple[str, ...] = option((), role="start", check=partial(_check_place, parse_tokens))
    """A:B ... or @FILE: the same for the samples that hold tokens A to B - 1 of the order, with K, M, B or T."""
    skip_documents: tuple[str, ...] = option(
        (), role="start", check=partial(_check_word, parse_documents), needs=TOKEN_FILES
    )
    """PREFIX:ID, PREFIX:A-B (both included) or @FILE: leave out the samples that hold any token of these documents of
    the token files PREFIX. In a resumed run, those that lie ahead."""
    iterations_to_skip: tuple[int, ...] = option((), role="start", at_least=1, needs=TRAINING_STEPS)
    """Steps whose samples are consumed without computing or updating anything."""

    other_meanings: ClassVar = """
    --iterations-to-skip
      --iterations-to-skip: the learning rate of later steps is that of their samples, as if the steps were taken;
      Megatron-LM's schedule does not count them, and it neither evaluates nor saves after one
    """

    def sample_ranges(self: Data, seq_length: int, phase: str | None = None) -> list[tuple[int, int]]:
        """Return the places of ``skip_samples`` and ``skip_tokens``, each from begin to end - 1, in no order.

        Sample ``i`` holds tokens ``i * seq_length`` to ``(i + 1) * seq_length - 1``. Entries of other phases than
        ``phase`` are left out.

        Raises:
            UserError: as :func:`read_list`.
        """
        samples = read_places("skip_samples", self.skip_samples, parse_samples)
        tokens = read_places("skip_tokens", self.skip_tokens, parse_tokens)
        of_samples = [(of, (begin // seq_length, -(-end // seq_length))) for of, (begin, end) in tokens]
        return [places for of, places in (*samples, *of_samples) if of in (None, phase)]

    def phases_of_places(self: Data) -> dict[str | None, str]:
        """Return the phases that ``skip_samples`` and ``skip_tokens`` name, with the flag; None for no phase.

        Raises:
            UserError: as :func:`read_list`.
        """
        options = ("skip_samples", self.skip_samples, parse_samples), ("skip_tokens", self.skip_tokens, parse_tokens)
        return {of: flag(name) for name, words, parse in options for of, _ in read_places(name, words, parse)}

    def document_ranges(self: Data) -> dict[str, list[range]]:
        """Return the documents of ``skip_documents`` by prefix.

        Raises:
            UserError: as :func:`read_list`.
        """
        documents: dict[str, list[range]] = {}
        for prefix, numbers in read_list("skip_documents", self.skip_documents, parse_documents):
            documents.setdefault(prefix, []).append(numbers)
        return documents

    def check_skipped(self: Data, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that the lists of what to skip can be read."""
        for read in (partial(self.sample_ranges, config.training.seq_length), self.document_ranges):
            try:
                read()
            except UserError as error:
                yield from error.problems
        if config.training.phase_name is None:
            with suppress(UserError):
                for phase, option_flag in self.phases_of_places().items():
                    if phase is not None:
                        sentence = f"{option_flag} names the phase {phase}, and this run has no phases"
                        yield Problem("E541", sentence, (f"{option_flag} A:B",))
