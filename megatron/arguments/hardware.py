"""The hardware of a run: that which flags name, or that of this machine, found without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch, ranks_per_node
from megatron.config.machine import gpu_memory_bytes, gpu_name, has_no_gpu, memory_bytes
from megatron.config.run import RunConfig
from megatron.planner.hardware import Cluster, accelerators, driver_accelerator, find_accelerator

PLAN_GPU = "--plan-gpu"

CPU = "cpu"
"""Name of the accelerator without a GPU. Its speed is not known, so that only layouts are compared by it."""

MOST_IN_A_NODE = 8
"""Most accelerators of a node; links of larger groups join the nodes of a rack."""


def find_cluster(config: RunConfig, world_size: int, environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """Return the hardware of a run: that of ``--plan-gpu``, or that of this machine; None for an unknown GPU.

    Raises:
        UserError: if there is no such hardware.
    """
    launch, named = Launch.read(environ), config.planning.plan_gpu
    each = ranks_per_node(environ) if launch.launcher else None
    if named is not None:
        accelerator = find_accelerator(named, PLAN_GPU)
    elif config.training.device == "cpu" or has_no_gpu(environ):
        each = each or world_size
        memory = memory_bytes() or accelerators()[CPU].memory
        return Cluster.of(replace(accelerators()[CPU], memory=memory / each), each)
    else:
        found = driver_accelerator(gpu_name() or "")
        if found is None:
            return None
        accelerator = replace(found, memory=min(found.memory, gpu_memory_bytes() or found.memory))
    whole_node = each if accelerator.node_size <= MOST_IN_A_NODE else None
    return Cluster.of(accelerator, whole_node, world_size=world_size)


def known_cluster(config: RunConfig, world_size: int, environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """Return the hardware of a run if its speed is known; None on CPUs, and on GPUs that the planner does not know."""
    on_cpu = config.training.device == "cpu" or has_no_gpu(environ)
    if config.planning.plan_gpu == CPU or (config.planning.plan_gpu is None and on_cpu):
        return None
    return find_cluster(config, world_size, environ)


def hardware_problems(config: RunConfig) -> tuple[Problem, ...]:
    """Return a problem if ``--plan-gpu`` names no hardware."""
    try:
        if config.planning.plan_gpu is not None:
            find_accelerator(config.planning.plan_gpu, PLAN_GPU)
    except UserError as error:
        return error.problems
    return ()
