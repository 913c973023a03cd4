"""Replicas that train apart (DiLoCo)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import Need, option

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

    @property
    def streams(self) -> int:
        """Streams that the training samples are dealt to."""
        return 1 if self.diloco_sync_interval is None else self.diloco_replicas
