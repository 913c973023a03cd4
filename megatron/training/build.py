"""Build everything that a training step needs from a validated configuration.

The order is: process groups, kernels, model chunks, optimizer, pipeline, data. Ranks compare kernels and pipeline
schedules with each other, because machines may differ in libraries or files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from socket import gethostname

import torch
from torch import Tensor, nn

from megatron.checkpoint.lease import Leases
from megatron.checkpoint.local_store import LocalStore
from megatron.config.batch import (
    final_iteration,
    full_global_batch_size,
    get_num_microbatches,
    global_batch_size_at,
    schedule_lengths,
)
from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch
from megatron.config.run import RunConfig
from megatron.data.dataset import split_label
from megatron.data.errors import DataError
from megatron.data.loader import DataSource, build_data
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh, init_distributed, world_group
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.sharding import ShardSpec
from megatron.distributed.timing import Clock, Timers, no_clock
from megatron.kernels.registry import select_kernels
from megatron.layers.build import DTYPES, BuildContext
from megatron.model.gpt import GPTChunk, build_chunks
from megatron.optimizer.distributed_optimizer import DistributedOptimizer
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.loss_scaler import LossScaler
from megatron.optimizer.lr_scheduler import LearningRateSchedule
from megatron.optimizer.param_groups import check_patterns, rule_of
from megatron.pipeline.actions import PipelineSchedule
from megatron.pipeline.actions import PipelineSchedule as Program
from megatron.pipeline.plan import SCHEDULE_SUFFIX, build_program, stage_layers
from megatron.pipeline.runtime import Pipeline
from megatron.planner.memory import parameter_shapes
from megatron.training.startup import StartupTimer
from megatron.training.throughput import Goodput

MAX_RANKS_SHOWN = 4  # listed in an error, of those with the same version


def check_same_data(data: DataSource, world: Group) -> None:
    """Check that all ranks read the same data in the same order; collective.

    Raises:
        DataError: on every rank, if they do not.

    """
    gathered = comm.all_gather_objects((gethostname(), data_layout(data)), world)
    hosts = [host for host, _ in gathered]
    by_rank = [splits for _, splits in gathered]
    names = dict.fromkeys(name for splits in by_rank for name in splits)
    differing = [name for name in names if len({splits.get(name) for splits in by_rank}) > 1]
    if differing:
        versions = [splits.get(differing[0], "nothing") for splits in by_rank]
        kinds = " and ".join(map(split_label, differing))
        raise DataError(
            f"the {kinds} data are not the same on all ranks: {_describe_versions(versions, hosts)}",
            "copy the same files to every machine, or use files on a shared file system",
        )


def check_same_kernels(chosen: str, world: Group) -> None:
    """Check that all ranks have chosen the same kernels; collective.

    Otherwise copies of a weight would not stay equal to the bit.

    Raises:
        UserError: on every rank, if they differ.

    """
    if differences := _differences(chosen, world):
        raise UserError([Problem("E904", f"ranks would compute differently: {differences}", ("--kernels torch",))])


def check_same_schedule(schedule: PipelineSchedule, world: Group) -> None:
    """Check that all ranks have read the same pipeline schedule from their files; collective.

    With different schedules the ranks would deadlock.

    Raises:
        UserError: on every rank, if they differ.

    """
    digest = hashlib.blake2b(repr(schedule.ranks).encode(), digest_size=8).hexdigest()
    if differences := _differences(digest, world):
        sentence = f"{schedule.name} is not the same on all ranks: {differences}"
        raise UserError([Problem("E212", sentence, ("copy the same file to every machine",))])


def data_layout(data: DataSource) -> dict[str, str]:
    """Return, by split name, the fingerprint of the data and the numbers of samples that were laid out."""
    return {
        name: f"content {fingerprint}, {len(data.datasets[name]):,} samples laid out for "
        + " + ".join(f"{count:,}" for count in data.segments[name])
        for name, fingerprint in data.fingerprints.items()
    }


def _differences(mine: str, world: Group) -> str:
    """Describe which ranks have which version, or return an empty string if all have the same; collective."""
    gathered = comm.all_gather_objects((gethostname(), mine), world)
    hosts = [host for host, _ in gathered]
    versions = [version for _, version in gathered]
    return _describe_versions(versions, hosts) if len(set(versions)) > 1 else ""


def _describe_versions(versions: Sequence[str], hosts: Sequence[str]) -> str:
    """Return a phrase such as ``ranks 0, 1 (node1): A; rank 2 (node2): B``."""
    described = []
    for version in dict.fromkeys(versions):
        ranks = [rank for rank, other in enumerate(versions) if other == version]
        machines = list(dict.fromkeys(hosts[rank] for rank in ranks))
        described.append(f"rank{'s' if len(ranks) > 1 else ''} {_shorten(ranks)} ({_shorten(machines)}): {version}")
    return "; ".join(described)


def _shorten(items: Sequence[object]) -> str:
    more = f" and {len(items) - MAX_RANKS_SHOWN:,} more" if len(items) > MAX_RANKS_SHOWN else ""
    return ", ".join(map(str, items[:MAX_RANKS_SHOWN])) + more


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
    """The parts of a run on this rank, and its progress. :meth:`start_at` sets ``schedule`` and ``data``."""

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
    goodput: Goodput = field(default_factory=Goodput)  # over all starts of the run
    startup: StartupTimer = field(default_factory=StartupTimer)
    schedule: LearningRateSchedule = field(init=False)
    data: DataSource = field(init=False)
    iteration: int = 0  # steps taken
    consumed_samples: int = 0
    batches_since: tuple[int, int] = (0, 0)  # steps and samples at which the current batch size options took effect
    evaluated: dict[str, int] = field(default_factory=dict)  # by split: steps taken before the last evaluation on it
    digest: int = 0  # of the first ``digested_samples`` samples that the run has consumed
    digested_samples: int = 0
    digest_read: int = 0  # of the samples that this rank has read since
    logged_digest: tuple[int, int] = (0, 0)  # number of samples and digest of the last :meth:`samples_digest`
    prefetched: Prefetched | None = None
    run_id: str = ""  # the same through all starts of the run
    notes: tuple[str, ...] = ()  # on kernels; the start of the run logs them
    files: Mapping[str, Path | bytes] = field(default_factory=dict)  # tokenizer etc. that checkpoints carry, by name
    local: LocalStore | None = None  # checkpoints on the nodes' own disks
    claims: Leases = field(default_factory=Leases)  # leases on the folders that checkpoints are written to

    def compute(self, batches: Sequence[MicroBatch], seed: Tensor | None, program: Program | None = None) -> None:
        """Run the pipeline over this rank's micro-batches.

        Args:
            batches: micro-batches of a step, or of an evaluation.
            seed: gradient of the objective with respect to the summed losses, 0-d; None for forward only.
            program: schedule to use instead of the run's own.

        """
        program = program or build_program(self.config.parallel, len(batches), evaluation=seed is None)
        for chunk in self.chunks.values():
            chunk.train(seed is not None)
        self.pipeline.run(program.ranks[self.mesh.coordinate["pp"]], batches, seed, self.timers)

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
        dp = self.mesh.data_size
        begin = iteration, consumed_samples
        self.iteration, self.consumed_samples = begin
        self.digest = 0
        self.digested_samples = consumed_samples
        self.digest_read = 0
        self.logged_digest = (0, 0)
        self.batches_since = batches_since
        self.prefetched = None
        self.schedule = LearningRateSchedule.from_config(config.optimizer, schedule_lengths(config, dp, *batches_since))
        with self.startup("data"):
            vocab = config.model.vocab
            self.data = build_data(config.data, config.training, vocab, dp, segments=segments, begin=begin)
            check_same_data(self.data, self.mesh.world)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return final_iteration(self.config.training, self.mesh.data_size, self.iteration, self.consumed_samples)

    @property
    def next_batch_size(self) -> int:
        """Samples of the next global batch."""
        return global_batch_size_at(self.config.training, self.mesh.data_size, self.consumed_samples)

    def samples_digest(self) -> str:
        """Return the digest of all consumed samples, computed from the sample order, in hexadecimal."""
        known, digest = max(self.logged_digest, (self.digested_samples, self.digest))
        digest = (digest + self.data.digest("train", known, self.consumed_samples)) % DIGEST_MODULUS
        self.logged_digest = self.consumed_samples, digest
        return f"{digest:016x}"

    def next_batches(self) -> list[MicroBatch]:
        """Return this rank's micro-batches of the next step, prefetched or read now."""
        place = self.consumed_samples, self.next_batch_size
        prefetched, self.prefetched = self.prefetched, None
        if prefetched is None or prefetched.place != place:
            return self._read("train", *place)
        self.digest_read += prefetched.digest
        return [replace(batch, step=self.iteration) for batch in prefetched.batches]

    def prefetch(self) -> None:
        """Read the batch of the step after the current one, which a GPU is computing and which is not counted yet."""
        if self.iteration + 1 >= self.total_steps:
            return
        first = self.consumed_samples + self.next_batch_size
        place = first, global_batch_size_at(self.config.training, self.mesh.data_size, first)
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
        size = full_global_batch_size(self.config.training, self.mesh.data_size)
        return self._read(split, index * size, size)

    def _read(self, split: str, first: int, size: int) -> list[MicroBatch]:
        places = self.data.rank_places(split, first, size, self.mesh.data_rank, self.mesh.data_size)
        if split == "train":
            self.digest_read += self.data.digest_places(split, places)
        return [self.data.micro_batch(split, group, self.iteration, self.device) for group in places]


