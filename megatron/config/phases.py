"""Options of the phases of a run, and a phase as the run takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.option import Need, WithPluginOptions, option

PLANNED = Need("phases or resume_mode=new-phase", "--phases, or --resume-mode new-phase")


@dataclass(frozen=True, init=False, eq=False, repr=False)
class PhaseOptions(WithPluginOptions):
    """Options of the phases of a run."""

    phases: str | None = option(None, role="start")
    """FILE.yaml of the phases of the run: a name, a number of tokens, and the options that change with each."""
    phase_name: str | None = option(None, role="start", needs=PLANNED)
    """Name of a phase that begins with resume_mode new-phase, in logs and plots. With phases, they have the names of
    the file."""

    refused: ClassVar = """
    phases and not save
    E340 --phases needs --save: a phase ends with a checkpoint, from which the next one begins
      fix: --save checkpoints

    phases and plan=auto
    E340 --phases does not support --plan auto: each phase would have a layout of its own
      fix: drop --plan

    phases and lora_rank
    E340 --phases does not support --lora-rank
      fix: drop --phases

    phases and diloco_sync_interval
    E340 --phases does not support DiLoCo: its replicas end a phase at different steps
      fix: drop --diloco-sync-interval | drop --phases

    resume_mode=new-phase and diloco_sync_interval
    E340 --resume-mode new-phase does not support DiLoCo: its replicas would begin the phase at different steps
      fix: drop --diloco-sync-interval

    resume_mode=new-phase and lora_rank
    E340 --resume-mode new-phase does not support --lora-rank: adapters of a phase are a run of their own
      fix: drop --resume-mode

    phases and num_epochs
    E340 --num-epochs is the length of a run, and phases have lengths of their own
      fix: drop --num-epochs
    """


@dataclass(frozen=True)
class Phase:
    """A phase of a run, ready to be taken."""

    config: Any  # a RunConfig, resolved
    notes: tuple[str, ...] = ()  # one line each
    steps: int = 0
    tokens: int = 0

    @property
    def name(self) -> str:
        """Its name; empty for a run of one phase."""
        return self.config.training.phase_name or ""
