"""Bugs of evaluations during training: they must not change it, and must compute without dropout."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.model.gpt import GPTChunk
from tests.kit.cases import MODEL, Case, evaluation
from tests.kit.runs import column, start, tiny_run
from tests.known_bugs.alone import alone
from tests.known_bugs.bug import KnownBug


def interrupted(rank: int, world_size: int) -> float:
    """Losses of steps with dropout and evaluations between them, from those without evaluations."""
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, flags in {"often": "--eval-interval 2 --eval-iters 1", "never": "--eval-iters 0"}.items():
            folder = Path(temporary) / name
            start(tiny_run(folder, f"--hidden-dropout 0.5 {flags}"))
            found.append(column(folder, "lm loss"))
    return max(abs(a / b - 1.0) for a, b in zip(*found, strict=True))


def stays_in_evaluation() -> AbstractContextManager[Any]:
    """After an evaluation, models train as they evaluate."""
    original, evaluated = GPTChunk.train, set[int]()

    def train(self: GPTChunk, mode: bool = True) -> GPTChunk:
        if not mode:
            evaluated.add(id(self))
        original(self, mode and id(self) not in evaluated)
        return self

    return patch.object(GPTChunk, "train", train)


def evaluated(rank: int, world_size: int) -> float:
    """The validation loss of a model with dropout, from that of one without, whose weights are the same."""
    dropping = replace(MODEL, hidden_dropout=0.5, attention_dropout=0.5)
    found, expected = (evaluation(rank, world_size, Case(model=model))[0] for model in (dropping, MODEL))
    return abs(found / expected - 1.0)


def drops_in_evaluation() -> AbstractContextManager[Any]:
    """Evaluations compute like training."""
    original = GPTChunk.train
    return patch.object(GPTChunk, "train", lambda self, mode=True: original(self, True))


BUGS = {
    "stays-in-evaluation": KnownBug(
        reports=("ThilinaRajapakse/simpletransformers#941", "webis-de/small-text#40"),
        kind="Evaluation",
        bug="after the first evaluation the model stayed in evaluation mode, and trained without dropout",
        check="losses of six steps with dropout and an evaluation after every second, against none",
        detector=alone(interrupted, within=0.0),
        plant=stays_in_evaluation,
    ),
    "drops-in-evaluation": KnownBug(
        reports=("karpathy/nanoGPT#240",),
        kind="Evaluation",
        bug="dropout was active in evaluations, so the validation loss was too high",
        check="the validation loss of a model with dropout against that of the same weights without, to the bit",
        detector=alone(evaluated, within=0.0),
        plant=drops_in_evaluation,
    ),
}
