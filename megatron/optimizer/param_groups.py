"""Parameter groups: update rule, learning-rate factor and weight-decay factor of every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.run import OptimizerConfig, matching_factor, parse_factor
from megatron.distributed.sharding import ShardSpec

DECOUPLED_LR_PARAMS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters that follow ``decoupled_lr``, as in Megatron-LM; learned position embeddings do not."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that are updated together, by one call of the update rule."""

    # Global names, in the model's order.
    names: tuple[str, ...]
    # Name of the update rule.
    rule: str
    # Use ``decoupled_lr``, the learning rate of embeddings and output layer.
    decoupled: bool
    lr_factor: float
    # By default 0 for biases and other vectors, 1 for matrices.
    weight_decay_factor: float


def param_groups(specs: Mapping[str, ShardSpec], config: OptimizerConfig) -> list[ParamGroup]:
    """Group all parameters by rule, learning rate and weight decay."""
    lr_factors = [parse_factor(text) for text in config.lr_factors]
    weight_decay_factors = [parse_factor(text) for text in config.weight_decay_factors]
    groups: dict[tuple[str, bool, float, float], list[str]] = {}
    for name, spec in specs.items():
        decoupled = config.decoupled_lr is not None and name in DECOUPLED_LR_PARAMS
        decay = matching_factor(name, weight_decay_factors, 1.0 if spec.decays else 0.0)
        key = rule_of(name, spec, config), decoupled, matching_factor(name, lr_factors, 1.0), decay
        groups.setdefault(key, []).append(name)
    return [ParamGroup(tuple(names), *key) for key, names in groups.items()]


def is_muon_param(name: str, spec: ShardSpec) -> bool:
    """Return True if Muon updates a parameter: matrices of blocks, not the embeddings or the output layer."""
    return name.startswith("layers.") and len(spec.shape) == 2


def rule_of(name: str, spec: ShardSpec, config: OptimizerConfig) -> str:
    """Return the name of a parameter's update rule; with Muon, Adam updates all but the matrices of blocks."""
    return config.optimizer if config.optimizer != "muon" or is_muon_param(name, spec) else "adam"
