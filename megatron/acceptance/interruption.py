"""A run that is killed and started again, and one that goes on in another layout: both must be the undisturbed one."""

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
"""Relative errors of losses that are allowed in another layout."""


@dataclass(frozen=True)
class Plan:
    """What happens.

    Attributes:
        steps: of the run.
        every: steps between saves.
        killed: step in which a rank is killed.
        rank: which.
        within: milliseconds after that step has begun.
    """

    steps: int
    every: int
    killed: int
    rank: int
    within: int

    @property
    def surely_saved(self) -> int:
        """The newest step whose checkpoint was there for sure when the rank was killed; its own may just be written."""
        return (self.killed - 2) // self.every * self.every

    @classmethod
    def draw(cls, steps: int, ranks: int, seed: int) -> Plan:
        """A moment after the first save and before the last."""
        chance, every = random.Random(seed), max(2, steps // 5)
        return cls(
            steps, every, chance.randint(every + 1, steps - every), chance.randrange(ranks), chance.randrange(20)
        )


def flags(folder: Path, device: str, ranks: int, plan: Plan, layout: str) -> list[str]:
    """Of a run in a folder; what it computes is the same in every layout."""
    words = f"{SIZE} {batch(ranks)} --lr 1e-3 --lr-warmup-iters 5 --deterministic --log-interval 1 --device {device}"
    length = f"--train-iters {plan.steps} --distributed-timeout-minutes 5 {FORMATS[device]}"
    saves = ["--run-dir", str(folder), "--save", str(folder / "checkpoints"), "--save-interval", str(plan.every)]
    return [*f"{words} {length} {layout}".split(), *saves]


def layout_of(ranks: int) -> str:
    """Of the run that is killed."""
    return f"{ZERO_1} {TENSOR} 2 --sequence-parallel" if ranks % 2 == 0 else ZERO_1


def other_layout(ranks: int) -> str:
    """In which its checkpoint is taken up."""
    return f"--pipeline-model-parallel-size 2 {STAGES}" if ranks % 2 == 0 else ""


def die_in_step(number: int, milliseconds: int) -> None:
    """Have this process killed within a step: so its ranks know of it from nothing but its silence."""
    original = Trainer.next_batches

    def next_batches(trainer: Trainer) -> Any:
        if trainer.iteration + 1 == number:
            threading.Thread(target=_die, args=(milliseconds / 1000,), daemon=True).start()
        return original(trainer)

    Trainer.next_batches = next_batches  # type: ignore[assignment, method-assign]  # of a process that is to die


def _die(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def train(words: Sequence[str]) -> int:
    """One rank of a run; rank ``words[0]`` is killed ``words[2]`` milliseconds after the begin of step ``words[1]``."""
    rank, step, milliseconds = map(int, words[:3])
    parsed = parse(words[3:])
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == rank:
        die_in_step(step, milliseconds)
    return run(parsed.config, parsed.notes)


@dataclass
class Trial:
    """What the runs of this part have in common.

    Attributes:
        launcher: starts them.
        folder: for their folders.
        device: ``cpu`` or ``cuda``.
        ranks: of each.
        plan: what happens in them.
        seconds: each may take.
    """

    launcher: Launcher
    folder: Path
    device: str
    ranks: int
    plan: Plan
    seconds: float

    def undisturbed(self, part: Part) -> bool:
        """The run that the others are held against."""
        words = flags(self.folder / "undisturbed", self.device, self.ranks, self.plan, layout_of(self.ranks))
        outcome = self.launcher.run("undisturbed", [PROGRAM, *words, "--async-save"], self.seconds)
        return self._ended(part, f"{self.plan.steps} steps", outcome)

    def interrupted(self, part: Part) -> None:
        """A rank is killed, the run started again."""
        plan, folder = self.plan, self.folder / "killed"
        words = flags(folder, self.device, self.ranks, plan, layout_of(self.ranks))
        fault = ["rank", "train", str(plan.rank), str(plan.killed), str(plan.within), *words]
        outcome = self.launcher.run("killed", ["tools/acceptance.py", *fault], self.seconds)
        last = _losses(folder)
        reached = max(last, default=0)
        what = f"rank {plan.rank} killed in step {plan.killed}"
        sentence = f"{outcome.ended}, with step {reached} as the last in the log"
        died = outcome.status not in (0, None) and plan.killed - 2 <= reached < plan.steps
        if not part.add(what, died, sentence):
            part.log = outcome.tail()
            return
        outcome = self.launcher.run("resumed", [PROGRAM, *words], self.seconds)
        if not self._ended(part, "started again", outcome):
            return
        told = _losses(folder)
        begun = _begun_at(folder)
        good = max(plan.surely_saved, 1) <= begun <= reached
        part.add("resumed from the newest checkpoint", good, f"it went on after step {begun} of {reached}")
        self._compare(part, "losses as undisturbed", told, range(1, plan.steps + 1), 0.0)

    def elsewhere(self, part: Part) -> None:
        """An asynchronously saved checkpoint of the undisturbed run, taken up in another layout."""
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

    def _compare(self, part: Part, what: str, told: dict[int, float], steps: range, allowed: float) -> None:
        """Whether the losses are those of the undisturbed run."""
        right = _losses(self.folder / "undisturbed")
        missing = [step for step in steps if step not in told or step not in right]
        if missing:
            part.add(what, False, f"no loss was recorded of step {missing[0]}")
            return
        off = {step: abs(told[step] - right[step]) / abs(right[step]) for step in steps}
        worst = max(off, key=lambda step: off[step])
        part.facts[what] = {"steps": [steps.start, steps.stop - 1], "error": off[worst], "at step": worst}
        good = all(error <= allowed for error in off.values())
        limit = f"allowed: {allowed:g}" if allowed else "they must be equal to the bit"
        sentence = f"steps {steps.start} to {steps.stop - 1} differ by {off[worst]:.1e} at most ({limit})"
        part.add(what, good, "equal to the bit" if good and not off[worst] else sentence)


def _losses(folder: Path) -> dict[int, float]:
    """Loss by step, as the run's folder has it; nothing for a run that has none."""
    try:
        return {point.iteration: point.loss for point in read_history(folder / "metrics.jsonl").train}
    except ValueError:
        return {}


def _begun_at(folder: Path) -> int:
    """Steps that the run had behind it when it was started for the last time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return max((line["iteration"] for line in lines if line.get("event") == "start"), default=0)
