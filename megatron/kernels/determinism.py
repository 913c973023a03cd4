"""``--deterministic``: equal runs are equal to the bit, or the run is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping

import torch

from megatron.config.problems import Problem, UserError


def _is_fixed_workspace(value: str) -> bool:
    return value in (":4096:8", ":16:8")


def _sums_in_ranks(value: str) -> bool:
    """Whether no reduction is left to switches (NVLS), which add in the order of arrival."""
    names = [name.strip().lower() for name in value.lstrip("^").split(",")]
    return "nvls" in names if value.startswith("^") else not any(name.startswith("nvls") for name in names)


VARIABLES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", _is_fixed_workspace),
    "NCCL_ALGO": ("^NVLS,NVLSTree", _sums_in_ranks),
}
"""What the environment of a run on GPUs must say: a value that is set where there is none, and which others do.

The first is torch's own condition for equal matrix products (docs of ``use_deterministic_algorithms``), the second
Megatron-LM's for equal sums over ranks.
"""


def make_deterministic(wanted: bool, device: torch.device, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Make torch compute the same bits in equal runs of this process; to be called before any GPU communicates.

    From here on torch raises where an operation knows only an order that differs from run to run; its fused attention
    takes backward passes that add in a fixed order. Which kernels are left out is decided by ``registry.choose``.

    Args:
        wanted: False does nothing.
        device: of the run.
        environ: gets the variables that cuBLAS and NCCL read.

    Returns:
        Lines to print.

    Raises:
        UserError: when a variable is set to something else.

    """
    if not wanted:
        return []
    problems = []
    for name, (value, allowed) in VARIABLES.items() if device.type == "cuda" else ():
        if not allowed(environ.setdefault(name, value)):
            sentence = f"--deterministic cannot be kept with {name}={environ[name]}"
            problems.append(Problem("E902", sentence, (f"export {name}='{value}'", "drop --deterministic")))
    if problems:
        raise UserError(problems)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass each
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    return ["deterministic: equal runs are equal to the bit; an operation that cannot promise it stops the run"]
