"""Build the model of a rank from a validated configuration: process groups, kernels, model chunks, pipeline.

Ranks compare kernels and pipeline schedules with each other, because machines may differ in libraries or files.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from megatron.arguments.planning import layout_flags
from megatron.arguments.validate import choose_cuda_graph
from megatron.config.batch import get_num_microbatches
from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch
from megatron.config.run import RunConfig
from megatron.config.text import echo
from megatron.distributed import comm
from megatron.distributed.comm import Group, symmetric_memory_missing
from megatron.distributed.context_parallel import ContextParallel
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.launch import init_distributed, world_group
from megatron.distributed.layout import Layout
from megatron.distributed.mappings import PIPELINED, SYMMETRIC_MEMORY, TPComm
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.kernels.compile import set_matmul_precision
from megatron.kernels.fp8 import Float8Layers, Float8Recipe
from megatron.kernels.linear import TORCH_LINEAR
from megatron.kernels.registry import Kernels, select_kernels
from megatron.layers.activation_offload import ActivationOffload
from megatron.layers.context import DTYPES, BuildContext
from megatron.layers.mixers.registry import unused_operations
from megatron.model.gpt import GPTChunk, build_chunks
from megatron.pipeline.actions import PipelineSchedule
from megatron.pipeline.communication import channels
from megatron.pipeline.plan import SCHEDULE_SUFFIX, build_program, stage_layers
from megatron.pipeline.runtime import Pipeline
from megatron.training.batch_reader import differences
from megatron.training.machine import missing_gpu_problem


def check_same_kernels(chosen: str, world: Group) -> None:
    """Raise a UserError on every rank if they chose different kernels: copies of a weight would differ. Collective."""
    differing, versions = differences({"kernels": chosen}, world)
    if differing:
        raise UserError([Problem("E904", f"ranks would compute differently: {versions}", ("--kernels torch",))])


def check_same_schedule(schedule: PipelineSchedule, world: Group) -> None:
    """Raise a UserError on every rank if they read different pipeline schedules: they would deadlock. Collective."""
    digest = hashlib.blake2b(repr(schedule.ranks).encode(), digest_size=8).hexdigest()
    differing, versions = differences({"schedule": digest}, world)
    if differing:
        sentence = f"{schedule.name} is not the same on all ranks: {versions}"
        raise UserError([Problem("E212", sentence, ("copy the same file to every machine",))])


def check_same_plan(config: RunConfig, world: Group) -> None:
    """Raise a UserError on every rank if ``--plan auto`` chose different layouts: machines may differ. Collective."""
    if config.planning.plan is None:
        return
    differing, versions = differences({"plan": layout_flags(config)}, world)
    if differing:
        sentence = f"--plan auto chose different layouts, because machines differ: {versions}"
        raise UserError([Problem("E963", sentence, ("--plan-gpu h100-80g", "the flags of one of them"))])


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
            raise UserError([missing_gpu_problem(f"torch {torch.__version__} finds no GPU")])
        found = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        sentence = f"this machine runs at least {launch.local_size} ranks, but has {found}"
        raise UserError([Problem("E207", sentence, (f"torchrun --nproc-per-node {gpus}", "--device cpu"))])
    device = torch.device("cuda", 0 if only_own_gpu else launch.local_rank)
    torch.cuda.set_device(device)
    return device


def choose_kernels(config: RunConfig, mesh: Mesh, device: torch.device) -> tuple[Kernels, list[str]]:
    """Return the kernels of the run, and notes on them. Collective.

    Raises:
        UserError: if a requested kernel is not available, or ranks chose different ones.
    """
    compute, parallel, precision = config.compute, config.parallel, config.precision
    if device.type == "cuda":
        set_matmul_precision(compute.reduced_precision_reduction)
    dtype, unfused = DTYPES[precision.params_dtype], config.model.attention_dropout > 0.0
    fp8 = None
    if precision.fp8_format is not None:
        fp8 = Float8Recipe(precision.fp8_format, precision.fp8_recipe, precision.fp8_wgrad)
    whole = parallel.context_parallel_size == 1 or parallel.cp_comm_type == "a2a"  # others attend in tiles
    whole &= config.model.softmax_type == "vanilla"  # so do sinks
    patterns = {config.model.pattern(i) for i in range(config.model.num_layers)} if whole else set()
    softcap = whole and config.model.attn_logit_softcapping is not None
    unused = unused_operations(config.model)
    kernels, notes = select_kernels(
        compute.kernel_words, device, dtype, compute.deterministic, unfused, fp8, patterns, softcap, unused
    )
    check_same_kernels(notes[0], mesh.world)
    return kernels, notes


def choose_tp_overlap(
    config: RunConfig, kernels: Kernels, mesh: Mesh, device: torch.device
) -> tuple[TPComm | None, list[str]]:
    """Return how tensor-parallel communication overlaps with products, and a note on it. Collective.

    Raises:
        UserError: if symmetric memory is requested, but not available.
    """
    parallel = config.parallel
    if not (parallel.tp_comm_overlap and parallel.sequence_parallel and mesh.tp.size > 1):
        return None, []
    method = parallel.tp_comm_overlap_method
    if method == "pipelined":
        return PIPELINED, ["tensor-parallel overlap: pipelined"]
    missing: str | None = "it replaces the chosen linear kernel"
    if config.model.lora_rank is not None:
        missing = "it multiplies without adapters"
    elif device.type != "cuda":
        missing = "it needs GPUs"
    elif choose_cuda_graph(config, mesh.world.size, device.type == "cuda")[0] == "step":
        missing = "capturing it in --cuda-graph step is untested"
    elif kernels.linear[:2] == TORCH_LINEAR[:2]:
        # replicas must not round differently
        reasons = comm.all_gather_objects(symmetric_memory_missing(mesh.tp, device), mesh.world)
        missing = next(filter(None, reasons), None)
    if missing is None:
        return SYMMETRIC_MEMORY, ["tensor-parallel overlap: symmetric_memory"]
    if method is not None:
        sentence = f"--tp-comm-overlap-method {method} is not possible here: {missing}"
        raise UserError([Problem("E930", sentence, ("--tp-comm-overlap-method pipelined",))])
    return PIPELINED, [f"tensor-parallel overlap: pipelined (symmetric_memory: {missing})"]


def build_context(
    config: RunConfig, mesh: Mesh, device: torch.device, draw_initial_values: bool, allocate: bool
) -> tuple[BuildContext, list[str]]:
    """Return the context in which layers are built, and notes on kernels and overlap. Collective.

    Raises:
        UserError: if a requested kernel or overlap is not available.
    """
    model, parallel, precision = config.model, config.parallel, config.precision
    kernels, notes = choose_kernels(config, mesh, device)
    tp_overlap, overlap_notes = choose_tp_overlap(config, kernels, mesh, device)
    cp = None
    if parallel.context_parallel_size > 1:
        cp = ContextParallel(mesh.cp_ring, mesh.cp_heads, gathers=parallel.cp_comm_type == "all_gather")
    context = BuildContext(
        mesh,
        GradAccumulator(kernels.linear.weight_gradient, queue_vectors=device.type == "cuda"),
        DTYPES[precision.params_dtype],
        device,
        config.training.seed,
        parallel.sequence_parallel,
        cp,
        tp_overlap,
        draw_initial_values=draw_initial_values,
        allocate=allocate,
        kernels=kernels,
        offload=ActivationOffload.from_config(config.training, device),
        fp8=Float8Layers(
            frozenset(n for n in range(model.num_layers + 1) if precision.layer_in_fp8(n, model.num_layers))
        ),
        model=model,
        parallel=parallel,
    )
    return context, [*notes, *overlap_notes]


def build_stages(config: RunConfig, context: BuildContext) -> dict[int, GPTChunk]:
    """Build the stages of this rank, by number."""
    layers, mesh = stage_layers(config.model, config.parallel, config.training.seq_length), context.mesh
    own = {stage: layers[stage] for stage, pp in enumerate(mesh.placement) if pp == mesh.coordinate["pp"]}
    return build_chunks(config.model, config.training, context, own)


def build_pipeline(config: RunConfig, context: BuildContext, chunks: Mapping[int, GPTChunk]) -> Pipeline:
    """Build the pipeline of this rank's stages."""
    mesh, buffer = context.mesh, partial(allocate_hidden_state, config, context.dtype, context.device)
    return Pipeline(chunks, mesh.placement, mesh.coordinate["pp"], mesh.channels, buffer, context.grad_accumulator)


