"""Which parameters have a learning rate or a weight decay of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from megatron.config.factors import factor_of, read_factor
from megatron.config.problems import Problem, UserError
from megatron.config.run import OptimizerConfig
from megatron.config.settings import flag
from megatron.optim.muon import is_muons
from megatron.parallel.shard import ShardSpec

DECOUPLED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters that follow ``decoupled_lr``, as in Megatron-LM: learned positions do not."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that one call of the update rule moves.

    Attributes:
        names: global, in the model's order.
        rule: the update rule, by its name.
        decoupled: they follow the learning rate of the embeddings and the output layer.
        lr_factor: multiplies their learning rate.
        weight_decay_factor: multiplies their weight decay; 0 for biases and other vectors unless somebody says else.
    """

    names: tuple[str, ...]
    rule: str
    decoupled: bool
    lr_factor: float
    weight_decay_factor: float


def param_groups(specs: Mapping[str, ShardSpec], config: OptimizerConfig) -> list[ParamGroup]:
    """All parameters, those that are treated alike together."""
    lr_factors = [read_factor(text) for text in config.lr_factors]
    weight_decay_factors = [read_factor(text) for text in config.weight_decay_factors]
    groups: dict[tuple[str, bool, float, float], list[str]] = {}
    for name, spec in specs.items():
        decoupled = config.decoupled_lr is not None and name in DECOUPLED
        decay = factor_of(name, weight_decay_factors, 1.0 if spec.decays else 0.0)
        groups.setdefault((rule_of(name, spec, config), decoupled, factor_of(name, lr_factors, 1.0), decay), []).append(
            name
        )
    return [ParamGroup(tuple(names), *key) for key, names in groups.items()]


def rule_of(name: str, spec: ShardSpec, config: OptimizerConfig) -> str:
    """The rule that moves a parameter: Muon leaves to Adam what is no matrix of a block."""
    return config.optimizer if config.optimizer != "muon" or is_muons(name, spec) else "adam"


def check_patterns(config: OptimizerConfig, names: Collection[str]) -> None:
    """Find patterns that stand for nothing.

    Args:
        config: with the patterns.
        names: of all parameters of the model, on whatever rank.

    Raises:
        UserError: when a pattern matches none of them.

    """
    problems = [
        _idle(option, *factor, names)
        for option in ("lr_factors", "weight_decay_factors")
        for factor in map(read_factor, getattr(config, option))
        if not any(fnmatchcase(name, factor[0]) for name in names)
    ]
    if problems:
        raise UserError(problems)


def _idle(option: str, pattern: str, factor: float, names: Collection[str]) -> Problem:
    nearest = (get_close_matches(pattern, names, n=1, cutoff=0.0) or list(names))[0]
    sentence = f"'{pattern}' in {option} matches no parameter; one is called {nearest}"
    return Problem("E407", sentence, (f"{flag(option)} '{nearest}={factor:g}'",))
