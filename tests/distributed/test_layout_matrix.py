"""Layout invariance: every layout trains exactly like one process.

Loss, gradient norm, every gradient and every weight after each of two steps, against a run of the same model on one
process in one micro-batch: the second step's gradients come from weights and optimizer state that the first has
updated. The cases cover every valid pair of two factors' values of ``grid.FACTORS``; those that
are not slow have every value twice.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config.compute import ComputeConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import PIPELINE_SCHEDULES, ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from tests.distributed import product
from tests.distributed.grid import (
    CONTEXT,
    DOCUMENTS,
    EXPERTS,
    FACTORS,
    LAYOUT,
    MAX_RANKS,
    OF_ADAPTERS,
    RECOMPUTE,
    SHARING,
    ZERO,
    Grid,
    case_of,
    choices,
    contexts,
    label,
    layouts,
    sharings,
    stages_on_a_rank,
    valid,
)
from tests.distributed.pairwise import Choice, Lightening, Pair, covering, pairs_of, shortened, valid_pairs
from tests.kit.cases import MODEL, SEQ_LENGTH, Case, compare_with_twin, evaluation, reference, run_on
from tests.kit.pool import Pool
from tools.lib.verify_parallel import StepDeviation, StepTrace

TOLERANCE_FP64 = 1e-10
TOLERANCE_FP32 = 1e-5
FLOOR_FP32 = 1e-3
"""Of the norm of all gradients, for the one that needs it in fp32."""
ZERO_BY_MATHEMATICS = "k_layernorm.bias"
"""Without rotary positions it shifts all scores of a query alike: what is left of its gradient is rounding."""

# In this order of values the greedy search finds fewest cases.
IN_ORDER = {
    "zero": ("3 freed", "3 kept", "0", "3 twice", "1", "2"),
    "experts": tuple(EXPERTS)[::-1],
    "schedule": FACTORS["schedule"][::-1],
    "mixers": ("mamba alone", "delta", "pure", "mamba", "attention", "both"),
}
MATRIX = covering(FACTORS | IN_ORDER, valid)
COSTS = {name: FACTORS[name] for name in ("tp", "cp", "dp", "layers", "samples", "recompute", "heads", "mixers")}
COSTS |= {"cp": (1, 2, 3, 4), "micro_batch": (4, 2, 1)}
"""Of what takes most time in a case, the values that take least first."""
Lightening(MATRIX, COSTS, valid).run()
SHORT = shortened(MATRIX)
"""Cases of the default set, in which every value occurs twice. All of ``MATRIX`` covers every pair of values."""

ADAPTED = covering(OF_ADAPTERS, valid)
_DENSE_BESIDE_EXPERTS = {"dp": 4, "zero": "3 twice", "experts": "shared", "ep": 2, "adapters": "dora"}
ADAPTED += [{name: FACTORS[name][0] for name in OF_ADAPTERS if name in FACTORS} | _DENSE_BESIDE_EXPERTS]
SHORT_ADAPTED = shortened(ADAPTED, times=1)

TP2_SP = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
TP4 = ParallelConfig(tensor_model_parallel_size=4, ddp_bucket_size=4000)
TP4_SP = replace(TP4, sequence_parallel=True)
GQA = replace(
    MODEL,
    num_query_groups=2,
    qk_layernorm=True,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    normalization="RMSNorm",
    position_embedding_type="rope",
    activation="swiglu",
)
MQA = replace(MODEL, num_query_groups=1, untie_embeddings_and_output_weights=True, window_size=5, z_loss_coeff=1e-3)
MIXED = replace(
    GQA,
    attention_dropout=0.0,
    add_bias_linear=False,
    **EXPERTS["balanced"] | {"moe_shared_expert_intermediate_size": 32},
)
CUT = replace(
    TP2_SP,
    data_parallel_sharding_strategy="optim_grads",
    overlap_param_gather=True,
    expert_model_parallel_size=2,
    ddp_bucket_size=4000,
)
RECOMPUTING = TrainingConfig(micro_batch_size=1, recompute_granularity="selective")


def check(steps: Sequence[StepTrace], differences: Sequence[StepDeviation], tolerance: float) -> None:
    worst = max(differences, key=lambda d: d.error)
    bad = [d for d in differences if d.error > tolerance]
    assert not bad, f"{len(bad)} of {len(differences)} differ, first {bad[0]}, worst {worst}"
    assert [step.drifted for step in steps] == [[]] * len(steps)


def slow_but(short: Sequence[Choice], cases: Sequence[Choice]) -> list[Any]:
    return [pytest.param(c, marks=() if c in short else pytest.mark.slow, id=label(c)) for c in cases]


@pytest.mark.parametrize("choice", slow_but(SHORT, MATRIX))
def test_every_layout_trains_like_one_process(pool: Pool, choice: Choice) -> None:
    case = case_of(choice)
    steps = run_on(pool, case)
    check(steps, compare_with_twin(steps, case), TOLERANCE_FP64)


@pytest.mark.parametrize("choice", slow_but(SHORT_ADAPTED, ADAPTED))
def test_every_layout_trains_adapters_like_one_process(pool: Pool, choice: Choice) -> None:
    case = case_of({name: values[0] for name, values in FACTORS.items()} | choice)
    steps = run_on(pool, case)
    assert all("lora" in name for name in steps[0].grads)
    check(steps, compare_with_twin(steps, case), TOLERANCE_FP64)


@pytest.mark.parametrize("precision", choices("frozen_weights_precision"))
def test_quantised_weights_are_the_same_in_every_layout(pool: Pool, precision: str) -> None:
    """Their blocks are cut by no layout."""
    wide = {"hidden_size": 128, "ffn_hidden_size": 256, "activation": "swiglu", "num_query_groups": 2}
    model = replace(MODEL, **wide, lora_rank=2, lora_dora=True, frozen_weights_precision=precision)
    cut = replace(TP2_SP, pipeline_model_parallel_size=2, pipeline_schedule="zb-h1", use_distributed_optimizer=True)
    case = Case(model, cut, dp=2, training=TrainingConfig(micro_batch_size=1))
    steps = run_on(pool, case)
    check(steps, compare_with_twin(steps, case), TOLERANCE_FP64)
    full = replace(case, model=replace(model, frozen_weights_precision=None))
    assert steps[0].loss != pytest.approx(reference(full.twin())[0].loss, rel=1e-4)


@pytest.mark.parametrize("module", choices("recompute_modules"))
def test_every_recomputed_module_alone(pool: Pool, module: str) -> None:
    """On both stages of a pipeline whose weight gradients come later than what is made again for them."""
    plain = {name: values[0] for name, values in FACTORS.items()}
    choice = plain | {"pp": 2, "schedule": "zb-h1", "tp": "2sp", "recompute": module, "dropout": "hidden"}
    case = case_of(choice)
    assert case.training.recompute_modules == RECOMPUTE[module]["recompute_modules"] == (module,)
    steps = run_on(pool, case)
    check(steps, compare_with_twin(steps, case), TOLERANCE_FP64)


@pytest.mark.parametrize("choice", MATRIX[1::30], ids=label)
def test_in_fp32_up_to_rounding(pool: Pool, choice: Choice) -> None:
    """With SGD: Adam's first steps divide each gradient by its own size, and so make rounding as large as a step."""
    case = case_of(choice | {"optimizer": "sgd"})
    case = replace(case, precision=PrecisionConfig(params_dtype="fp32"))
    steps = run_on(pool, case)
    check(steps, compare_with_twin(steps, case, FLOOR_FP32), TOLERANCE_FP32)
    without_floor = compare_with_twin(steps, case, gradient_floor=0.0)
    check(steps, [d for d in without_floor if not d.name.endswith(ZERO_BY_MATHEMATICS)], TOLERANCE_FP32)


