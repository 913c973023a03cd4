"""Pipeline schedules as data: actions, and lists of actions per rank.

``2F0`` is stage 2, forward, micro-batch 0. Written as text, one line per rank, a schedule is a CSV file that can be
read, edited and passed to a run; PyTorch's pipelining writes the same format.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from megatron.config.files import read_small

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
COMPUTE_KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)
"""Forward; the whole backward; and its halves, the gradients of a stage's input and those of its weights."""

SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
COMMUNICATION_KINDS = (SEND_F, RECV_F, SEND_B, RECV_B)
"""``2SEND_F0`` sends the output of stage 2, which ``3RECV_F0`` receives as the input of stage 3. ``3SEND_B0`` sends the
gradient of that input back, which ``2RECV_B0`` receives."""

EVALUATION_KINDS = (FORWARD, SEND_F, RECV_F)
"""Kinds in the program of an evaluation."""

_TEXT = re.compile(rf"([0-9]{{1,9}})({'|'.join((*COMMUNICATION_KINDS, *COMPUTE_KINDS))})([0-9]{{1,9}})")

_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
"""PyTorch's notation for a forward and a backward computed at the same time: ``(0F3;3B1)OVERLAP_F_B``."""

_OF_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
"""Further actions of PyTorch's runtime, for fully sharded parameters."""


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or run."""

    def __init__(self, sentence: str, *fixes: str) -> None:
        """Create the error from a sentence and fixes as command-line text such as ``--pipeline-schedule zb-v``."""
        super().__init__(sentence)
        self.sentence, self.fixes = sentence, fixes


class ScheduleSize(NamedTuple):
    """Dimensions that a schedule is built for."""

    ranks: int  # of the pipeline
    chunks: int  # stages on each rank
    microbatches: int  # of a step
    group: int  # of the interleaved schedule: micro-batches that pass a stage before the rank's next stage


class Action(NamedTuple):
    """One action of a rank; ``kind`` is one of ``COMPUTE_KINDS``, or in a program also of ``COMMUNICATION_KINDS``."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def to_number(self) -> int:
        """Return a number above 0 for the action."""
        kind = (*COMPUTE_KINDS, *COMMUNICATION_KINDS).index(self.kind)
        return 1 << 62 | self.stage << 40 | kind << 32 | self.microbatch

    @classmethod
    def from_number(cls, number: int) -> Action:
        """Return the action that :meth:`to_number` has numbered."""
        kind = (*COMPUTE_KINDS, *COMMUNICATION_KINDS)[number >> 32 & 0xFF]
        return cls(number >> 40 & 0x3FFFFF, kind, number & 0xFFFFFFFF)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse text such as ``2F0`` or ``3RECV_F0``, in upper or lower case."""
        found = _TEXT.fullmatch(text.strip().upper())
        if found is None:
            kinds = " or ".join(COMPUTE_KINDS)
            raise ScheduleError(f"'{text.strip()}' is not an action: an action is a stage, {kinds}, a micro-batch")
        stage, kind, microbatch = found.groups()
        return cls(int(stage), kind, int(microbatch))


def parse_cell(cell: str) -> list[Action]:
    """Parse a cell of a schedule file: no action if empty or ``None``, several if separated by semicolons."""
    text = cell.strip()
    if text.upper() in ("", "NONE"):
        return []
    if _OF_FSDP.fullmatch(text):
        raise ScheduleError(
            f"'{text}' is not an action here: it belongs to PyTorch's fully sharded parameters (FSDP); a schedule "
            "lists only what is computed",
            "write the file with _dump_csv(filename, format='compute_only')",
        )
    pair = _PAIR.fullmatch(text)
    return [Action.parse(part) for part in (pair[1] if pair else text).split(";") if part.strip()]


@dataclass(frozen=True)
class PipelineSchedule:
    """Actions of every rank in order: ``COMPUTE_KINDS`` in a schedule, also ``COMMUNICATION_KINDS`` in a program."""

    name: str  # of the schedule, or of its file
    ranks: tuple[tuple[Action, ...], ...]  # actions by pipeline rank

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Rank of every stage.

        Raises:
            ScheduleError: if a stage between the first and the last is on no rank, or one is on several.
        """
        rank_of: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for stage in {action.stage for action in actions}:
                other = rank_of.setdefault(stage, rank)
                if other != rank:
                    there, here = (next(a for a in self.ranks[r] if a.stage == stage) for r in (other, rank))
                    raise ScheduleError(f"stage {stage} is on rank {other} and on rank {rank}, with {there} and {here}")
        missing = [stage for stage in range(len(rank_of)) if stage not in rank_of]
        if missing or not rank_of:
            raise ScheduleError(f"no rank has stage {missing[0] if missing else 0}")
        return tuple(rank_of[stage] for stage in range(len(rank_of)))

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.placement)

    @cached_property
    def microbatches(self) -> int:
        """Number of micro-batches: one more than the largest index."""
        return 1 + max((action.microbatch for actions in self.ranks for action in actions), default=-1)

    def only(self, kinds: Sequence[str]) -> PipelineSchedule:
        """Return the schedule with only actions of ``kinds``."""
        return PipelineSchedule(
            self.name, tuple(tuple(a for a in actions if a.kind in kinds) for actions in self.ranks)
        )

    def save(self, path: Path) -> None:
        """Write one line per rank, actions separated by commas."""
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [str(action) for action in actions] for actions in self.ranks
            )

    @classmethod
    def load(cls, path: Path) -> PipelineSchedule:
        """Read a file written by :meth:`save`, a spreadsheet or PyTorch's pipelining; empty cells are idle time.

        A pair that PyTorch computes at the same time becomes two actions in a row.

        Raises:
            ScheduleError: if the file is unreadable or invalid; names the line and the cell.
        """
        try:
            lines = list(csv.reader(StringIO(read_small(path).decode("utf-8-sig"), newline="")))
        except FileNotFoundError:
            raise ScheduleError(f"there is no file {path}") from None
        except OSError as error:
            raise ScheduleError(f"{path} cannot be read: {error.strerror}") from None
        except (UnicodeDecodeError, csv.Error) as error:
            raise ScheduleError(f"{path} cannot be read as a schedule: {error}") from None
        while lines and not any(cell.strip() for cell in lines[-1]):
            lines.pop()
        ranks = []
        for number, cells in enumerate(lines, start=1):
            try:
                ranks.append(tuple(chain.from_iterable(map(parse_cell, cells))))
            except ScheduleError as error:
                raise ScheduleError(f"{path}, line {number}: {error.sentence}", *error.fixes) from None
            if not ranks[-1]:
                raise ScheduleError(
                    f"{path}, line {number} has no action; line {number} lists the actions of rank {number - 1}"
                )
        if not ranks:
            raise ScheduleError(f"{path} has no action; each line lists the actions of a rank, such as 0F0,0B0")
        return cls(path.name, tuple(ranks))
