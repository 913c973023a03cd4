"""Which samples a rank computes in a step: a pure map from consumed samples, with no state to save."""

from __future__ import annotations


def micro_batches(
    consumed_samples: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int, padded: bool = False
) -> list[range]:
    """Places in the sample stream of each of this rank's micro-batches, in the order they are computed.

    The global batch is the next ``global_batch`` places. It is cut into groups of ``micro_batch * dp_size``;
    of every group, data-parallel rank ``r`` computes places ``[r * micro_batch, (r + 1) * micro_batch)``
    (Megatron-LM's "single" order), so growing the batch never moves a sample to another place.

    Where the last group is not full and ``padded`` allows it, some of its micro-batches have fewer places, or none: all
    ranks have equally many. One that has none begins, and ends, where the global batch ends.

    Raises:
        ValueError: when the groups do not fill the global batch and it is not padded, or there is no such rank.
    """
    group = micro_batch * dp_size
    if group <= 0 or global_batch <= 0 or (global_batch % group and not padded):
        raise ValueError(
            f"a global batch of {global_batch} is not a multiple of micro-batch {micro_batch} x DP {dp_size} = {group}"
        )
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"data-parallel rank {dp_rank} of {dp_size} does not exist")
    end = consumed_samples + global_batch
    starts = (first + dp_rank * micro_batch for first in range(consumed_samples, end, group))
    return [range(min(start, end), min(start + micro_batch, end)) for start in starts]
