"""This machine and a run: checks of its GPUs, memory and folders, and the environment variables of its libraries.

Does not import torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

from megatron.arguments.fitting import Change, fitting_changes
from megatron.arguments.validate import choose_cuda_graph, find_problems
from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch, ranks_per_node
from megatron.config.machine import gpu_memory_bytes, has_no_gpu, memory_bytes
from megatron.config.run import RunConfig
from megatron.config.text import counted, format_bytes
from megatron.planner.memory import machine_state_bytes, max_peak_bytes
from megatron.planner.search import HEADROOM

MACHINE_CODES = frozenset(("E207", "E217", "E701"))
"""Codes of problems that one machine of several may have."""

NO_GPU_FOUND = "no GPU found: training on CPU"


def missing_gpu_problem(found: str) -> Problem:
    """Return the problem of ``--device cuda`` without a GPU; ``found`` is a clause on what finds none."""
    return Problem("E207", f"--device cuda, but {found}", ("--device cpu",))


def fit_to_machine(
    config: RunConfig, world_size: int, environ: Mapping[str, str] = os.environ
) -> tuple[RunConfig, list[str]]:
    """Return the configuration as this machine can run it, and notes.

    If the whole run is on this machine and it has no GPU, ``--distributed-backend nccl``, which Megatron-LM's scripts
    have, is left to the device. A machine of several that has lost its GPUs is reported later, by name.

    Args:
        config: checked and resolved, vocabulary size included.
        world_size: number of ranks.
        environ: environment of this rank.

    Raises:
        UserError: with everything that this machine lacks.
    """
    device, parallel, notes = config.training.device, config.parallel, list[str]()
    placed = config  # on the device that this machine has
    launch, ranks = Launch.read(environ), ranks_per_node(environ)
    alone = device != "cpu" and max(launch.world_size, world_size) <= ranks and has_no_gpu(environ)
    problems = [*_folder_problems(config)]
    if alone and device == "cuda":
        problems.append(missing_gpu_problem("this machine has no GPU that torch can use"))
    elif alone:
        notes.append(NO_GPU_FOUND)
        if parallel.distributed_backend == "nccl":
            config = replace(config, parallel=replace(parallel, distributed_backend=None))
            notes.append("--distributed-backend nccl has no effect without GPUs: the ranks use gloo")
        placed = replace(config, training=replace(config.training, device="cpu"))
        problems += find_problems(placed, world_size)
    first = launch.rank - launch.local_rank
    here = range(first, min(first + ranks, world_size))
    found = [*_memory_problems(placed, world_size, here, device == "cpu" or alone)]
    problems += [each for each in found if isinstance(each, Problem)]
    notes += [each for each in found if isinstance(each, str)]
    if problems:
        raise UserError(problems, notes)
    return config, notes


def _folder_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if the run folder cannot be written."""
    if config.logging.run_dir is None:
        return
    folder = Path(config.logging.run_dir)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        sentence = f"the run folder {folder} cannot be written: {existing} is not yours to write"
        yield Problem("E701", sentence, ("--run-dir ANOTHER_FOLDER",))


def _memory_problems(config: RunConfig, world_size: int, ranks: range, on_cpu: bool) -> Iterator[Problem | str]:
    """Yield a problem if the state of this machine's ranks exceeds its memory, or a note if a step may exceed it.

    Notes on the cheapest changes with which it would fit follow.
    """
    if config.model.vocab_size is None:
        return
    states = machine_state_bytes(config, world_size, ranks)
    peak = sum(max_peak_bytes(config, world_size).values())
    of_host = sum((Counter(host) + (Counter(device) if on_cpu else Counter()) for device, host in states), Counter())
    held = f"its {counted(len(ranks), 'rank')}"
    demands = [("this machine has", held, of_host, on_cpu * peak * len(ranks), memory_bytes())]
    if not on_cpu:
        fullest = max((Counter(device) for device, _ in states), key=Counter.total)
        demands.append(("a GPU of this machine has", "its fullest rank", fullest, peak, gpu_memory_bytes()))
    for owner, holder, state, most, limit in demands:
        if limit is None or max(state.total(), most) <= limit:
            continue
        has, changes = f"{owner} {format_bytes(limit)} of memory", list[Change]()
        if most:  # a forecast of the peak, which a change of the layout may lower
            changes = fitting_changes(config, world_size, HEADROOM * limit / (len(ranks) if on_cpu else 1))
        if state.total() <= limit:
            yield f"memory may not suffice: {has}, and a step of {holder} needs some {format_bytes(most)}"
        else:
            parts = (f"{name} {format_bytes(size)}" for name, size in state.items() if size > state.total() / 1000)
            sentence = f"{has}, and {holder} would need at least {format_bytes(state.total())}: {', '.join(parts)}"
            yield Problem("E217", sentence, tuple(change.flags for change in changes))
        yield from (f"would fit: {change}" for change in changes)


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Number of hardware queues through which kernels reach the GPU."""

ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Variables with the options of PyTorch's GPU allocator: the name since torch 2.9, and the earlier one."""


