"""All options of a run, in groups; each group has a file of its own in this package.

The fields of the groups are the only source of the flags, YAML keys, ``--help``, docs/flags.md, of what may change when
a run resumes (``role``), and of what is set without effect (``needs``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.compute import ComputeConfig
from megatron.config.data import DataConfig
from megatron.config.diloco import DilocoConfig
from megatron.config.elastic import ElasticConfig
from megatron.config.evaluation import EvaluationConfig
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.option import WithPluginOptions
from megatron.config.parallel import ParallelConfig
from megatron.config.planning import PlanningConfig
from megatron.config.plugins import option_groups
from megatron.config.precision import PrecisionConfig
from megatron.config.profiling import ProfilingConfig
from megatron.config.reliability import ReliabilityConfig
from megatron.config.training import TrainingConfig


@dataclass(frozen=True)
class RunConfig(WithPluginOptions):
    """All options of ``pretrain_gpt.py``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    planning: PlanningConfig = field(default_factory=PlanningConfig)

    def group(self, name: str) -> Any:
        """Return the options of a group, built in or of a plugin."""
        return getattr(self, name) if name in vars(self) else self.plugin(option_groups()[name])

    def with_group(self, name: str, options: Any) -> RunConfig:
        """Return the configuration with another group of options."""
        if name in vars(self):
            return replace(self, **{name: options})
        others = (each for each in self.plugin_options if type(each) is not type(options))
        return self.with_plugin_options((*others, options))

    def with_plugin_options(self, options: tuple[Any, ...]) -> RunConfig:
        """Return the configuration with the options of plugins, also in the groups that components get."""
        changed: dict[str, Any] = {
            name: replace(group, plugin_options=options)
            for name in vars(self)
            if isinstance(group := getattr(self, name), WithPluginOptions)
        }
        return replace(self, plugin_options=options, **changed)

    @property
    def resume_options(self) -> CheckpointConfig:
        """Options of the checkpoint to resume or start from; adapters start from nothing."""
        return self.checkpoint if self.model.lora_rank is not None else self.checkpoint.first_start
