"""What a run tells of itself: to the console, to files, to trackers, in profiles."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import option


@dataclass(frozen=True)
class LoggingConfig:
    """What a run prints and leaves behind."""

    log_interval: int = option(
        10, "Steps between progress lines; the loss is their mean, the gradient norm the last one's.", at_least=1
    )
    run_dir: str | None = option(None, "Folder for the resolved config, metrics.jsonl, pictures and profiles.")
    tensorboard_dir: str | None = option(None, "Folder for TensorBoard files.")
    wandb_project: str | None = option(
        None, "Project of Weights & Biases to report to. WANDB_MODE=offline keeps the report on the disk."
    )
    wandb_exp_name: str | None = option(None, "Name of the run in Weights & Biases. Default: of run_dir.")
    wandb_save_dir: str | None = option(
        None, "Folder for the files of Weights & Biases. Default: run_dir, else the current one."
    )
    wandb_entity: str | None = option(None, "User or team of the project. Default: that of the login.")
    timing_log_level: int = option(
        0, "Timers besides that of the whole step: 1 for its phases, 2 for their parts.", at_least=0, at_most=2
    )
    timing_log_option: str = option(
        "minmax", "What is told of each timer over all ranks.", choices=("max", "minmax", "all")
    )
    log_health_interval: int | None = option(
        None,
        "Steps between reports on gradients, updates and activations of every layer. Default: none.",
        at_least=1,
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None, "Steps between checks that all copies of the weights are equal to the bit. Default: none.", at_least=1
    )


@dataclass(frozen=True)
class ProfilingConfig:
    """Profiles of chosen steps, kept in the run's folder; also from a running job, see docs/operations.md."""

    profile: bool = option(False, "Record a profile (PyTorch's, as a Chrome trace) of chosen steps.")
    profile_memory: bool = option(False, "Record every allocation in those steps: a snapshot of a GPU, else a curve.")
    profile_pipeline: bool = option(False, "Record when each action of the pipeline ran in those steps, on every rank.")
    profile_step_start: int = option(10, "First step recorded.", at_least=1)
    profile_step_end: int = option(12, "The first step after it that is not.", at_least=2)
    profile_ranks: tuple[int, ...] = option((0,), "Ranks that record.", at_least=0)
    pytorch_profiler_collect_shapes: bool = option(False, "Record the shapes of operands.")
    pytorch_profiler_collect_callstack: bool = option(False, "Record the lines of Python that called.")
