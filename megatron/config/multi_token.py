"""Multi-token prediction: its options, which are those of the model, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.option import MAX_LAYERS, ZERO_IS_NONE, Need, Run, option
from megatron.config.text import counted

DEPTHS = Need("mtp_num_layers")

LATER_TOKENS, LATER_MASK, LATER_WEIGHTS = "later_tokens", "later_mask", "later_weights"
"""Names in ``MicroBatch.extra``: the tokens 1, 2, .. further, int64 ``[b, s, depths + 1]``; 1 where the prediction of a
depth counts, ``[b, s, depths]``; and the weights of the losses of the depths, fp64 ``[depths]``."""


@dataclass(frozen=True, init=False, eq=False, repr=False)
class MultiTokenOptions:
    """Options of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    The output of the model predicts the next token. Depth k takes it together with the next k tokens, one more at each
    depth, and predicts the token after them.
    """

    mtp_num_layers: int | None = option(
        None, role="shape", at_least=1, at_most=MAX_LAYERS, droppable=True, megatron=ZERO_IS_NONE
    )
    """Number of further tokens that training predicts at each position, with a block for each. Evaluation and
    generation do without these blocks. Default: none."""
    mtp_loss_scaling_factor: float = option(0.1, role="schedule", above=0, needs=DEPTHS)
    """Weight of multi-token prediction: the mean of the losses of its depths is multiplied by this and added to the
    loss. The logged loss is that of the next token."""
    mtp_use_repeated_layer: bool = option(False, role="shape", droppable=True, needs=DEPTHS)
    """Use one layer for all depths of multi-token prediction, one after the other. Its gradient is the sum over the
    depths, and the losses of its router are their mean."""
    mtp_detach_heads: bool = option(False, role="schedule", needs=DEPTHS)
    """Train only the layers of multi-token prediction by its losses: no gradient passes to the hidden states, the
    embedding and the output layer of the model. These layers are clipped by a gradient norm of their own."""

    refused: ClassVar = """
    mtp_num_layers and position_embedding_type=learned_absolute
    E119 --mtp-num-layers needs rotary positions or none: its embeddings are those of later tokens, at other positions
      fix: --position-embedding-type rope | --position-embedding-type none | drop --mtp-num-layers

    mtp_num_layers>=seq_length
    E119 --mtp-num-layers {mtp_num_layers}: a sample of {seq_length} tokens has no label so far ahead
      fix: --seq-length {mtp_num_layers*2} | drop --mtp-num-layers

    mtp_num_layers and objective=dpo|distillation
    E119 --mtp-num-layers predicts tokens, which --objective {objective} does not train
      fix: --objective next_token | drop --mtp-num-layers

    mtp_num_layers and attention_prefix>1
    E119 --mtp-num-layers needs causal attention: tokens of a prefix see the labels of further predictions
      fix: --attention-pattern global | drop --mtp-num-layers

    mtp_num_layers and lora_rank
    E119 --mtp-num-layers has no adapters, and --lora-rank trains nothing else
      fix: drop --mtp-num-layers | drop --lora-rank
    """

    @property
    def prediction_depths(self) -> int:
        """Number of tokens after the next one that training predicts at each position."""
        return self.mtp_num_layers or 0

    @property
    def prediction_layers(self) -> int:
        """Number of different layers that predict these tokens."""
        return min(self.prediction_depths, 1) if self.mtp_use_repeated_layer else self.prediction_depths

    @property
    def head_losses(self) -> tuple[str, ...]:
        """Names under which the losses of the depths are logged."""
        return tuple(f"mtp loss {depth + 1}" for depth in range(self.prediction_depths))

    @property
    def norm_groups(self) -> int:
        """Number of groups of parameters that are clipped apart."""
        return 1 + (self.prediction_depths > 0 and self.mtp_detach_heads)

    def row_model(self, config: Run, world_size: int) -> str:
        """Return the number of further tokens."""
        if not self.mtp_num_layers:
            return ""
        one, layers = self.prediction_layers < self.prediction_depths, config.model.mtp_hybrid_override_pattern
        shared = f" by {'one block of ' * one}layers {layers}" if layers else " by one layer" * one
        return (
            f"predicts {counted(self.prediction_depths, 'further token')}{shared}{', detached' * self.mtp_detach_heads}"
        )
