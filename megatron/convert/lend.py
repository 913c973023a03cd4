"""A model on the meta device whose modules have weights only while they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

Load = Callable[[str], Tensor]


class Lender:
    """Gives each module its own parameters just before it runs and takes them back after: one module's exist at a time.

    Attributes:
        model: whose parameters are shapes only.
    """

    def __init__(self, model: nn.Module, load: Load, aliases: Mapping[str, str] | None = None) -> None:
        """Watch all modules of ``model`` from now on.

        Args:
            model: on the meta device.
            load: the value of a parameter, by its dotted name.
            aliases: names of parameters that are another one.
        """
        self.model, self._load, self._aliases = model, load, aliases or {}
        self._shapes: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                self._names[module] = f"{name}." if name else ""
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after)

    def give(self, module: nn.Module) -> None:
        """Let a module have its weights until :meth:`take`.

        Raises:
            ValueError: when a weight has another shape than the module's.
        """
        self._shapes[module] = dict(module.named_parameters(recurse=False))
        for name, shape in self._shapes[module].items():
            full = self._names[module] + name
            value = self._load(self._aliases.get(full, full))
            if value.shape != shape.shape:
                raise ValueError(f"{full} is {list(shape.shape)}, its value {list(value.shape)}")
            setattr(module, name, nn.Parameter(value, requires_grad=False))

    def take(self, module: nn.Module) -> None:
        """Leave a module its shapes only."""
        for name, shape in self._shapes.pop(module).items():
            setattr(module, name, shape)

    def _before(self, module: nn.Module, inputs: Any) -> None:
        self.give(module)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.take(module)