MAX_FULL_MESH = 64
"""Largest number of ranks between which gloo connects every pair when a group is created."""


def default_variables(
    config: RunConfig, world_size: int, environ: Mapping[str, str], cores: int, cuda: bool
) -> Mapping[str, str]:
    """Return the variables to set for a run, without those that ``environ`` sets.

    Args:
        config: validated and resolved.
        world_size: number of ranks.
        environ: environment of this rank.
        cores: that this rank may use.
        cuda: True if the run may use a GPU.
    """
    # gloo would connect every pair of ranks when a group is created, and fail with hundreds of them
    # (Megatron-LM#877). Connecting at the first message has no timeout if the peer has died before (gloo#520).
    found = {"TORCH_GLOO_LAZY_INIT": "1"} if world_size > MAX_FULL_MESH else {}
    if cuda:
        parallel = config.parallel
        # With one queue kernels start in launch order: a transfer before the matrix product that hides it. In a
        # pipeline, a transfer that waits for its peer would hold up all kernels behind it.
        one_queue = parallel.tensor_model_parallel_size > 1 and parallel.pipeline_model_parallel_size == 1
        found[CONNECTIONS] = "1" if one_queue else "32"
        # each rank of a node would start as many processes as the node has cores, up to 32
        found["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, min(32, cores // ranks_per_node(environ))))
        # NCCL registers the buffers of captured collectives, which fails or hangs in expandable segments
        # (pytorch#158029; Megatron-LM refuses the combination): registration is switched off, and a run with graphs
        # keeps the allocator's default.
        found["NCCL_GRAPH_REGISTER"] = "0"
        if choose_cuda_graph(config, world_size)[0] == "none" and not any(name in environ for name in ALLOCATOR):
            found[ALLOCATOR[0]] = "expandable_segments:True"
    return {name: value for name, value in found.items() if name not in environ}


def set_variables(config: RunConfig, cuda: bool, environ: MutableMapping[str, str] = os.environ) -> str:
    """Set the variables that are not set. Call before anything of CUDA starts.

    Args:
        config: validated and resolved.
        cuda: True if the run may use a GPU.
        environ: environment of this rank, changed in place.

    Returns:
        A line for the start of the log.

    Raises:
        UserError: if a variable is set to a value with which the run could hang.
    """
    parallel, launch = config.parallel, Launch.read(environ)
    stages = parallel.pipeline_model_parallel_size
    if cuda and stages > 1 and environ.get(CONNECTIONS) == "1":
        reason = "a transfer that waits for its peer would hold up all kernels behind it"
        sentence = f"{CONNECTIONS}=1 cannot be used with {stages} pipeline ranks: {reason}"
        raise UserError([Problem("E916", sentence, (f"unset {CONNECTIONS}", f"export {CONNECTIONS}=32"))])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environ.update(default_variables(config, launch.world_size, environ, cores, cuda))
    shown = (CONNECTIONS, *ALLOCATOR, "NCCL_GRAPH_REGISTER", "TORCHINDUCTOR_COMPILE_THREADS")
    return "environment: " + " ".join(f"{name}={environ[name]}" for name in shown if name in environ)
