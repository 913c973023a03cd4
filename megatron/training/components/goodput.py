"""Save the time account of a run, which goes on over all its starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron.training.component import Component
from megatron.training.metrics import Goodput


class GoodputState(Component):
    """Goodput of this run; another run that starts from its checkpoint begins with its own."""

    name = "goodput"
    state_types: ClassVar[Mapping[str, Any]] = {"first_start": float, "productive_seconds": float, "starts": int}
    is_of_run = True

    def __init__(self, goodput: Goodput) -> None:
        """Save and load ``goodput``."""
        self._goodput = goodput

    def state_dict(self) -> Mapping[str, Any]:
        """See :class:`Component`."""
        return self._goodput.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`Component`."""
        self._goodput.load_state_dict(state)