LARGE = Case(
    ModelConfig(
        num_layers=1,
        hidden_size=256,
        num_attention_heads=4,
        vocab_size=50304,
        max_position_embeddings=SEQ_LENGTH,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    TP2_SP,
    PrecisionConfig(params_dtype="fp32"),
    optimizer=OptimizerConfig(clip_grad=1.0, adam_eps=1e-3),
    steps=1,
)
"""A tied embedding of 12.9 million elements, and one step of Adam. Its eps is about the size of the gradients: a
smaller one would make a whole step of what is zero up to rounding."""


def test_a_large_parameter_in_fp32(pool: Pool) -> None:
    """The norm sums millions of squares: an fp32 accumulator that adds them in order is off by more than 1e-5."""
    steps = run_on(pool, LARGE)
    check(steps, compare_with_twin(steps, LARGE, gradient_floor=0.0), TOLERANCE_FP32)
    clipped = steps[0].grads.values()
    assert max(grad.numel() for grad in clipped) > 10_000_000
    assert steps[0].grad_norm > LARGE.optimizer.clip_grad
    exact = math.sqrt(sum(grad.double().square().sum().item() for grad in clipped))
    assert exact == pytest.approx(LARGE.optimizer.clip_grad, rel=1e-6)


def test_the_matrix_is_small_and_covers_every_pair_that_can_occur() -> None:
    assert len(MATRIX) <= 75
    assert all(valid(choice) and set(choice) == set(FACTORS) for choice in MATRIX)
    in_ci, in_all = (Counter(v for choice in cases for v in choice.items()) for cases in (SHORT, MATRIX))
    assert {value for value in in_all if in_ci[value] < min(2, in_all[value])} == set()
    assert {*in_all} == {(name, value) for name, values in FACTORS.items() for value in values}
    covered = set().union(*map(pairs_of, MATRIX))
    together = pairs_that_fit()
    for pair in valid_pairs(FACTORS, lambda choice: True):
        ruled = {name for name, _ in pair} <= {*LAYOUT, *SHARING, *CONTEXT}
        assert (pair in together if ruled else valid(dict(pair))) == (pair in covered), sorted(pair)


@pytest.mark.parametrize("page", ["architecture", "performance"])
def test_the_pages_count_its_cases(page: str) -> None:
    text = " ".join((product.FILE.parents[2] / "docs" / f"{page}.md").read_text().split())
    pattern = rf"{len(MATRIX)} further cases cover every pair of {len(FACTORS)} factors; CI runs {len(SHORT)} of them"
    assert re.search(pattern, text), pattern


def pairs_that_fit() -> set[Pair]:
    """Pairs of values of what rules connect, from every layout, sharing and context with the same TP, DP and CP."""
    found: set[Pair] = set()
    by_grid: dict[Grid, list[list[Choice]]] = defaultdict(lambda: [[], [], []])
    for i, whole in enumerate((layouts(), sharings(), contexts())):
        for c in whole:
            by_grid[c["tp"], c["dp"], c["cp"]][i].append(c)
    for parts in by_grid.values():
        if all(parts):
            found.update(*(pairs_of(c) for part in parts for c in part))
            for ends in itertools.combinations([set().union(*(c.items() for c in part)) for part in parts], 2):
                found |= {frozenset(pair) for pair in itertools.product(*ends) if pair[0][0] != pair[1][0]}
    return found


OF_THE_MODEL = {"samples", "layers"}
OF_COMPUTING = {
    *LAYOUT,
    *CONTEXT,
    "recompute",
    "mlp_chunk",
    "loss_chunk",
    "overlap",
    "bucket",
    "zero",
    "gather",
    "ep",
    "etp",
}
OF_COMPUTING -= OF_THE_MODEL
MATTERS = sorted(set(FACTORS) - OF_COMPUTING - {"rotary"})


@pytest.mark.parametrize("factor", MATTERS)
def test_every_value_of_a_factor_of_the_model_changes_the_numbers(factor: str) -> None:
    """Otherwise the matrix would compare the same model with itself under several names."""
    plain = {name: values[0] for name, values in FACTORS.items()}
    plain |= {"positions": "rope"} if factor == "heads" else {}
    seen = [numbers(case_of(plain | {factor: value})) for value in FACTORS[factor]]
    assert len(set(seen)) == len(seen) - (factor == "mixers")  # the pattern of a GPT is one


def test_partial_interleaved_rotation_changes_the_numbers() -> None:
    plain = {name: values[0] for name, values in FACTORS.items()} | {"positions": "rope"}
    assert len({numbers(case_of(plain | {"rotary": value})) for value in FACTORS["rotary"]}) == 2


def numbers(case: Case) -> tuple[float, ...]:
    steps = reference(case.twin())
    weights = steps[-1].weights.values()
    return steps[0].loss, steps[0].grad_norm, steps[-1].loss, sum(weight.abs().sum().item() for weight in weights)


LONG = [
    pytest.param(Case(GQA, TP4_SP, dp=2, steps=20, training=RECOMPUTING), id="tp4-sp-dp2-gqa-dropout-recompute"),
    pytest.param(Case(MQA, TP4, steps=20, training=TrainingConfig(micro_batch_size=2)), id="tp4-mqa-untied"),
    pytest.param(Case(MODEL, TP2_SP, dp=2, steps=20, documents=DOCUMENTS["all"]), id="tp2-sp-dp2-documents"),
    pytest.param(Case(MIXED, CUT, dp=2, steps=20, training=RECOMPUTING), id="tp2-sp-dp2-ep2-zero2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG)
def test_twenty_steps(pool: Pool, case: Case) -> None:
    steps, expected = run_on(pool, case), reference(case.twin())
    assert [s.loss for s in steps] == pytest.approx([s.loss for s in expected], rel=1e-8, abs=0.0)
    assert steps[-1].drifted == []


@pytest.mark.parametrize(("case", "dtype"), [(Case(GQA, TP2_SP), "fp32"), (*LONG[-1].values, "bf16")])
def test_two_equal_runs_are_equal_to_the_bit(pool: Pool, case: Case, dtype: str) -> None:
    case = replace(case, precision=PrecisionConfig(params_dtype=dtype), steps=2)
    first, second = run_on(pool, case), run_on(pool, case)
    for a, b in zip(first, second, strict=True):
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
        for got, again in ((a.grads, b.grads), (a.weights, b.weights)):
            assert all(torch.equal(got[name], again[name]) for name in got)


COMPILED = Case(
    replace(GQA, attention_dropout=0.0, z_loss_coeff=1e-3),
    TP2_SP,
    documents=DOCUMENTS["all"],
    compute=ComputeConfig(kernels=("add_norm=compiled", "cross_entropy=compiled")),
)
"""Of the regions those in which ranks differ, or between whose parts they communicate; compiling all takes minutes."""


@pytest.mark.slow
def test_compiled_kernels_on_two_ranks_train_like_torch_on_one(pool: Pool) -> None:
    steps = run_on(pool, COMPILED, timeout=600)
    check(steps, compare_with_twin(steps, COMPILED), TOLERANCE_FP64)


@pytest.mark.slow
@pytest.mark.parametrize("tp", FACTORS["tp"])
@pytest.mark.parametrize("name", product.TABLES)
def test_full_product(pool: Pool, name: str, tp: str) -> None:
    choices, *_ = product.TABLES[name]
    findings = product.run(pool, [choice for choice in choices() if choice["tp"] == tp])
    assert findings.cases >= 10
    assert findings.failed == []


def test_the_product_crosses_every_schedule_with_every_size_of_the_pipeline() -> None:
    crossed = {(c["schedule"], c["pp"], c["vpp"], c["tp"], c["dp"], c["untied"]) for c in product.layouts()}
    assert {c[:3] for c in crossed} == {
        (name, pp, vpp)
        for name, pp, vpp in itertools.product(PIPELINE_SCHEDULES, (1, 2, 4), (1, 2))
        if stages_on_a_rank(name) in (None, vpp)
    }
    assert {c[1:2] + c[3:] for c in crossed} == {
        (pp, tp, dp, untied)
        for pp, tp, dp, untied in itertools.product((1, 2, 4), FACTORS["tp"], (1, 2), (False, True))
        if pp * int(tp[0]) * dp <= MAX_RANKS
    }
    assert len([*product.layouts()]) + len([*product.models()]) > 1500


def test_the_product_crosses_sharding_with_expert_layouts() -> None:
    crossed = [*product.sharings()]
    assert {(c["pp"], c["dp"], c["zero"]) for c in crossed} == {
        (pp, dp, zero)
        for pp, dp, zero in itertools.product((1, 2), (1, 2, 3, 4), ZERO)
        if zero == "0" or (dp > 1 and (dp % 2 == 0 or not zero.endswith("twice")))
    }
    mixed = {(c["zero"], c["ep"], c["etp"]) for c in crossed if c["experts"] != "none"}
    twice = [zero for zero in ZERO if zero.endswith("twice")]
    small = {(zero, 4, etp) for zero in twice for etp in (None, 2)}  # eight ranks hold them once
    assert mixed == {*itertools.product(ZERO, (1, 2, 4), (None, 1, 2))} - small


@pytest.mark.parametrize("case", LONG[-1:])
def test_evaluation_in_every_layout(pool: Pool, case: Case) -> None:
    expected = evaluation(0, 1, case.twin())
    assert expected[0] != expected[1]
    for found in pool.run(case.world_size, evaluation, case):
        assert found == pytest.approx(expected, rel=TOLERANCE_FP64, abs=0.0)
