"""Options of logging and profiling."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import option


@dataclass(frozen=True)
class LoggingConfig:
    """Console output, metric files and experiment trackers."""

    log_interval: int = option(
        10, "Steps between log lines. The loss is the mean over them, the gradient norm that of the last.", at_least=1
    )
    run_dir: str | None = option(None, "Folder for the resolved config, metrics.jsonl, plots and profiles.")
    tensorboard_dir: str | None = option(None, "Folder for TensorBoard files.")
    wandb_project: str | None = option(None, "Weights & Biases project. WANDB_MODE=offline keeps the data on disk.")
    wandb_exp_name: str | None = option(None, "Name of the Weights & Biases run. Default: the name of run_dir.")
    wandb_save_dir: str | None = option(
        None, "Folder for files of Weights & Biases. Default: run_dir, or the current folder."
    )
    wandb_entity: str | None = option(None, "Weights & Biases user or team. Default: that of the login.")
    timing_log_level: int = option(
        0, "Timers logged: 0 for the whole step, 1 also its phases, 2 also their parts.", at_least=0, at_most=2
    )
    timing_log_option: str = option(
        "minmax", "Values logged of each timer over all ranks.", choices=("max", "minmax", "all")
    )
    log_health_interval: int | None = option(
        None,
        "Steps between reports on gradients, updates and activations of every layer. Default: never.",
        at_least=1,
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None, "Steps between checks that data-parallel replicas have bitwise equal weights. Default: never.", at_least=1
    )


@dataclass(frozen=True)
class ProfilingConfig:
    """Profiles of selected steps, written to run_dir. docs/operations.md explains how to profile a running job."""

    profile: bool = option(False, "Record a PyTorch profile (Chrome trace) of the selected steps.")
    profile_memory: bool = option(False, "Record memory allocations in those steps: a snapshot on GPU, a curve on CPU.")
    profile_pipeline: bool = option(False, "Record the time of every pipeline action in those steps, on all ranks.")
    profile_step_start: int = option(10, "First recorded step.", at_least=1)
    profile_step_end: int = option(12, "Step before which recording ends.", at_least=2)
    profile_ranks: tuple[int, ...] = option((0,), "Ranks that record.", at_least=0)
    pytorch_profiler_collect_shapes: bool = option(False, "Record the shapes of operator inputs.")
    pytorch_profiler_collect_callstack: bool = option(False, "Record Python call stacks.")
