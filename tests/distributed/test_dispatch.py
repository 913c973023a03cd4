"""Tokens that travel between ranks, against a loop over all tokens in one process."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.config import plugins
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.comm import Group
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.layers.dispatch import BoundedDispatcher, Dispatcher, ExactDispatcher, ExpertRows
from megatron.training.build import build_trainer
from megatron.training.callbacks.health import explain_nonfinite
from megatron.training.step import train_step
from tests.distributed.grid import RECOMPUTE
from tests.kit.cases import MODEL, RATES, Case, batches_of, compare_with_twin, run_case, run_on
from tests.kit.pool import Pool
from tools.lib.verify_parallel import RankTrace, join_traces

ROOT = Path(__file__).parents[2]
HIDDEN = 3


@dataclass(frozen=True)
class Travel:
    """Tokens of every rank, and how they travel."""

    choices: str = "random"
    experts: int = 8
    topk: int = 3
    tokens: tuple[int, ...] = (6, 6, 6, 6)
    # None for the exact exchange
    bound: float | None = None
    # EP, expert-TP
    sizes: tuple[int, int] = (4, 1)

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a rank's tokens, their choices and the weights of these."""
        generator, tokens = torch.Generator().manual_seed(rank), self.tokens[rank]
        chosen = torch.stack(
            [torch.randperm(self.experts, generator=generator)[: self.topk] for _ in range(tokens)]
            or [torch.zeros(0, self.topk, dtype=torch.int64)]
        ).view(tokens, self.topk)
        if self.choices == "one":  # the other choices are on the last rank
            chosen = torch.tensor([2, *range(self.experts - self.topk + 1, self.experts)]).expand(tokens, -1)
        elif self.choices == "dropped":
            chosen = chosen.masked_fill(torch.rand(chosen.shape, generator=generator) < 0.4, self.experts)
            chosen[:1] = self.experts
        elif self.choices == "few":  # expert 3 and the last rank have no tokens
            chosen = torch.tensor([0, 2, 1, 4, 5])[: self.topk].expand(tokens, -1)
        elif self.choices == "pair":  # both experts of the first of four ranks
            chosen = torch.tensor([0, 1]).expand(tokens, -1)
        elif self.choices == "own":  # an expert of the rank that has the token
            chosen = torch.tensor([2 * rank]).expand(tokens, -1)
        x, weights = (torch.randn(tokens, n, generator=generator, dtype=torch.float64) for n in (HIDDEN, self.topk))
        return x.requires_grad_(), chosen, weights.requires_grad_()


def product(expert: int, etp: int, etp_size: int) -> Tensor:
    """Return the part of an expert's matrix that an expert-TP rank has."""
    generator = torch.Generator().manual_seed(1000 + expert)
    whole = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
    part = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
    return (part if etp else whole - part) if etp_size == 2 else whole


def travel(rank: int, world_size: int, case: Travel) -> tuple[Tensor, Tensor, Tensor, bool, int]:
    """Return the output of this rank's tokens, both gradients, whether buffers overflowed, and rows of experts."""
    ep, etp = case.sizes
    tp = {"tensor_model_parallel_size": etp, "sequence_parallel": True} if etp > 1 else {}
    parallel = ParallelConfig(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, **tp)  # type: ignore[arg-type]
    mesh = Mesh(Layout.from_config(parallel, world_size), rank)
    arguments = mesh.group("ep", "etp"), etp, case.experts, case.topk
    exchange: Dispatcher = ExactDispatcher(*arguments)
    if case.bound is not None:
        exchange = BoundedDispatcher(*arguments, bound=case.bound)
    x_TH, experts_TK, weights_TK = case.inputs(rank)
    sent = exchange.dispatch(x_TH, experts_TK, weights_TK, case.choices == "dropped")
    tokens = sent.wait()
    rows = ExpertRows.of(tokens, exchange.local)
    x_RH = rows.rows.copy(tokens.x)
    first, here = mesh.coordinate["ep"] * exchange.local, mesh.coordinate["etp"]
    ends = [0, *rows.offsets.tolist()]
    parts = [x_RH[s:e] @ product(first + i, here, etp) for i, (s, e) in enumerate(zip(ends, ends[1:]))]
    padding = torch.full_like(x_RH[ends[-1] :], torch.nan)
    y_RH = torch.cat([*parts, padding]) * rows.weights.unsqueeze(1)
    y_TH = sent.combine(rows.rows.add(y_RH))()
    y_TH.backward(torch.full_like(y_TH, 1.0 + rank))
    assert x_TH.grad is not None
    assert weights_TK.grad is not None
    overflowed = tokens.overflowed is not None and bool(tokens.overflowed)
    return y_TH.detach(), x_TH.grad, weights_TK.grad, overflowed, len(x_RH)


