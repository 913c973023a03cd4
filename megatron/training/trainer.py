"""The parts of a run on this rank, its progress, and the batches that it reads.

Built by :func:`megatron.training.build.build_trainer`. A step reads its micro-batches with
:meth:`Trainer.next_batches` and runs them with :meth:`Trainer.compute`; on a GPU, the batch of the next step is read
while the GPU computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
from torch import Tensor, nn

from megatron.arguments.checks.training import schedule_problems
from megatron.config.batch import (
    final_iteration,
    full_global_batch_size,
    global_batch_size_at,
    lr_scale,
    schedule_lengths,
)
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.config.text import listed, listed_ranks
from megatron.convert.base_model import BaseModel
from megatron.data.dataset import split_label
from megatron.data.errors import DataError
from megatron.data.loader import DataSource, build_data
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.context_parallel import ContextParallel
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.sharding import ShardSpec
from megatron.distributed.timing import Timers
from megatron.kernels.fp8 import WeightCasts
from megatron.model.gpt import GPTChunk
from megatron.model.objective import Objective
from megatron.optimizer.distributed_optimizer import DistributedOptimizer
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.loss_scaler import LossScaler
from megatron.optimizer.lr_scheduler import LearningRateSchedule
from megatron.pipeline.actions import PipelineSchedule
from megatron.pipeline.plan import build_program
from megatron.pipeline.runtime import Pipeline
from megatron.training.metrics import Goodput
from megatron.training.startup import StartupTimer

MAX_PROGRAMS = 4
"""Schedules kept: a large one takes 16 MiB, and every stage of a batch ramp has its own."""

DIGEST_MODULUS = 2**64
"""Digests of samples are added modulo this number."""


@dataclass(frozen=True)
class Prefetched:
    """This rank's micro-batches of the next step, read before the step begins."""

    place: tuple[int, int]  # first sample of the global batch, and its number of samples
    batches: list[MicroBatch]
    digest: int  # of the samples in ``batches``


