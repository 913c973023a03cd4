"""Set the environment variables that CUDA, NCCL, gloo and Inductor read when they start. Does not import torch.

A variable that is already set is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from megatron.arguments.validate import choose_cuda_graph
from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch, ranks_per_node
from megatron.config.run import RunConfig

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
