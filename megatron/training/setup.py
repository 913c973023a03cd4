"""From a validated configuration to everything a training step needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.checkpoint.claims import Claims
from megatron.checkpoint.exchange import Tier
from megatron.config.batch import batch_at, global_batch, microbatches, total_steps
from megatron.config.launch import Launch
from megatron.config.lengths import lengths
from megatron.config.parameters import parameters
from megatron.config.problems import Problem, UserError
from megatron.config.run import RunConfig
from megatron.data.errors import DataError
from megatron.data.loader import DataSource, build_data
from megatron.kernels.registry import choose
from megatron.model.gpt import GPTChunk, build_chunks
from megatron.optim.buckets import GradBuckets
from megatron.optim.groups import check_patterns, rule_of
from megatron.optim.optimizer import Optimizer
from megatron.optim.scaler import LossScaler
from megatron.optim.schedule import Schedule
from megatron.parallel.build import DTYPES, BuildContext
from megatron.parallel.grads import GradSink
from megatron.parallel.layout import Layout
from megatron.parallel.mesh import Mesh, everyone, start_distributed
from megatron.parallel.microbatch import MicroBatch
from megatron.parallel.shard import ShardSpec
from megatron.parallel.stopwatch import Clock, unmeasured
from megatron.pipeline.actions import Schedule as Program
from megatron.pipeline.plan import FILE, program_for, stage_layers
from megatron.pipeline.runtime import Pipeline
from megatron.training.agreement import check_same_data, check_same_kernels, check_same_schedule
from megatron.training.goodput import Goodput
from megatron.training.startup import StartUp
from megatron.training.timers import Timers

DIGESTS = 2**64
"""Digests of samples are numbers below this."""


@dataclass(frozen=True)
class Ahead:
    """Micro-batches that are read before their step begins.

    Attributes:
        place: the first sample of the global batch, and how many it has.
        batches: this rank's.
        digest: of their samples.
    """

    place: tuple[int, int]
    batches: list[MicroBatch]
    digest: int


@dataclass
class Trainer:
    """The parts of a run and how far it is. Schedule and data are there once :meth:`begin_at` has said where it begins.

    Attributes:
        chunks: this rank's parts of the model, by the number of their stage.
        pipeline: runs them.
        specs: place of every parameter of this rank, by global name.
        params: the parameters themselves.
        timers: of the phases of a step.
        goodput: of the run, all its starts together.
        startup: of this start.
        iteration: steps taken.
        consumed_samples: samples they used.
        batches_since: steps and samples after which the batches began that are those of now.
        evaluated: by split, steps taken before the last evaluation on it.
        digest: digest of the first ``digested_samples`` samples that the run has consumed.
        digest_read: digest of those that this rank has read since.
        ahead: what :meth:`read_ahead` has read.
        digest_told: samples of which :meth:`samples_digest` told last, and that digest.
        run_id: name of the run through all its starts; empty until one is given.
        notes: what the start of the run is to say of how it computes.
        files: what its checkpoints carry besides, by name: those of the tokenizer, for whoever uses the model.
        local: the nodes' folders of checkpoints.
        claims: on the folders that the run's checkpoints are written to.
    """

    config: RunConfig
    mesh: Mesh
    device: torch.device
    chunks: Mapping[int, GPTChunk]
    pipeline: Pipeline
    specs: Mapping[str, ShardSpec]
    params: Mapping[str, nn.Parameter]
    buckets: GradBuckets
    optimizer: Optimizer
    scaler: LossScaler
    timers: Timers
    goodput: Goodput = field(default_factory=Goodput)
    startup: StartUp = field(default_factory=StartUp)
    schedule: Schedule = field(init=False)
    data: DataSource = field(init=False)
    iteration: int = 0
    consumed_samples: int = 0
    batches_since: tuple[int, int] = (0, 0)
    evaluated: dict[str, int] = field(default_factory=dict)
    digest: int = 0
    digested_samples: int = 0
    digest_read: int = 0
    digest_told: tuple[int, int] = (0, 0)
    ahead: Ahead | None = None
    run_id: str = ""
    notes: tuple[str, ...] = ()
    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    local: Tier | None = None
    claims: Claims = field(default_factory=Claims)

    def compute(self, batches: Sequence[MicroBatch], seed: Tensor | None, program: Program | None = None) -> None:
        """Run the pipeline over this rank's micro-batches.

        Args:
            batches: of a step, or of an evaluation.
            seed: factor of the summed losses in the global objective, 0-d; None to go forward only.
            program: in place of the run's own.

        """
        program = program or program_for(self.config.parallel, len(batches), evaluation=seed is None)
        for chunk in self.chunks.values():
            chunk.train(seed is not None)
        self.pipeline.run(program.ranks[self.mesh.coordinate["pp"]], batches, seed, self.timers)

    def begin_at(
        self,
        iteration: int,
        consumed_samples: int,
        stretches: Mapping[str, Sequence[int]] | None = None,
        batches_since: tuple[int, int] = (0, 0),
    ) -> None:
        """Take the run's schedule and data up from here; collective.

        Args:
            iteration: steps taken.
            consumed_samples: samples they used.
            stretches: how the data were laid out for them; None for a run that begins.
            batches_since: steps and samples after which the batches began that are those of now.

        Raises:
            DataError: when the data cannot be opened, or are not the same on all ranks.

        """
        config, dp, begin = self.config, self.mesh.data_size, (iteration, consumed_samples)
        self.iteration, self.consumed_samples = begin
        self.digest, self.digested_samples, self.digest_read, self.digest_told = 0, consumed_samples, 0, (0, 0)
        self.batches_since, self.ahead = batches_since, None
        self.schedule = Schedule.from_config(config.optimizer, lengths(config, dp, *batches_since))
        with self.startup("data"):
            vocab = config.model.vocab
            self.data = build_data(config.data, config.training, vocab, dp, stretches=stretches, begin=begin)
            check_same_data(self.data, self.mesh.world)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return total_steps(self.config.training, self.mesh.data_size, self.iteration, self.consumed_samples)

    @property
    def next_batch_size(self) -> int:
        """Samples of the next global batch."""
        return batch_at(self.config.training, self.mesh.data_size, self.consumed_samples)

    def samples_digest(self) -> str:
        """Digest of the samples that the run has consumed, as the sample stream has them, in hexadecimal."""
        known, digest = max(self.digest_told, (self.digested_samples, self.digest))
        digest = (digest + self.data.digest("train", known, self.consumed_samples)) % DIGESTS
        self.digest_told = self.consumed_samples, digest
        return f"{digest:016x}"

    def next_batches(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next step."""
        place, (ahead, self.ahead) = (self.consumed_samples, self.next_batch_size), (self.ahead, None)
        if ahead is None or ahead.place != place:
            return self._read("train", *place)
        self.digest_read += ahead.digest
        return [replace(batch, step=self.iteration) for batch in ahead.batches]

    def read_ahead(self) -> None:
        """Read for the step after the next one already, while a GPU is at that; to be called before it is counted."""
        if self.iteration + 1 >= self.total_steps:
            return
        first, counted = self.consumed_samples + self.next_batch_size, self.digest_read
        place = first, batch_at(self.config.training, self.mesh.data_size, first)
        try:
            with self.timers("batch-generator"):  # a device that is done with its step stands still for this, too
                batches = self._read("train", *place)
            self.ahead = Ahead(place, batches, self.digest_read - counted)
        except (DataError, OSError):  # told when their turn comes, and the steps before are safe
            self.ahead = None
        self.digest_read = counted

    def evaluation_batches(self, split: str, index: int) -> list[MicroBatch]:
        """This rank's micro-batches of global batch ``index`` of a validation or test split."""
        size = global_batch(self.config.training, self.mesh.data_size)
        return self._read(split, index * size, size)

    def _read(self, split: str, first: int, size: int) -> list[MicroBatch]:
        places = self.data.share(split, first, size, self.mesh.data_rank, self.mesh.data_size)
        if split == "train":
            self.digest_read += self.data.digest_places(split, places)
        return [self.data.micro_batch(split, group, self.iteration, self.device) for group in places]


