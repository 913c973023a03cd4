"""Declaring parameters, once or as a tied weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.config.run import TrainingConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.sharding import Init
from megatron.layers.context import BuildContext
from megatron.model.gpt import GPTChunk
from megatron.pipeline.partition import stages_from_counts
from tests.solo import one_rank_mesh, tiny

WORDS = "embedding.word_embeddings.weight"


def context() -> BuildContext:
    return BuildContext(one_rank_mesh(), GradAccumulator())


def test_a_name_is_taken_once() -> None:
    c = context()
    spec = c.shard.split((4, 3), 0, Init(0.02))
    c.submodule("a").parameter("weight", spec)
    with pytest.raises(ValueError, match=r"a\.weight is declared twice"):
        c.submodule("a").parameter("weight", spec)


def test_a_tied_weight_is_one_parameter_with_two_uses() -> None:
    c = context()
    spec = replace(c.shard.split((4, 3), 0, Init(0.02)), tied=True)
    first, second = c.submodule("a").parameter("weight", spec), c.root.submodule("a").parameter("weight", spec)
    assert first is second
    assert c.specs["a.weight"].contributions == 2
    with pytest.raises(ValueError, match="declared twice"):
        c.submodule("a").parameter("weight", replace(spec, shape=(3, 4)))


@pytest.mark.parametrize("untied", [False, True])
def test_chunks_of_one_model_agree_on_names_and_initial_values(untied: bool) -> None:
    """Cut into two chunks, each with a context of its own, the model has the parameters of the whole."""
    config = tiny(untie_embeddings_and_output_weights=untied)
    split = (stages_from_counts([2]), stages_from_counts([1, 1]))
    whole, *parts = (GPTChunk(config, TrainingConfig(), context(), stage) for stages in split for stage in stages)
    held = [set(part.params) for part in parts]
    assert held[0] | held[1] == set(whole.params)
    assert held[0] & held[1] == (set() if untied else {WORDS})
    for part in parts:
        assert dict(part.named_parameters()).keys() >= set(part.params) - {WORDS}
        assert all(torch.equal(p, whole.params[name]) for name, p in part.params.items())
        assert WORDS not in part.specs or part.specs[WORDS].contributions == 1
    assert whole.specs[WORDS].contributions == (1 if untied else 2)
