"""torch.compile of the element-wise regions between matrix products, and ``--deterministic``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron.config.errors import Problem, UserError
from megatron.config.privacy import PRIVATE_FOLDER, check_access
from megatron.kernels.operation import missing_modules

MAX_COMPILED_SHAPES = 64
"""Maximum number of shapes per compiled function, beyond which torch raises an error. A run has few:
blocks, query and key norms, training and evaluation, the last chunk of the loss."""


def compiler_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why torch.compile cannot work here, or None."""
    if device.type == "cuda":
        return None if importlib.util.find_spec("triton") else "torch.compile needs triton, which is not installed"
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if any(map(shutil.which, compilers)):
        return None
    return f"torch.compile needs a C++ compiler; there is no {' or '.join(compilers)}"


def triton_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why our Triton kernels cannot work here, or None."""
    if device.type != "cuda" or dtype == torch.float64:
        return "it needs fp32, bf16 or fp16 on a GPU"
    return missing_modules("triton")


def triton_region(name: str, module: str = "triton_regions") -> Callable[[], Callable[..., Any]]:
    """Return a factory of a function of a module in ``kernels/`` that cannot be imported without Triton."""

    def make() -> Callable[..., Any]:
        use_private_cache()
        function: Callable[..., Any] = getattr(importlib.import_module(f"megatron.kernels.{module}"), name)
        return function

    return make


def compiled(function: Callable[..., Any], any_rows: bool = False) -> Callable[[], Callable[..., Any]]:
    """Return a factory of ``function`` compiled with static shapes, as one graph per shape.

    With ``any_rows`` one graph serves all sizes of the first dimension. The rows of experts have another number in
    every step.
    """

    def make() -> Callable[..., Any]:
        import torch._dynamo.config as limits  # takes seconds, and most runs do not need it
        import torch._inductor.config as inductor

        use_private_cache()
        made: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)

        def run(*arguments: Any) -> Any:
            # Set on every call: torch's settings are per thread, and backward runs in another thread.
            if limits.recompile_limit < MAX_COMPILED_SHAPES:
                limits.recompile_limit = MAX_COMPILED_SHAPES
            if inductor.cpp_cache_precompile_headers:  # they lie in PyTorch's default folder, whatever is set
                inductor.cpp_cache_precompile_headers = False
            # Otherwise the tiling of reductions would depend on autotuning. A change makes dynamo recompile.
            for t in tree_leaves(arguments) if any_rows else ():
                if isinstance(t, torch.Tensor):
                    torch._dynamo.maybe_mark_dynamic(t, 0)
            deterministic = torch.are_deterministic_algorithms_enabled()
            if inductor.deterministic != deterministic:
                inductor.deterministic = deterministic
            return made(*arguments)

        return run

    return make


def set_matmul_precision(reduced: bool) -> None:
    """Let matrix products on GPUs use TF32 never, and add partial sums in bf16 or fp16 only if ``reduced``.

    NVIDIA's images set ``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE``, which turns TF32 on for fp32 runs.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = reduced


CACHE_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
"""Variables that name a folder of compiled code, and the name of our own one."""


def use_private_cache(environ: MutableMapping[str, str] = os.environ) -> None:
    """Keep compiled code, which torch unpickles and runs, where no other user can write.

    PyTorch's default has a known name in ``/tmp``, where anybody can create it first. It is used only if nobody else
    can write to it; so is a folder set in ``environ``. Otherwise a folder in the home folder is used, with a warning.
    PyTorch sets the variable itself when parts of it are imported. Triton's cache is a subfolder, unless its variable
    is set.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    def private(folder: Path) -> str:
        folder.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        check_access(folder)
        return str(folder)

    for variable, name in CACHE_VARIABLES.items():
        if variable in environ or name == "torchinductor":
            try:
                environ[variable] = private(Path(environ.get(variable) or default_cache_dir()))
            except OSError as error:
                try:
                    environ[variable] = private(Path.home() / ".cache" / "megatron-pretrain" / name)
                except (OSError, RuntimeError):  # no home: a user without a name, as in a container
                    environ[variable] = tempfile.mkdtemp()
                why = f"{error.filename}: {error.strerror}"
                warnings.warn(f"torch.compile uses {environ[variable]}, not {why}", stacklevel=2)


def _is_fixed_workspace(value: str) -> bool:
    return value in (":4096:8", ":16:8")


def _excludes_nvls(value: str) -> bool:
    """Return True if NCCL_ALGO excludes NVLS: switches add in the order of arrival."""
    names = [name.strip().lower() for name in value.lstrip("^").split(",")]
    return "nvls" in names if value.startswith("^") else not any(name.startswith("nvls") for name in names)


DETERMINISM_VARIABLES: dict[str, tuple[str, Callable[[str], bool]]] = {
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
    for name, (value, allowed) in DETERMINISM_VARIABLES.items() if device.type == "cuda" else ():
        if not allowed(environ.setdefault(name, value)):
            sentence = f"--deterministic cannot be kept with {name}={environ[name]}"
            problems.append(Problem("E902", sentence, (f"export {name}='{value}'", "drop --deterministic")))
    if problems:
        raise UserError(problems)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass each
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    return ["deterministic: equal runs are equal to the bit; an operation that cannot promise it stops the run"]