def by_hand(case: Travel, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token, choice by choice."""
    x_TH, experts_TK, weights_TK = case.inputs(rank)
    y = x_TH * 0.0
    for t, chosen in enumerate(experts_TK.tolist()):
        for k, expert in enumerate(chosen):
            if expert < case.experts:
                one_hot = torch.eye(len(x_TH), dtype=torch.float64)[:, t : t + 1]
                y = y + one_hot * weights_TK[t, k] * (x_TH[t] @ product(expert, 0, 1))
    grads = torch.autograd.grad(y, [x_TH, weights_TK], torch.full_like(y, 1.0 + rank), allow_unused=True)
    dx, dw = (torch.zeros_like(t) if g is None else g for t, g in zip((x_TH, weights_TK), grads))
    return y.detach(), dx, dw


UNEVEN = (6, 0, 1, 9)
CASES = {
    **{f"exact, {choices}": Travel(choices) for choices in ("random", "one", "dropped", "few")},
    "exact, uneven": Travel(tokens=UNEVEN),
    "exact, uneven, dropped": Travel("dropped", tokens=UNEVEN),
    "exact, more choices than experts of a rank": Travel(topk=5),
    "exact, all experts": Travel(experts=4, topk=4),
    "exact, expert-TP 2": Travel(sizes=(2, 2)),
    "exact, expert-TP 2, dropped": Travel("dropped", sizes=(2, 2), tokens=UNEVEN),
    "exact, expert-TP 2 alone": Travel(sizes=(1, 2)),
    **{f"whole, {choices}": Travel(choices, bound=4.0) for choices in ("random", "one", "dropped", "few")},
    "bounded, more choices than experts of a rank": Travel(topk=5, bound=2.5),
    "bounded, expert-TP 2": Travel(sizes=(2, 2), bound=1.9),
    "bounded, expert-TP 2, dropped": Travel("dropped", sizes=(2, 2), bound=1.9),
    "bounded, expert-TP 2 alone": Travel(sizes=(1, 2), bound=1.0),
}
NO_ROOM = {
    "in a block": Travel("own", topk=1, bound=2.0),
    "for rows": Travel("pair", topk=2, bound=3.0),
}


def all_travels(rank: int, world_size: int, cases: dict[str, Travel]) -> dict[str, Any]:
    return {name: travel(rank, world_size, case) for name, case in cases.items()}


def test_tokens_reach_their_experts_and_results_return(pool: Pool) -> None:
    ranks = pool.run(4, all_travels, CASES)
    for name, case in CASES.items():
        for rank, found in enumerate(ranks):
            y, dx, dw, overflowed, _ = found[name]
            assert not overflowed, name
            torch.testing.assert_close((y, dx, dw), by_hand(case, rank), rtol=1e-12, atol=1e-12, msg=name)


def test_an_overflow_makes_results_nan(pool: Pool) -> None:
    """On some rank of each group: so the loss, a sum over all, is not a number."""
    ranks = pool.run(4, all_travels, NO_ROOM)
    for name in NO_ROOM:
        assert any(found[name][3] for found in ranks), name
        assert any(found[name][0].isnan().any() for found in ranks), name


def test_a_bound_that_is_just_enough_is_enough(pool: Pool) -> None:
    """All tokens choose both experts of the first of four ranks."""
    tokens = 8
    just, less = (Travel("few", topk=1, tokens=(tokens,) * 4, bound=b) for b in (4.0, 3.8))
    ranks = pool.run(4, all_travels, {"just": just, "less": less})
    for rank, found in enumerate(ranks):
        assert not found["just"][3]
        torch.testing.assert_close(found["just"][:3], by_hand(just, rank), rtol=1e-12, atol=1e-12)
    assert any(found["less"][3] for found in ranks)
    assert ranks[0]["just"][4] == 4 * tokens


@pytest.mark.parametrize(("experts", "topk", "ep"), [(8, 3, 4), (16, 8, 2), (8, 1, 8)])
def test_blocks_hold_what_a_popular_rank_gets(experts: int, topk: int, ep: int) -> None:
    """With bound 1 as many rows as choices at balance, of different tokens; with bound EP all tokens."""
    group = Group(tuple(range(ep)))
    one, all_of_them = (BoundedDispatcher(group, 1, experts, topk, bound=b) for b in (1.0, float(ep)))
    assert one.buffers(600).block == min(600, 600 * topk // ep)
    assert one.buffers(600).expert_rows == 600 * topk
    assert all_of_them.buffers(600).block == 600
    assert all_of_them.buffers(600).expert_rows == ep * 600 * min(topk, experts // ep)


# ---- in a model

EXPERTS = replace(
    MODEL,
    add_bias_linear=True,
    activation="swiglu",
    num_experts=8,
    moe_router_topk=3,
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=16,
    moe_shared_expert_gate=True,
)
BOUNDED = {"moe_exchange": "bounded", "moe_exchange_bound": 4.0}
HALVES = {"overlap_moe_expert_parallel_comm": True}
SHARED = {"moe_shared_expert_overlap": True}


def layout(**options: Any) -> ParallelConfig:
    return ParallelConfig(**options)


TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2, EP4 = ({"expert_model_parallel_size": ep} for ep in (2, 4))
LAYOUTS = {
    "ep4, bounded, halves, shared": Case(EXPERTS, layout(**EP4, **BOUNDED, **HALVES, **SHARED), dp=4, steps=2),
    "tp2, ep2, etp2, halves, modules recomputed": Case(
        EXPERTS,
        layout(**TP2, **EP2, expert_tensor_parallel_size=2, **HALVES, **SHARED, **BOUNDED),
        dp=2,
        training=TrainingConfig(micro_batch_size=1, **RECOMPUTE["all modules"]),
        steps=2,
    ),
    "pp2, cp2, ep2, zb-h1, halves": Case(
        EXPERTS,
        layout(
            **EP2,
            **HALVES,
            pipeline_model_parallel_size=2,
            context_parallel_size=2,
            pipeline_schedule="zb-h1",
            **BOUNDED,
        ),
        training=TrainingConfig(micro_batch_size=1),
        steps=2,
    ),
    "dp4, ep2, zero 2, exact, halves, shared, all recomputed": Case(
        EXPERTS,
        layout(**EP2, **HALVES, **SHARED, data_parallel_sharding_strategy="optim_grads"),
        dp=4,
        training=TrainingConfig(micro_batch_size=1, **RECOMPUTE["uniform 2"]),
        steps=2,
    ),
    "etp2": Case(EXPERTS, layout(**TP2, expert_tensor_parallel_size=2, **SHARED), steps=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_exchanges_train_the_same_in_every_layout(pool: Pool, name: str) -> None:
    case = LAYOUTS[name]
    steps = run_on(pool, case)
    assert [step.drifted for step in steps] == [[], []]
    for deviation in compare_with_twin(steps, case):
        assert deviation.error <= 1e-10, deviation


def gathered(rank: int, world_size: int, case: Case, module: str) -> list[RankTrace]:
    """Train with a dispatcher that a plugin registers."""
    with patch.dict(plugins._registered, {"dispatcher": {}}):
        exec(module, {"__name__": "gather"})
        return run_case(rank, world_size, case)


@pytest.mark.parametrize("fault", ["", "[rank]"])
def test_a_dispatcher_from_outside_trains_the_same(pool: Pool, fault: str) -> None:
    """The one of docs/moe.md; a fault in it is noticed."""
    page = (ROOT / "docs" / "moe.md").read_text()
    (module,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "GatherDispatcher" in block)
    case = Case(EXPERTS, layout(**EP4, moe_exchange="gather"), dp=4, steps=1)
    module = module.replace("// dispatcher.tp_size * local", "* 0") if fault else module
    steps = [join_traces(step) for step in zip(*pool.run(4, gathered, case, module))]
    worst = max(deviation.error for deviation in compare_with_twin(steps, case))
    assert worst > 1e-3 if fault else worst <= 1e-10


def all_to_one_rank(rank: int, world_size: int, case: Case) -> tuple[float, bool, bool, str]:
    """A step in which all tokens choose the first experts: loss, skipped, weights unchanged, explanation."""
    trainer = build_trainer(case.config(), rank, world_size)
    for name, parameter in trainer.params.items():
        if name.endswith("router.weight"):
            torch.nn.init.zeros_(parameter)
    before = {name: parameter.clone() for name, parameter in trainer.params.items()}
    batches = batches_of(trainer, case, 0)
    metrics = train_step(trainer, batches, RATES)
    same = all(torch.equal(p, before[name]) for name, p in trainer.params.items())
    explained = explain_nonfinite(trainer, batches) if metrics.loss.isnan() else ""
    return metrics.loss.item(), bool(metrics.skipped), same, explained


NEEDED = (
    r"step 1 changed no weight: on rank [0-3] in layers\.[13]\.mlp there are (\d+) rows .*, where "
    r"--moe-exchange-bound 1\.2 holds (\d+); resume with --moe-exchange-bound ([\d.]+), the smallest that holds this "
    "step, or with --moe-exchange exact"
)


def test_an_overflow_changes_no_weight_and_names_the_bound_that_is_enough(pool: Pool) -> None:
    def take(bound: float) -> list[tuple[float, bool, bool, str]]:
        exchange = BOUNDED | {"moe_exchange_bound": bound}
        return pool.run(4, all_to_one_rank, Case(EXPERTS, layout(**EP4, **exchange), dp=4, steps=1))

    (text,) = {explained for *_, explained in take(1.2)}
    found = re.fullmatch(NEEDED, text)
    assert found, text
    needed, held, enough = int(found[1]), int(found[2]), float(found[3])
    assert needed > held
    for loss, skipped, same, _ in take(round(enough - 0.01, 2)):
        assert skipped
        assert same
        assert math.isnan(loss)
    for loss, skipped, *_ in take(enough):
        assert not skipped
        assert math.isfinite(loss)


PROGRAM_LAYOUTS = {
    "ep2": (2, "--expert-model-parallel-size 2"),
    "ep2, tp2": (2, "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
                    "--expert-tensor-parallel-size 1"),
    "ep2, pp2, interleaved": (4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 "
                                 "--num-layers-per-virtual-pipeline-stage 1"),
    "ep2, pp2, zb-h1, halves": (4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 "
                                   "--pipeline-schedule zb-h1 --overlap-moe-expert-parallel-comm"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAM_LAYOUTS)
def test_a_run_that_overflows_ends_with_one_sentence_and_continues_with_the_bound_in_it(
    tmp_path: Path, name: str
) -> None:
    ranks, flags = PROGRAM_LAYOUTS[name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += f"pretrain_gpt.py --preset tiny-moe --mock-data --vocab-size 512 --global-batch-size 8 {flags}".split()
    saved = tmp_path / "saved"
    command += f"--seq-length 64 --micro-batch-size 2 --save-interval 1 --save {saved} --load {saved}".split()

    def run(more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more.split()], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )

    first = run("--train-iters 3 --exit-interval 1 --moe-exchange exact")
    assert first.returncode == 0, first.stderr
    before = {path: path.read_bytes() for path in saved.rglob("*.safetensors")}
    assert before
    overflow = run("--train-iters 3 --moe-exchange bounded --moe-exchange-bound 1")
    assert overflow.returncode == 1
    (sentence,) = re.findall(r"^error on rank \d: (.*)$", overflow.stderr, re.MULTILINE)
    found = re.fullmatch(NEEDED.replace("step 1", "step 2").replace(r"1\.2", "1").replace("[13]", r"\d+"), sentence)
    assert found, sentence
    assert "NonFiniteError" not in overflow.stderr
    assert {path: path.read_bytes() for path in before} == before
    last = run(f"--train-iters 3 --exit-interval 1 --moe-exchange bounded --moe-exchange-bound {found[3]}")
    assert last.returncode == 0, last.stderr
