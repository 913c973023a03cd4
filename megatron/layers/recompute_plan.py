"""Plan of the activations to recompute in backward; without torch, for the model and the planner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.training import TrainingConfig


@dataclass(frozen=True)
class RecomputePlan:
    """Activation recomputation of consecutive blocks, those of a pipeline stage."""

    # Modules recomputed inside every block (selective recomputation).
    modules: frozenset[str] = frozenset()
    # Consecutive blocks that are recomputed together; 0 for none.
    group: int = 0
    # Number of first blocks that are recomputed as a whole.
    blocks: int = 0
    # Rows that an MLP computes at a time, and again in backward; None for all at once.
    mlp_chunk_size: int | None = None

    @classmethod
    def from_config(cls, config: TrainingConfig, num_blocks: int) -> RecomputePlan:
        """Return the plan that the recompute flags give ``num_blocks`` blocks."""
        chunk_size = config.mlp_chunk_size
        match config.recompute_granularity, config.recompute_method:
            case "selective", _:
                return cls(frozenset(config.recompute_modules), mlp_chunk_size=chunk_size)
            case "full", "block":
                return cls(frozenset(), 1, min(config.recompute_num_layers or num_blocks, num_blocks), chunk_size)
            case "full", _:
                return cls(frozenset(), config.recompute_num_layers or 1, num_blocks, chunk_size)
        return cls(mlp_chunk_size=chunk_size)

    @property
    def drops_activation(self) -> bool:
        """True if the activation of an MLP is recomputed alone; a recomputed MLP keeps none."""
        return "activation" in self.modules and "mlp" not in self.modules

    def segments(self, num_blocks: int, training: bool = True) -> Iterator[tuple[range, bool]]:
        """Yield consecutive blocks, and whether they are recomputed together; the others are alone.

        Args:
            num_blocks: of the stage.
            training: False for a forward pass without backward.
        """
        recomputed = min(self.blocks, num_blocks) if training else 0
        for start in range(0, recomputed, self.group or 1):
            yield range(start, min(start + self.group, recomputed)), True
        for number in range(recomputed, num_blocks):
            yield range(number, number + 1), False
