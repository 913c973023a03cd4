"""Text does not depend on how many tensor-parallel ranks write it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.arguments.cli import parse
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.inference.generate import PipelinedModel, SamplingParams, generate
from megatron.layers.context import BuildContext
from megatron.model.gpt import GPTChunk, build_gpt
from megatron.training.build import build_trainer
from tests.kit.cases import MODEL, Case, pipeline
from tests.kit.checkpoints import save_model
from tests.kit.pool import Pool, RankError
from tools.generate import main

PROMPTS = [[5, 17, 99], [100], [3, 1, 4, 1, 5, 9, 2, 6], [44, 44]]
NEW = 7

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "untied-gqa": {"num_query_groups": 2, "untie_embeddings_and_output_weights": True},
    "mqa-rope-qk-norm-window": {
        "num_query_groups": 1,
        "position_embedding_type": "rope",
        "qk_layernorm": True,
        "window_size": 5,
        "activation": "swiglu",
    },
    "post-norm-all-heads": {
        "normalization": "RMSNorm",
        "layernorm_placement": "post",
        "apply_layernorm_1p": True,
        "qk_layernorm": True,
        "qk_layernorm_scope": "all",
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "no_rope_freq": "2",
        "attention_pattern": "local:5,global",
        "rotary_base_local": 50.0,
        "logits_scaling": 0.5,
    },
}
SAMPLINGS = {"greedy": SamplingParams(0.0), "sampled": SamplingParams(1.2, 60, 0.97, seed=11)}


def chunk_on(rank: int, tp: int, config: ModelConfig, sequence_parallel: bool = False) -> GPTChunk:
    """The model of a seed on this rank."""
    layout = Layout.from_config(ParallelConfig(tensor_model_parallel_size=tp), tp)
    mesh = Mesh(layout, rank, timedelta(seconds=20), max(1, tp // config.kv_groups))
    context = BuildContext(mesh, GradAccumulator(), torch.float64, sequence_parallel=sequence_parallel)
    return build_gpt(config, TrainingConfig(), context)


def write(rank: int, tp: int, config: ModelConfig, sampling: SamplingParams) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits of the first prompt, and what follows each."""
    chunk = chunk_on(rank, tp, config).eval()
    return chunk.logits(torch.tensor(PROMPTS[:1])), generate(chunk, PROMPTS, NEW, sampling, batch_size=3)


@cache
def alone(name: str, sampling: str) -> tuple[torch.Tensor, list[list[int]]]:
    return write(0, 1, replace(MODEL, **MODELS[name]), SAMPLINGS[sampling])


@pytest.mark.parametrize(
    ("name", "sampling", "tp"),
    [
        ("gpt2", "greedy", 2),
        ("untied-gqa", "sampled", 4),
        ("mqa-rope-qk-norm-window", "sampled", 2),
        ("post-norm-all-heads", "greedy", 4),
    ],
)
def test_generation_of_every_rank_matches_one_process(pool: Pool, name: str, sampling: str, tp: int) -> None:
    expected_logits, expected = alone(name, sampling)
    assert len({token for ids in expected for token in ids}) > 4
    ranks = pool.run(tp, write, replace(MODEL, **MODELS[name]), SAMPLINGS[sampling])
    for logits, new in ranks:
        assert torch.equal(logits, ranks[0][0]), "ranks must agree to the bit, or they would part in the end"
        torch.testing.assert_close(logits, expected_logits, rtol=1e-10, atol=1e-10)
        assert new == expected


def continued(rank: int, world_size: int, flags: str) -> list[list[int]]:
    """Return the text that a model in training generates after each prompt, on this rank."""
    run = "--mock-data --vocab-size 128 --train-iters 1 --params-dtype fp64 --device cpu --num-layers 2 --seq-length 32"
    run += " --hidden-size 32 --num-attention-heads 4 --position-embedding-type rope"
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    config = parse(f"{run} {flags if world_size > 1 else flags.split('--context')[0]}".split(), environ).config
    (chunk,) = build_trainer(config, rank, world_size).chunks.values()
    return generate(chunk, PROMPTS, NEW, SAMPLINGS["greedy"])


