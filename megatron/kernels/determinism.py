"""``--deterministic``: bitwise reproducible runs."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping

import torch

from megatron.config.problems import Problem, UserError


def _is_fixed_workspace(value: str) -> bool:
    return value in (":4096:8", ":16:8")


def _excludes_nvls(value: str) -> bool:
    """Return True if NCCL_ALGO excludes NVLS: switches add in the order of arrival."""
    names = [name.strip().lower() for name in value.lstrip("^").split(",")]
    return "nvls" in names if value.startswith("^") else not any(name.startswith("nvls") for name in names)


VARIABLES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", _is_fixed_workspace),
    "NCCL_ALGO": ("^NVLS,NVLSTree", _excludes_nvls),
}
"""Environment variables of deterministic runs on GPUs: the value to set, and a test of an existing one.

The first is PyTorch's condition for reproducible matrix products (docs of ``use_deterministic_algorithms``), the second
Megatron-LM's for reproducible reductions over ranks.
"""


def make_deterministic(wanted: bool, device: torch.device, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Make PyTorch deterministic in this process. To be called before the first GPU communication.

    Afterwards torch raises in operations without a deterministic implementation. Kernels that are not deterministic
    are excluded by ``registry.select_kernels``.

    Args:
        wanted: False does nothing.
        device: of the run.
        environ: receives the variables that cuBLAS and NCCL read.

    Returns:
        Lines to print.

    Raises:
        UserError: when a variable is already set to a value that is not deterministic.

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
