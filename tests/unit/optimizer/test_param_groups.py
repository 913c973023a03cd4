"""Groups: who decays, who follows the decoupled rate, whom a pattern names."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from megatron.config.run import OptimizerConfig
from megatron.convert.huggingface.weights import build_on_meta
from megatron.distributed.sharding import ShardSpec
from megatron.optimizer.param_groups import param_groups
from tests.solo import tiny

SPECS: dict[str, ShardSpec] = dict(build_on_meta(tiny(untie_embeddings_and_output_weights=True)).specs)


def by_name(config: OptimizerConfig) -> dict[str, tuple[bool, float, float]]:
    groups = param_groups(SPECS, config)
    keys = [(g.decoupled, g.lr_factor, g.weight_decay_factor) for g in groups]
    assert len(keys) == len(set(keys)), "one call of the rule for what is treated alike"
    names = [name for g in groups for name in g.names]
    assert sorted(names) == sorted(SPECS)
    return {name: key for g, key in zip(groups, keys) for name in g.names}


def test_vectors_do_not_decay() -> None:
    found = by_name(OptimizerConfig())
    assert len(set(found.values())) == 2
    for name, key in found.items():
        vector = name.endswith("bias") or "norm" in name
        assert key == (False, 1.0, 0.0 if vector else 1.0), name


def test_embedding_and_output_layer_follow_the_decoupled_rate() -> None:
    """Not the positions, nor biases: Megatron-LM marks these two weights only."""
    found = by_name(OptimizerConfig(decoupled_lr=1e-3))
    assert {name for name, key in found.items() if key[0]} == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }
    assert not any(key[0] for key in by_name(OptimizerConfig()).values())


def test_the_last_pattern_that_matches_counts() -> None:
    patterns = {"*": 3.0, "layers.*.mlp.*": 0.5, "layers.1.*": 0.25, "*.bias": 0.0}
    words = tuple(f"{pattern}={factor}" for pattern, factor in patterns.items())
    rates, decays = by_name(OptimizerConfig(lr_factors=words)), by_name(OptimizerConfig(weight_decay_factors=words))
    for name in SPECS:
        expected = [factor for pattern, factor in patterns.items() if fnmatch(name, pattern)][-1]
        assert rates[name][1] == expected
        assert decays[name][2] == expected, "said of a vector, it decays"


def test_muon_leaves_to_adam_what_is_no_matrix_of_a_block() -> None:
    """Each with its own rate and decay, whoever moves it."""
    config = OptimizerConfig(optimizer="muon", decoupled_lr=1e-3, lr_factors=("layers.1.*=0.5",))
    found = {name: (g.rule, g.decoupled, g.lr_factor) for g in param_groups(SPECS, config) for name in g.names}
    assert found.keys() == SPECS.keys()
    for name, (rule, decoupled, factor) in found.items():
        matrix = name.startswith("layers.") and len(SPECS[name].shape) == 2
        assert rule == ("muon" if matrix else "adam"), name
        assert decoupled == (name in ("embedding.word_embeddings.weight", "output_layer.weight"))
        assert factor == (0.5 if name.startswith("layers.1.") else 1.0)


@pytest.mark.parametrize("rule", ["adam", "sgd", "lion"])
def test_other_rules_move_everything(rule: str) -> None:
    assert {group.rule for group in param_groups(SPECS, OptimizerConfig(optimizer=rule))} == {rule}
