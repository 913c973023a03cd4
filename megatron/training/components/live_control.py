"""Carry out the requests to a running job: the same on all ranks, after the same step, and each with an answer."""

from __future__ import annotations

from megatron.data.dataset import split_kind
from megatron.training.checkpointer import Checkpointer
from megatron.training.component import Component
from megatron.training.control import COMMANDS, NO_REQUEST, ControlRequest
from megatron.training.loop import CallbackList, evaluate_and_log, is_due
from megatron.training.rank_log import set_level
from megatron.training.stop import StopRequest
from megatron.training.trainer import Trainer


class LiveControl(Component):
    """Acts on what the ranks have agreed on after a step (:attr:`StopRequest.requests`).

    A run with requested saves, evaluations and log lines has the losses of one without, to the bit. Profiles are
    recorded by :class:`megatron.training.callbacks.profiler.StepProfiler`.
    """

    def __init__(self, trainer: Trainer, stop: StopRequest, checkpointer: Checkpointer) -> None:
        """Act on the requests of ``stop``."""
        self._trainer, self._stop, self._checkpointer = trainer, stop, checkpointer

    @property
    def pauses(self) -> bool:  # type: ignore[override]
        """True only in a step after which something is to be done, so that other steps have no barrier."""
        return self._stop.requests != NO_REQUEST

    def on_train_start(self) -> None:
        """Remove the mark of an earlier start."""
        if self._stop.control is not None:
            self._stop.control.mark_stopped(None)

    def on_step_start(self) -> None:
        """Look for requests from now on: what is found before the first step would be lost."""
        if self._stop.control is not None:
            self._stop.control.open()

    def on_iteration_end(self) -> None:
        """Carry out the requests, and answer them."""
        requests = self._stop.requests
        answers: dict[str, tuple[bool, str]] = {}
        if requests.evaluate or requests.save:
            CallbackList(self._trainer, self.log).call(Component.settle)
        if requests.evaluate:
            answers["evaluate"] = self._evaluate()
        if requests.save:
            answers["save"] = self._save()
        if requests.log_interval:
            self.log.interval = requests.log_interval
            answers["log_interval"] = True, f"a log line every {requests.log_interval} steps from now on"
        if requests.log_level:
            answers["log_level"] = set_level(requests.log_level)
        step = self._trainer.iteration
        for field, what in (("profile", "profile"), ("pipeline", "timeline of the pipeline")):
            if steps := getattr(requests, field):
                answers[field] = True, f"{what} of steps {step + 1} to {step + steps}"
        if self._stop.control is not None and self._stop.control.pending:
            self._answer(answers)

    def on_stop(self, error: BaseException | None) -> None:
        """Answer what is left when the run ends."""
        control, step, total = self._stop.control, self._trainer.iteration, self._trainer.total_steps
        if control is None or error is not None:
            return
        if control.stops and step < total:
            control.mark_stopped(step)
        ended = False, f"not carried out: the run has ended with step {step}"
        answers = {command.field: ended for command in COMMANDS.values()}
        self._answer(answers | {"": (True, f"stopped after step {step} of {total}")})

    def _answer(self, answers: dict[str, tuple[bool, str]]) -> None:
        """Report the outcome of pending requests, on rank 0."""
        control, left = self._stop.control, list[ControlRequest]()
        for request in [] if control is None else control.pending:
            done, answer = answers.get(request.field, (False, ""))
            if request.problem:
                done, answer = False, request.problem
            if not answer:
                left.append(request)
                continue
            asked = f"{request.text} (asked for by {request.user}): " if request.text else ""
            if asked and request.problem:
                asked = f"request of {request.user}: "  # the problem has the word
            self.log.control(f"{asked}{answer}", done, request=request.text, user=request.user, id=request.id)
        if control is not None:
            control.pending = left

    def _evaluate(self) -> tuple[bool, str]:
        """Evaluate the validation data; collective."""
        trainer, progress = self._trainer, self._trainer.progress
        splits = [split for split in trainer.data.used if split_kind(split) == "valid"]
        if not splits:
            return False, "this run evaluates no validation data; the next start does with --eval-iters N"
        for split in splits:
            if progress.evaluated.get(split, 0) < trainer.iteration:  # not evaluated after this step as scheduled
                evaluate_and_log(trainer, split, self.log, CallbackList(trainer, self.log))
        losses = ", ".join(f"{split} {progress.losses[split]:.6g}" for split in splits)
        return True, f"loss after step {trainer.iteration}: {losses}"

    def _save(self) -> tuple[bool, str]:
        """Save a checkpoint; collective."""
        checkpointer, step = self._checkpointer, self._trainer.iteration
        if checkpointer.options.save is None:
            return False, "this run saves no checkpoints; --save FOLDER lets it"
        if is_due(checkpointer.options.save_interval, step) or checkpointer.is_last_step_saved():
            return True, f"step {step} is saved as scheduled"
        if not checkpointer.save(needed=False):
            return True, f"step {step} is left to the replica that saves for the run, whose log has the outcome"
        failed = False, f"step {step} is not saved; a warning has the reason"
        if checkpointer.options.async_save:  # ranks complete a background save after different steps
            pending = checkpointer.pending
            begun = pending is not None and pending[0].iteration == step
            return (True, f"step {step} is being saved in the background") if begun else failed
        return (True, f"step {step} is saved") if checkpointer.is_last_step_saved() else failed
