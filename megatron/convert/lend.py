"""Loading the weights of a model on the meta device one module at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

Load = Callable[[str], Tensor]


class Lender:
    """Loads the parameters of each module before its forward pass and releases them after it."""

    def __init__(self, model: nn.Module, load: Load, aliases: Mapping[str, str] | None = None) -> None:
        """Register forward hooks on all modules of ``model``.

        Args:
            model: on the meta device.
            load: returns the value of a parameter by its dotted name.
            aliases: tied parameter -> name of the parameter to load instead.
        """
        self.model, self._load, self._aliases = model, load, aliases or {}
        self._meta: dict[nn.Module, dict[str, nn.Parameter]] = {}  # parameters to restore, of loaded modules
        self._prefixes: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._prefixes[module] = f"{name}." if name else ""
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after)

    def load(self, module: nn.Module) -> None:
        """Load a module's own parameters until :meth:`release`.

        Raises:
            ValueError: when the shape of a value is not that of the parameter.
        """
        self._meta[module] = dict(module.named_parameters(recurse=False))
        for name, parameter in self._meta[module].items():
            full = self._prefixes[module] + name
            value = self._load(self._aliases.get(full, full))
            if value.shape != parameter.shape:
                raise ValueError(f"{full} is {list(parameter.shape)}, its value {list(value.shape)}")
            setattr(module, name, nn.Parameter(value, requires_grad=False))

    def release(self, module: nn.Module) -> None:
        """Put a module's meta parameters back."""
        for name, parameter in self._meta.pop(module).items():
            setattr(module, name, parameter)

    def _before(self, module: nn.Module, inputs: Any) -> None:
        self.load(module)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.release(module)
