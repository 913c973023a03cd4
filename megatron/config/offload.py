"""Offload of activations to host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.option import Need, option


@dataclass(frozen=True, init=False, eq=False, repr=False)
class ActivationOffloadOptions:
    """Options of activation offload."""

    cpu_offloading_num_layers: int = option(0, role="free", at_least=0)
    """Offload what the first blocks of every stage keep for backward to host memory. Recomputed groups of blocks, whose
    inputs are offloaded, count by their first block."""
    min_offloaded_tensor_size: int = option(
        1024 * 1024, role="free", at_least=1, needs=Need("cpu_offloading_num_layers>0", "offload")
    )
    """Elements of the smallest tensor that activation offload moves."""

    refused: ClassVar = """
    cpu_offloading_num_layers>num_layers
    E942 --cpu-offloading-num-layers {cpu_offloading_num_layers}: the model has {num_layers} layers
      fix: --cpu-offloading-num-layers {num_layers}

    cuda_graph=step and cpu_offloading_num_layers>0
    E940 --cuda-graph step is untested with --cpu-offloading-num-layers
      fix: --cuda-graph none | --cuda-graph optimizer | --cpu-offloading-num-layers 0
    """
