"""Named stretches of time, as a profile shows them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NOTHING = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """A range of that name in the profile that is being recorded; where none is, nothing (50 ns)."""
    return record_function(name) if torch.autograd._profiler_enabled() else _NOTHING
