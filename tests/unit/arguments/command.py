"""Command lines, parsed in-process: the configuration, or the problems."""

from __future__ import annotations

import shlex
from typing import Any

from megatron.arguments.cli import ParsedArguments, parse
from megatron.config.errors import Problem, UserError

MODEL = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 1024"
RUN = "--mock-data --vocab-size 257 --train-iters 100"


def run(flags: str = "", ranks: int = 1, base: str = RUN, **readers: Any) -> ParsedArguments:
    """Parse a command line after ``base``, as a rank of ``ranks``; of ``MODEL``, unless something else may give one."""
    model = "" if "--preset" in flags or readers else MODEL
    return parse(shlex.split(f"{model} {base} {flags}"), {"RANK": "0", "WORLD_SIZE": str(ranks)}, **readers)


def problems(flags: str = "", ranks: int = 1, base: str = RUN, **readers: Any) -> tuple[Problem, ...]:
    """Return the problems of a command line; none if it is accepted."""
    try:
        run(flags, ranks, base, **readers)
    except UserError as error:
        return error.problems
    return ()


def codes(flags: str = "", ranks: int = 1, base: str = RUN, **readers: Any) -> list[str]:
    """Return the error codes of a command line."""
    return [problem.code for problem in problems(flags, ranks, base, **readers)]


def notes(flags: str = "", ranks: int = 1, base: str = RUN, **readers: Any) -> str:
    """Return the notes of a command line that is accepted, a line each."""
    return "\n".join(run(flags, ranks, base, **readers).notes)
