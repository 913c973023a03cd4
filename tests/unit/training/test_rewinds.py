"""Runs that go back: against runs that are started by hand from the same checkpoint, killed anywhere, and refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron.training.incidents import read_incidents
from tests.kit.runs import (
    Outcome,
    differences,
    spoiled_sample,
    start,
    steps,
    tiny_run,
)

FLAGS = "--params-dtype fp64 --train-iters 10 --save-interval 2"
NONFINITE = "--on-nonfinite rewind:3"
SPIKES = "--skip-spikes 12 --spike-window 4 --on-spike rewind:3"


def run_flags(folder: Path, more: str = "") -> str:
    return f"{FLAGS} --save {folder}/saved {more}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run in which nothing happens."""
    return start(tiny_run(tmp_path_factory.mktemp("plain"), FLAGS))


def in_step(outcome: Outcome, step: int, number: int = 1) -> tuple[int, ...]:
    """The tokens of a sample of a step."""
    return outcome.samples[step][number][1]


def by_hand(folder: Path, found: Path, step: int, skips: str, flags: str) -> Outcome:
    """Start from a checkpoint of another run, without samples."""
    shutil.copytree(found / f"saved/iter_{step:07d}", folder / f"from/iter_{step:07d}")
    return start(tiny_run(folder, f"{flags} --load {folder}/from --save {folder}/saved --skip-samples {skips}"))


def test_a_run_that_goes_back_equals_one_that_is_started_by_hand(tmp_path: Path, plain: Outcome) -> None:
    """In step 7, NaN: the newest checkpoint of step 4 or earlier, without the samples of steps 5 to 7."""
    folder = tmp_path / "run"
    with spoiled_sample(in_step(plain, 7)):
        outcome = start(tiny_run(folder, run_flags(folder, NONFINITE)))
    assert outcome.status == 0
    assert "goes back from step 7 to step 4, and leaves out the samples 16:28" in outcome.out
    hand = by_hand(tmp_path / "hand", folder, 4, "16:28", FLAGS)
    assert hand.status == 0
    assert {step: hand.samples[step] for step in range(5, 11)} == {s: outcome.samples[s] for s in range(5, 11)}
    assert differences(folder / "saved/iter_0000010", tmp_path / "hand/saved/iter_0000010") == ["rewinds"]
    again = steps(folder)
    assert {step: again[step] for step in range(5, 11)} == steps(tmp_path / "hand")
    (incident,) = [incident for _, incident in read_incidents(folder)]
    assert (incident.kind, incident.step, incident.facts["places"]) == ("nonfinite", 7, [24, 28])
    assert "output of layers.0.input_layernorm, micro-batch 1, samples [25]" in incident.sentence
