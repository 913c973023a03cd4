"""Checks of offload to host memory."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.errors import Problem
from megatron.config.run import RunConfig


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
