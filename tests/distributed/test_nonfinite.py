"""The first cause of a nonfinite loss among several ranks: rank, module or gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map

from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.training.build import build_trainer
from megatron.training.callbacks.health import explain_nonfinite
from megatron.training.trainer import Trainer
from tests.distributed.detect import DP2, MOE_EP2, TP2, TP2_SP
from tests.distributed.detect_experts import HEADS_CP2
from tests.kit.cases import Case, batches_of, pipeline
from tests.kit.pool import Pool
from tests.kit.runs import column, start, tiny_run

NAN = float("nan")
FC1, FC2, FC1_0 = "layers.1.mlp.linear_fc1", "layers.1.mlp.linear_fc2", "layers.0.mlp.linear_fc1"
ONE = "samples [0]"

PP2 = pipeline(2)
PP2_VPP2 = pipeline(2, stages=2, layers=4)
PP4_VPP2 = pipeline(4, stages=2, layers=8)
PP4_V = pipeline(4, "dualpipe-v", layers=8)


def part(trainer: Trainer, name: str) -> Module:
    """The module of that name, in whichever stage of the rank it is."""
    return next(module for chunk in trainer.chunks.values() for at, module in chunk.named_modules() if at == name)


def bad_weight(trainer: Trainer, module: str) -> None:
    torch.nn.init.constant_(part(trainer, module).get_parameter("weight"), NAN)


def bad_output(trainer: Trainer, module: str, microbatch: int) -> None:
    """From the module's call for ``microbatch`` on."""
    calls = iter(range(1000))

    def spoil(module: Module, inputs: Any, output: Any) -> Any:
        bad = tree_map(lambda t: t * NAN if isinstance(t, Tensor) else t, output)
        return bad if next(calls) >= microbatch else None

    part(trainer, module).register_forward_hook(spoil)


def bad_gradient(trainer: Trainer, module: str) -> None:
    """Of the module's output; forward is as it should be."""

    def spoil(module: Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * NAN)

    part(trainer, module).register_forward_hook(spoil)


Damage = tuple[int, Callable[..., None], tuple[Any, ...]]
"""Rank, what happens to it, and to which part."""


def explained(rank: int, world_size: int, case: Case, damages: tuple[Damage, ...]) -> str:
    trainer = build_trainer(case.config(), rank, world_size)
    for at, damage, part in damages:
        if at == rank:
            damage(trainer, *part)
    return explain_nonfinite(trainer, trainer.complete(batches_of(trainer, case, 0)))