def choose_device(name: str) -> torch.device:
    """Return the device of this rank and make it current; ``auto`` takes a GPU if there is one.

    Raises:
        UserError: if this machine has fewer GPUs than ranks, or none for ``cuda``.

    """
    gpus = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if gpus == 0 and name != "cuda":
        return torch.device("cpu")
    launch = Launch.read(os.environ)
    only_own_gpu = launch.launcher == "srun" and gpus == 1  # srun --gpus-per-task hides the GPUs of other ranks
    if not only_own_gpu and launch.local_size > gpus:
        if gpus == 0:
            sentence = f"--device cuda, but torch {torch.__version__} finds no GPU"
            raise UserError([Problem("E207", sentence, ("--device cpu",))])
        found = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        sentence = f"this machine runs at least {launch.local_size} ranks, but has {found}"
        raise UserError([Problem("E207", sentence, (f"torchrun --nproc-per-node {gpus}", "--device cpu"))])
    device = torch.device("cuda", 0 if only_own_gpu else launch.local_rank)
    torch.cuda.set_device(device)
    return device


def build_trainer(
    config: RunConfig,
    rank: int,
    world_size: int,
    fresh: bool = True,
    device: torch.device | None = None,
    clock: Clock = no_clock,
) -> Trainer:
    """Build the model and everything around it on this rank; collective over all ranks.

    Args:
        config: validated and resolved (derived values are filled in).
        rank: global rank.
        world_size: number of ranks; more than one requires torch.distributed to be initialised.
        fresh: True initialises the weights and starts at step 0; False leaves both for a checkpoint to set.
        device: device to use instead of the configured one; on ``meta`` nothing is allocated.
        clock: times the phases ``groups``, ``kernels``, ``model``, ``optimizer`` and ``data``.

    Raises:
        UserError: if the device or a kernel is not available, or an option names a parameter that does not exist.
        DataError: if the data of a fresh run cannot be opened.

    """
    device = device or choose_device(config.training.device)
    model, parallel, training = config.model, config.parallel, config.training
    with clock("groups"):
        mesh = _mesh(config, rank, world_size)
    dtype = DTYPES[config.precision.params_dtype]
    with clock("kernels"):
        kernels, notes = select_kernels(config.compute.kernels, device, dtype, config.compute.deterministic)
        check_same_kernels(notes[0], mesh.world)
    sink = GradAccumulator(kernels.weight_gradient)
    context = BuildContext(
        mesh, sink, dtype, device, training.seed, parallel.sequence_parallel, initialised=fresh, kernels=kernels
    )
    layers = stage_layers(model, parallel)
    pp_rank = mesh.coordinate["pp"]
    own_layers = {stage: layers[stage] for stage, pp in enumerate(mesh.placement) if pp == pp_rank}
    with clock("model"):
        chunks = build_chunks(model, training, context, own_layers)
    specs, params = context.specs, context.params
    with clock("optimizer"):
        buckets, optimizer = _optimizer(config, context)
    for chunk in chunks.values():
        optimizer.weights.wait_before_forward(chunk.parts)
    buffer = partial(allocate_hidden_state, config, dtype, device)
    pipeline = Pipeline(chunks, mesh.placement, pp_rank, mesh.channels, buffer, sink)
    scaler = LossScaler.from_config(config.precision, device)
    timers = Timers(config.logging.timing_log_level, device)
    trainer = Trainer(
        config, mesh, device, chunks, pipeline, specs, params, buckets, optimizer, scaler, timers, notes=tuple(notes)
    )
    if fresh:
        with clock("data"):
            trainer.start_at(0, 0)
    return trainer


