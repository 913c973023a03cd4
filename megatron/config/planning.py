"""Options of the planner: the choice of the layout, and the hardware that it assumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.option import option


@dataclass(frozen=True)
class PlanningConfig:
    """Choice of the layout by the planner, and the hardware that it assumes."""

    plan: str | None = option(None, role="start", choices=("auto",))
    """auto: the options of the layout that are not given are those that the planner predicts to be fastest of those
    that fit: parallel sizes, schedule, ZeRO stage, micro-batch size, recomputation, offload. A resumed run keeps them,
    on the same number of ranks."""
    plan_gpu: str | None = option(None, role="start")
    """Hardware of the ranks for the planner and for the forecast of the summary: a name of its table, such as h100-80g,
    or a YAML file. Default: that of this machine."""

    refused: ClassVar = """
    plan=auto and not global_batch_size and not step_batch_size_schedule
    E960 --plan auto needs the global batch: without one, it would follow from the layout that is chosen
      fix: --global-batch-size 512
    """
