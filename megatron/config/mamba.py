"""Mamba-2: its options, which are those of the model, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar, TypeAlias

from megatron.config.errors import Problem
from megatron.config.option import MAX_SIZE, Need, Run, option
from megatron.config.text import divisors, flag_fixes, multiples_as_fixes, nearest

MAMBA = Need("has_mamba", "layers of Mamba-2")

Model: TypeAlias = Any
"""The model, a :class:`megatron.config.model.ModelConfig`, which inherits the class of options."""

MAMBA_MIXER = "mamba2"
"""Name of the mixer."""

SEGMENT_CHUNKS = 16
"""Chunks of the scan in PyTorch that are computed at a time, which bounds the memory of their scores."""


@dataclass(frozen=True, init=False, eq=False, repr=False)
class MambaOptions:
    """Options of Mamba-2 (SSD, arXiv 2405.21060)."""

    mamba_state_dim: int = option(128, role="shape", at_least=1, at_most=MAX_SIZE, needs=MAMBA)
    """Channels of the state of each channel of a head."""
    mamba_head_dim: int = option(64, role="shape", at_least=1, at_most=MAX_SIZE, needs=MAMBA)
    """Channels of a head of Mamba-2."""
    mamba_num_groups: int = option(8, role="shape", at_least=1, at_most=MAX_SIZE, needs=MAMBA)
    """Groups of heads that write to their states, and read from them, with the same vectors B and C."""
    mamba_num_heads: int | None = option(None, role="shape", at_least=1, at_most=MAX_SIZE, needs=MAMBA)
    """Number of heads of Mamba-2. Default: 2 x hidden_size / mamba_head_dim."""
    mamba_conv_kernel_dim: int = option(4, role="shape", at_least=1, at_most=MAX_SIZE, needs=MAMBA)
    """Tokens that the causal convolution before the scan of Mamba-2 spans."""
    mamba_conv_bias: bool = option(True, role="shape", needs=MAMBA)
    """Use a bias in this convolution."""
    mamba_proj_bias: bool = option(False, role="shape", needs=MAMBA)
    """Use biases in the projections of Mamba-2, which do not follow --add-bias-linear."""
    mamba_dt_min: float = option(0.0, role="function", at_least=0, needs=MAMBA)
    """Least step size of Mamba-2, after softplus."""
    mamba_dt_max: float | None = option(None, role="function", above=0, example=100, needs=MAMBA)
    """Largest step size. Default: no limit."""
    mamba_norm_groups: int | None = option(None, role="function", at_least=1, at_most=MAX_SIZE, needs=MAMBA)
    """Groups of channels that the norm before the output projection of Mamba-2 divides by an RMS each; 1 is the whole
    width. Default: mamba_num_groups."""
    mamba_norm_before_gate: bool = option(False, role="function", needs=MAMBA)
    """Multiply by the gate after this norm, instead of before it."""
    mamba_chunk_size: int = option(128, role="free", at_least=1, at_most=1024, needs=MAMBA)
    """Tokens of a chunk of the scan, which changes its result by rounding only."""

    other_meanings: ClassVar = """
    --norm-epsilon and has_mamba and not norm_epsilon=1e-05
      norm_epsilon is that of the norm inside of Mamba-2, too, which is 1e-5 in Megatron-LM
    """

    refused: ClassVar = """
    has_mamba and not mamba_num_heads and mamba_expanded_size%mamba_head_dim
    E118 2 x hidden size, {mamba_expanded_size}, does not divide into heads of {mamba_head_dim} channels for Mamba-2
      fix: --mamba-num-heads {mamba_num_groups} | --hidden-size {hidden_size%mamba_head_dim}

    has_mamba and mamba_heads%mamba_num_groups
    E118 {mamba_heads} heads of Mamba-2 do not divide into {mamba_num_groups} groups
      fix: --mamba-num-groups 1 | --mamba-num-heads {mamba_heads%mamba_num_groups}

    has_mamba and mamba_norm_groups and mamba_inner_size%mamba_norm_group_count
    E118 {mamba_inner_size} channels of Mamba-2 do not divide into {mamba_norm_group_count} groups for the norm
      fix: drop --mamba-norm-groups | --mamba-norm-groups 1

    has_mamba and mamba_dt_min>mamba_dt_max
    E118 --mamba-dt-min {mamba_dt_min} exceeds --mamba-dt-max {mamba_dt_max}
      fix: drop --mamba-dt-min | drop --mamba-dt-max
    """

    @property
    def has_mamba(self: Model) -> bool:
        """True if Mamba-2 is among the mixers."""
        return any(MAMBA_MIXER in mixers for mixers in self.kinds_of_layers)

    @property
    def mamba_expanded_size(self: Model) -> int:
        """Width of all heads by default."""
        return int(2 * self.hidden_size)

    @property
    def mamba_heads(self) -> int:
        """Number of heads."""
        return self.mamba_num_heads or self.mamba_expanded_size // self.mamba_head_dim

    @property
    def mamba_inner_size(self) -> int:
        """Width of all heads."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def mamba_norm_group_count(self) -> int:
        """Groups of channels of the norm."""
        return self.mamba_norm_groups or self.mamba_num_groups

    def check_mamba_layout(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that heads and groups divide over TP, and heads over the ranks that exchange them for rows."""
        if not self.has_mamba:
            return
        heads, groups, norms = self.mamba_heads, self.mamba_num_groups, self.mamba_norm_groups
        tp, exchange = config.parallel.tensor_model_parallel_size, config.parallel.cp_head_ranks
        if heads % tp or groups % tp or (norms not in (None, 1) and norms % tp):
            common = gcd(heads, groups, groups if norms in (None, 1) else norms)
            fit = [n for n in divisors(common) if world_size % n == 0]
            sentence = f"{heads} heads of Mamba-2 in {groups} groups do not divide over TP {tp}"
            if not (heads % tp or groups % tp):
                sentence = f"{norms} groups of the norm of Mamba-2 do not divide over TP {tp}"
            yield Problem("E116", sentence, flag_fixes("--tensor-model-parallel-size", nearest(tp, fit)))
        elif heads % (tp * exchange):
            over = f"TP {tp} x {exchange} ranks that exchange heads for rows"
            fixes = (*multiples_as_fixes("--mamba-num-heads", heads, tp * exchange), "--cp-comm-type p2p")
            yield Problem("E201", f"{heads} heads of Mamba-2 do not divide over {over}", fixes)
