"""What pipeline ranks do, as data: actions, and schedules made of them.

A schedule is a list of actions per rank. ``2F0`` is stage 2, forward, micro-batch 0. Written as text, one line per
rank, it is a CSV file that people can read, edit and bring along; PyTorch's pipelining writes the same form.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""Forward; the whole backward; its two halves: gradients of a stage's input, then those of its weights."""

COMPUTE = (FORWARD, BACKWARD, INPUT, WEIGHT)
"""What a stage computes."""

SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
"""``2SEND_F0`` sends the output of stage 2, which ``3RECV_F0`` receives as the input of stage 3; ``3SEND_B0`` sends the
gradient of that input back, which ``2RECV_B0`` receives."""

COMMUNICATION = (SEND_F, RECV_F, SEND_B, RECV_B)
"""What moves between ranks."""

EVALUATION = (FORWARD, SEND_F, RECV_F)
"""All that an evaluation needs of a program."""

_TEXT = re.compile(rf"([0-9]{{1,9}})({'|'.join((*COMMUNICATION, *COMPUTE))})([0-9]{{1,9}})")

_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
"""PyTorch's way to say that a forward and a backward are computed at once: ``(0F3;3B1)OVERLAP_F_B``."""

_OF_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
"""What PyTorch's runtime does besides with fully sharded parameters."""


class ScheduleError(ValueError):
    """A schedule that cannot be made, read or run.

    Attributes:
        sentence: what was seen, and the rule.
        fixes: what to change, nearest first: words of a command such as ``--pipeline-schedule zb-v``.
    """

    def __init__(self, sentence: str, *fixes: str) -> None:
        super().__init__(sentence)
        self.sentence, self.fixes = sentence, fixes


class Size(NamedTuple):
    """What a schedule is made for: pipeline ranks, stages on each (chunks), and micro-batches of a step.

    ``group`` is of the interleaved schedule alone: micro-batches that a stage takes before the rank's next one.
    """

    ranks: int
    chunks: int
    microbatches: int
    group: int


class Action(NamedTuple):
    """One thing that a rank does: ``kind`` is one of ``COMPUTE``, or of ``COMMUNICATION`` in a program."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that a text such as ``2F0`` or ``3RECV_F0`` names, in capitals or not.

        Raises:
            ScheduleError: when it names none.
        """
        found = _TEXT.fullmatch(text.strip().upper())
        if found is None:
            raise ScheduleError(f"'{text.strip()}' is no action: one is a stage, {' or '.join(COMPUTE)}, a micro-batch")
        stage, kind, microbatch = found.groups()
        return cls(int(stage), kind, int(microbatch))


def read_cell(cell: str) -> list[Action]:
    """The actions in a cell of a file: none where it is empty or ``None``, several between semicolons.

    Raises:
        ScheduleError: when some of it is no action.
    """
    text = cell.strip()
    if text.upper() in ("", "NONE"):
        return []
    if _OF_FSDP.fullmatch(text):
        raise ScheduleError(
            f"'{text}' is no action here: it belongs to PyTorch's fully sharded parameters (FSDP); a schedule says "
            "only what is computed",
            "write the file with _dump_csv(filename, format='compute_only')",
        )
    pair = _PAIR.fullmatch(text)
    return [Action.parse(part) for part in (pair[1] if pair else text).split(";") if part.strip()]


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order: ``COMPUTE`` alone in a schedule, with ``COMMUNICATION`` in a program.

    Attributes:
        name: what people call it, or the file it came from.
        ranks: by pipeline rank.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage.

        Raises:
            ScheduleError: when a stage between the first and the last is on no rank, or one is on several.
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
        """How many there are over all ranks."""
        return len(self.placement)

    @cached_property
    def microbatches(self) -> int:
        """One more than the largest number of a micro-batch."""
        return 1 + max((action.microbatch for actions in self.ranks for action in actions), default=-1)

    def only(self, kinds: Sequence[str]) -> Schedule:
        """The same without actions of other kinds: with ``F`` alone, an evaluation."""
        return Schedule(self.name, tuple(tuple(a for a in actions if a.kind in kinds) for actions in self.ranks))

    def save(self, path: Path) -> None:
        """Write one line per rank, actions separated by commas."""
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [str(action) for action in actions] for actions in self.ranks
            )

    @classmethod
    def load(cls, path: Path) -> Schedule:
        """Read what :meth:`save`, a spreadsheet or PyTorch's pipelining wrote; empty cells are idle time.

        A pair that PyTorch computes at once becomes two actions in a row.

        Raises:
            ScheduleError: when the file cannot be read, naming the line and the cell that is no action.
        """
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                lines = list(csv.reader(file))
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
                ranks.append(tuple(chain.from_iterable(map(read_cell, cells))))
            except ScheduleError as error:
                raise ScheduleError(f"{path}, line {number}: {error.sentence}", *error.fixes) from None
            if not ranks[-1]:
                raise ScheduleError(
                    f"{path}, line {number} has no action; line {number} is what rank {number - 1} does"
                )
        if not ranks:
            raise ScheduleError(f"{path} has no action; each line is what a rank does, such as 0F0,0B0")
        return cls(path.name, tuple(ranks))
