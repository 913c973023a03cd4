"""torch.compile for regions between the matrix products."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

MOST_SHAPES = 64
"""Shapes for which a region is compiled. A run has few: blocks, query and key norms, training and evaluation, a last
short chunk of the loss. Beyond the limit torch would go back to eager computation."""


def no_compiler(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why torch.compile cannot work here; None when it should."""
    if device.type == "cuda":
        return None if importlib.util.find_spec("triton") else "torch.compile needs triton, which is not installed"
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if any(map(shutil.which, compilers)):
        return None
    return f"torch.compile needs a C++ compiler; there is no {' or '.join(compilers)}"


def compiled(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """How to make the compiled form of ``function``: once per shape, as one graph, all sizes constants."""

    def make() -> Callable[..., Any]:
        import torch._dynamo.config as limits  # takes seconds, and most runs do not need it
        import torch._inductor.config as inductor

        made: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)

        def run(*arguments: Any) -> Any:
            if limits.recompile_limit < MOST_SHAPES:  # torch keeps settings by thread, and backward has one of its own
                limits.recompile_limit = MOST_SHAPES
            wanted = torch.are_deterministic_algorithms_enabled()  # dynamo compiles anew for the next run of a process
            if inductor.deterministic != wanted:
                inductor.deterministic = wanted  # or reductions would be cut as timing on the GPU suggests
            return made(*arguments)

        return run

    return make
