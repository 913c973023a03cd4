"""Exchange of tokens between the ranks of experts: its options, and the sizes of its buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from megatron.config.option import Need, option

EXPERT_RANKS = Need("expert_model_parallel_size>1", "EP above 1")


@dataclass(frozen=True, init=False, eq=False, repr=False)
class DispatchOptions:
    """Options of the exchange of tokens."""

    moe_exchange: str = option(
        "exact", role="free", choices=("exact", "bounded"), kind="dispatcher", needs=EXPERT_RANKS
    )
    """Exchange of tokens between the ranks of experts: exact sends as many rows as there are, and the host waits for
    their numbers once per layer and micro-batch; bounded has buffers of fixed size, and the host never waits.
    Evaluation and generation are exact."""
    moe_exchange_bound: float = option(2.0, role="free", at_least=1, needs=(EXPERT_RANKS, "moe_exchange=bounded"))
    """bounded: the buffers hold what arrives if the tokens of any rank's micro-batch choose the experts of a rank so
    many times as often as the mean. A step that does not fit has no finite loss and changes no weight; the
    run ends and names the bound that holds it, or goes on with --on-nonfinite skip."""
    moe_shared_expert_overlap: bool = option(
        False, role="free", needs=("moe_shared_expert_intermediate_size", EXPERT_RANKS)
    )
    """Compute the shared expert while tokens travel: its first linear on their way to the experts, the second on their
    way back."""
    overlap_moe_expert_parallel_comm: bool = option(False, role="free", needs=EXPERT_RANKS)
    """Process the tokens of a rank in two halves: one travels while the experts compute the other."""

    refused: ClassVar = """
    cuda_graph=step and num_experts and expert_model_parallel_size>1 and moe_exchange=exact
    E214 --cuda-graph step does not support --moe-exchange exact: its numbers of rows differ in every step
      fix: --moe-exchange bounded | --cuda-graph none

    num_experts and expert_model_parallel_size>1 and moe_exchange=bounded and params_dtype=fp16
    E214 --moe-exchange bounded does not support fp16: an overflow of its buffers would lower the loss scale
      fix: --moe-exchange exact | --bf16
    """


class ExchangeBuffers(NamedTuple):
    """Rows in the buffers of the bounded exchange, of a rank and micro-batch."""

    # Sent to each rank, and received from it.
    block: int
    # Of the experts of a rank.
    expert_rows: int

    @classmethod
    def of(cls, bound: float, tokens: int, topk: int, local: int, ep: int, etp: int) -> ExchangeBuffers:
        """Return the sizes.

        If the experts of a rank are chosen ``bound`` times as often as the mean, ``bound`` T K rows are for them, of
        which a rank sends ``bound`` T K / EP at most, and none of its T tokens twice.

        Args:
            bound: ``--moe-exchange-bound``.
            tokens: T, of a rank.
            topk: K, choices of a token.
            local: experts of a rank.
            ep: EP.
            etp: expert-TP: ranks that get the same rows.
        """
        block = min(tokens, math.ceil(bound * tokens * topk / ep))
        most = ep * etp * block * min(topk, local)
        return cls(block, min(most, math.ceil(bound * tokens * topk * etp)))

    def smallest_bound(self, tokens: int, topk: int, local: int, ep: int, etp: int) -> float:
        """Return the smallest bound, in hundredths, whose buffers are not below these; for arguments see :meth:`of`."""

        def holds(hundredths: int) -> bool:
            buffers = ExchangeBuffers.of(hundredths / 100, tokens, topk, local, ep, etp)
            return buffers.block >= self.block and buffers.expert_rows >= self.expert_rows

        enough = max(self.block * ep, self.expert_rows / etp) / (tokens * topk)
        hundredths = max(100, math.ceil(100 * enough))
        while hundredths > 100 and holds(hundredths - 1):  # the sizes are rounded up
            hundredths -= 1
        return hundredths / 100


def ranks_of_token(experts: int, topk: int, ep: int) -> float:
    """Return the mean number of EP ranks that hold an expert of a token, if all choices are equally likely."""
    elsewhere = experts - experts // ep
    return ep * (1.0 - math.comb(elsewhere, topk) / math.comb(experts, topk))
