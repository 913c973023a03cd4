"""The closed formulas of what a rank holds against the objects of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import cast

import pytest
import torch
from torch import Tensor

from megatron.config.arguments import parse
from megatron.config.memory import BYTES, checkpoint_bytes, rank_parameters, shown, state_bytes
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import MOMENTS, TrainingConfig
from megatron.model.gpt import build_chunks
from megatron.parallel.build import BuildContext
from megatron.parallel.comm import Group
from megatron.parallel.grads import GradSink
from megatron.parallel.mesh import Mesh
from megatron.parallel.ownership import ALIGNMENT
from megatron.pipeline.plan import placement, resolved, stage_layers
from megatron.training.checkpointing import held
from megatron.training.setup import build


def shapes() -> list[ModelConfig]:
    base = ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=8, vocab_size=50, max_position_embeddings=16)
    switches = product((1, 2, 8), ("gelu", "swiglu"), ((True, "RMSNorm"), (False, "LayerNorm")))
    models = [
        replace(
            base,
            num_query_groups=groups,
            activation=activation,
            qk_layernorm=extras,
            normalization=norm,
            untie_embeddings_and_output_weights=extras,
        )
        for groups, activation, (extras, norm) in switches
    ]
    return [*models, *(replace(m, add_bias_linear=False, add_qkv_bias=m.qk_layernorm) for m in models)]


@dataclass(frozen=True)
class OneRank:
    """As much of a mesh as building takes."""

    tp: Group
    placement: tuple[int, ...]
    coordinate: dict[str, int]
    ends: Group


PIPELINES = (
    ParallelConfig(),
    ParallelConfig(pipeline_model_parallel_size=2),
    ParallelConfig(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2),
    ParallelConfig(pipeline_model_parallel_size=2, pipeline_schedule="zb-v"),
    ParallelConfig(pipeline_model_parallel_size=3, pipeline_model_parallel_layout="E|ttt|L"),
)


def built(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """Elements of the parameters on each rank of a pipeline."""
    layers = stage_layers(model, parallel)
    ranks, tp = parallel.pipeline_model_parallel_size, tuple(range(parallel.tensor_model_parallel_size))
    of_stage = placement(parallel, len(layers) // ranks)
    ends = Group(tuple({of_stage[0], of_stage[-1]}))
    counts = []
    for rank in range(ranks):
        mesh = cast("Mesh", OneRank(Group(tp), of_stage, {"pp": rank}, ends))
        context = BuildContext(mesh, GradSink(), device=torch.device("meta"))
        build_chunks(model, TrainingConfig(), context, {s: layers[s] for s, r in enumerate(of_stage) if r == rank})
        counts.append(sum(p.numel() for p in context.params.values()))
    return counts


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", shapes(), ids=repr)
def test_parameters_on_a_rank_are_those_of_the_model_it_builds(model: ModelConfig, tp: int) -> None:
    for pipeline in PIPELINES:
        parallel = replace(resolved(model, pipeline), tensor_model_parallel_size=tp)
        assert rank_parameters(model, parallel) == max(built(model, parallel)), pipeline


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


OPTIMIZERS = [
    *MOMENTS,
    "adam --exp-avg-dtype bf16",
    "adam --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --ema-decay 0.99",
    "lion --exp-avg-dtype bf16 --lr-factors *.bias=2",
    "sgd --ema-decay 0.9",
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", BYTES)
def test_bytes_of_each_part_are_those_of_the_objects_of_a_run(dtype: str, optimizer: str) -> None:
    argv = ["--mock-data", "--vocab-size", "257", "--train-iters", "1", "--seq-length", "16", "--device", "cpu"]
    config = parse([*argv, "--params-dtype", dtype, "--optimizer", *optimizer.split()], {}).config
    trainer, expected = build(config, 0, 1), state_bytes(config)
    params, masters = trainer.optimizer.params, trainer.optimizer.masters
    assert nbytes(params.values()) == expected["weights"]
    own = [m for name, m in masters.items() if m.data_ptr() != params[name].data_ptr()]
    assert nbytes(own) == expected["masters"]
    moments = [t for tensors in trainer.optimizer.moments().values() for t in tensors.values()]
    assert nbytes(moments) == expected["moments"]
    assert nbytes(trainer.optimizer.average.values()) == expected["average"]
    assert sum(spec.numel * t.itemsize for spec, t in held(trainer).values()) == checkpoint_bytes(config)
    buffers = [bucket.buffer for bucket in trainer.buckets.buckets]
    alignment = (len(params) + len(buffers)) * ALIGNMENT * buffers[0].itemsize
    assert expected["gradients"] <= nbytes(buffers) < expected["gradients"] + alignment


def test_bytes_are_shown_in_the_unit_that_fits() -> None:
    megabytes = {0.5: "0.50 MB", 102: "102.00 MB", 103: "0.10 GB", 1.5 * 2**20: "1,536.00 GB"}
    assert {n: shown(n * 2**20) for n in megabytes} == megabytes
