"""Parameter groups: update rule, learning-rate factor and weight-decay factor of every parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron.config.optimizer import OptimizerConfig, matching_factor, parse_factor
from megatron.distributed.param_layout import block_of
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
    # Updated by the host, in its memory.
    offloaded: bool = False
    # Clipped together, perhaps with other groups: :attr:`ShardSpec.norm_group`.
    norm_group: int = 0


def param_groups(
    specs: Mapping[str, ShardSpec], config: OptimizerConfig, offloaded: Collection[str] = ()
) -> list[ParamGroup]:
    """Group all parameters by rule, learning rate and weight decay; those ``offloaded`` are in the last groups."""
    lr_factors = [parse_factor(text) for text in config.lr_factors]
    weight_decay_factors = [parse_factor(text) for text in config.weight_decay_factors]
    groups: dict[tuple[str, bool, float, float, bool, int], list[str]] = {}
    for name, spec in specs.items():
        decoupled = config.decoupled_lr is not None and name in DECOUPLED_LR_PARAMS
        decay = matching_factor(name, weight_decay_factors, 1.0 if spec.decays else 0.0)
        lr_factor = matching_factor(name, lr_factors, 1.0)
        key = rule_of(name, spec, config), decoupled, lr_factor, decay, name in offloaded, spec.norm_group
        groups.setdefault(key, []).append(name)
    found = [ParamGroup(tuple(names), *key) for key, names in groups.items()]
    return sorted(found, key=lambda group: group.offloaded)


def offloaded_params(elements: Mapping[str, int], specs: Mapping[str, ShardSpec], config: OptimizerConfig) -> set[str]:
    """Return the parameters whose shards the host updates.

    They are taken in the order in which backward completes gradients, so that most copies overlap with it; one that
    would exceed the fraction is left out. Muon's matrices stay on the device, which multiplies them.

    Args:
        elements: of this rank's shard of each parameter, in that order.
        specs: by name.
        config: of the optimizer.
    """
    if not config.optimizer_cpu_offload:
        return set()
    movable = {name: count for name, count in elements.items() if rule_of(name, specs[name], config) != "muon"}
    left = config.optimizer_offload_fraction * sum(movable.values())
    chosen = set()
    for name, count in movable.items():
        if count <= left:
            chosen.add(name)
            left -= count
    return chosen


def rule_of(name: str, spec: ShardSpec, config: OptimizerConfig) -> str:
    """Return the name of a parameter's update rule.

    Muon updates the matrices of blocks. Adam updates the rest, also the embeddings and the output layer.
    """
    if config.optimizer != "muon" or (spec.is_matrix and "layers." in block_of(name)):
        return config.optimizer
    return "adam"
