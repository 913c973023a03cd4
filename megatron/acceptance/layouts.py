"""The layouts that a cluster check compares: a few that fit the ranks and use every kind of communication."""

from __future__ import annotations

from dataclasses import dataclass

SIZE = (
    "--mock-data --vocab-size 512 --num-layers 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 8 "
    "--seq-length 64 --max-position-embeddings 64 --init-method-std 0.05 --seed 1234"
)
"""A model that takes milliseconds per step, with heads and layers that many layouts divide."""

EXPERTS = "--num-experts 4 --moe-router-topk 4 --moe-ffn-hidden-size 64 --disable-bias-linear"
"""Make the model a mixture of experts. Every token uses all experts: if rounding could choose between two, correct
layouts would differ."""

ZERO_1, ZERO_2 = "--use-distributed-optimizer", "--data-parallel-sharding-strategy optim_grads --overlap-param-gather"
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
STAGES = "--num-virtual-stages-per-pipeline-rank 2"
WIDEST = 8


@dataclass(frozen=True)
class LayoutCase:
    """One parallel layout."""

    name: str  # in the report
    flags: str  # command-line flags
    experts: bool = False  # whether the model is a mixture of experts


def layouts(ranks: int, per_node: int) -> list[LayoutCase]:
    """Return the layouts for ``ranks`` ranks, ``per_node`` on every node; none for a single rank."""
    if ranks == 1:
        return []
    tp, half = widest_divisor(per_node), f"{PIPELINE} 2"
    cases = [
        LayoutCase(f"DP{ranks}", ""),
        LayoutCase(f"DP{ranks}, ZeRO-1", ZERO_1),
        LayoutCase(f"DP{ranks}, ZeRO-2", ZERO_2),
    ]
    if tp > 1:
        cases.append(LayoutCase(f"TP{tp} SP{_dp(ranks // tp)}", f"{TENSOR} {tp} --sequence-parallel"))
    if ranks % 2 == 0:
        cases += [
            LayoutCase(f"PP2{_dp(ranks // 2)}", half),
            LayoutCase(f"PP2 VPP2{_dp(ranks // 2)}, ZeRO-1", f"{half} {STAGES} {ZERO_1}"),
            LayoutCase(f"EP2{_dp(ranks)}", "--expert-model-parallel-size 2", experts=True),
        ]
    if ranks % 4 == 0:
        both = f"{TENSOR} 2 --sequence-parallel"
        cases += [
            LayoutCase(f"TP2 SP PP2 VPP2{_dp(ranks // 4)}, ZeRO-2", f"{both} {half} {STAGES} {ZERO_2}"),
            LayoutCase(f"EP2 TP2 SP{_dp(ranks // 2)}, ZeRO-1", f"{both} --expert-model-parallel-size 2 {ZERO_1}", True),
        ]
    return cases


def widest_divisor(ranks: int) -> int:
    """Return the largest tensor-parallel size of at most ``WIDEST`` that divides the ranks of a node."""
    return max(size for size in (1, 2, 4, WIDEST) if ranks % size == 0)


def _dp(size: int) -> str:
    return f" DP{size}" if size > 1 else ""


def batch(ranks: int) -> str:
    """Return a global batch size that all layouts divide and that gives pipelines enough micro-batches."""
    return f"--global-batch-size {2 * ranks}"
