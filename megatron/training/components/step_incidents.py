"""Report a step that is a spike or not finite, and do what the policy of the run asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.reliability import REWIND, Policy
from megatron.distributed.launch import run_on_rank0
from megatron.distributed.micro_batch import MicroBatch
from megatron.training.component import Component, LoopEndError
from megatron.training.incidents import Incident, read_incidents, record_incident
from megatron.training.step_record import gather_step_record
from megatron.training.trainer import Trainer

FOLLOWS = {
    "log": "the update was applied",
    "skip": "the update was skipped",
    "stop": "the run stops",
    REWIND: "the run goes back",
}
"""What follows a step, by policy."""


class RewindNeededError(LoopEndError):
    """A step is to be undone, and those before it: ``rewind:N``."""

    def __init__(self, kind: str, step: int, steps: int, places: tuple[int, int], sentence: str) -> None:
        """Store what is to be undone.

        Args:
            kind: of the incident.
            step: number of the step, from 1.
            steps: to go back at least, and whose samples are left out.
            places: of these samples in the order of the data, from begin to end - 1.
            sentence: what was found.
        """
        super().__init__(sentence)
        self.kind, self.step, self.steps, self.places = kind, step, steps, places


def act_on_step(
    component: Component,
    trainer: Trainer,
    kind: str,
    batches: Sequence[MicroBatch],
    policy: Policy,
    sentence: str,
    facts: Mapping[str, Any] | None = None,
    explain: Callable[[], str] | None = None,
    intact: bool = False,
) -> tuple[str, str | None]:
    """Report a step, and go back if the policy asks for it; return what was found, and its folder. Collective.

    Args:
        component: has the log of the run.
        trainer: of the run.
        kind: of the incident.
        batches: of the step, on this rank.
        policy: of the run for such steps.
        sentence: what was found.
        facts: for the record, JSON.
        explain: returns a sentence that names the cause, collective, and takes the time of a step; called if the run
            cannot go on, or the incident gets a folder.
        intact: see :func:`megatron.training.step_record.gather_step_record`.

    Raises:
        RewindNeededError: if the run is to go back.
    """
    step, run_dir = batches[0].step + 1, trainer.config.logging.run_dir
    most = trainer.config.reliability.max_incidents
    has_room = run_dir is not None and run_on_rank0(lambda: _recorded(run_dir) < most, trainer.mesh.world)
    record: Mapping[str, Any] = {}
    if has_room:  # first, because others compute the step again
        numbers = {"loss": (facts or {}).get("loss"), "grad_norm": (facts or {}).get("grad-norm")}
        record = gather_step_record(trainer, batches, numbers, intact)
    replayed = "".join(part.replay_step() for part in trainer.components) if intact else ""
    if explain is not None and (has_room or policy.act not in ("log", "skip")):
        sentence = explain()
    sentence += replayed
    reader = trainer.reader
    own = reader.range_of_steps(step - 1, step)
    text = f"{sentence}; {FOLLOWS[policy.act]}"
    folder = None
    if component.log.enabled:
        words = f"{policy.act}:{policy.steps}" if policy.steps else policy.act
        found = {"policy": words, "places": own, **(facts or {})}
        if has_room and run_dir is not None:
            try:
                folder = record_incident(run_dir, Incident(kind, step, sentence, found), record)
            except OSError as error:
                component.log.warning(f"the incident of step {step} is not recorded: {error}")
        component.log.incident(kind, text, folder, ends=policy.act == "stop")
    if policy.act == REWIND:
        places = reader.range_of_steps(max(0, step - policy.steps), step)
        raise RewindNeededError(kind, step, policy.steps, places, sentence)
    where = None if folder is None else str(folder)
    return sentence, run_on_rank0(lambda: where, trainer.mesh.world) if has_room else None


def _recorded(run_dir: str) -> int:
    """Return the number of spikes and steps that are not finite with a folder."""
    return sum(incident.kind in ("spike", "nonfinite") for _, incident in read_incidents(Path(run_dir)))
