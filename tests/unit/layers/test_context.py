"""Declaring parameters, once or as a tied weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.config.training import TrainingConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.sharding import Init
from megatron.layers.context import BuildContext
from megatron.layers.mixers.attention import AttentionMixer
from megatron.model.gpt import build_chunks, build_gpt
from megatron.pipeline.partition import stages_from_counts
from tests.kit.solo import one_rank_mesh, tiny

WORDS = "embedding.word_embeddings.weight"


def context() -> BuildContext:
    return BuildContext(one_rank_mesh(), GradAccumulator())


def test_a_parameter_is_declared_and_built_once_unless_it_is_tied() -> None:
    c = context()
    spec = c.sharding.dense.split((4, 3), 0, Init(0.02))
    c.declare({"a.weight": spec, "tied.weight": replace(spec, tied=True)})
    c.submodule("a").parameter("weight")
    with pytest.raises(ValueError, match=r"a\.weight is built twice"):
        c.submodule("a").parameter("weight")
    assert c.submodule("tied").parameter("weight") is c.submodule("tied").parameter("weight")
    with pytest.raises(KeyError, match=r"b\.weight"):
        c.submodule("b").parameter("weight")
    assert c.submodule("a").bias() is None


def test_a_layer_that_builds_less_than_is_declared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BuildContext, "bias", lambda self, autograd=False: None)
    with pytest.raises(RuntimeError, match=r"do not build .*layers\.0\.self_attention\.linear_qkv\.bias"):
        build_gpt(tiny(), TrainingConfig(), context())


def test_a_layer_that_builds_in_another_order_than_declared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = AttentionMixer.parameters
    monkeypatch.setattr(AttentionMixer, "parameters", lambda *given: dict([*original(*given).items()][::-1]))
    built, declared = (f"layers\\.0\\.self_attention\\.linear_{name}" for name in ("qkv.weight", "proj.bias"))
    with pytest.raises(RuntimeError, match=f"build {built} where {declared} is declared"):
        build_gpt(tiny(), TrainingConfig(), context())


@pytest.mark.parametrize("untied", [False, True])
def test_chunks_of_one_model_agree_on_names_and_initial_values(untied: bool) -> None:
    """Cut into two chunks, each with a context of its own, the model has the parameters of the whole."""
    config = tiny(untie_embeddings_and_output_weights=untied)
    split = (stages_from_counts([2]), stages_from_counts([1, 1]))
    stages = (stage for stages in split for stage in stages)
    whole, *parts = (build_chunks(config, TrainingConfig(), context(), {0: stage})[0] for stage in stages)
    held = [set(part.params) for part in parts]
    assert held[0] | held[1] == set(whole.params)
    assert held[0] & held[1] == (set() if untied else {WORDS})
    for part in parts:
        assert dict(part.named_parameters()).keys() >= set(part.params) - {WORDS}
        assert all(torch.equal(p, whole.params[name]) for name, p in part.params.items())
        assert WORDS not in part.specs or part.specs[WORDS].contributions == 1
    assert whole.specs[WORDS].contributions == (1 if untied else 2)