CASES: dict[str, tuple[Case, tuple[Damage, ...], str]] = {
    "tp2, cut by rows": (TP2, ((1, bad_weight, (FC1,)),), f"rank 1: output of {FC1}, micro-batch 0, samples [0, 1]"),
    "tp2, summed": (TP2, ((1, bad_weight, (FC2,)),), f"ranks 0, 1: output of {FC2}, micro-batch 0, samples [0, 1]"),
    "tp2, second micro-batch": (
        TP2,
        ((1, bad_output, ("layers.0.mlp.linear_fc1", 1)),),
        "rank 1: output of layers.0.mlp.linear_fc1, micro-batch 1, samples [2, 3]",
    ),
    "tp2-sp, gradient": (
        TP2_SP,
        ((1, bad_gradient, (FC1,)),),
        f"rank 1: gradient of {FC1}.weight, micro-batch 0",
    ),
    "dp2": (DP2, ((1, bad_weight, (FC1,)),), f"rank 1: output of {FC1}, micro-batch 0, samples [2, 3]"),
    "dp2, the earlier micro-batch": (
        replace(DP2, training=TrainingConfig(micro_batch_size=1)),
        ((0, bad_output, ("layers.0", 1)), (1, bad_output, ("layers.1", 0))),
        "rank 1: output of layers.1, micro-batch 0, samples [1]",
    ),
    "dp2, output before gradient": (
        DP2,
        ((0, bad_gradient, (FC1,)), (1, bad_output, ("layers.1", 0))),
        "rank 1: output of layers.1, micro-batch 0, samples [2, 3]",
    ),
    "tp2, a replicated activation on one rank": (
        TP2,
        ((1, bad_weight, ("layers.1.input_layernorm",)),),
        "rank 1: output of layers.1.input_layernorm, micro-batch 0, samples [0, 1]",
    ),
    "ep2, experts of one rank": (
        MOE_EP2,
        ((1, bad_weight, ("layers.1.mlp.experts.linear_fc1",)),),
        "rank 1: output of layers.1.mlp.experts.linear_fc1, micro-batch 0, samples [2, 3]",
    ),
    "cp2, a head of further tokens": (
        HEADS_CP2,
        ((1, bad_weight, ("heads.depths.0.eh_proj",)),),
        "rank 1: output of mtp.layers.0.eh_proj, micro-batch 0, samples [0]",
    ),
    "pp2, gradient of the first stage": (
        PP2,
        ((0, bad_gradient, ("embedding",)),),
        "rank 0: gradient of embedding.position_embeddings.weight, micro-batch 0",
    ),
    "pp2, second micro-batch before the first stage of the third": (
        PP2,
        ((1, bad_output, ("layers.1", 1)), (0, bad_output, ("layers.0", 2))),
        "rank 1: output of layers.1, micro-batch 1, samples [1]",
    ),
    "pp2 vpp2, gradients of stages in backward's order": (
        PP2_VPP2,
        ((0, bad_gradient, ("layers.2.mlp.linear_fc1",)), (1, bad_gradient, (FC1,))),
        "rank 0: gradient of layers.2.mlp.linear_fc1.weight, micro-batch 0",
    ),
    "pp4 vpp2, the sixth stage": (
        PP4_VPP2,
        ((1, bad_weight, ("layers.5.mlp.linear_fc1",)), (3, bad_weight, ("layers.7.mlp.linear_fc1",))),
        f"rank 1: output of layers.5.mlp.linear_fc1, micro-batch 0, {ONE}",
    ),
    "pp4 in a v, gradient": (
        PP4_V,
        ((2, bad_gradient, ("layers.5.mlp.linear_fc1",)), (3, bad_gradient, ("layers.4.mlp.linear_fc1",))),
        "rank 2: gradient of layers.5.mlp.linear_fc1.weight, micro-batch 0",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_is_named(pool: Pool, name: str) -> None:
    case, damages, where = CASES[name]
    printed = pool.run(case.world_size, explained, case, damages)
    assert printed == [f"the loss or gradient of step 1 is not finite; first on {where}"] * case.world_size


def test_a_nonfinite_value_that_does_not_recur_is_reported_as_such(pool: Pool) -> None:
    (printed, _) = pool.run(2, explained, DP2, ())
    assert printed.startswith("the loss or gradient of step 1 is not finite, but all values before the sum")


def test_empty_masks_are_no_incident(pool: Pool, tmp_path: Path) -> None:
    """Nothing is divided by 0: the loss and all gradients of such a step are 0."""
    config = tiny_run(tmp_path, "--params-dtype fp64 --train-iters 2 --on-nonfinite stop", 2)
    assert pool.run(2, masked_run, config) == [(0, ""), (0, "")]
    assert column(tmp_path, "grad-norm") == [0, 0]


def masked_run(rank: int, world_size: int, config: RunConfig) -> tuple[int | None, str]:
    original = Trainer.next_batches

    def next_batches(trainer: Trainer) -> Any:
        return [replace(batch, loss_mask=batch.loss_mask * 0) for batch in original(trainer)]

    with patch.object(Trainer, "next_batches", next_batches):
        outcome = start(config, None, rank, world_size)
    return outcome.status, outcome.err


def explained_twice(rank: int, world_size: int, case: Case) -> tuple[str, bool]:
    """The second time nothing is wrong; whether weights are as they were and gradients are reduced early again."""
    trainer = build_trainer(case.config(), rank, world_size)
    before = [p.clone() for p in trainer.params.values()]
    batches = batches_of(trainer, case, 0)
    explain_nonfinite(trainer, batches)
    same = all(torch.equal(a, b) for a, b in zip(before, trainer.params.values()))
    empty = not any(chunk.sums.values for chunk in trainer.chunks.values())
    return explain_nonfinite(trainer, batches), same and trainer.buckets.overlap and empty


@pytest.mark.parametrize("case", [DP2, PP2_VPP2], ids=["dp2", "pp2-vpp2"])
def test_looking_leaves_the_trainer_as_it_was(pool: Pool, case: Case) -> None:
    assert all(untouched for _, untouched in pool.run(2, explained_twice, case))
