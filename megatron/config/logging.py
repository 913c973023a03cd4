"""Console output, metric files and experiment trackers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from os.path import exists, isdir, isfile  # unlike pathlib's they do not raise for a very long name
from pathlib import Path
from typing import ClassVar

from megatron.config.errors import Problem
from megatron.config.option import MegatronOption, Need, Run, option
from megatron.config.text import flag
from megatron.config.training import EVALUATION

WANDB = Need("wandb_project")
TIMERS = Need("timing_log_level>0", "--timing-log-level above 0")


@dataclass(frozen=True)
class LoggingConfig:
    """Console output, metric files and experiment trackers."""

    log_interval: int = option(
        10, role="free", at_least=1, megatron=MegatronOption("100", "a log line every ten steps")
    )
    """Steps between log lines. The loss is the mean over them, the gradient norm that of the last."""
    run_dir: str | None = option(None, role="start")
    """Folder for the resolved config, metrics.jsonl, plots and profiles."""
    tensorboard_dir: str | None = option(None, role="start")
    """Folder for TensorBoard files."""
    wandb_project: str | None = option(None, role="start", spellings=("--wandb-project-name",))
    """Weights & Biases project. WANDB_MODE=offline keeps the data on disk."""
    wandb_exp_name: str | None = option(None, role="start", needs=WANDB, spellings=("--wandb-name",))
    """Name of the Weights & Biases run. Default: the name of run_dir."""
    wandb_save_dir: str | None = option(None, role="start", needs=WANDB)
    """Folder for files of Weights & Biases. Default: run_dir, or the current folder."""
    wandb_entity: str | None = option(None, role="start", needs=WANDB, spellings=("--wandb-entity-name",))
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
    moe_per_layer_logging: bool = option(False, role="start", needs="num_experts")
    """Log the metrics of experts, and the losses of routers, of every layer by names of their own."""
    save_tokens_per_expert_interval: int | None = option(
        None, role="start", at_least=1, needs=("num_experts", "run_dir")
    )
    """Steps between records of the loads of all experts in metrics.jsonl, from which their picture is drawn. Default: a
    hundredth of the run."""
    check_weight_hash_across_dp_replicas_interval: int | None = option(None, role="start", at_least=1)
    """Steps between checks that data-parallel replicas have bitwise equal weights. Default: never."""

    refused: ClassVar = """
    sample_prompts and pipeline_model_parallel_size>1
    E708 --sample-prompts generates text without --pipeline-model-parallel-size only
      fix: --pipeline-model-parallel-size 1 | drop --sample-prompts

    sample_prompts and expert_model_parallel_size>1
    E708 --sample-prompts generates text without --expert-model-parallel-size only
      fix: --expert-model-parallel-size 1 | drop --sample-prompts

    sample_prompts and sequence_parallel
    E708 --sample-prompts generates text without --sequence-parallel only
      fix: --no-sequence-parallel | drop --sample-prompts
    """

    def check_empty_names(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Reject empty names of folders and projects."""
        for option_flag in (flag(each.name) for each in fields(self) if getattr(self, each.name) == ""):
            yield Problem("E702", f"{option_flag} '' is empty", (f"drop {option_flag}", f"{option_flag} NAME"))

    def check_run_folder(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that ``--run-dir`` is a folder or can be created. Rank 0 finds out later whether it is writable."""
        if not self.run_dir:
            return
        folder = Path(self.run_dir)
        existing = next(path for path in (folder, *folder.parents) if exists(path))
        if not isdir(existing):
            where = "it" if existing == folder else str(existing)
            sentence = f"--run-dir {folder}: {where} is a file, not a folder"
            yield Problem("E701", sentence, (f"--run-dir {existing}-run",))

    def check_sample_prompts(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that the prompts can be read."""
        path = self.sample_prompts
        if path is not None and config.training.eval_iters and not isfile(path):
            sentence = f"--sample-prompts {path}: there is no such file; it has a prompt per line"
            yield Problem("E708", sentence, ("drop --sample-prompts",))
