"""The declared parameters against a closed formula, and against the layers of every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import cast

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import Specs
from megatron.layers.context import BuildContext
from megatron.layers.parameters import gpt, num_parameters
from megatron.model.gpt import build_chunks
from megatron.pipeline.plan import resolve_pipeline, stage_layers, stage_placement
from megatron.planner.memory import rank_parameters, stages_by_rank

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


def formula(m: ModelConfig, experts: int | None) -> int:
    """Number of parameters with ``experts`` experts in every block, by hand."""
    h, d, bias, vectors = m.hidden_size, m.head_dim, m.add_bias_linear, 2 if m.normalization == "LayerNorm" else 1
    qkv_rows, matrices = (m.num_attention_heads + 2 * m.kv_groups) * d, 3 if m.gated else 2
    attention = qkv_rows * (h + m.qkv_bias) + h * (m.num_attention_heads * d + bias)
    attention += 2 * d * vectors * m.qk_layernorm
    if m.num_experts is None or experts is None:
        mlp = matrices * m.ffn * h + ((matrices - 1) * m.ffn + h) * bias
    else:
        mlp = m.num_experts * h + matrices * h * (experts * m.expert_ffn + (m.moe_shared_expert_intermediate_size or 0))
    positions = (m.max_position_embeddings or 0) * (m.position_embedding_type == "learned_absolute")
    tables = m.vocab * (1 + m.untie_embeddings_and_output_weights) + positions
    heads = 1 if m.mtp_use_repeated_layer else m.prediction_depths
    blocks = (m.num_layers + heads) * (attention + mlp + 2 * h * vectors) + heads * (2 * h * h + 3 * h * vectors)
    return blocks + h * (tables + vectors)


MULTI_TOKEN = [
    replace(BASE, position_embedding_type="rope", mtp_num_layers=2, add_bias_linear=False, num_experts=experts)
    for experts in (None, 4)
]
MULTI_TOKEN.append(replace(MULTI_TOKEN[0], mtp_use_repeated_layer=True))


@pytest.mark.parametrize("m", [*dense(), *mixtures(), *MULTI_TOKEN])
def test_their_number_matches_a_closed_formula(m: ModelConfig) -> None:
    assert num_parameters(m) == formula(m, m.num_experts) == sum(spec.numel for spec in gpt(m).values())
    assert num_parameters(m, active=True) == formula(m, m.num_experts and m.moe_router_topk)


@dataclass(frozen=True)
class OneRank:
    """As much of a mesh as building takes."""

    layout: Layout
    rank: int

    @property
    def coordinate(self) -> dict[str, int]:
        return self.layout.coordinate(self.rank)

    @property
    def tp(self) -> Group:
        return self.group("tp")

    def group(self, *axes: str) -> Group:
        ranks = self.layout.group_of(self.rank, axes)
        return Group(ranks, ranks.index(self.rank))


def built(model: ModelConfig, parallel: ParallelConfig, layout: Layout, rank: int) -> Specs:
    """Build the layers of a rank without memory, and return their parameters."""
    mesh, layers = OneRank(layout, rank), stage_layers(model, parallel, TrainingConfig().seq_length)
    of_stage = stage_placement(parallel, len(layers) // parallel.pipeline_model_parallel_size)
    context = BuildContext(cast("Mesh", mesh), GradAccumulator(), device=torch.device("meta"))
    here = {s: layers[s] for s, r in enumerate(of_stage) if r == mesh.coordinate["pp"]}
    build_chunks(model, TrainingConfig(), context, here)
    assert {name: tuple(p.shape) for name, p in context.params.items()} == {
        name: spec.local_shape for name, spec in context.specs.items()
    }
    return context.specs


def check(model: ModelConfig, parallel: ParallelConfig, ranks: int) -> None:
    """On the first and the last rank of every pipeline stage, shapes and buckets are those that the planner sums."""
    parallel = resolve_pipeline(model, parallel)
    layout = Layout.from_config(parallel, ranks)
    each = ranks // parallel.pipeline_model_parallel_size
    for rank in sorted({stage + at for stage in range(0, ranks, each) for at in (0, each - 1)}):
        specs, listed = (
            {name: (spec.local_shape, spec.reduce_axes, spec.tied) for name, spec in found.items()}
            for found in (
                built(model, parallel, layout, rank),
                rank_parameters(RunConfig(model=model, parallel=parallel), layout.coordinate(rank)["pp"]),
            )
        )
        assert [*specs.items()] == [*listed.items()], (parallel, rank)


PIPELINES = (
    ParallelConfig(),
    ParallelConfig(pipeline_model_parallel_size=2),
    ParallelConfig(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2),
    ParallelConfig(pipeline_model_parallel_size=2, pipeline_schedule="zb-v"),
    ParallelConfig(pipeline_model_parallel_size=3, pipeline_model_parallel_layout="E|ttt|L"),
)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_rank_builds_the_parameters_of_the_planner(tp: int) -> None:
    for model, pipeline in zip(dense()[tp - 1 :: 3], cycle(PIPELINES)):
        parallel = replace(pipeline, tensor_model_parallel_size=tp)
        check(model, parallel, tp * pipeline.pipeline_model_parallel_size)


def grids() -> Iterator[tuple[ParallelConfig, int]]:
    for (tp, ep, etp), pp in product(((1, 1, None), (1, 4, None), (2, 2, 1), (2, 1, None), (1, 2, 2)), (1, 2)):
        cut = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp, "pipeline_model_parallel_size": pp}
        yield ParallelConfig(tensor_model_parallel_size=tp, **cut), 4 * pp  # type: ignore[arg-type]


def test_so_does_every_rank_of_a_mixture_of_experts() -> None:
    for model, (parallel, ranks) in zip(mixtures(), cycle(grids())):  # 16 models and 10 grids
        check(model, parallel, ranks)


def test_an_unknown_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="vocab_size is not known"):
        gpt(replace(BASE, vocab_size=None))


def test_every_stage_is_on_one_rank() -> None:
    model = replace(BASE, num_layers=4)
    first, second = stages_by_rank(RunConfig(model=model, parallel=resolve_pipeline(model, PIPELINES[3])))
    assert [stage.first for stage in first + second].index(True) == 0
    assert first[-1].last
    assert len(second) == 2
