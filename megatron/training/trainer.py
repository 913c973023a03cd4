"""The parts of a run on this rank: what was built, where the run is, the reader of batches, and the components.

Built by :func:`megatron.training.build.build_trainer`. A step reads its micro-batches with
:meth:`Trainer.next_batches` and runs them with :meth:`Trainer.compute`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.arguments.checks.training import schedule_problems
from megatron.config.batch import Origin, final_iteration, lr_scale, schedule_lengths, schedule_start
from megatron.config.errors import UserError
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.data.loader import DataSource
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.sharding import ShardSpec
from megatron.distributed.timing import Clock, Timers, no_clock
from megatron.model.gpt import GPTChunk
from megatron.model.objective import Objective
from megatron.optimizer.distributed_optimizer import DistributedOptimizer
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.lr_scheduler import LearningRateSchedule
from megatron.pipeline.actions import PipelineSchedule
from megatron.pipeline.plan import build_program
from megatron.pipeline.runtime import Pipeline
from megatron.training.batch_reader import BatchReader, Progress
from megatron.training.component import Component
from megatron.training.components.precision import LossScaler


@dataclass
class Trainer:
    """The parts of a run on this rank."""

    config: RunConfig
    mesh: Mesh
    device: torch.device
    chunks: Mapping[int, GPTChunk]  # this rank's model chunks, by stage number
    pipeline: Pipeline
    specs: Mapping[str, ShardSpec]  # of this rank's parameters, by global name
    params: Mapping[str, nn.Parameter]
    buckets: GradBuffer
    optimizer: DistributedOptimizer
    scaler: LossScaler
    timers: Timers
    progress: Progress
    reader: BatchReader
    notes: tuple[str, ...] = ()  # on kernels and overlap; the start of the run logs them
    clock: Clock = no_clock  # of the phases of the start
    schedule: LearningRateSchedule = field(init=False)  # set by :meth:`start_at`
    components: list[Component] = field(default_factory=list)  # in the order in which they act
    files: Mapping[str, Path | bytes] = field(default_factory=dict)  # tokenizer etc. that checkpoints carry, by name
    held_checkpoints: set[int] = field(default_factory=set)  # steps of checkpoints that are in use and not deleted

    def start_at(
        self,
        iteration: int,
        consumed_samples: int,
        segments: Mapping[str, Sequence[int]] | None = None,
        batches_since: tuple[int, int] = (0, 0),
        origin: Origin | None = None,
    ) -> None:
        """Set the position of the run, and build its learning-rate schedule and data from there; collective.

        Args:
            iteration: steps taken.
            consumed_samples: samples used by them.
            segments: segments in which the data were laid out, by split; None for a new run.
            batches_since: steps and samples of the phase at which the current batch size options took effect.
            origin: of the phase; None for the one in ``progress``.

        Raises:
            DataError: if the data cannot be opened, or are not the same on all ranks.
        """
        config, progress, dp = self.config, self.progress, self.mesh.dp_size
        progress.iteration, progress.consumed_samples = iteration, consumed_samples
        progress.origin = origin or progress.origin
        progress.total_steps = progress.origin.iteration + final_iteration(config.training, dp, *progress.in_phase)
        progress.batches_since = batches_since
        if problems := [*schedule_problems(config, dp, batches_since)]:
            raise UserError(problems)
        lengths = schedule_lengths(config, dp, *batches_since)
        start = schedule_start(config, progress.origin)
        self.schedule = LearningRateSchedule.from_config(config.optimizer, lengths, lr_scale(config, dp), start)
        with self.clock("data"):
            self.reader.open(segments)

    def use_loaded_weights(self, by: Component | None = None) -> None:
        """Compute with main parameters that were set; components other than ``by``, which set them, start anew."""
        self.optimizer.write_weights()
        for component in self.components:
            if component is not by:
                component.on_weights_loaded()

    def acting(self, hook: Callable[..., object]) -> list[Component]:
        """Return the components that override a hook, such as ``Component.on_batches``, in the order of the list."""
        name = hook.__name__
        return [component for component in self.components if getattr(type(component), name) is not hook]

    def next_batches(self) -> list[MicroBatch]:
        """Return this rank's micro-batches of the next step."""
        return self.complete(self.reader.next_batches())

    def complete(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return micro-batches with what components add to them. Collective."""
        for component in self.acting(Component.on_batches):
            batches = component.on_batches(batches)
        return batches

    def compute(
        self, batches: Sequence[MicroBatch], loss_grad: Tensor | None, program: PipelineSchedule | None = None
    ) -> None:
        """Run the pipeline over this rank's micro-batches.

        Args:
            batches: micro-batches of a step, or of an evaluation.
            loss_grad: gradient of the objective with respect to the summed losses, 0-d; None for forward only.
            program: schedule to use instead of the run's own.
        """
        program = program or _program(self.config.parallel, len(batches), loss_grad is None)
        for chunk in self.chunks.values():
            chunk.train(loss_grad is not None)
        with ExitStack() as contexts:
            for component in self.acting(Component.while_computing):
                contexts.enter_context(component.while_computing())
            self.pipeline.run(program.ranks[self.mesh.coordinate["pp"]], batches, loss_grad, self.timers)
        self.optimizer.weights.release()

    def discard_step(self) -> None:
        """Forget a step whose capture failed. Nothing of it was computed, and nothing of it may be waited for."""
        for chunk in self.chunks.values():
            chunk.sums.pop()
        self.pipeline.discard()
        self.buckets.discard()
        self.optimizer.weights.discard()

    @property
    def iteration(self) -> int:
        """Steps taken."""
        return self.progress.iteration

    @property
    def consumed_samples(self) -> int:
        """Samples used by the steps taken."""
        return self.progress.consumed_samples

    @property
    def total_steps(self) -> int:
        """Steps taken at the end of the current phase, which is that of the run if it has no other."""
        return self.progress.total_steps

    @property
    def data(self) -> DataSource:
        """Data of the run."""
        return self.reader.source

    @property
    def objective(self) -> Objective:
        """Objective of the run, the same on every rank."""
        return next(iter(self.chunks.values())).objective

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the metrics of the objective and of the losses of the heads, which a step logs."""
        return next(iter(self.chunks.values())).loss_names

    @property
    def auxiliary_losses(self) -> Mapping[str, float]:
        """Coefficients of the auxiliary losses of the model by name, summed over layers; the same on every rank."""
        return next(iter(self.chunks.values())).auxiliary_losses


@lru_cache(maxsize=4)  # a large one takes 16 MiB, and every stage of a batch ramp has its own
def _program(parallel: ParallelConfig, num_microbatches: int, evaluation: bool) -> PipelineSchedule:
    return build_program(parallel, num_microbatches, evaluation=evaluation)
