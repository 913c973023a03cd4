"""Components: the parts of a run that have state, or act around a step, behind one interface.

The average of the weights, the loss scaler, DiLoCo, the position in the data, users' callbacks and others are each a
:class:`Component`. The trainer lists them; step, loop and checkpointer go through the list, and name none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

from megatron.checkpoint.format import Manifest
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.location import Location
from megatron.checkpoint.tensor_file import GlobalTensor
from megatron.distributed.micro_batch import MicroBatch
from megatron.optimizer.distributed_optimizer import UpdateHook, UpdateResult
from megatron.training.loggers.base import Metrics
from megatron.training.loggers.console import print_warning
from megatron.training.resume_source import ResumeSource

if TYPE_CHECKING:
    from megatron.training.loggers.run_logger import RunLogger
    from megatron.training.metrics import StepMetrics


class LoopEndError(Exception):
    """Raised by a component on all ranks after the same step: the loop ends in good order, and saves nothing."""


Kinds = Mapping[str, Mapping[str, Tensor]]
"""Tensors of this rank by kind and global name of their parameter, each with the shape of the parameter's shard."""


class CheckpointWriter(Protocol):
    """Writes checkpoints."""

    lease: Lease | None
    """On the folder."""


class Component(UpdateHook):
    """Base class. Override what is needed; what is not overridden costs nothing.

    Every method is called on all ranks, in the same order, so it may communicate; exceptions are documented. In the
    order of a run: ``before_load``, ``prepare``, ``load``, ``load_state_dict`` or ``on_weights_loaded``, ``on_start``,
    ``on_train_start``; in every step ``on_step_start``, ``before_compute``, ``on_gradients``, ``before_update``,
    ``before_rule``, ``after_update``, ``after_step``, ``on_step_end``, ``on_iteration_end``; at the end ``on_stop``.
    """

    name: str = ""
    """Key of :meth:`state_dict` in checkpoints. Without one, nothing is saved."""

    is_of_run: bool = False
    """True for state that another run does not take over when it starts from a checkpoint of this one."""

    state_types: ClassVar[Mapping[str, Any]] = {}
    """Types in :meth:`state_dict`, as of `odd_values`; a checkpoint with others is passed over. Empty for any."""

    missing: str | None = "the checkpoint lacks tensors of the {name}, which starts anew"
    """Note on a checkpoint without a kind of :meth:`tensors`, after which :meth:`on_weights_loaded` is called; None for
    a component without which no checkpoint can be resumed."""

    plugin: str | None = None
    """Name under which a plugin has registered it; errors name it."""

    memory_part: str = ""
    """Part of the memory report that counts :meth:`tensors`; empty for none."""

    interval: int = 1
    """The step hooks are called in every ``interval``-th step only. Must be the same on all ranks."""

    pauses: bool = True
    """False for step hooks that belong to the step: their time counts, no barrier is added, and weights may still be
    on their way from other ranks."""

    observes_modules: bool = False
    """True if the step hooks use hooks of modules: a CUDA graph would not run them, so these steps run eagerly."""

    log: RunLogger
    """Log of the run, set before ``on_train_start``."""

    # ---- State

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as JSON: numbers, texts, lists and dicts. That of rank 0 is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` has returned; not called if that was empty."""

    def tensors(self) -> Kinds:
        """Return the tensors of the state, sharded like the main parameters; they are saved and loaded in place.

        In checkpoints they are ``optim.{kind}.{parameter}``, so kinds are words, and unique in a run.
        """
        return {}

    def stored_tensors(self) -> Mapping[str, GlobalTensor]:
        """Return the parts that this rank writes of tensors with other names or layouts."""
        return {}

    def tensors_to_load(self, manifest: Manifest) -> Mapping[str, GlobalTensor]:
        """Return the parts that this rank reads of a checkpoint, of tensors like :meth:`stored_tensors`."""
        return {}

    def check(self, manifest: Manifest) -> Sequence[str]:
        """Check a checkpoint before it is read, even if nothing but its weights is; return notes."""
        return ()

    def prepare(self, manifest: Manifest) -> Sequence[str]:
        """Check a checkpoint that is resumed, and allocate :meth:`tensors` for it; return notes."""
        return ()

    def load(self, manifest: Manifest) -> Sequence[str]:
        """Read :meth:`tensors_to_load`; return notes.

        Raises:
            DamagedCheckpointError: on every rank, if the checkpoint's checksums do not match.
        """
        return ()

    def on_weights_loaded(self) -> None:
        """Start anew from main parameters that were set without this component's state."""

    # ---- Start and stop

    def before_load(self, source: ResumeSource) -> Sequence[str]:
        """Act before the start of the run is loaded; return notes."""
        return ()

    def on_start(self, stopped: Callable[[], bool]) -> Sequence[str]:
        """Act once when the start of the run is loaded; return notes.

        Args:
            stopped: returns True once this rank is requested to stop. A long wait polls it and gives up.
        """
        return ()

    def on_train_start(self) -> None:
        """Act once before the first step of this start, or before the evaluation with ``--skip-train``."""

    def on_stop(self, error: BaseException | None) -> None:
        """Act once when the run ends on this rank: after its last step, a request to stop, or an error.

        After an error do not communicate, because other ranks may still be in a step. A start that fails is stopped,
        too, maybe before ``on_start`` or without a log.
        """

    # ---- In the loop

    def on_step_start(self) -> None:
        """Act before the micro-batches of the next step are read. A step hook."""

    def passes_over(self, step: int) -> bool:
        """Return True if the samples of step number ``step``, the next one, are to be consumed without computing."""
        return False

    def on_batches(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step or an evaluation with what the component adds to them."""
        return batches

    def while_computing(self) -> AbstractContextManager[None]:
        """Return a context around each run of the pipeline, in which weights do not change."""
        return nullcontext()

    def on_loss_grad(self, loss_grad: Tensor) -> Tensor:
        """Return the gradient of the summed losses with which backward starts, 0-d; inside a captured step."""
        return loss_grad

    def before_compute(self, batches: Sequence[MicroBatch], loss_grad: Tensor, tokens: Tensor) -> None:
        """Act before the pipeline runs, inside a captured step.

        Args:
            batches: this rank's micro-batches of the step, with what all components have added.
            loss_grad: gradient of the summed losses with which backward starts, 0-d.
            tokens: weight of the global batch, 0-d.
        """

    def on_gradients(self, losses: dict[str, Tensor], tokens: Tensor) -> None:
        """Act on the reduced gradients before the update, inside a captured step.

        Gradients of this rank's shards are those of the global batch times the loss scale, and may be changed in place.

        Args:
            losses: of the step by name, 0-d, equal on all ranks; entries may be replaced.
            tokens: weight of the global batch, by which losses and gradients are divided, 0-d.
        """

    def after_step(self, outcome: UpdateResult) -> None:
        """Act after an update, inside a captured step: on the device, in place and without waiting for it."""

    def on_step_taken(self, batches: Sequence[MicroBatch]) -> None:
        """Act when the work of a step of ``batches`` has been given to the device, before the step is counted."""

    def replay_step(self) -> str:
        """Return what computing the last step again has found, as the end of a sentence; empty if it is not known.

        Called after a step that was not normal, while weights and reduced gradients are those of the step. Gradients
        may be overwritten.
        """
        return ""

    def settle(self) -> None:
        """Read what past steps have left on the device; the loop is about to wait for it anyway."""

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Act after a step was counted, before it is logged, evaluated or saved. A step hook.

        Args:
            metrics: 0-d tensors on the device; reading one waits for the device.
        """

    def metrics(self) -> Metrics:
        """Return values to add to a log line, by names such as ``mine/average``; the clock of steps runs."""
        return {}

    def on_log(self, metrics: Metrics) -> None:
        """Act after the log line of ``metrics``, which covers the steps since the last one."""

    def other_weights(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """Return contexts in which the model has other weights, which evaluations measure too, by metric suffix."""
        return {}

    def on_evaluate(self, metrics: Metrics) -> None:
        """Act after the evaluation of one split."""

    def before_save(self) -> None:
        """Complete what the state consists of, before a checkpoint is composed."""

    def writes(self, saver: CheckpointWriter) -> bool:
        """Return False if another process saves this step; called before :meth:`before_save`.

        Args:
            saver: about to save; may be given a lease on its folder.
        """
        return True

    def is_whole_after(self, error: Exception) -> bool:
        """Return True if the state of this rank is whole after an error, so that the step can be saved."""
        return False

    def on_save(self, path: Location) -> None:
        """Act after a checkpoint in ``--save`` has been written.

        Do not communicate: with ``--async-save`` ranks learn of it after different steps, in which the clock runs and
        weights may be incomplete.
        """

    def on_iteration_end(self) -> None:
        """Act last in an iteration: the step is logged, evaluated and saved if due. A step hook."""


@contextmanager
def stopped_after_errors(components: Iterable[Component]) -> Iterator[None]:
    """Stop the components after an error inside, before their run has begun."""
    try:
        yield
    except BaseException as error:
        stop_components(components, error)
        raise


def stop_components(components: Iterable[Component], error: BaseException | None) -> None:
    """Call ``on_stop`` of every component; after an error, further errors are warnings."""
    for component in components:
        try:
            with name_in_errors(component.plugin, "on_stop"):
                component.on_stop(error)
        except Exception as other:
            if error is None:
                raise
            print_warning(f"{type(component).__name__}.on_stop failed after the error, too: {other}")


@contextmanager
def name_in_errors(name: str | None, where: str) -> Iterator[None]:
    """Add a note with the name of a user's callback to errors raised inside; without a name do nothing."""
    try:
        yield
    except Exception as error:
        if name is not None:
            error.add_note(f"raised by the callback {name} (--plugin), in {where}")
        raise
