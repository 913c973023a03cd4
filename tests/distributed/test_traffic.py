"""Bytes on the wire, counted where they are sent, against closed formulas."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import pytest

from megatron.arguments.cli import parse
from megatron.config.batch import get_num_microbatches
from megatron.config.dispatch import ranks_of_token
from megatron.config.run import RunConfig
from megatron.distributed.comm import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE, REDUCE_SCATTER, SEND
from megatron.distributed.layout import Layout
from megatron.layers.parameters import num_parameters
from megatron.optimizer.lr_scheduler import Rates
from megatron.pipeline.plan import stage_placement, virtual_stages
from megatron.planner.communication import attention_traffic, micro_batch_collectives, step_collectives
from megatron.planner.memory import data_parallel_traffic
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from tests.kit.pool import Pool

Sent = dict[tuple[str, str], float]
LENGTH, HIDDEN, LAYERS = 16, 32, 2
MODEL = (
    f"--mock-data --vocab-size 256 --train-iters 1 --device cpu --num-layers {LAYERS} --hidden-size {HIDDEN} "
    f"--num-attention-heads 4 --seq-length {LENGTH} "
    "--normalization RMSNorm --disable-bias-linear --ddp-bucket-size 9000"
)
SCALARS = 2 * 8
"""Bytes of the tokens of a step, and of their loss, which replicas add up."""


def config_of(flags: str, ranks: int) -> RunConfig:
    return parse([*MODEL.split(), *flags.split()], {"RANK": "0", "WORLD_SIZE": str(ranks)}).config


def step(rank: int, world_size: int, every: tuple[str, ...]) -> list[Sent]:
    """Return the bytes that this rank sends in a step, by axes and operation."""
    found = []
    for flags in every:
        trainer = build_trainer(config_of(flags, world_size), rank, world_size)
        meter = trainer.mesh.meter
        meter.pop_bytes_sent()
        train_step(trainer, trainer.next_batches(), Rates(1e-3, 0.0))
        trainer.optimizer.weights.wait()
        found.append(meter.pop_bytes_sent())
    return found


def of_axes(sent: Sent, axes: str) -> dict[str, float]:
    return {operation: count for (where, operation), count in sent.items() if where == axes}


def ring(count: float, ranks: int) -> float:
    return count * (ranks - 1) / ranks


ZERO = "--data-parallel-sharding-strategy"
TWICE = "--num-distributed-optimizer-instances 2"
STRATEGIES = (
    *("no_shard", "optim", "optim_grads", f"optim_grads {TWICE}"),
    *("optim_grads_params", f"optim_grads_params {TWICE} --no-reshard-after-forward"),
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
REPLICAS = (
    *(f"{ZERO} {strategy} --global-batch-size 12" for strategy in STRATEGIES),
    *(f"{ZERO} {strategy} --global-batch-size 8 --bf16 --grad-reduce-in-bf16" for strategy in STRATEGIES),
    f"{ZERO} optim --overlap-param-gather --no-overlap-grad-reduce --global-batch-size 4 --bf16 --optimizer muon",
    f"{ZERO} optim_grads_params --global-batch-size 12 --untie-embeddings-and-output-weights {FULL}",
    f"{ZERO} optim_grads_params --global-batch-size 8 --param-gather-prefetch 2 {TWICE}",
)


def test_replicas_send_the_bytes_of_the_formulas(pool: Pool) -> None:
    found = pool.run(4, step, REPLICAS)
    for number, flags in enumerate(REPLICAS):
        expected: dict[str, float] = defaultdict(float, data_parallel_traffic(config_of(flags, 4), 4))
        expected[ALL_REDUCE] += 2 * ring(SCALARS, 4)
        for rank in found:
            assert of_axes(rank[number], "dp") == pytest.approx(expected, rel=1e-12), flags


def test_the_formulas_match_textbooks() -> None:
    """For P parameters in fp32: 2 P (n-1)/n elements without ZeRO and with ZeRO-1, and m + 1 times half of it."""
    config = config_of("--global-batch-size 12", 4)
    assert get_num_microbatches(config.training, 4) == 3
    whole = ring(4 * num_parameters(config.model), 4)
    expected = {"no_shard": {ALL_REDUCE: 2 * whole}, "optim": {REDUCE_SCATTER: whole, ALL_GATHER: whole}}
    expected["optim_grads"] = {REDUCE_SCATTER: 3 * whole, ALL_GATHER: whole}
    # All weights twice: for forward and backward, the tied one for the embedding and the output layer. With prefetching
    # the last blocks are kept between these.
    expected["optim_grads_params --param-gather-prefetch 0"] = {REDUCE_SCATTER: 3 * whole, ALL_GATHER: 3 * 2 * whole}
    for strategy, formula in expected.items():
        printed = data_parallel_traffic(config_of(f"{ZERO} {strategy} --global-batch-size 12", 4), 4)
        assert printed == pytest.approx(formula, rel=0.03), strategy  # what alignment adds


STAGES = (
    "--pipeline-model-parallel-size 2 --reshard-after-forward --pipeline-schedule zb-h1",
    "--pipeline-model-parallel-size 2 --pipeline-schedule 1f1b",
    "--pipeline-model-parallel-size 2 --reshard-after-forward --pipeline-schedule zb-v --num-layers 4",
    "--pipeline-model-parallel-size 2 --reshard-after-forward --pipeline-schedule interleaved --num-layers 4 "
    "--num-layers-per-virtual-pipeline-stage 1 --untie-embeddings-and-output-weights",
)


def test_stages_gather_weights_as_often_as_the_formula_states(pool: Pool) -> None:
    """Delayed weight gradients are reduced later, so only the gathers are compared."""
    every = tuple(f"{ZERO} optim_grads_params --global-batch-size 8 {flags}" for flags in STAGES)
    found = pool.run(4, step, every)
    for number, flags in enumerate(every):
        for rank, sent in enumerate(found):
            formula = data_parallel_traffic(config_of(flags, 4), 4, rank)
            assert of_axes(sent[number], "dp")[ALL_GATHER] == pytest.approx(formula[ALL_GATHER], rel=1e-12), (
                flags,
                rank,
            )


def test_stages_send_activations_down_and_their_gradients_up(pool: Pool) -> None:
    count = 6
    found = pool.run(2, step, (f"--pipeline-model-parallel-size 2 --global-batch-size {count}",))
    assert [of_axes(rank[0], "pp")[SEND] for rank in found] == [count * LENGTH * HIDDEN * 4] * 2


def test_tensor_parallel_ranks_send_activations(pool: Pool) -> None:
    flags = "--tensor-model-parallel-size 2 --global-batch-size 1 --untie-embeddings-and-output-weights"
    found = pool.run(2, step, (flags, f"{flags} --sequence-parallel", f"{flags} --sequence-parallel --tp-comm-overlap"))
    activation = LENGTH * HIDDEN * 4
    losses = 2 * ring(3 * LENGTH * 4, 2)  # of each token: largest logit, sum, logit of the label
    for plain, sequence, overlap in found:
        # Forward after attention, MLP and embedding; backward before attention, MLP and output layer.
        assert of_axes(plain, "tp") == {ALL_REDUCE: 2 * ring((4 * LAYERS + 2) * activation, 2) + losses}
        both = of_axes(sequence, "tp")
        # The input of a column-parallel layer is gathered once more for the gradient of its weight.
        assert both[REDUCE_SCATTER] == ring((4 * LAYERS + 2) * activation, 2)
        assert both[ALL_GATHER] == ring((4 * LAYERS + 2 + 2 * LAYERS) * activation, 2)
        # Overlap sends as much, but gathers to products, and reduces from products that nothing else hides, in parts.
        parts = of_axes(overlap, "tp")
        assert parts[BROADCAST] == ring(4 * LAYERS * activation, 2)
        assert parts[REDUCE] == ring(2 * LAYERS * activation, 2)
        assert sum(parts.values()) == sum(both.values())


def test_tokens_travel_to_their_experts_and_back(pool: Pool) -> None:
    """Every token goes to all experts, so that what leaves a rank is known without knowing what the router does."""
    experts = 4
    flags = (
        f"--num-experts {experts} --moe-router-topk {experts} --expert-model-parallel-size 2 --moe-ffn-hidden-size 16 "
        f"--global-batch-size 4 {ZERO}"
    )
    strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params", "no_shard --moe-exchange bounded")
    every = tuple(f"{flags} {strategy}" for strategy in strategies)
    found = pool.run(4, step, every)
    ways = 4 * LENGTH * HIDDEN * 4  # a token goes once to the other rank and back, and the gradients of both
    choices = 2 * LENGTH * 2 * experts * 4  # experts and their weights, and the gradients of these
    counts = 2 * 4
    for number, case in enumerate(every):
        for rank in found:
            sent = ways + choices + (0 if "bounded" in case else counts)
            assert of_axes(rank[number], "ep") == {ALL_TO_ALL: LAYERS * sent}, case
            expected = data_parallel_traffic(config_of(case, 4), 4)
            both = defaultdict(float, of_axes(rank[number], "dp"))
            for operation, count in of_axes(rank[number], "edp").items():
                both[operation] += count
            both[ALL_REDUCE] -= 2 * ring(SCALARS, 4)
            assert {o: n for o, n in both.items() if n} == pytest.approx(expected, rel=1e-12), case


@pytest.mark.parametrize(("experts", "topk", "ep"), [(8, 2, 4), (16, 8, 8), (12, 3, 2)])
def test_a_token_goes_once_to_each_rank_of_its_experts(experts: int, topk: int, ep: int) -> None:
    every = [{e // (experts // ep) for e in chosen} for chosen in combinations(range(experts), topk)]
    assert ranks_of_token(experts, topk, ep) == pytest.approx(sum(map(len, every)) / len(every), rel=1e-12)


CP = "--seq-length 48 --global-batch-size 2 --context-parallel-size 4 --cp-comm-type"
MAMBA = "--token-mixers mamba2 --mamba-head-dim 4 --mamba-num-groups 4 --mamba-state-dim 6"
BOTH = "a2a+p2p --hierarchical-context-parallel-sizes 2 2"
RECOMPUTED = "--recompute-granularity selective --recompute-modules core_attn"
DELTA = (
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 6 --linear-value-head-dim 5 "
    "--token-mixers gated-delta-net"
)
CONTEXTS = (
    f"{CP} p2p --bf16",
    f"{CP} all_gather --window-size 5 --micro-batch-size 2",
    f"{CP} a2a --num-query-groups 1",
    f"{CP} {BOTH} --num-query-groups 2 --window-size 5",
    f"{CP} p2p --num-query-groups 2 --attention-pattern local:5,dilated:3:5",
    f"{CP} p2p --attention-pattern chunked:16,prefix:20",
    f"{CP} p2p --attention-pattern local:3+first:7,global",
    f"{CP} all_gather --recompute-granularity full",
    f"{CP} {BOTH} --recompute-granularity full --recompute-method block --recompute-num-layers 1",
    f"{CP} {BOTH} {RECOMPUTED}",
    f"{CP} p2p --bf16 {MAMBA}",
    f"{CP} a2a {MAMBA} --mamba-num-groups 2",
    f"{CP} {BOTH} {MAMBA} --recompute-granularity full",
    "--seq-length 48 --global-batch-size 2 --context-parallel-size 2 --tensor-model-parallel-size 2 "
    "--sequence-parallel --cp-comm-type a2a --num-query-groups 2",
    f"{CP} p2p {DELTA} --bf16 --micro-batch-size 2 --global-batch-size 4",
    f"{CP} {BOTH} {DELTA} --linear-num-key-heads 1 --recompute-granularity full",
    f"{CP} a2a {DELTA} attention",
)


def test_context_parallel_ranks_send_the_bytes_of_the_formulas(pool: Pool) -> None:
    found = pool.run(4, step, CONTEXTS)
    for number, flags in enumerate(CONTEXTS):
        sent: dict[str, float] = defaultdict(float)
        for rank in found:
            for operation, count in of_axes(rank[number], "cp").items():
                sent[operation] += count / 4
        config = config_of(flags, 4)
        passes = LAYERS * get_num_microbatches(config.training, config.parallel.data_parallel_size(4))
        formula = attention_traffic(config)
        gathered = sent[ALL_GATHER] + sent[REDUCE_SCATTER]  # replicas only reduce gradients
        found_here = (sent[SEND], gathered, sent[ALL_TO_ALL])
        expected = tuple(passes * count for count in (formula.p2p, formula.all_gather, formula.a2a))
        assert found_here == pytest.approx(expected, rel=1e-12), flags


LATENT = (
    "--multi-latent-attention --q-lora-rank 8 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
)
TENSOR, SEQUENCE = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE, MIXTURE = "--pipeline-model-parallel-size 2", "--num-experts 4 --moe-router-topk 4 --global-batch-size 4"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
OF_TWO = (
    f"{TENSOR} --global-batch-size 2 --untie-embeddings-and-output-weights",
    f"{SEQUENCE} --global-batch-size 2 --tp-comm-overlap --num-query-groups 1 --qk-layernorm",
    f"{SEQUENCE} --global-batch-size 2 --recompute-granularity full --recompute-method block --recompute-num-layers 1",
    f"{SEQUENCE} --global-batch-size 2 {SELECTIVE} mlp --cross-entropy-chunk-size 8",
    f"{SEQUENCE} --global-batch-size 2 --mlp-chunk-size 4",
    f"{SEQUENCE} --global-batch-size 2 {LATENT} {SELECTIVE} mla_up_proj",
    f"{TENSOR} --global-batch-size 2 {LATENT}",
    f"{SEQUENCE} --global-batch-size 2 --mtp-num-layers 2 --position-embedding-type rope",
    f"{SEQUENCE} --global-batch-size 2 {MAMBA}",
    f"{PIPELINE} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4",
)
OF_FOUR = (
    f"{SEQUENCE} {PIPELINE} --pipeline-schedule zb-h1 --global-batch-size 4",
    f"{SEQUENCE} {PIPELINE} --pipeline-schedule zb-v --num-layers 4 --global-batch-size 6",
    f"{SEQUENCE} --global-batch-size 4 {ZERO} optim",
    f"{SEQUENCE} --global-batch-size 8 {ZERO} optim_grads_params",
    f"{SEQUENCE} --context-parallel-size 2 --cp-comm-type a2a --global-batch-size 2 {SELECTIVE} core_attn",
    f"{SEQUENCE} --context-parallel-size 2 --global-batch-size 2 {MIXTURE}",
    f"{SEQUENCE} {MIXTURE} --expert-model-parallel-size 2 {SELECTIVE} mlp",
    f"{SEQUENCE} {MIXTURE} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-overlap",
    f"{MIXTURE} --bf16 --expert-model-parallel-size 4 --overlap-moe-expert-parallel-comm --recompute-granularity full",
    f"{MIXTURE} --expert-model-parallel-size 2 --moe-exchange bounded --moe-latent-size 16",
)
PARTS = {BROADCAST: ALL_GATHER, REDUCE: REDUCE_SCATTER}
"""Collectives that overlap is made of, and what they are parts of."""
SCALARS_OF_A_STEP = 64
"""Most bytes on an axis of numbers of tokens, losses and norms, which the planner leaves out."""


def axis_of(axes: str, operation: str) -> str:
    """Return the planner's axis of the meter's; tokens go to experts over TP, and gradients are summed over CP, too."""
    if axes in ("dp", "dp-cp", "edp") or (axes, operation) == ("cp", ALL_REDUCE):
        return "data"
    dense = {"tp": "tensor", "cp": "context", "pp": "pipeline"}
    return "expert" if (axes, operation) == ("tp", ALL_TO_ALL) else dense.get(axes, "expert")


def predicted(config: RunConfig, ranks: int) -> dict[tuple[str, str], float]:
    """Return the bytes that all ranks together send in a step, by axis and operation."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    layout = Layout.from_config(config.parallel, ranks)
    placement = stage_placement(config.parallel, virtual_stages(config.model, config.parallel))
    stages = list(zip(placement, micro_batch_collectives(config, ranks), strict=True))
    microbatches = get_num_microbatches(config.training, layout.sizes["dp"])
    for rank in range(ranks):
        at = layout.coordinate(rank)["pp"]
        of_stages = [(each, microbatches) for stage, found in stages if stage == at for each in found]
        for each, times in [*of_stages, *((each, 1) for each in step_collectives(config, ranks, at))]:
            total[each.axis, each.operation] += times * each.sent
    return total


@pytest.mark.parametrize(("ranks", "every"), [(2, OF_TWO), (4, OF_FOUR)])
def test_collectives_of_all_axes_are_what_runs_send(pool: Pool, ranks: int, every: tuple[str, ...]) -> None:
    """Sums over the ranks, which hold different shards and see different chunks of a ring."""
    found = pool.run(ranks, step, every)
    for number, flags in enumerate(every):
        counted: dict[tuple[str, str], float] = defaultdict(float)
        for sent in found:
            for (axes, operation), count in sent[number].items():
                if axes != "world":
                    counted[axis_of(axes, operation), PARTS.get(operation, operation)] += count
        expected = predicted(config_of(flags, ranks), ranks)
        for key in counted.keys() | expected.keys():
            few = SCALARS_OF_A_STEP * ranks if key[1] == ALL_REDUCE else 0
            assert 0 <= counted[key] - expected[key] + 1e-6 <= few + 2e-6, (flags, key, counted[key], expected[key])
