"""Replicas that train apart (DiLoCo)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.errors import Problem
from megatron.config.option import Need, Run, option
from megatron.config.text import counted

DILOCO = Need("diloco_sync_interval")


@dataclass(frozen=True)
class DilocoConfig:
    """Replicas on slow networks that train apart and average their weights from time to time (DiLoCo)."""

    diloco_sync_interval: int | None = option(None, role="schedule", at_least=1)
    """Steps between two synchronisations of a weight with the other replicas (H in arXiv 2311.08105)."""
    diloco_server: str | None = option(None, role="start", needs=DILOCO)
    """HOST:PORT of tools/diloco_server.py, the same for all replicas."""
    diloco_secret_file: str | None = option(None, role="start", needs=DILOCO)
    """File with a secret of 16 characters or more, the same for the server and all replicas; others are refused."""
    diloco_replicas: int = option(2, role="schedule", at_least=1, needs=DILOCO)
    """Replicas that the samples are divided among, and that a start waits for, up to diloco_timeout."""
    diloco_replica: int | None = option(None, role="start", at_least=0, needs=DILOCO)
    """Index of this replica, from 0. Default: that of its checkpoint, or the first one without a living replica."""
    diloco_outer_lr: float = option(0.7, role="schedule", above=0, needs=DILOCO)
    """Learning rate of the outer SGD."""
    diloco_outer_momentum: float = option(0.9, role="schedule", at_least=0, below=1, needs=DILOCO)
    """Nesterov momentum of the outer SGD."""
    diloco_fragments: int = option(1, role="schedule", at_least=1, needs=DILOCO)
    """Parts of the model that are synchronised in turn, one every diloco_sync_interval / diloco_fragments steps."""
    diloco_delay: int = option(0, role="schedule", at_least=0, needs=DILOCO)
    """Steps taken while a synchronisation is in progress (arXiv 2501.18512)."""
    diloco_mix: float = option(0.0, role="schedule", at_least=0, below=1, needs=DILOCO)
    """Share of a replica's own weights in those after a synchronisation; the rest are the outer weights."""
    diloco_int8: bool = option(False, role="schedule", needs=DILOCO)
    """Send outer gradients as int8 with stochastic rounding, except weights that several ranks of a replica hold."""
    diloco_timeout: float = option(60.0, role="start", above=0, needs=DILOCO)
    """Seconds without a heartbeat after which a replica counts as dead."""

    state_copies: ClassVar = {"outer": ("diloco_sync_interval", 2)}  # outer weights and momentum

    refused: ClassVar = """
    diloco_sync_interval and optimizer_cpu_offload
    E941 --optimizer-cpu-offload is untested with --diloco-sync-interval
      fix: drop --optimizer-cpu-offload | drop --diloco-sync-interval

    diloco_sync_interval and local_save
    E953 --local-save does not support DiLoCo, whose outer weights nodes do not send each other
      fix: drop --local-save | drop --diloco-sync-interval

    diloco_sync_interval and diloco_fragments>num_layers
    E951 --diloco-fragments {diloco_fragments}: a fragment has at least one of the model's {num_layers} layers
      fix: --diloco-fragments {num_layers}

    diloco_sync_interval%diloco_fragments and not diloco_fragments>num_layers
    E951 --diloco-sync-interval {diloco_sync_interval} is not a multiple of --diloco-fragments {diloco_fragments}
      fix: --diloco-sync-interval {diloco_sync_interval%diloco_fragments}

    diloco_sync_interval and diloco_replica>=diloco_replicas
    E952 --diloco-replica {diloco_replica}: the {diloco_replicas} replicas have the indices 0 to {diloco_replicas-1}
      fix: --diloco-replica {diloco_replicas-1} | --diloco-replicas {diloco_replica+1}

    diloco_sync_interval and async_save and diloco_delay>0
    E953 --async-save does not support --diloco-delay: its buffer has no room for averages to be merged
      fix: --no-async-save | --diloco-delay 0
    """

    @property
    def streams(self) -> int:
        """Streams that the training samples are dealt to."""
        return 1 if self.diloco_sync_interval is None else self.diloco_replicas

    def check_diloco_server(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that there is a server to meet at, and that its address can be read."""
        fix = "--diloco-server 127.0.0.1:29400"
        if not self.diloco_sync_interval or config.training.skip_train:
            return
        if self.diloco_server is None:
            place = "the --diloco-server at which replicas meet (tools/diloco_server.py)"
            yield Problem("E950", f"--diloco-sync-interval needs {place}", (fix, "drop --diloco-sync-interval"))
            return
        host, _, port = self.diloco_server.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            yield Problem("E950", f"--diloco-server {self.diloco_server} is not HOST:PORT", (fix,))

    def check_diloco_delay(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that rounds do not overlap."""
        apart, more = divmod(self.diloco_sync_interval or 0, self.diloco_fragments)
        if apart and not more and self.diloco_delay > apart:
            sentence = f"--diloco-delay {self.diloco_delay} is longer than the {apart} steps between two rounds"
            yield Problem("E951", sentence, (f"--diloco-delay {apart}",))

    def note_lost_steps(self, config: Run, world_size: int) -> Iterator[str]:
        """Yield a note if the steps during an exchange are lost."""
        if self.diloco_sync_interval and self.diloco_delay and not self.diloco_mix:
            yield (
                f"--diloco-delay {self.diloco_delay} without --diloco-mix: rounds undo the steps of their exchange; "
                "--diloco-mix 0.5 keeps half of them"
            )

    def row_diloco(self, config: Run, world_size: int) -> str:
        """Return the replicas, their rounds, and the outer update."""
        if self.diloco_sync_interval is None:
            return ""
        fragments = self.diloco_fragments
        every = f"every {counted(self.diloco_sync_interval, 'step')}"
        if fragments > 1:
            steps = counted(self.diloco_sync_interval // fragments, "step")
            every += f", one of {fragments} fragments every {steps}"
        if self.diloco_delay:
            every += f", exchanged during {counted(self.diloco_delay, 'step')}, mix {self.diloco_mix:g}"
        rounded = " as int8" if self.diloco_int8 else ""
        update = f"outer SGD {self.diloco_outer_lr:g}, Nesterov momentum {self.diloco_outer_momentum:g}"
        return f"{counted(self.diloco_replicas, 'replica')}, synchronised{rounded} {every}; {update}"
