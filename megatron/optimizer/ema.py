"""Exponential moving average of the main parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.optimizer.rules import UpdateArgs, UpdateRule


class AveragedRule(UpdateRule):
    """Wraps an update rule: after each update that is not skipped, the parameters are averaged."""

    def __init__(
        self,
        rule: UpdateRule,
        names: Sequence[str],
        main_params: Mapping[str, Tensor],
        averages: Mapping[str, Tensor],
        decay: float,
    ) -> None:
        """Wrap ``rule``, which updates the parameters ``names``; ``decay`` is the weight of the old average."""
        self.params, self.state, self.step_counts = rule.params, rule.state, rule.step_counts
        self._rule, self._names, self._decay = rule, names, decay
        self._main_params, self._averages = main_params, averages

    @torch.no_grad()
    def update(self, args: UpdateArgs) -> None:
        """Update the parameters, then the averages."""
        self._rule.update(args)
        weight = (1.0 - self._decay) * (1.0 - args.skip.double())
        for name in self._names:
            average = self._averages[name]
            average.lerp_(self._main_params[name], weight.to(average.dtype))