def _optimizer(config: RunConfig, context: BuildContext) -> tuple[GradBuffer, DistributedOptimizer]:
    """Build the gradient buckets and the optimizer of the parameters in ``context``."""
    parallel, mesh = config.parallel, context.mesh
    specs, params = context.specs, context.params
    ranks = range(parallel.pipeline_model_parallel_size)
    names = dict.fromkeys(p.name for pp in ranks for p in parameter_shapes(config.model, parallel, pp))
    check_patterns(config.optimizer, names)
    dtypes = {name: p.dtype for name, p in params.items()}
    uncut = {name for name, spec in specs.items() if rule_of(name, spec, config.optimizer) == "muon"}
    buckets = GradBuffer(specs, dtypes, mesh, context.sink, context.device, parallel, uncut)
    overlap = parallel.overlap_param_gather
    optimizer = DistributedOptimizer(
        params, specs, buckets, mesh, config.optimizer, context.seed, context.kernels.adam, overlap
    )
    return buckets, optimizer


def _mesh(config: RunConfig, rank: int, world_size: int) -> Mesh:
    """Create the process groups; collective. The schedule of the full batch says which rank holds which stage."""
    model, parallel = config.model, config.parallel
    layout = Layout.from_config(parallel, world_size)
    program = build_program(parallel, get_num_microbatches(config.training, layout.sizes["dp"]))
    if str(parallel.pipeline_schedule).endswith(SCHEDULE_SUFFIX):
        check_same_schedule(program, world_group(rank, world_size))
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    kv_copies = max(1, parallel.tensor_model_parallel_size // model.kv_groups)
    gathers = parallel.overlap_param_gather and parallel.zero_stage > 0
    return Mesh(layout, rank, timeout, kv_copies, program.placement, parallel.optimizer_instances, gathers)


def allocate_hidden_state(config: RunConfig, dtype: torch.dtype, device: torch.device, batch: MicroBatch) -> Tensor:
    """Allocate the receive buffer for a stage's input, ``[S(/tp), B, H]``."""
    samples, length = batch.tokens.shape
    rows = length // config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else length
    return torch.empty((rows, samples, config.model.hidden_size), dtype=dtype, device=device)


def join_distributed(config: RunConfig) -> tuple[int, int]:
    """Initialise torch.distributed from the launcher's environment; return ``(rank, world size)``.

    Raises:
        UserError: if the device is not available, its backend is another, or the address of rank 0 is missing.

    """
    launch = Launch.read(os.environ)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    init_distributed(config.parallel.distributed_backend, timeout, choose_device(config.training.device))
    return launch.rank, launch.world_size
