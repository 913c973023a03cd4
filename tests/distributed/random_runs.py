"""Random command lines, each against one process: ``python -m tests.distributed.random_runs [--first N] [--runs 100]``.

A command line is refused with sentences, or its run has the numbers of one process: loss, norm, every gradient and
weight, in fp64. Models are of experts, latent attention, further predictions and layer patterns as often as not;
layouts, schedules, recomputation, offloading, optimizers and documents are drawn beside them. Command line N is always
the same.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.arguments.cli import parse
from megatron.config.errors import UserError
from megatron.config.layer_pattern import parse_pattern
from megatron.config.parallel import PIPELINE_SCHEDULES
from megatron.config.run import RunConfig
from megatron.data.loader import MaskBuilder
from tests.distributed.grid import choices
from tests.kit.cases import LR, SEQ_LENGTH, Case, PackedConversations, reference, run_on
from tests.kit.pool import Pool
from tools.lib.verify_parallel import compare_traces

TOLERANCE = 1e-10
ATTEMPTS = 40
"""Command lines drawn for one that is not refused."""

FIXED = (
    f"--mock-data --device cpu --params-dtype fp64 --train-iters 2 --seq-length {SEQ_LENGTH} --hidden-size 32"
    f" --max-position-embeddings {SEQ_LENGTH} --ffn-hidden-size 48 --num-attention-heads 4 --init-method-std 0.2"
    " --make-vocab-size-divisible-by 8 --norm-epsilon 0.1 --adam-eps 1e-5 --muon-num-ns-steps 2 --lr 1e-2"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 10 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6",
    "--rotary-scaling-factor 1|--rotary-scaling-factor 4 --mscale 0.8 --mscale-all-dim 1.2 "
    "--yarn-original-max-position-embeddings 8",
    "|--q-lora-rank 12",
    "|--qk-layernorm",
)
PLAIN = ("|--num-query-groups 2|--num-query-groups 1", "||--qk-layernorm", "|||--softmax-type learnable")
EXPERTS = (
    "--num-experts 2|--num-experts 3|--num-experts 4|--num-experts 8|--num-experts 8|--num-experts 16",
    "--moe-ffn-hidden-size 8|--moe-ffn-hidden-size 24",
    "--moe-router-topk 1|--moe-router-topk 2|--moe-router-topk 2|--moe-router-topk 3|--moe-router-topk 8",
    "|--moe-router-pre-softmax|--moe-router-score-function sigmoid|--moe-router-score-function sqrtsoftplus",
    "|--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type seq_aux_loss"
    "|--moe-aux-loss-coeff 0.1 0.2 --moe-router-load-balancing-type seq_aux_loss global_aux_loss"
    "|--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type global_aux_loss"
    "|--moe-router-load-balancing-type sinkhorn",
    "|--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05",
    "||--moe-router-num-groups 2 --moe-router-group-topk 1|--moe-router-num-groups 4 --moe-router-group-topk 2"
    "|--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-group-score-topk 2",
    "|--moe-router-topk-scaling-factor 2.5",
    "||--moe-z-loss-coeff 0.02",
    "||--moe-shared-expert-intermediate-size 16"
    "|--moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate --moe-shared-expert-overlap",
    "|||--moe-latent-size 12",
    "||--moe-layer-freq 2|--moe-layer-freq [0,1]",
    "|||--moe-router-force-load-balancing",
    "--expert-model-parallel-size 1|--expert-model-parallel-size 2|--expert-model-parallel-size 4",
    "|--expert-tensor-parallel-size 1|--expert-tensor-parallel-size 2",
    "|--moe-exchange bounded --moe-exchange-bound 8",
    "|--overlap-moe-expert-parallel-comm",
)
OF_SYMBOLS = {
    "M": (
        "--mamba-state-dim 6 --mamba-head-dim 8 --mamba-num-groups 4 --mamba-chunk-size 5"
        "|--mamba-state-dim 4 --mamba-head-dim 4 --mamba-num-heads 8 --mamba-num-groups 2 --mamba-chunk-size 7"
        "|--mamba-state-dim 5 --mamba-head-dim 6 --mamba-num-heads 12 --mamba-num-groups 1",
        "|--mamba-conv-kernel-dim 1|--mamba-conv-kernel-dim 2|--mamba-conv-kernel-dim 7",
        "||--no-mamba-conv-bias",
        "||--mamba-proj-bias",
        "||--mamba-dt-min 0.02 --mamba-dt-max 0.2",
        "||--mamba-norm-groups 1|--mamba-norm-groups 2",
        "||--mamba-norm-before-gate",
    ),
    "G": (
        "--linear-num-key-heads 4 --linear-num-value-heads 8|--linear-num-key-heads 4 --linear-num-value-heads 4"
        "|--linear-num-key-heads 2 --linear-num-value-heads 12|--linear-num-key-heads 1 --linear-num-value-heads 4",
        "--linear-key-head-dim 4 --linear-value-head-dim 6|--linear-key-head-dim 8 --linear-value-head-dim 8",
        "|--linear-conv-kernel-dim 1|--linear-conv-kernel-dim 2|--linear-conv-kernel-dim 7",
    ),
}
"""Options of the recurrent mixers of a layer pattern."""
DEEP = "--num-layers 1|--num-layers 2|--num-layers 3|--num-layers 4"
FURTHER = (
    "|--mtp-num-layers 1|--mtp-num-layers 2|--mtp-num-layers 2 --mtp-use-repeated-layer"
    "|--mtp-num-layers 2 --mtp-detach-heads|--mtp-num-layers 2 --mtp-use-repeated-layer --mtp-detach-heads"
)
OTHERS = (
    "--vocab-size 128|--vocab-size 101|--vocab-size 13",
    "|--untie-embeddings-and-output-weights",
    "--position-embedding-type rope|--position-embedding-type rope|--position-embedding-type none",
    "--normalization RMSNorm|--normalization LayerNorm",
    "||--layernorm-placement post|--layernorm-placement sandwich|--parallel-attention",
    "|--disable-bias-linear",
    "|".join(f"--activation {name}" for name in choices("activation")),
    "--hidden-dropout 0|--hidden-dropout 0|--hidden-dropout 0.1",
    "--attention-dropout 0|--attention-dropout 0|--attention-dropout 0.1",
    "||--attention-output-gate",
    "|||--attention-pattern local:5,global|--attention-pattern local:3+first:2,prefix:4",
    "|||--recompute-granularity full|--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    + "".join(f"|--recompute-granularity selective --recompute-modules {m}" for m in choices("recompute_modules"))
    + "|--cpu-offloading-num-layers 1 --min-offloaded-tensor-size 1",
    "|||--mlp-chunk-size 5",
    "|--cross-entropy-chunk-size 7",
    "|||--optimizer muon|--optimizer sgd",
    "|||--optimizer-cpu-offload",
    "|||--ema-decay 0.9",
    "|".join(f"--data-parallel-sharding-strategy {s}" for s in choices("data_parallel_sharding_strategy")),
    "|--ddp-bucket-size 4000",
    "|||--pad-global-batch",
)
DOCUMENTS = (
    *[MaskBuilder()] * 4,
    MaskBuilder(eod=7, reset_positions=True, reset_attention=True),
    MaskBuilder(eod=7, reset_attention=True, reset_pattern=True),
    PackedConversations(),
)


@dataclass(frozen=True)
class RandomRun:
    """A command line on ``ranks`` ranks, with its samples; ``refused`` others were drawn before it."""

    flags: str
    ranks: int
    config: RunConfig
    documents: MaskBuilder
    late_labels: bool
    refused: int

    def case(self) -> Case:
        """Return the steps to compare."""
        c = self.config
        dp, samples = c.parallel.data_parallel_size(self.ranks), c.training.global_batch_size
        more: Mapping[str, Any] = {"documents": self.documents, "late_labels": self.late_labels}
        return Case(c.model, c.parallel, c.precision, c.training, c.optimizer, dp, samples, compute=c.compute, **more)


def command_line(draw: random.Random) -> tuple[str, int]:
    """Draw flags and ranks, which may not fit together."""
    sizes = {"tensor": 1, "context": 1, "pipeline": 1, "data": 1}
    for name in draw.sample([*sizes], 3):
        sizes[name] = draw.choice([n for n in (1, 2, 2, 3, 4) if n * _ranks(sizes) <= 8])
    flags = [FIXED, *(draw.choice(options.split("|")) for options in OTHERS)]
    mixture = draw.random() < 0.85
    attention = draw.choice((LATENT, PLAIN))
    for options in (*attention, *(EXPERTS if mixture else ())):
        flags.append(draw.choice(options.split("|")))
    if draw.random() < 0.5:
        flags += layer_pattern(draw, "+" if attention is LATENT else "*", mixture, sizes["pipeline"])
    else:
        flags += [draw.choice(options.split("|")) for options in (DEEP, FURTHER)]
    if sizes["tensor"] > 1:
        flags.append(f"--tensor-model-parallel-size {sizes['tensor']}")
        flags.append("--sequence-parallel" if mixture else draw.choice(("", "--sequence-parallel")))
        flags.append(draw.choice(("", "", "--tp-comm-overlap")))
    if sizes["context"] > 1:
        kind = draw.choice(choices("cp_comm_type"))
        flags.append(f"--context-parallel-size {sizes['context']} --cp-comm-type {kind}")
        flags.append("--hierarchical-context-parallel-sizes 2 2" * (kind == "a2a+p2p"))
    if sizes["pipeline"] > 1:
        flags.append(f"--pipeline-model-parallel-size {sizes['pipeline']}")
        flags.append(f"--pipeline-schedule {draw.choice([s for s in PIPELINE_SCHEDULES if s != 'searched'])}")
    micro_batch = draw.choice((1, 1, 2, 3))
    batch = micro_batch * sizes["data"] * draw.choice((1, 2, 2, 3, 4)) + ("--pad-global-batch" in flags)
    flags.append(f"--micro-batch-size {micro_batch} --global-batch-size {batch}")
    return " ".join(flag for flag in flags if flag), _ranks(sizes)


def layer_pattern(draw: random.Random, attention: str, mixture: bool, stages: int) -> list[str]:
    """Draw a layer pattern, perhaps with cuts and further predictions, and the options of its mixers."""
    plugin = draw.random() < 0.2
    symbols = f"MMGG{attention}-" + "EE" * mixture + "LL" * plugin
    layers = "".join(draw.choice(symbols) for _ in range(draw.randint(1, 7))) + "E" * mixture
    heads = draw.choice(("", "", f"/{attention}E" if mixture else f"/{attention}-", "/M-", "/G")) * draw.randint(1, 2)
    if stages > 1 and draw.random() < 0.5:
        bounds = [0, *itertools.accumulate(map(len, parse_pattern(layers.replace("L", "M")).blocks))]
        cuts = sorted(draw.choices(bounds, k=stages - 1))
        layers = "|".join(layers[start:stop] for start, stop in itertools.pairwise((0, *cuts, len(layers))))
    found = [
        "--plugin tests.distributed.gated_linear" * plugin,
        f"--hybrid-layer-pattern={layers}{heads}",
        draw.choice(("", "", "--mtp-detach-heads")) * bool(heads),
    ]
    drawn = (options for symbol, more in OF_SYMBOLS.items() if symbol in layers + heads for options in more)
    return found + [draw.choice(options.split("|")) for options in drawn]


def _ranks(sizes: Mapping[str, int]) -> int:
    return sizes["tensor"] * sizes["context"] * sizes["pipeline"] * sizes["data"]


def random_run(number: int) -> RandomRun:
    """Return the first command line of a number that is not refused."""
    draw = random.Random(number)
    for refused in itertools.count():
        flags, ranks = command_line(draw)
        documents, late = draw.choice(DOCUMENTS), draw.random() < 0.2
        try:
            config = parse(flags.split(), {"RANK": "0", "WORLD_SIZE": str(ranks)}).config
        except UserError:
            if refused < ATTEMPTS:
                continue
            raise
        return RandomRun(flags, ranks, config, documents, late, refused)
    raise AssertionError


def largest_error(pool: Pool, run: RandomRun) -> float:
    """Return the largest relative error of a run; infinite if copies differ."""
    case = run.case()
    steps = run_on(pool, case)
    pairs = zip(steps, reference(case.twin()), strict=True)
    errors = [d.error for i, (got, ref) in enumerate(pairs) for d in compare_traces(i, got, ref, 1e-5, LR)]
    return float("inf") if any(step.drifted for step in steps) else max(errors)


def failures(pool: Pool, numbers: range, counts: Counter[str]) -> Iterator[str]:
    """Yield what is wrong, with its command line."""
    for number in numbers:
        run = random_run(number)
        error = largest_error(pool, run)
        counts["refused"] += run.refused
        counts["compared"] += 1
        if not error < TOLERANCE:
            yield f"{number}: {error:.1e} on {run.ranks} ranks, {run.documents}, {run.flags}"


def main() -> int:
    """Run, and print what is wrong; 1 if something is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--runs", type=int, default=100)
    options, counts, wrong = parser.parse_args(), Counter[str](), 0
    with Pool() as pool:
        for failure in failures(pool, range(options.first, options.first + options.runs), counts):
            print(failure, flush=True)
            wrong += 1
    print(f"{counts['compared']} runs compared, {wrong} wrong; {counts['refused']} command lines refused")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
