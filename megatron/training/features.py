"""The components of a run, in the order in which they act; main adds what belongs to the start itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron.config.plugins import registered
from megatron.training.callbacks.base import Callback
from megatron.training.callbacks.export import HuggingFaceExport
from megatron.training.callbacks.health import HealthReport, ReplicaCheck
from megatron.training.callbacks.profiler import StepProfiler
from megatron.training.checkpointer import Checkpointer
from megatron.training.component import Component, name_in_errors
from megatron.training.components.adapter_base import AdapterBase
from megatron.training.components.average import AverageWeights
from megatron.training.components.exchange_overflow import ExchangeOverflow
from megatron.training.components.expert_loads import KIND as EXPERT_LOADS
from megatron.training.components.expert_loads import ExpertLoadBalance
from megatron.training.components.expert_report import ExpertReport
from megatron.training.components.grad_compression import ERROR_KIND, CompressionState
from megatron.training.components.head_weights import HeadWeights
from megatron.training.components.kept_casts import KeptCasts
from megatron.training.components.live_control import LiveControl
from megatron.training.components.nonfinite import NonFiniteCheck
from megatron.training.components.optimizer_state import OptimizerState
from megatron.training.components.passed_steps import PassedSteps
from megatron.training.components.power import PowerMeter
from megatron.training.components.slow_ranks import SlowRanks
from megatron.training.components.source_losses import SourceLosses
from megatron.training.components.spikes import SpikeCheck, SpikeGuard
from megatron.training.components.state_checksums import StateChecksums
from megatron.training.components.store_prefetch import StorePrefetch
from megatron.training.diloco.component import Diloco
from megatron.training.diloco.outer_optimizer import PARAM
from megatron.training.elastic import ElasticReplica
from megatron.training.frozen_models import FrozenModelInputs
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.replay_check.component import ReplayCheck
from megatron.training.stop import StopRequest
from megatron.training.trainer import Trainer

if TYPE_CHECKING:
    from megatron.training.local_checkpoints import NodeCheckpoints


class Feature(Protocol):
    """A class of components."""

    def create(self, trainer: Trainer) -> Component | None:
        """Return the component, or None if the configuration does not ask for it."""


FEATURES: Sequence[Feature] = (
    ElasticReplica,  # first, because the others see the gradients of all replicas
    ReplayCheck,
    CompressionState,
    ExpertLoadBalance,
    ExchangeOverflow,
    SpikeGuard,
    PassedSteps,
    AverageWeights,
    KeptCasts,
    AdapterBase,
    FrozenModelInputs,
    HeadWeights,
    Diloco,
    ExpertReport,
    SourceLosses,
    SlowRanks,
)
"""Features with state, or which act around a step, in the order in which they act."""

UNUSED: Mapping[str, tuple[type[Component], str]] = {
    ERROR_KIND: (CompressionState, "the checkpoint's errors of compressed gradients are not used"),
    EXPERT_LOADS: (ExpertLoadBalance, "the checkpoint's loads of experts are not used"),
    f"{PARAM}.": (Diloco, "the checkpoint is a DiLoCo replica's: it continues from this replica's weights, alone"),
}
"""Beginnings of kinds of tensors in a checkpoint -> the feature, and a note if the run does not have it."""


def build_components(trainer: Trainer) -> list[Component]:
    """Create the components that the configuration asks for, before the start of the run is loaded."""
    created = [component for feature in FEATURES if (component := feature.create(trainer)) is not None]
    kinds = {type(component) for component in created}
    unused = {kind: note for kind, (feature, note) in UNUSED.items() if feature not in kinds}
    state = [OptimizerState(trainer.optimizer, trainer.mesh.world, unused), StateChecksums(trainer)]
    return [*state, trainer.scaler, trainer.reader, *created]


def build_callbacks(
    trainer: Trainer,
    log: RunLogger,
    stop: StopRequest,
    checkpointer: Checkpointer,
    others: NodeCheckpoints | None = None,
) -> list[Component]:
    """Create the components that act in the loop alone, when the start of the run is loaded."""
    config, logging = trainer.config, trainer.config.logging
    callbacks: list[Component] = []
    if (prefetch := StorePrefetch.create(trainer, stop)) is not None:
        callbacks.append(prefetch)
    callbacks.append(NonFiniteCheck(trainer))
    if (spikes := SpikeCheck.create(trainer)) is not None:
        callbacks.append(spikes)
    if logging.run_dir is not None:  # a profile, and other acts, may be requested at any time
        callbacks.append(PowerMeter(trainer))
        callbacks.append(LiveControl(trainer, stop, checkpointer))
        callbacks.append(StepProfiler(trainer, log, lambda: stop.requests))
    if logging.log_health_interval is not None:
        callbacks.append(HealthReport(trainer, logging.log_health_interval))
    if (interval := logging.check_weight_hash_across_dp_replicas_interval) is not None:
        callbacks.append(ReplicaCheck(trainer, interval))
    if logging.sample_prompts is not None and config.training.eval_iters:
        from megatron.training.callbacks.sample_prompts import SamplePrompts  # optional

        callbacks.append(SamplePrompts(trainer, Path(logging.sample_prompts)))
    if config.evaluation.evaluate_tasks and not config.training.skip_train:
        from megatron.training.callbacks.evaluate_tasks import EvaluateTasks  # optional

        callbacks.append(EvaluateTasks(trainer))
    checkpoint = config.checkpoint
    if checkpoint.save is not None and checkpoint.save_hf_interval is not None:
        callbacks.append(HuggingFaceExport(trainer, Path(checkpoint.save), checkpoint.save_hf_interval))
    if others is not None:
        callbacks += others.callbacks(trainer)
    return callbacks


def plugin_callbacks(trainer: Trainer) -> list[Component]:
    """Create the callbacks that plugins have registered, before the start of the run is loaded.

    Raises:
        TypeError: if a plugin registers something else.
    """
    callbacks: list[Component] = []
    for name, create in registered("callback").items():
        with name_in_errors(name, "its creation"):
            callback = create(trainer)
            if not isinstance(callback, Callback):
                raise TypeError(f"a {type(callback).__name__} does not derive from Callback")
        callback.plugin, callback.name = name, f"callback {name}"
        callbacks.append(callback)
    return callbacks
