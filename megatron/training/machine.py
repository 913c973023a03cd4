"""Checks of a run against this machine, before torch is imported: its GPUs, its memory, and its folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from megatron.arguments.validate import find_problems
from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch, ranks_per_node
from megatron.config.machine import gpu_memory_bytes, has_no_gpu, memory_bytes
from megatron.config.run import RunConfig
from megatron.config.text import counted, format_bytes
from megatron.planner.memory import machine_state_bytes, max_peak_bytes

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
        problems += find_problems(replace(config, training=replace(config.training, device="cpu")), world_size)
    first = launch.rank - launch.local_rank
    here = range(first, min(first + ranks, world_size))
    found = [*_memory_problems(config, world_size, here, device == "cpu" or alone)]
    problems += [each for each in found if isinstance(each, Problem)]
    if problems:
        raise UserError(problems, notes)
    return config, [*notes, *(each for each in found if isinstance(each, str))]


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
    """Yield a problem if the state of this machine's ranks exceeds its memory, or a note if a step may exceed it."""
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
        has = f"{owner} {format_bytes(limit)} of memory"
        if state.total() <= limit:
            yield f"memory may not suffice: {has}, and a step of {holder} needs some {format_bytes(most)}"
            continue
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in state.items() if size > state.total() / 1000)
        yield Problem("E217", f"{has}, and {holder} would need at least {format_bytes(state.total())}: {parts}")
