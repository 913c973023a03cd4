"""The list of parameters against those that the layers declare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import cast

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import TrainingConfig
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import ShardSpec
from megatron.layers.context import BuildContext
from megatron.model.gpt import build_chunks
from megatron.optimizer.muon import is_muon_param
from megatron.pipeline.plan import resolve_pipeline, stage_layers, stage_placement
from megatron.planner.memory import parameter_shapes, stages_by_rank

BASE = ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=8, vocab_size=50, max_position_embeddings=16)


def dense() -> list[ModelConfig]:
    switches = product((1, 2, 8), ("gelu", "swiglu"), ((True, "RMSNorm"), (False, "LayerNorm")))
    models = [
        replace(
            BASE,
            num_query_groups=groups,
            activation=activation,
            qk_layernorm=extras,
            normalization=norm,
            untie_embeddings_and_output_weights=extras,
        )
        for groups, activation, (extras, norm) in switches
    ]
    return [*models, *(replace(m, add_bias_linear=False, add_qkv_bias=m.qk_layernorm) for m in models)]


def mixtures() -> list[ModelConfig]:
    without_biases = replace(BASE, add_bias_linear=False, num_experts=4, position_embedding_type="rope")
    switches = product(("gelu", "swiglu"), (None, 48), (None, 24), (False, True))
    return [
        replace(
            without_biases,
            activation=activation,
            moe_ffn_hidden_size=width,
            moe_shared_expert_intermediate_size=shared,
            untie_embeddings_and_output_weights=untied,
        )
        for activation, width, shared, untied in switches
    ]


@dataclass(frozen=True)
class OneRank:
    """As much of a mesh as building takes."""

    layout: Layout
    rank: int
    placement: tuple[int, ...]

    @property
    def coordinate(self) -> dict[str, int]:
        return self.layout.coordinate(self.rank)

    @property
    def tp(self) -> Group:
        return self.group("tp")

    @property
    def embedding_group(self) -> Group:
        return Group(tuple({self.placement[0], self.placement[-1]}))

    def group(self, *axes: str) -> Group:
        ranks = self.layout.group_of(self.rank, axes)
        return Group(ranks, ranks.index(self.rank))


PIPELINES = (
    ParallelConfig(),
    ParallelConfig(pipeline_model_parallel_size=2),
    ParallelConfig(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2),
    ParallelConfig(pipeline_model_parallel_size=2, pipeline_schedule="zb-v"),
    ParallelConfig(pipeline_model_parallel_size=3, pipeline_model_parallel_layout="E|ttt|L"),
)


def declared(model: ModelConfig, parallel: ParallelConfig, layout: Layout, rank: int) -> dict[str, ShardSpec]:
    """What the layers of a rank declare, built without memory."""
    layers = stage_layers(model, parallel)
    of_stage = stage_placement(parallel, len(layers) // parallel.pipeline_model_parallel_size)
    mesh = OneRank(layout, rank, of_stage)
    context = BuildContext(cast("Mesh", mesh), GradAccumulator(), device=torch.device("meta"))
    here = {s: layers[s] for s, r in enumerate(of_stage) if r == mesh.coordinate["pp"]}
    build_chunks(model, TrainingConfig(), context, here)
    return context.specs


def check(model: ModelConfig, parallel: ParallelConfig, ranks: int) -> None:
    """On the first and the last rank of every pipeline stage."""
    parallel = resolve_pipeline(model, parallel)
    layout = Layout.from_config(parallel, ranks)
    each = ranks // parallel.pipeline_model_parallel_size
    for rank in sorted({stage + at for stage in range(0, ranks, each) for at in (0, each - 1)}):
        specs = declared(model, parallel, layout, rank)
        listed = parameter_shapes(model, parallel, layout.coordinate(rank)["pp"])
        assert [p.name for p in listed] == [*specs], (parallel, rank)
        for p in listed:
            spec = specs[p.name]
            found = p.shape, p.axes, p.tied, p.vector, p.of_block
            vector = len(spec.shape) == 1
            assert found == (spec.local_shape, spec.reduce_axes, spec.tied, vector, is_muon_param(p.name, spec)), p


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_they_are_those_that_the_layers_declare(tp: int) -> None:
    for model, pipeline in zip(dense(), cycle(PIPELINES)):  # 24 models and 5 pipelines
        parallel = replace(pipeline, tensor_model_parallel_size=tp)
        check(model, parallel, tp * pipeline.pipeline_model_parallel_size)


def grids() -> Iterator[tuple[ParallelConfig, int]]:
    for (tp, ep, etp), pp in product(((1, 1, None), (1, 4, None), (2, 2, 1), (2, 1, None), (1, 2, 2)), (1, 2)):
        cut = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp, "pipeline_model_parallel_size": pp}
        yield ParallelConfig(tensor_model_parallel_size=tp, **cut), 4 * pp  # type: ignore[arg-type]


def test_so_are_those_of_a_mixture_of_experts() -> None:
    for model, (parallel, ranks) in zip(mixtures() * 2, cycle(grids())):  # 16 models and 10 grids
        check(model, parallel, ranks)


def test_a_vocabulary_that_is_not_known_is_said() -> None:
    with pytest.raises(ValueError, match="vocab_size is not known"):
        parameter_shapes(replace(BASE, vocab_size=None), ParallelConfig(), 0)


def test_every_stage_is_on_one_rank() -> None:
    parallel = replace(PIPELINES[3], pipeline_model_parallel_size=2)
    first, second = stages_by_rank(replace(BASE, num_layers=4), resolve_pipeline(replace(BASE, num_layers=4), parallel))
    assert [stage.first for stage in first + second].index(True) == 0
    assert first[-1].last
    assert len(second) == 2
