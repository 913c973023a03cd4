"""Kill a run and resume it, and resume it in another layout; losses must be those of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.acceptance.launcher import Launcher, Outcome
from megatron.acceptance.layouts import SIZE, STAGES, TENSOR, ZERO_1, batch
from megatron.acceptance.report import Part
from megatron.config.arguments import parse
from megatron.training.history import read_history
from megatron.training.main import run
from megatron.training.setup import Trainer

PROGRAM = "pretrain_gpt.py"
FORMATS = {"cpu": "", "cuda": "--bf16"}
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}
"""Allowed relative errors of losses in another layout."""


@dataclass(frozen=True)
class Plan:
    """The run, and the moment at which a rank is killed."""

    steps: int  # of the run
    every: int  # steps between saves
    killed: int  # step in which the rank is killed
    rank: int  # the rank that is killed
    within: int  # milliseconds after that step has started

    @property
    def surely_saved(self) -> int:
        """The newest step whose checkpoint was complete when the rank was killed."""
        return (self.killed - 2) // self.every * self.every

    @classmethod
    def draw(cls, steps: int, ranks: int, seed: int) -> Plan:
        """Draw a moment after the first save and before the last."""
        chance, every = random.Random(seed), max(2, steps // 5)
        return cls(
            steps, every, chance.randint(every + 1, steps - every), chance.randrange(ranks), chance.randrange(20)
        )


def flags(folder: Path, device: str, ranks: int, plan: Plan, layout: str) -> list[str]:
    """Return the flags of a run in a folder; it computes the same in every layout."""
    words = f"{SIZE} {batch(ranks)} --lr 1e-3 --lr-warmup-iters 5 --deterministic --log-interval 1 --device {device}"
    length = f"--train-iters {plan.steps} --distributed-timeout-minutes 5 {FORMATS[device]}"
    saves = ["--run-dir", str(folder), "--save", str(folder / "checkpoints"), "--save-interval", str(plan.every)]
    return [*f"{words} {length} {layout}".split(), *saves]


def layout_of(ranks: int) -> str:
    """Return the layout flags of the run that is killed."""
    return f"{ZERO_1} {TENSOR} 2 --sequence-parallel" if ranks % 2 == 0 else ZERO_1


def other_layout(ranks: int) -> str:
    """Return the layout flags of the run that loads its checkpoint."""
    return f"--pipeline-model-parallel-size 2 {STAGES}" if ranks % 2 == 0 else ""


def die_in_step(number: int, milliseconds: int) -> None:
    """Kill this process with SIGKILL during a step, so that other ranks notice only that it is silent."""
    original = Trainer.next_batches

    def next_batches(trainer: Trainer) -> Any:
        if trainer.iteration + 1 == number:
            threading.Thread(target=_die, args=(milliseconds / 1000,), daemon=True).start()
        return original(trainer)

    Trainer.next_batches = next_batches  # type: ignore[assignment, method-assign]  # only this process


def _die(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def train(words: Sequence[str]) -> int:
    """Run one rank; rank ``words[0]`` is killed ``words[2]`` milliseconds after the start of step ``words[1]``."""
    rank, step, milliseconds = map(int, words[:3])
    parsed = parse(words[3:])
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == rank:
        die_in_step(step, milliseconds)
    return run(parsed.config, parsed.notes)


@dataclass
class Trial:
    """The runs of this part."""

    launcher: Launcher
    folder: Path  # contains the run folders
    device: str  # cpu or cuda
    ranks: int
    plan: Plan
    seconds: float  # time limit of each run

    def undisturbed(self, part: Part) -> bool:
        """Run the reference of the other runs."""
        words = flags(self.folder / "undisturbed", self.device, self.ranks, self.plan, layout_of(self.ranks))
        outcome = self.launcher.run("undisturbed", [PROGRAM, *words, "--async-save"], self.seconds)
        return self._ended(part, f"{self.plan.steps} steps", outcome)

    def interrupted(self, part: Part) -> None:
        """Kill a rank, restart the run, and compare its losses."""
        plan, folder = self.plan, self.folder / "killed"
        words = flags(folder, self.device, self.ranks, plan, layout_of(self.ranks))
        fault = ["rank", "train", str(plan.rank), str(plan.killed), str(plan.within), *words]
        outcome = self.launcher.run("killed", ["tools/acceptance.py", *fault], self.seconds)
        reached = max(_losses(folder), default=0)
        what = f"rank {plan.rank} killed in step {plan.killed}"
        sentence = f"{outcome.ended}, with step {reached} as the last in the log"
        died = outcome.status not in (0, None) and plan.killed - 2 <= reached < plan.steps
        if not part.add(what, died, sentence):
            part.log = outcome.tail()
            return
        outcome = self.launcher.run("resumed", [PROGRAM, *words], self.seconds)
        if not self._ended(part, "started again", outcome):
            return
        resumed_at = _last_start(folder)
        good = max(plan.surely_saved, 1) <= resumed_at <= reached
        part.add("resumed from the newest checkpoint", good, f"it continued after step {resumed_at} of {reached}")
        self._compare(part, "losses as undisturbed", _losses(folder), range(1, plan.steps + 1), 0.0)

    def elsewhere(self, part: Part) -> None:
        """Load an asynchronously saved checkpoint of the reference run in another layout."""
        plan, folder = self.plan, self.folder / "elsewhere"
        at = plan.steps - plan.every
        words = flags(folder, self.device, self.ranks, plan, other_layout(self.ranks))
        load = ["--load", str(self.folder / "undisturbed" / "checkpoints"), "--ckpt-step", str(at)]
        outcome = self.launcher.run("elsewhere", [PROGRAM, *words, *load], self.seconds)
        layout = other_layout(self.ranks) or "none"
        if self._ended(part, f"step {at} loaded with {layout}", outcome):
            steps = range(at + 1, plan.steps + 1)
            self._compare(part, "losses as before", _losses(folder), steps, TOLERANCE[self.device])

    def _ended(self, part: Part, what: str, outcome: Outcome) -> bool:
        good = part.add(what, outcome.status == 0, f"{outcome.ended} after {outcome.seconds:.0f} s")
        if not good:
            part.log = outcome.tail()
        return good

    def _compare(self, part: Part, what: str, losses: dict[int, float], steps: range, allowed: float) -> None:
        """Check that the losses are those of the reference run."""
        expected = _losses(self.folder / "undisturbed")
        missing = [step for step in steps if step not in losses or step not in expected]
        if missing:
            part.add(what, False, f"no loss was recorded for step {missing[0]}")
            return
        errors = {step: abs(losses[step] - expected[step]) / abs(expected[step]) for step in steps}
        worst = max(errors, key=lambda step: errors[step])
        part.facts[what] = {"steps": [steps.start, steps.stop - 1], "error": errors[worst], "at step": worst}
        good = all(error <= allowed for error in errors.values())
        limit = f"allowed: {allowed:g}" if allowed else "they must be bitwise equal"
        sentence = f"steps {steps.start} to {steps.stop - 1} differ by {errors[worst]:.1e} at most ({limit})"
        part.add(what, good, "bitwise equal" if good and not errors[worst] else sentence)


def _losses(folder: Path) -> dict[int, float]:
    """Read the loss by step from a run's folder; empty if it has none."""
    try:
        return {point.iteration: point.loss for point in read_history(folder / "metrics.jsonl").train}
    except ValueError:
        return {}


def _last_start(folder: Path) -> int:
    """Read the step at which the run's last start began."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return max((line["iteration"] for line in lines if line.get("event") == "start"), default=0)