def choose_device(name: str) -> torch.device:
    """The device of this rank; ``auto`` takes a GPU when there is one.

    Raises:
        UserError: when this machine has fewer GPUs than ranks, or ``cuda`` none.

    """
    gpus = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if gpus == 0 and name != "cuda":
        return torch.device("cpu")
    launch = Launch.read(os.environ)
    alone = launch.launcher == "srun" and gpus == 1  # srun --gpus-per-task shows each rank nothing but its own GPU
    if not alone and launch.local_size > gpus:
        raise UserError([_too_few_gpus(gpus, launch)])
    device = torch.device("cuda", 0 if alone else launch.local_rank)
    torch.cuda.set_device(device)
    return device


def _too_few_gpus(gpus: int, launch: Launch) -> Problem:
    if gpus == 0:
        return Problem("E207", f"--device cuda, but torch {torch.__version__} finds no GPU", ("--device cpu",))
    fixes = (f"torchrun --nproc-per-node {gpus}", "--device cpu")
    seen = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    return Problem("E207", f"this machine runs at least {launch.local_size} ranks, but has {seen}", fixes)


def build(
    config: RunConfig,
    rank: int,
    world_size: int,
    fresh: bool = True,
    device: torch.device | None = None,
    clock: Clock = unmeasured,
) -> Trainer:
    """Build the model and everything around it on this rank; collective over all ranks.

    Args:
        config: validated and resolved (no derived value left open).
        rank: global rank.
        world_size: number of ranks; more than one needs torch.distributed to be started.
        fresh: a run that begins. Otherwise the weights are left zero and the place open, for a checkpoint to say.
        device: in place of the one that is configured; on ``meta`` nothing is allocated.
        clock: measures the parts: ``groups``, ``kernels``, ``model``, ``optimizer``, ``data``.

    Raises:
        UserError: when the device, a kernel, or a parameter that was asked for is not there.
        DataError: when the data of a run that begins cannot be opened.

    """
    device = device or choose_device(config.training.device)
    model, parallel, training = config.model, config.parallel, config.training
    with clock("groups"):
        mesh = _mesh(config, rank, world_size)
    dtype = DTYPES[config.precision.params_dtype]
    with clock("kernels"):
        kernels, notes = choose(config.compute.kernels, device, dtype, config.compute.deterministic)
        check_same_kernels(notes[0], mesh.world)
    sink = GradSink(kernels.weight_gradient)
    context = BuildContext(
        mesh, sink, dtype, device, training.seed, parallel.sequence_parallel, initialised=fresh, kernels=kernels
    )
    layers, here = stage_layers(model, parallel), mesh.coordinate["pp"]
    held = {stage: layers[stage] for stage, pp in enumerate(mesh.placement) if pp == here}
    with clock("model"):
        chunks = build_chunks(model, training, context, held)
    specs, params = context.specs, context.params
    with clock("optimizer"):
        buckets, optimizer = _optimizer(config, context)
    for chunk in chunks.values():
        optimizer.weights.awaited_by(chunk.parts)
    pipeline = Pipeline(chunks, mesh.placement, here, mesh.channels, partial(hidden_state, config, dtype, device), sink)
    scaler = LossScaler.from_config(config.precision, device)
    timers = Timers(config.logging.timing_log_level, device)
    trainer = Trainer(
        config, mesh, device, chunks, pipeline, specs, params, buckets, optimizer, scaler, timers, notes=tuple(notes)
    )
    if fresh:
        with clock("data"):
            trainer.begin_at(0, 0)
    return trainer


