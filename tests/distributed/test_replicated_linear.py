"""Linears that every tensor-parallel rank computes of its rows, in a mixer with a down- and an up-projection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from megatron.config import plugins
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.sharding import Sharding, Specs
from megatron.kernels.linear import with_bias_gradient
from megatron.layers.context import BuildContext, ForwardContext, MixerOutput
from megatron.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.layers.mixers.base import Mixer, input_projection, output_projection, replicated_projection, under
from megatron.layers.recompute_plan import RecomputePlan
from tests.kit.cases import MODEL, Case, assert_like_one_process, run_case
from tests.kit.pool import Pool
from tests.kit.short import one_in
from tools.lib.verify_parallel import RankTrace

LATENT = 16


class Narrow(nn.Module):
    """``out(sin(a) b + c)`` of the three parts of ``up(down(x))``."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.linear_down = ReplicatedLinear(context.submodule("linear_down"))
        self.linear_up = ColumnParallelLinear(context.submodule("linear_up"))
        self.linear_out = RowParallelLinear(context.submodule("linear_out"))

    def forward(self, n_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        down = with_bias_gradient(self.linear_down(n_SBH), self.linear_down.bias)
        a, b, c = self.linear_up(down).chunk(3, -1)
        y_SBH = self.linear_out(a.sin() * b + c)
        return MixerOutput(y_SBH, self.linear_out.bias)


class NarrowMixer(Mixer):
    module = "narrow"

    def parameters(self, config: ModelConfig, sharding: Sharding) -> Specs:
        width = 2 * config.hidden_size
        return under(
            linear_down=replicated_projection(config, sharding, LATENT),
            linear_up=input_projection(config, sharding, (3, width), LATENT, bias=False),
            linear_out=output_projection(config, sharding, width),
        )

    def build(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> nn.Module:
        return Narrow(context)


@contextmanager
def registered() -> Iterator[None]:
    plugins.register("mixer", "narrow")(NarrowMixer)
    try:
        yield
    finally:
        plugins._registered["mixer"].clear()


@pytest.fixture(autouse=True)
def mixer() -> Iterator[None]:
    with registered():
        yield


def run(rank: int, ranks: int, case: Case) -> list[RankTrace]:
    with registered():
        return run_case(rank, ranks, case)


TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}


def case(parallel: dict[str, Any], fp8: str | None = None, **model: Any) -> Case:
    narrow = replace(MODEL, token_mixers=("narrow", "attention"), **model)
    precision = PrecisionConfig(params_dtype="fp64")
    if fp8 is not None:
        precision = replace(precision, fp8_format="hybrid", fp8_recipe=fp8)
    return Case(narrow, ParallelConfig(**parallel), precision, TrainingConfig(micro_batch_size=2))


CASES = {
    "tp": case(TP2),
    "sp": case(SP2),
    "sp, 4 ranks": case({"tensor_model_parallel_size": 4, "sequence_parallel": True}),
    "tp, lora": case(TP2, lora_rank=2),
    "sp, dora": case(SP2, lora_rank=2, lora_dora=True),
    "sp, lora of parts": case(SP2, lora_rank=2, lora_target=("linear_up.[02]", "mlp.*", "linear_down")),
    "sp, fp8 tensorwise": case(SP2, "tensorwise"),
    "sp, fp8 rowwise": case(SP2, "rowwise"),
}


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_every_layout_computes_the_same(pool: Pool, name: str) -> None:
    one = CASES[name]
    assert_like_one_process(pool.run(one.world_size, run, one), one)
