"""The samples of each rank's micro-batches, as a pure function of the samples consumed so far."""

from __future__ import annotations


def micro_batches(
    consumed_samples: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int, padded: bool = False
) -> list[range]:
    """Return the places in the sample stream of each of this rank's micro-batches, in the order of computation.

    The global batch is the next ``global_batch`` places. It is cut into groups of ``micro_batch * dp_size``; of each
    group, data-parallel rank ``r`` computes places ``[r * micro_batch, (r + 1) * micro_batch)`` (Megatron-LM's "single"
    order), so a growing batch size never moves a sample to another place.

    Args:
        consumed_samples: samples read before this batch.
        global_batch: samples in the global batch.
        micro_batch: samples in a micro-batch.
        dp_rank: this rank's data-parallel index.
        dp_size: number of data-parallel ranks.
        padded: allow a last group that is not full. Its micro-batches are then shorter, or empty ranges at the end of
            the global batch; all ranks have equally many.

    Raises:
        ValueError: when the groups do not fill the global batch and ``padded`` is False, or ``dp_rank`` is out of
            range.
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
