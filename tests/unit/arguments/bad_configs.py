"""Command lines with their answers: the problems of those that are refused, and the notes on the others.

A case in the files below is a paragraph: a command line, after the number of ranks, and the answer. To add one, write
its first line; then rewrite the files, and read the difference: ``python -m tests.unit.arguments.bad_configs``.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron.arguments.cli import parse
from megatron.config.errors import UserError
from megatron.convert.huggingface.config import read_model_values

GOLDEN = Path(__file__).parents[2] / "golden" / "bad_configs.txt"
NOTES = GOLDEN.with_name("notes.txt")


@dataclass(frozen=True)
class Case:
    """A command line on ``ranks`` ranks; srun starts those of several ``machines``."""

    title: str
    flags: str
    ranks: int
    machines: int

    def answer(self) -> str:
        """Return the problems or the notes."""
        environ = {"RANK": "0", "WORLD_SIZE": str(self.ranks)}
        if self.machines > 1:
            place = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
            environ = place | {"SLURM_NTASKS": str(self.ranks), "SLURM_NNODES": str(self.machines)}
        try:
            notes = parse(shlex.split(self.flags), environ, read_model=read_model_values).notes
        except UserError as error:
            return str(error)
        return "\n".join(notes) or "no notes"


def read(path: Path) -> dict[Case, str]:
    """Return the cases of a file with their answers."""
    cases = {}
    for paragraph in path.read_text().split("\n\n"):
        title, _, answer = paragraph.strip("\n").partition("\n")
        ranks, machines, flags = re.fullmatch(r"\[(\d+) ranks?(?: on (\d+) machines)?\] (.*)", title).groups()  # type: ignore[union-attr]
        cases[Case(title, flags, int(ranks), int(machines or 1))] = answer
    return cases


if __name__ == "__main__":
    for path in (GOLDEN, NOTES):
        path.write_text("\n".join(f"{case.title}\n{case.answer()}\n" for case in read(path)))
