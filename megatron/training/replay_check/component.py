"""Compute steps again and compare to the bit (``--replay-check N``), and act on a difference.

A step that is checked is recorded (:mod:`megatron.training.replay_check.recorder`), and computed again before its
update, while the weights are still those that it has used. The update is repeated on copies of some parameters, weights
that were gathered are compared with digests of their owners, and main parameters and moments with what the update
before has left (:mod:`megatron.training.replay_check.state`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from megatron.checkpoint.location import parse_location
from megatron.checkpoint.rewinds import record_corruption
from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch
from megatron.config.text import counted
from megatron.distributed import comm
from megatron.distributed.launch import run_on_rank0
from megatron.distributed.micro_batch import MicroBatch
from megatron.optimizer.distributed_optimizer import UpdateResult
from megatron.optimizer.param_groups import ParamGroup
from megatron.optimizer.rules import UpdateArgs, UpdateRule
from megatron.training.callbacks.health import WeightCopy, differing_ranks, find_differing_copies
from megatron.training.component import Component
from megatron.training.failure_report import DEVICE, FAILURES_FILE, CorruptionError, host_name
from megatron.training.incidents import Incident, record_incident
from megatron.training.loggers.base import Metrics
from megatron.training.loggers.console import print_warning
from megatron.training.loggers.run_folder import JsonLinesLogger
from megatron.training.metrics import StepMetrics, device_name
from megatron.training.replay_check.recorder import GIVEN, GRADIENT, REDUCED, StepRecord, StepRecorder
from megatron.training.replay_check.state import Finding, Flags, GatherCheck, StateAtRest, UpdateCheck
from megatron.training.replay_check.verdict import SOFTWARE, Difference, RankReport, Verdict, judge, odd_one_out
from megatron.training.step import compute_gradients
from megatron.training.step_record import gather_step_record
from megatron.training.trainer import Trainer

CORRUPTION = "E982"
"""Code of the error."""

REPLAYS = 3
"""Replays of the first step of a start, and of a step that differs from its first replay."""

CALIBRATING = 2
"""Steps at the start that are all checked: the first repeats an update, and the second compares what it has left."""

LISTED_PARAMETERS = 8
"""Parameters with a wrong gradient that a report names, at most."""


class ReplayCheck(Component):
    """Checks every ``interval``-th step, the first two of a start, and those after which the run saves."""

    name = "replay_check"
    state_types: ClassVar[Mapping[str, Any]] = {"clean": int}
    is_of_run = True
    pauses = False
    observes_modules = True

    def __init__(self, trainer: Trainer, interval: int) -> None:
        """Observe the run; nothing is recorded before its first step."""
        self._trainer, self._every = trainer, interval
        self._policy = trainer.config.reliability.on_corruption
        self._recorder = StepRecorder(trainer)
        self._at_rest, self._update, self._gather = StateAtRest(trainer), UpdateCheck(), GatherCheck(trainer)
        # The last step that was found clean, or with which the run began.
        self._clean: int | None = None
        self._first = 0
        self._checks = 0
        self._due = self._calibrated = False
        # Of the step that is checked, until they are read.
        self._flags: list[Flags] = []

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        interval = trainer.config.reliability.replay_check
        return None if interval is None or trainer.config.training.skip_train else cls(trainer, interval)

    # ---- State

    def state_dict(self) -> Mapping[str, Any]:
        """See :class:`Component`."""
        return {} if self._clean is None else {"clean": self._clean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`Component`."""
        self._clean = state["clean"]

    def on_weights_loaded(self) -> None:
        """See :class:`Component`."""
        self._at_rest.forget()

    # ---- A step

    def on_train_start(self) -> None:
        """See :class:`Component`."""
        self._first = self._trainer.iteration + 1
        if self._clean is None:
            self._clean = self._trainer.iteration

    def _is_due(self, step: int) -> bool:
        checkpoint = self._trainer.config.checkpoint
        saves = checkpoint.save is not None and (
            step == self._trainer.total_steps
            or (checkpoint.save_interval is not None and step % checkpoint.save_interval == 0)
        )
        return step % self._every == 0 or step < self._first + CALIBRATING or saves

    def before_compute(self, batches: Sequence[MicroBatch], loss_grad: Tensor, tokens: Tensor) -> None:
        """Compare gathered weights with their owners', and begin to record; collective. See :class:`Component`."""
        self._inputs = batches, loss_grad, tokens
        self._due = self._is_due(self._trainer.iteration + 1)
        if self._due:
            self._trainer.optimizer.weights.wait()
            self._flags = [self._gather.compare()]
            self._recorder.start()

    def on_gradients(self, losses: dict[str, Tensor], tokens: Tensor) -> None:
        """Compute the step again, and compare; see :class:`Component`.

        Raises:
            CorruptionError: on every rank, if hardware has computed wrong.
            UserError: on every rank, if an operation is not deterministic.
        """
        if not self._due:
            return
        step, flags = self._recorder.finish(), self._take_flags()
        replays = [self._replay() for _ in range(1 if self._calibrated else REPLAYS)]
        differ = [step.differences(replay, self._trainer.device) for replay in replays]
        if self._is_any_set([*differ, *(each.values for each in flags)]):
            replays += [self._replay() for _ in range(REPLAYS - len(replays))]
            self._conclude([step, *replays], flags)
        self._calibrated = True

    def _replay(self) -> StepRecord:
        self._recorder.start()
        compute_gradients(self._trainer, *self._inputs)
        return self._recorder.finish()

    def _take_flags(self) -> list[Flags]:
        taken, self._flags = self._flags, []
        return taken

    def replay_step(self) -> str:
        """Compare the reduced gradients with those of a replay; see :class:`Component`."""
        if not self._due:  # else it was replayed before its update
            step, replay = StepRecord(), StepRecord()
            self._recorder.record_reduced(step)
            compute_gradients(self._trainer, *self._inputs)
            self._recorder.record_reduced(replay)
            if self._is_any_set([step.differences(replay, self._trainer.device)]):
                return "; its replay has other gradients: a transient fault, or an operation that is not deterministic"
        return "; its replay is the same to the bit, so no transient fault has caused it"

    def before_update(self, loss: Tensor | None, grad_norm: Tensor) -> Tensor | None:
        """Compare main parameters and moments with what the last update has left; see :class:`UpdateHook`."""
        if self._due:
            self._flags += [self._at_rest.compare()]
        return None

    def before_rule(self, group: ParamGroup, rule: UpdateRule, args: UpdateArgs) -> None:
        """Copy what some parameters are updated by; see :class:`UpdateHook`."""
        if self._due and group.names:
            self._update.copy(group, rule, args, self._checks)

    def after_step(self, outcome: UpdateResult) -> None:
        """Repeat the update of the copies; see :class:`Component`."""
        if self._due:
            self._flags += [self._update.compare(self._trainer.device)]
        self._at_rest.forget()
        if self._is_due(self._trainer.iteration + 2):  # the next step; this one is not counted yet
            self._at_rest.remember()

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Compare what the step has left, on all ranks; collective.

        Raises:
            CorruptionError: on every rank, if there is a difference.
        """
        if not self._due:
            return
        self._checks += 1
        self._trainer.optimizer.weights.wait()
        flags = [*self._take_flags(), self._gather.compare()]
        copies = find_differing_copies(self._trainer)
        differ = torch.full((1,), bool(copies), device=self._trainer.device)
        if self._is_any_set([*(each.values for each in flags), differ]):
            self._conclude([], flags, copies)
        else:
            self._clean = self._trainer.iteration

    def _is_any_set(self, flags: Sequence[Tensor]) -> bool:
        """Return True if a flag is set on any rank; collective."""
        any_set = torch.cat([flag.flatten() for flag in flags]).any().float()
        return bool(comm.all_reduce(any_set, self._trainer.mesh.world, "max").item())

    def metrics(self) -> Metrics:
        """See :class:`Component`."""
        return {"replay-checks": self._checks, "replay-clean-step": self._clean}

    def on_stop(self, error: BaseException | None) -> None:
        """Report what was checked, and observe no longer; see :class:`Component`."""
        self._recorder.stop()
        if error is None:
            steps, last = counted(self._checks, "step"), f"the last that was found clean is {self._clean}"
            self.log.note(f"--replay-check: {steps} checked from step {self._first} on; {last}")

    # ---- A difference

    def _conclude(
        self, records: Sequence[StepRecord], flags: Sequence[Flags], copies: Sequence[WeightCopy] = ()
    ) -> None:
        """Find what is wrong, record it, and act on it; collective.

        Args:
            records: of the step and its replays; none once the step is counted.
            flags: of what was compared beside them.
            copies: of weights on this rank that differ from other ranks'.
        """
        trainer, world = self._trainer, self._trainer.mesh.world
        step = trainer.iteration + bool(records)
        classes = [next(i for i, a in enumerate(records) if first_difference(a, b) is None) for b in records]
        by_rank: list[Any] = comm.all_gather_objects([classes, [[*copy] for copy in copies]], world)
        odd, pair = None, None
        if records:
            odd = odd_one_out([each for each, _ in by_rank])
            # the computation that differs and one of the others, or two replays
            pair = (records[1], records[2]) if odd is None else (records[odd], records[0 if odd else 1])
        first = None if pair is None else first_difference(*pair)
        labels = {*comm.all_gather_objects("" if first is None else first.label, world)}
        given = set() if pair is None else differing_inputs(*pair) & labels
        found = [
            *(finding for each in flags for finding in each.findings()),
            *copies_of_minority([[WeightCopy(*copy) for copy in each] for _, each in by_rank], world.rank),
        ]
        local_rank, device = Launch.read(os.environ).local_rank, describe_device(trainer.device)
        mine = RankReport(world.rank, host_name(os.environ), local_rank, device, first, sorted(given), found)
        reports = [RankReport.from_json(each) for each in comm.all_gather_objects(mine.to_json(), world)]
        calibrated = self._calibrated if records else self._checks > CALIBRATING
        verdict = judge(reports, step, len(records) - 1, odd, calibrated)
        self._report(verdict, reports, step)

    def _report(self, verdict: Verdict, reports: Sequence[RankReport], step: int) -> None:
        """Record the verdict, first of all that checkpoints are suspect, and raise the error that ends the run."""
        config, world = self._trainer.config, self._trainer.mesh.world
        run_dir, save, clean = config.logging.run_dir, config.checkpoint.save, self._clean or 0
        ends = self._policy != "report"
        if world.rank == 0 and ends and verdict.is_hardware and save is not None:
            record_corruption(parse_location(save), clean, step)
        folder: Path | None = None
        record = {} if run_dir is None else gather_step_record(self._trainer, self._inputs[0], {}, intact=False)
        if run_dir is not None and world.rank == 0:
            facts = {
                "cause": verdict.cause,
                "place": verdict.place,
                "ranks": [*verdict.ranks],
                "hosts": [*verdict.hosts],
                "last clean step": clean,
                "reports": [report.to_json() for report in reports if report.first or report.found],
            }
            try:
                folder = record_incident(run_dir, Incident("corruption", step, verdict.sentence, facts), record)
                self.log.incident("corruption", verdict.sentence, folder, ends=ends)
                if ends and verdict.is_hardware:
                    record_device_failures(Path(run_dir), verdict, reports)
            except OSError as error:
                print_warning(f"the incident is not recorded: {error}")
        if not ends:
            self._at_rest.forget()  # somebody may repair it
            return
        if verdict.is_hardware:
            failure = CorruptionError(f"{CORRUPTION} {verdict.sentence}; the last step that was found clean is {clean}")
            if where := run_on_rank0(lambda: str(folder or ""), world):
                failure.add_note(f"samples and configuration of the step: {where}")
            if save is not None:
                other = "" if self._policy == "exclude" else " with --on-corruption exclude"
                failure.add_note(f"go on: the same command{other}, which resumes from step {clean} or before")
            raise failure
        fixes = () if verdict.place in SOFTWARE else ("--deterministic",)
        raise UserError([Problem("E983", verdict.sentence, (*fixes, "drop --replay-check"))])


def first_difference(a: StepRecord, b: StepRecord) -> Difference | None:
    """Return the first event of two records that differs; None if there is none. Waits for the device."""
    others = [i for i, (x, y) in enumerate(zip(a.events, b.events)) if x != y]
    different = others or [i for i, (x, y) in enumerate(zip(a.values(), b.values())) if x != y]
    if not different:
        return None if len(a.events) == len(b.events) else Difference(REDUCED, "number of events", "", "", "")
    index = min(different)
    before = f"{a.events[index - 1].place} {a.events[index - 1].action}".rstrip() if index else ""
    params = dict.fromkeys(a.events[i].place for i in different if a.events[i].kind in (GRADIENT, REDUCED))
    return Difference(*a.events[index], before, [*params][:LISTED_PARAMETERS])


def differing_inputs(a: StepRecord, b: StepRecord) -> set[str]:
    """Return the labels of communication to which this rank has given something else."""
    values = zip(a.events, a.values(), b.values())
    return {event.label for event, x, y in values if event.kind == GIVEN and x != y}


def copies_of_minority(by_rank: Sequence[Sequence[WeightCopy]], rank: int) -> list[Finding]:
    """Return a rank's copies that differ from most others."""
    names = dict.fromkeys(copy.what for each in by_rank for copy in each)
    return [("copies", name) for name in names if rank in differing_ranks(name, by_rank)[0]]


def describe_device(device: torch.device) -> str:
    """Return the name of this rank's device; with index and UUID on GPUs, which the driver's tools show, too."""
    if device.type != "cuda":
        return device_name(device)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "unknown")
    return f"GPU {torch.cuda.current_device()}, {device_name(device)}, UUID {uuid}"


def record_device_failures(run_dir: Path, verdict: Verdict, reports: Sequence[RankReport]) -> None:
    """Append a line to ``failures.jsonl`` for every host at fault, so that a restart can leave it out."""
    file = JsonLinesLogger(run_dir / FAILURES_FILE, warn=print_warning)
    for host in verdict.hosts:
        rank = next(rank for rank in verdict.ranks if reports[rank].host == host)
        line = {
            "rank": rank,
            "host": host,
            "local_rank": reports[rank].local_rank,
            "kind": DEVICE,
            "sentence": verdict.sentence,
        }
        file.write({"time": time.time(), **line})
    file.close()
