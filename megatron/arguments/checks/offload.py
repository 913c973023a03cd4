"""Checks of offload to host memory."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.errors import Problem
from megatron.config.run import RunConfig

NO_OPTIMIZER_OFFLOAD = "drop --optimizer-cpu-offload"


def check_graph_offload(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject capturing what is offloaded: the host updates parameters, and a graph keeps its own memory."""
    mode, none = config.compute.cuda_graph, "--cuda-graph none"
    if mode in ("optimizer", "step") and config.optimizer.optimizer_cpu_offload:
        sentence = f"--cuda-graph {mode} cannot capture the updates of --optimizer-cpu-offload, which the host computes"
        yield Problem("E940", sentence, (none, NO_OPTIMIZER_OFFLOAD))
    if mode == "step" and config.training.cpu_offloading_num_layers:
        sentence = "--cuda-graph step is untested with --cpu-offloading-num-layers"
        yield Problem("E940", sentence, (none, "--cuda-graph optimizer", "--cpu-offloading-num-layers 0"))


def check_offload_diloco(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject DiLoCo with offloaded main parameters, which is untested."""
    if config.diloco.diloco_sync_interval is not None and config.optimizer.optimizer_cpu_offload:
        sentence = "--optimizer-cpu-offload is untested with --diloco-sync-interval"
        yield Problem("E941", sentence, (NO_OPTIMIZER_OFFLOAD, "drop --diloco-sync-interval"))


def check_offloaded_weights(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that weights in host memory are all updated there."""
    optimizer = config.optimizer
    if not config.parallel.offloads_weights:
        return
    dropped = "drop --param-cpu-offload"
    if optimizer.optimizer == "muon":
        yield Problem("E943", "--param-cpu-offload: muon updates matrices on the device", (dropped,))
    elif not optimizer.optimizer_cpu_offload or optimizer.optimizer_offload_fraction < 1.0:
        sentence = "--param-cpu-offload needs --optimizer-cpu-offload of all parameters"
        yield Problem("E943", sentence, ("--optimizer-cpu-offload --optimizer-offload-fraction 1", dropped))


def check_offloaded_layers(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that there are as many blocks as are to be offloaded."""
    count, layers = config.training.cpu_offloading_num_layers, config.model.num_layers
    if count > layers:
        sentence = f"--cpu-offloading-num-layers {count}: the model has {layers} layers"
        yield Problem("E942", sentence, (f"--cpu-offloading-num-layers {layers}",))
