"""What a run does about faults: checks, records, and what follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.errors import Problem
from megatron.config.option import Need, Run, option

REPLAY = Need("replay_check")


@dataclass(frozen=True)
class ReliabilityConfig:
    """Faults of hardware, data and numbers: how they are found, recorded and survived."""

    replay_check: int | None = option(None, role="free", at_least=1, example=50)
    """Compute every N-th step again, also the first of a start and those that are saved, and compare to the bit."""
    replay_check_part: str = option("all", role="free", choices=("all", "rotate"), needs=REPLAY)
    """What of a step is computed again: all micro-batches, or one of them in turn and all in every n-th check."""
    on_corruption: str = option("stop", role="free", choices=("stop", "exclude", "report"), needs=REPLAY)
    """After a difference: end the run, and refuse to resume (stop); end it, and let a restart resume from a checkpoint
    before it without the node (exclude); or record it and go on (report)."""

    refused: ClassVar = """
    replay_check and cuda_graph=optimizer|step
    E981 --replay-check {replay_check} repeats steps eagerly, and --cuda-graph {cuda_graph} captures them
      fix: --cuda-graph none | drop --replay-check

    replay_check and diloco_sync_interval
    E981 --replay-check {replay_check} is untested with --diloco-sync-interval
      fix: drop --replay-check | drop --diloco-sync-interval

    replay_check and grad_compression!=none
    E981 --replay-check {replay_check}: --grad-compression keeps errors, which a repeated step would change
      fix: drop --replay-check | --grad-compression none

    replay_check and optimizer_cpu_offload
    E981 --replay-check {replay_check} is untested with --optimizer-cpu-offload
      fix: drop --replay-check | drop --optimizer-cpu-offload

    replay_check and local_save
    E981 --replay-check {replay_check} is untested with --local-save: nodes could resume from what is suspect
      fix: drop --replay-check | drop --local-save
    """

    def check_suspects(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that suspect checkpoints can be set aside."""
        save = config.checkpoint.save
        if self.replay_check is not None and save is not None and "://" in save:
            sentence = f"--replay-check {self.replay_check} sets suspect checkpoints aside on disks only, not in {save}"
            yield Problem("E981", sentence, ("drop --replay-check", "--save DIR"))
