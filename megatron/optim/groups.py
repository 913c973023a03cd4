"""Which parameters have a learning rate or a weight decay of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from megatron.config.factors import factor_of, read_factor
from megatron.config.problems import Problem, UserError
from megatron.config.run import OptimizerConfig
from megatron.config.settings import flag
from megatron.parallel.shard import ShardSpec

DECOUPLED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters that follow ``decoupled_lr``, as in Megatron-LM: learned positions do not."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that one call of the update rule moves.

    Attributes:
        names: global, in the model's order.
        decoupled: they follow the learning rate of the embeddings and the output layer.
        lr_factor: multiplies their learning rate.
        weight_decay_factor: multiplies their weight decay; 0 for biases and other vectors unless somebody says else.
    """

    names: tuple[str, ...]
    decoupled: bool
    lr_factor: float
    weight_decay_factor: float


def param_groups(specs: Mapping[str, ShardSpec], config: OptimizerConfig) -> list[ParamGroup]:
    """All parameters, those that are treated alike together.

    Raises:
        UserError: when a pattern matches none.
    """
    lr_factors = _factors("lr_factors", config.lr_factors, specs)
    weight_decay_factors = _factors("weight_decay_factors", config.weight_decay_factors, specs)
    groups: dict[tuple[bool, float, float], list[str]] = {}
    for name, spec in specs.items():
        decoupled = config.decoupled_lr is not None and name in DECOUPLED
        decay = factor_of(name, weight_decay_factors, 1.0 if spec.decays else 0.0)
        groups.setdefault((decoupled, factor_of(name, lr_factors, 1.0), decay), []).append(name)
    return [ParamGroup(tuple(names), *key) for key, names in groups.items()]


def _factors(option: str, texts: Sequence[str], specs: Mapping[str, ShardSpec]) -> list[tuple[str, float]]:
    factors = [read_factor(text) for text in texts]
    problems = [_idle(option, *factor, specs) for factor in factors if not _matches(factor[0], specs)]
    if problems:
        raise UserError(problems)
    return factors


def _matches(pattern: str, specs: Mapping[str, ShardSpec]) -> bool:
    return any(fnmatchcase(name, pattern) for name in specs)


def _idle(option: str, pattern: str, factor: float, specs: Mapping[str, ShardSpec]) -> Problem:
    nearest = (get_close_matches(pattern, specs, n=1, cutoff=0.0) or list(specs))[0]
    sentence = f"'{pattern}' in {option} matches no parameter; one is called {nearest}"
    return Problem("E407", sentence, (f"{flag(option)} '{nearest}={factor:g}'",))