@pytest.mark.parametrize("model", ["--window-size 5", "--num-experts 4 --moe-aux-loss-coeff 0.1 --disable-bias-linear"])
def test_context_parallel_ranks_write_whole_sequences(pool: Pool, model: str) -> None:
    """As --sample-prompts does, on every rank."""
    flags = f"{model} --context-parallel-size 2 --cp-comm-type"
    for method in ("p2p", "a2a"):
        assert pool.run(2, continued, f"{flags} {method}") == [continued(0, 1, flags)] * 2


def logits_with_sequence_parallelism(rank: int, tp: int) -> None:
    chunk_on(rank, tp, MODEL, sequence_parallel=True).eval().logits(torch.tensor([[1, 2, 3, 4]]))


def test_sequence_parallelism_is_refused(pool: Pool) -> None:
    with pytest.raises(RankError, match="without sequence parallelism"):
        pool.run(2, logits_with_sequence_parallelism)


def run_tool(
    rank: int, ranks: int, flags: list[str], program: Callable[[list[str]], int] = main
) -> tuple[int, str, str]:
    """A tool on one rank, as under torchrun: exit status, standard output and error."""
    launched = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launched.items():
            patch.setitem(os.environ, name, value)
        out, err = StringIO(), StringIO()
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.setattr(
            "megatron.distributed.launch.destroy_distributed", lambda: None
        )  # the pool does it, when all are done
        return program(flags), out.getvalue(), err.getvalue()


def test_the_tool_on_several_ranks(pool: Pool, tmp_path: Path) -> None:
    chunk = chunk_on(0, 1, replace(MODEL, **MODELS["untied-gqa"]))
    save_model(chunk, tmp_path, files={}, params_dtype="fp64")
    prompts = [" ".join(map(str, ids)) for ids in PROMPTS]
    flags = ["--load", str(tmp_path), "--prompt", *prompts, "--max-new-tokens", "7", "--top-k", "50"]
    status, expected, speed = run_tool(0, 1, flags)
    assert (status, speed[:10]) == (0, "generate: ")
    first, second = pool.run(2, run_tool, flags)
    assert first[:2] == (0, expected)
    assert second == (0, "", "")


def test_a_prompt_cannot_come_from_one_standard_input(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, run_tool, ["--load", str(tmp_path)])
    assert first[0] == second[0] == 2
    assert "--prompts FILE" in first[2]
    assert second[2] == ""


def continued_by_stages(rank: int, world_size: int, case: Case) -> list[list[int]]:
    """Continue the prompts with the model of a run, whatever its layout."""
    trainer = build_trainer(case.config(), rank, world_size)
    parts = [part for chunk in trainer.chunks.values() for part in chunk.parts]
    with trainer.optimizer.weights.gathered(parts):
        return generate(PipelinedModel(trainer), PROMPTS, NEW, SAMPLINGS["sampled"], batch_size=3, indices=(7, 0, 3, 4))


ROPE: dict[str, Any] = {"layers": 4, "position_embedding_type": "rope", "window_size": 5}
STAGES = {
    "tp2-pp2": pipeline(2, **ROPE, tensor_model_parallel_size=2),
    "vpp": pipeline(2, stages=2, **ROPE),
    "zb-v": pipeline(2, "zb-v", **ROPE),
    "zero3": replace(pipeline(1, **ROPE, data_parallel_sharding_strategy="optim_grads_params"), dp=2),
}


@pytest.mark.parametrize("name", STAGES)
def test_the_stages_of_a_pipeline_write_the_files_of_one_process(pool: Pool, name: str) -> None:
    case = STAGES[name]
    (chunk,) = build_trainer(case.twin().config(), 0, 1).chunks.values()
    expected = generate(chunk, PROMPTS, NEW, SAMPLINGS["sampled"], indices=(7, 0, 3, 4))
    assert expected != generate(chunk, PROMPTS, NEW, SAMPLINGS["sampled"])
    assert pool.run(case.world_size, continued_by_stages, case) == [expected] * case.world_size