def build_mesh(config: RunConfig, rank: int, world_size: int) -> Mesh:
    """Create the process groups; collective. The schedule of the full batch determines which rank holds which stage."""
    model, parallel = config.model, config.parallel
    layout = Layout.from_config(parallel, world_size)
    program = build_program(parallel, get_num_microbatches(config.training, layout.sizes["dp"]))
    if str(parallel.pipeline_schedule).endswith(SCHEDULE_SUFFIX):
        check_same_schedule(program, world_group(rank, world_size))
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    tp_ranks_per_kv_head = max(1, parallel.tensor_model_parallel_size // model.kv_groups)
    opens = rank == 0 and world_group(rank, world_size).uses_nccl
    began = time.monotonic()
    if opens:
        echo(f"opening the communicators of {world_size} ranks", file=sys.stderr, flush=True)
    mesh = Mesh(
        layout,
        rank,
        timeout,
        tp_ranks_per_kv_head,
        program.placement,
        channels(program.placement),
        parallel.optimizer_instances,
        separate_gather_groups=parallel.gathers_during_compute,
        cp_head_ranks=parallel.cp_head_ranks,
    )
    if opens:
        names = ", ".join(group.name for group in mesh.created)
        echo(f"opened in {time.monotonic() - began:.1f}s, in this order: {names}", file=sys.stderr, flush=True)
    return mesh


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
