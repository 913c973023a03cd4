"""Compare forecasts with the memory that Megatron-LM's functional tests record.

    python -m benchmarks.published_memory

The values are those of the last rank, ``torch.cuda.memory_stats``: what is allocated after a step, and the most in it
(NVIDIA/Megatron-LM, tests/functional_tests/test_cases, golden values). These are the cases of full size: in those of a
few million parameters workspaces of kernels decide, which no forecast has. There, Transformer Engine computes the
layers; two differences have flags here: masks of hidden dropout are kept (``dropout=torch``), and logits are those of
all tokens at once (``--cross-entropy-chunk-size``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.arguments.cli import parse
from megatron.planner.memory import STATE_KINDS, peaks_by_rank, rank_state_bytes

COMMON = (
    "--mock-data --train-iters 1 --device cuda --bf16 --use-distributed-optimizer --overlap-param-gather"
    " --untie-embeddings-and-output-weights --micro-batch-size"
)
GPT_7B = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --seq-length 8192"
    " --global-batch-size 8 --vocab-size 131073 --kernels dropout=torch --cross-entropy-chunk-size 16384"
)
MIXTRAL = (
    "--num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48 --num-query-groups 8"
    " --seq-length 4096 --global-batch-size 256 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8"
    " --expert-model-parallel-size 8 --num-experts 8 --moe-router-topk 2 --swiglu --normalization RMSNorm"
    " --position-embedding-type rope --disable-bias-linear --sequence-parallel --attention-dropout 0 --hidden-dropout 0"
    " --vocab-size 32000 --cross-entropy-chunk-size 4096"
)
TP4 = f"{COMMON} 2 {GPT_7B} --tensor-model-parallel-size 4"
PP4 = f"{COMMON} 1 {GPT_7B} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"


class Case(NamedTuple):
    """A case with its recorded bytes."""

    name: str
    flags: str
    ranks: int
    # After a step, and the most in it.
    allocated: int
    peak: int


CASES = (
    Case("gpt3_7b_tp4_pp1_memory_speed, A100", TP4, 8, 20_634_103_808, 58_188_115_968),
    Case("gpt3_7b_tp4_pp1_memory_speed, H100", TP4, 8, 20_663_519_232, 57_143_791_616),
    Case("gpt3_7b_tp4_pp1_memory_speed, GB200", TP4, 8, 20_663_463_936, 58_217_476_096),
    Case("gpt3_7b_tp1_pp4_memory_speed, A100", PP4, 8, 24_510_808_064, 60_489_064_448),
    Case("gpt3_7b_tp1_pp4_memory_speed, H100", PP4, 8, 24_808_996_864, 60_720_852_992),
    Case("gpt3_7b_tp1_pp4_memory_speed, GB200", PP4, 8, 24_540_168_192, 60_519_342_080),
    # Its number of nodes is not published; 128 ranks are one replica.
    Case("mixtral_8x22b_tp2pp8ep8vpp1_release, H100", f"{COMMON} 1 {MIXTRAL}", 128, 23_002_929_152, 28_533_706_752),
)


def forecast(case: Case) -> tuple[int, int]:
    """Return the forecast bytes of the last rank, without buffers of NCCL: after a step, and the most in it."""
    config = parse(case.flags.split(), {"RANK": "0", "WORLD_SIZE": str(case.ranks)}).config
    state = sum(rank_state_bytes(config, case.ranks, case.ranks - 1).values())
    last = peaks_by_rank(config, case.ranks)[-1]
    return state, state + sum(size for part, size in last.items() if part not in (*STATE_KINDS, "NCCL estimate"))


def table() -> Iterator[str]:
    """Yield the rows of recorded and forecast gigabytes, and their errors."""
    yield "| case | after a step: recorded | forecast | error | peak: recorded | forecast | error |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for case in CASES:
        cells = [
            cell
            for recorded, expected in zip((case.allocated, case.peak), forecast(case))
            for cell in (f"{recorded / 1e9:.2f}", f"{expected / 1e9:.2f}", f"{expected / recorded - 1:+.1%}")
        ]
        yield f"| {' | '.join([case.name, *cells])} |"


if __name__ == "__main__":
    print("\n".join(table()))