@dataclass
class Trainer:
    """The parts of a run on this rank, and its progress. :meth:`start_at` sets the fields without an initial value."""

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
    cp: ContextParallel | None = None  # distribution of every sample over ranks
    # 0-d, nonzero after a step that is to end the run: later steps change nothing. None for a run that never ends so.
    halted: Tensor | None = None
    goodput: Goodput = field(default_factory=Goodput)  # over all starts of the run
    startup: StartupTimer = field(default_factory=StartupTimer)
    # schedules of steps, and with True of evaluations, by number of micro-batches
    programs: dict[tuple[int, bool], PipelineSchedule] = field(default_factory=dict)
    schedule: LearningRateSchedule = field(init=False)
    data: DataSource = field(init=False)
    total_steps: int = field(init=False)  # of the whole run
    iteration: int = 0  # steps taken
    consumed_samples: int = 0
    batches_since: tuple[int, int] = (0, 0)  # steps and samples at which the current batch size options took effect
    evaluated: dict[str, int] = field(default_factory=dict)  # by split: steps taken before the last evaluation on it
    losses: dict[str, float] = field(default_factory=dict)  # last ones by split; of train, those of the last log line
    held_checkpoints: set[int] = field(default_factory=set)  # steps of checkpoints that are in use and not deleted
    start_digest: int = 0  # of the samples consumed before this start
    digest_read: int = 0  # of the samples that this rank has read since
    digest: tuple[int, int] = (0, 0)  # number of samples and digest of the last :meth:`samples_digest`
    prefetched: Prefetched | None = None
    # adds to micro-batches what the objective reads of a frozen model; None if it reads of none
    frozen_inputs: Callable[[Sequence[MicroBatch]], list[MicroBatch]] | None = None
    stream: int = 0  # of training samples, among those of the replicas
    run_id: str = ""  # the same through all starts of the run
    weight_casts: WeightCasts = field(default_factory=WeightCasts)
    base: BaseModel | None = None  # the model that adapters are trained for
    notes: tuple[str, ...] = ()  # on kernels and overlap; the start of the run logs them
    files: Mapping[str, Path | bytes] = field(default_factory=dict)  # tokenizer etc. that checkpoints carry, by name

    def compute(
        self, batches: Sequence[MicroBatch], loss_grad: Tensor | None, program: PipelineSchedule | None = None
    ) -> None:
        """Run the pipeline over this rank's micro-batches.

        Args:
            batches: micro-batches of a step, or of an evaluation.
            loss_grad: gradient of the objective with respect to the summed losses, 0-d; None for forward only.
            program: schedule to use instead of the run's own, which is kept by the number of micro-batches.
        """
        if program is None:
            key = len(batches), loss_grad is None
            if key not in self.programs:
                if len(self.programs) == MAX_PROGRAMS:
                    del self.programs[next(iter(self.programs))]
                self.programs[key] = build_program(self.config.parallel, len(batches), evaluation=loss_grad is None)
            program = self.programs[key]
        for chunk in self.chunks.values():
            chunk.train(loss_grad is not None)
        # ZeRO-3 frees weights between their uses, and so their quantised copies.
        kept = nullcontext() if self.config.parallel.reshards_after_forward else self.weight_casts.kept()
        with kept:
            self.pipeline.run(program.ranks[self.mesh.coordinate["pp"]], batches, loss_grad, self.timers)
        self.optimizer.weights.release()

    def discard_step(self) -> None:
        """Forget a step whose capture failed. Nothing of it was computed, and nothing of it may be waited for."""
        for chunk in self.chunks.values():
            chunk.sums.pop()
        self.pipeline.discard()
        self.buckets.discard()
        self.optimizer.weights.discard()

    def start_at(
        self,
        iteration: int,
        consumed_samples: int,
        segments: Mapping[str, Sequence[int]] | None = None,
        batches_since: tuple[int, int] = (0, 0),
    ) -> None:
        """Set the position of the run, and build its learning-rate schedule and data from there; collective.

        Args:
            iteration: steps taken.
            consumed_samples: samples used by them.
            segments: segments in which the data were laid out, by split; None for a new run.
            batches_since: steps and samples at which the current batch size options took effect.

        Raises:
            DataError: if the data cannot be opened, or are not the same on all ranks.
        """
        config = self.config
        dp = self.mesh.dp_size
        begin = iteration, consumed_samples
        self.iteration, self.consumed_samples = begin
        self.total_steps = final_iteration(config.training, dp, *begin)
        self.batches_since = batches_since
        self.prefetched = None
        problems = list(schedule_problems(config, dp, batches_since))
        if problems:
            raise UserError(problems)
        lengths = schedule_lengths(config, dp, *batches_since)
        self.schedule = LearningRateSchedule.from_config(config.optimizer, lengths, lr_scale(config, dp))
        with self.startup("data"):
            vocab = config.model.vocab
            prefix = config.model.attention_prefix
            self.data = build_data(
                config.data,
                config.training,
                vocab,
                dp,
                segments=segments,
                begin=begin,
                prefix=prefix,
                stream=(self.stream, config.diloco.streams),
            )
            check_same_data(self.data, self.mesh.world)
            self.start_digest = self.data.digest("train", 0, consumed_samples)
        self.digest = consumed_samples, self.start_digest
        self.digest_read = 0

    def use_stream(self, index: int) -> None:
        """Read the training samples of a stream, before the first step."""
        self.stream = index
        if hasattr(self, "data"):  # of a run that starts from scratch
            self.data = replace(self.data, stream=(index, self.config.diloco.streams))

    @property
    def objective(self) -> Objective:
        """Objective of the run, the same on every rank."""
        return next(iter(self.chunks.values())).objective

    @property
    def next_batch_size(self) -> int:
        """Samples of the next global batch."""
        return global_batch_size_at(self.config.training, self.mesh.dp_size, self.consumed_samples)

    def samples_digest(self) -> int:
        """Return the digest of all consumed samples, computed from the sample order."""
        known, digest = self.digest
        digest = (digest + self.data.digest("train", known, self.consumed_samples)) % DIGEST_MODULUS
        self.digest = self.consumed_samples, digest
        return digest

    def next_batches(self) -> list[MicroBatch]:
        """Return this rank's micro-batches of the next step, prefetched or read now."""
        place = self.consumed_samples, self.next_batch_size
        prefetched, self.prefetched = self.prefetched, None
        if prefetched is None or prefetched.place != place:
            return self.with_frozen_inputs(self._read("train", *place))
        self.digest_read += prefetched.digest
        return self.with_frozen_inputs([replace(batch, step=self.iteration) for batch in prefetched.batches])

    def prefetch(self) -> None:
        """Read the batch of the step after the current one, which a GPU is computing and which is not counted yet."""
        if self.iteration + 1 >= self.total_steps:
            return
        first = self.consumed_samples + self.next_batch_size
        place = first, global_batch_size_at(self.config.training, self.mesh.dp_size, first)
        digest_before = self.digest_read
        try:
            with self.timers("batch-generator"):  # a GPU that finishes its step meanwhile idles during this
                batches = self._read("train", *place)
            self.prefetched = Prefetched(place, batches, self.digest_read - digest_before)
        except (DataError, OSError):  # :meth:`next_batches` will raise it, after the current step is counted
            self.prefetched = None
        self.digest_read = digest_before

    def evaluation_batches(self, split: str, index: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of global batch ``index`` of a validation or test split."""
        size = full_global_batch_size(self.config.training, self.mesh.dp_size)
        return self.with_frozen_inputs(self._read(split, index * size, size))

    def with_frozen_inputs(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return micro-batches with what the objective reads of a frozen model. Collective."""
        return batches if self.frozen_inputs is None else self.frozen_inputs(batches)

    def _read(self, split: str, first: int, size: int) -> list[MicroBatch]:
        places = self.data.rank_places(split, first, size, self.mesh.dp_rank, self.mesh.dp_size)
        if split == "train" and self.mesh.group("cp").rank == 0:  # its peers read the same samples
            self.digest_read += self.data.digest_places(split, places)
        rows = None if self.cp is None else self.cp.rows(self.data.seq_length)
        return [self.data.micro_batch(split, group, self.iteration, self.device, rows) for group in places]


def check_same_data(data: DataSource, world: Group) -> None:
    """Check that all ranks read the same data in the same order; collective.

    Raises:
        DataError: on every rank, if they do not.
    """
    layout = {
        name: f"content {fingerprint}, {len(data.datasets[name]):,} samples laid out for "
        + " + ".join(f"{count:,}" for count in data.segments[name])
        for name, fingerprint in data.fingerprints.items()
    }
    gathered: list[list[Any]] = comm.all_gather_objects([gethostname(), layout], world)
    hosts = [host for host, _ in gathered]
    by_rank = [splits for _, splits in gathered]
    names = dict.fromkeys(name for splits in by_rank for name in splits)
    differing = [name for name in names if len({splits.get(name) for splits in by_rank}) > 1]
    if differing:
        versions = [splits.get(differing[0], "nothing") for splits in by_rank]
        kinds = " and ".join(map(split_label, differing))
        raise DataError(
            f"the {kinds} data are not the same on all ranks: {describe_versions(versions, hosts)}",
            "copy the same files to every machine, or use files on a shared file system",
        )


def describe_versions(versions: Sequence[str], hosts: Sequence[str]) -> str:
    """Return a phrase such as ``ranks 0, 1 (node1): A; rank 2 (node2): B``."""
    described = []
    for version in dict.fromkeys(versions):
        ranks = [rank for rank, other in enumerate(versions) if other == version]
        machines = list(dict.fromkeys(hosts[rank] for rank in ranks))
        described.append(f"{listed_ranks(ranks)} ({listed(machines)}): {version}")
    return "; ".join(described)