def _optimizer(config: RunConfig, context: BuildContext) -> tuple[GradBuckets, Optimizer]:
    """The gradients of what was built in the context, and who moves it along them."""
    model, parallel, mesh, specs, params = config.model, config.parallel, context.mesh, context.specs, context.params
    ranks = range(parallel.pipeline_model_parallel_size)
    check_patterns(config.optimizer, dict.fromkeys(p.name for pp in ranks for p in parameters(model, parallel, pp)))
    dtypes = {name: p.dtype for name, p in params.items()}
    uncut = {name for name, spec in specs.items() if rule_of(name, spec, config.optimizer) == "muon"}
    buckets = GradBuckets(specs, dtypes, mesh, context.sink, context.device, parallel, uncut)
    kernel, overlap = context.kernels.adam, parallel.overlap_param_gather
    return buckets, Optimizer(params, specs, buckets, mesh, config.optimizer, context.seed, kernel, overlap)


def _mesh(config: RunConfig, rank: int, world_size: int) -> Mesh:
    """The ranks and their groups; collective. The stages lie where the program of the full batch has them."""
    model, parallel = config.model, config.parallel
    layout = Layout.from_config(parallel, world_size)
    program = program_for(parallel, microbatches(config.training, layout.sizes["dp"]))
    if str(parallel.pipeline_schedule).endswith(FILE):
        check_same_schedule(program, everyone(rank, world_size))
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    kv_copies = max(1, parallel.tensor_model_parallel_size // model.kv_groups)
    gathers = parallel.overlap_param_gather and parallel.zero_stage > 0
    return Mesh(layout, rank, timeout, kv_copies, program.placement, parallel.optimizer_instances, gathers)


def hidden_state(config: RunConfig, dtype: torch.dtype, device: torch.device, batch: MicroBatch) -> Tensor:
    """Room for what one stage hands to the next: ``[S(/tp), B, H]``, not filled."""
    samples, length = batch.tokens.shape
    rows = length // config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else length
    return torch.empty((rows, samples, config.model.hidden_size), dtype=dtype, device=device)


def join(config: RunConfig) -> tuple[int, int]:
    """Start torch.distributed as the launcher's environment says; returns ``(rank, world size)``.

    Raises:
        UserError: when the device is not there, its backend is another, or nothing says where rank 0 is.

    """
    launch = Launch.read(os.environ)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    start_distributed(config.parallel.distributed_backend, timeout, choose_device(config.training.device))
    return launch.rank, launch.world_size
