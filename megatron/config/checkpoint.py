"""Folders and intervals of checkpoints, and the start of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from megatron.config.option import ZERO_IS_NONE, Need, option
from megatron.config.training import TRAINING_STEPS

RESUME_MODES = ("exact", "new-schedule", "new-phase", "weights-only")
"""Resume modes, from the one that restores most of a checkpoint to the one that restores least."""

SAVE = Need("save", "a folder to save to")
LOCAL_SAVE = Need("local_save")
KEEP_LAST = Need("not save or keep_last", "--keep-last")
START_POINT = Need("load or save", "a checkpoint to start from")


@dataclass(frozen=True)
class CheckpointConfig:
    """Folders and intervals of checkpoints, retention, and the start of a run."""

    save: str | None = option(None, role="start")
    """Folder for checkpoints, or s3://BUCKET/RUN. If it holds checkpoints, the run resumes from the newest valid
    one."""
    save_interval: int | None = option(
        None,
        role="start",
        at_least=1,
        needs=(SAVE, TRAINING_STEPS),
        megatron=ZERO_IS_NONE,
        spellings=("--persistent-save-interval",),
    )
    """Steps between checkpoints. Default: only when the run ends or stops."""
    keep_last: int | None = option(None, role="start", at_least=1, needs=(SAVE, TRAINING_STEPS))
    """Number of checkpoints to keep; older ones are deleted after each save. Default: all."""
    keep_every: int | None = option(None, role="start", at_least=1, needs=(SAVE, KEEP_LAST, TRAINING_STEPS))
    """keep_last: never delete checkpoints of steps that are a multiple of this."""
    async_save: bool = option(False, role="start", needs=(SAVE, TRAINING_STEPS))
    """Write checkpoints in the background, from a copy in host memory."""
    save_hf_interval: int | None = option(None, role="start", at_least=1, needs=(SAVE, TRAINING_STEPS))
    """Steps between checkpoints that are exported to Hugging Face, to the folder hf in save, while training goes on. A
    multiple of save_interval."""
    local_save: str | None = option(None, role="start", needs=TRAINING_STEPS)
    """Folder on each node's disk or memory for checkpoints between those in save; {node} is the node number."""
    local_save_interval: int | None = option(None, role="start", at_least=1, needs=(LOCAL_SAVE, TRAINING_STEPS))
    """Steps between checkpoints in local_save."""
    load: str | None = option(None, role="start")
    """Start point when the save folder holds no checkpoint: a checkpoint or a folder of checkpoints, saved in any
    layout, or megatron:DIR for those of Megatron-LM; hf:DIR or hf:ORG/NAME (on the hub) for the weights and
    architecture of a Hugging Face model; dcp:DIR (torch.distributed.checkpoint), deepspeed:DIR or nanotron:DIR for the
    weights of other programs."""
    pretrained_checkpoint: str | None = option(None, role="start")
    """The model that fine-tuning starts from, in the forms of load; its weights alone are read, once. With lora_rank
    they stay frozen: every start reads them, and checkpoints in save hold the adapters alone."""
    ckpt_step: int | None = option(None, role="start", at_least=0, needs=START_POINT)
    """Step of the checkpoint to load. Default: the newest valid one."""
    exit_on_missing_checkpoint: bool = option(False, role="start", needs=START_POINT)
    """Stop if neither save nor load holds a checkpoint, instead of starting from scratch."""
    resume_mode: str = option(
        "exact", role="start", choices=RESUME_MODES, aliases={"--finetune": "weights-only"}, needs=START_POINT
    )
    """Restore from load, or without it from save: exact (everything), new-schedule (everything, but batch size, run
    length, optimizer settings and schedules from the flags), new-phase (weights, moments and counters: all lengths
    count from there), or weights-only."""

    refused: ClassVar = """
    lora_rank and not pretrained_checkpoint
    E806 --lora-rank {lora_rank} trains adapters of a model, and none is given
      fix: --pretrained-checkpoint hf:DIR | --pretrained-checkpoint RUN

    save and save_hf_interval%save_interval
    E805 --save-hf-interval {save_hf_interval} is not a multiple of --save-interval {save_interval}
      fix: --save-hf-interval {save_hf_interval%save_interval}

    save_hf_interval and save and not save_interval
    E805 --save-hf-interval needs --save-interval, because it exports checkpoints
      fix: --save-interval {save_hf_interval} | drop --save-hf-interval
    """

    @property
    def first_start(self) -> CheckpointConfig:
        """The same with ``pretrained_checkpoint`` in the place of ``load``, if that is not set or is ``save``."""
        if self.pretrained_checkpoint is None or self.load not in (None, self.save):
            return self
        return replace(self, load=self.pretrained_checkpoint, resume_mode="weights-only")
