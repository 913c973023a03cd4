"""Console output, metric files and experiment trackers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import Need, option
from megatron.config.training import EVALUATION

WANDB = Need("wandb_project")

TIMERS = Need("timing_log_level>0", "--timing-log-level above 0")


@dataclass(frozen=True)
class LoggingConfig:
    """Console output, metric files and experiment trackers."""

    log_interval: int = option(10, role="free", at_least=1)
    """Steps between log lines. The loss is the mean over them, the gradient norm that of the last."""
    run_dir: str | None = option(None, role="start")
    """Folder for the resolved config, metrics.jsonl, plots and profiles."""
    tensorboard_dir: str | None = option(None, role="start")
    """Folder for TensorBoard files."""
    wandb_project: str | None = option(None, role="start")
    """Weights & Biases project. WANDB_MODE=offline keeps the data on disk."""
    wandb_exp_name: str | None = option(None, role="start", needs=WANDB)
    """Name of the Weights & Biases run. Default: the name of run_dir."""
    wandb_save_dir: str | None = option(None, role="start", needs=WANDB)
    """Folder for files of Weights & Biases. Default: run_dir, or the current folder."""
    wandb_entity: str | None = option(None, role="start", needs=WANDB)
    """Weights & Biases user or team. Default: that of the login."""
    wandb_group: str | None = option(None, role="start", needs=WANDB)
    """Group of the Weights & Biases run."""
    wandb_tags: tuple[str, ...] = option((), role="start", needs=WANDB)
    """Tags of the Weights & Biases run."""
    wandb_notes: str | None = option(None, role="start", needs=WANDB)
    """Notes on the Weights & Biases run."""
    sample_prompts: str | None = option(None, role="start", needs=EVALUATION)
    """Text file with a prompt per line. After each evaluation, the console, TensorBoard and Weights & Biases get a
    continuation of each."""
    timing_log_level: int = option(0, role="start", at_least=0, at_most=2)
    """Timers logged: 0 for the whole step, 1 also its phases, 2 also their parts."""
    timing_log_option: str = option("minmax", role="start", choices=("max", "minmax", "all"), needs=TIMERS)
    """Values logged of each timer over all ranks."""
    log_health_interval: int | None = option(None, role="start", at_least=1)
    """Steps between reports on gradients, updates and activations of every layer. Default: never."""
    check_weight_hash_across_dp_replicas_interval: int | None = option(None, role="start", at_least=1)
    """Steps between checks that data-parallel replicas have bitwise equal weights. Default: never."""
