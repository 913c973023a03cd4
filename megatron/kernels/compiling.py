"""torch.compile of the element-wise regions between matrix products."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

MOST_SHAPES = 64
"""Maximum number of shapes per compiled function, beyond which torch falls back to eager execution. A run has few:
blocks, query and key norms, training and evaluation, the last chunk of the loss."""


def no_compiler(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why torch.compile cannot work here, or None."""
    if device.type == "cuda":
        return None if importlib.util.find_spec("triton") else "torch.compile needs triton, which is not installed"
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if any(map(shutil.which, compilers)):
        return None
    return f"torch.compile needs a C++ compiler; there is no {' or '.join(compilers)}"


def compiled(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Return a factory of ``function`` compiled with static shapes, as one graph per shape."""

    def make() -> Callable[..., Any]:
        import torch._dynamo.config as limits  # takes seconds, and most runs do not need it
        import torch._inductor.config as inductor

        made: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)

        def run(*arguments: Any) -> Any:
            # Set on every call: torch's settings are per thread, and backward runs in another thread.
            if limits.recompile_limit < MOST_SHAPES:
                limits.recompile_limit = MOST_SHAPES
            # Otherwise the tiling of reductions would depend on autotuning. A change makes dynamo recompile.
            deterministic = torch.are_deterministic_algorithms_enabled()
            if inductor.deterministic != deterministic:
                inductor.deterministic = deterministic
            return made(*arguments)

        return run

    return make
