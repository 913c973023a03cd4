"""What is installed: Python, PyTorch and what it was built for, required packages, and what others would buy here.

Reads the records of installed packages only. Does not import torch.
"""

from __future__ import annotations

import ctypes
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import NamedTuple

from megatron.config.machine import CUDA_DRIVER
from megatron.config.text import package_version
from tools.lib.findings import BAD, NOTE, OK, Finding

GROUP, OPTIONAL = "software", "optional packages"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA: oldest driver for any of its minor versions (NVIDIA's guide of CUDA's compatibility)."""


class Package(NamedTuple):
    """An optional package.

    Attributes:
        name: of the distribution.
        buys: what a run or a tool gets from it.
        measured: a figure, and the page that has it; empty if nothing was measured here.
        install: words after ``pip install``.
        on_gpu: it is of use on NVIDIA GPUs only.
        used: False if nothing here uses it.
    """

    name: str
    buys: str
    measured: str = ""
    install: str = ""
    on_gpu: bool = False
    used: bool = True


PACKAGES = (
    Package("triton", "kernels between matrix products", "10 launches a block; docs/performance.md", on_gpu=True),
    Package(
        "flash-attn",
        "attention with windows and documents; PyTorch's own `varlen` does the same without it",
        install="flash-attn --no-build-isolation",
        on_gpu=True,
    ),
    Package(
        "apex", "norms, linears and Adam where Triton's kernels fail", install="apex, from its source", on_gpu=True
    ),
    Package("mamba-ssm", "the recurrence of Mamba-2 layers", install="mamba-ssm --no-build-isolation", on_gpu=True),
    Package(
        "causal-conv1d", "convolutions of hybrid models", install="causal-conv1d --no-build-isolation", on_gpu=True
    ),
    Package("flash-linear-attention", "the recurrence of gated DeltaNet layers", on_gpu=True),
    Package("transformer-engine", "", used=False),
    Package("liger-kernel", "", used=False),
    Package(
        "gigatoken",
        "preprocessing that is faster than `tokenizers`",
        "45 (42–47) times one thread of `tokenizers` on 2 cores; docs/performance.md",
    ),
    Package("orjson", "faster reading of JSON lines in preprocessing"),
    Package("matplotlib", "pictures of runs, layouts and schedules"),
    Package("tensorboard", "--tensorboard-dir"),
    Package("wandb", "--wandb-project"),
    Package("s3fs", "checkpoints and data in S3 (s3://)"),
    Package("gcsfs", "checkpoints and data in Google's store (gs://); untested"),
    Package("adlfs", "checkpoints and data in Azure's store (az://); untested"),
    Package("lm-eval", "tasks of the Language Model Evaluation Harness"),
    Package("datasets", "corpora of the Hugging Face hub"),
    Package("pyarrow", "corpora in Parquet and Arrow files"),
    Package("datatrove", "preprocess_data.py --quality"),
    Package("spacy", "preprocess_data.py --quality"),
    Package("sentencex", "preprocess_data.py --split-sentences"),
    Package("peft", "comparison of exported adapters"),
)
"""Packages that are not required. A figure is one of this repository's measurements."""


def installed(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def software_findings(gpu: bool, driver: str | None) -> Iterator[Finding]:
    """Yield findings on Python, PyTorch and the required packages.

    Args:
        gpu: this machine has an NVIDIA GPU, as far as its driver's files show.
        driver: version of the driver, if known.
    """
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding(GROUP, "python", OK, f"{python} ({sys.executable})", facts={"version": python})
    yield Finding(GROUP, "megatron", OK, package_version())
    torch = installed("torch")
    if torch is None:
        yield Finding(GROUP, "torch", BAD, "not installed", "pip install torch")
    else:
        yield torch_finding(torch, cuda_of_torch(), gpu, driver, cuda_of_driver())
        nccl = next(
            (f"{name} {found}" for cuda in OLDEST_DRIVERS if (found := installed(name := f"nvidia-nccl-cu{cuda}"))),
            None,
        )
        if nccl:
            yield Finding(GROUP, "nccl", OK, nccl)
    yield from _required()


def cuda_of_driver() -> str | None:
    """Return the newest version of CUDA that the driver supports; None without a driver."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL(CUDA_DRIVER).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def cuda_of_torch() -> str | None:
    """Return the version of CUDA that the installed PyTorch was built for, from its files."""
    for path in distribution("torch").files or ():
        if str(path) == "torch/version.py":
            found = re.search(
                r"^cuda(?:: [^=]*)? = ['\"]([\d.]+)['\"]", Path(str(path.locate())).read_text(), re.MULTILINE
            )
            return found[1] if found else None
    return None


def torch_finding(torch: str, cuda: str | None, gpu: bool, driver: str | None, driver_cuda: str | None) -> Finding:
    """Return whether PyTorch's build fits the driver."""
    built = f"{torch}, built for CUDA {cuda}" if cuda else f"{torch}, built without CUDA"
    facts = {"version": torch, "cuda": cuda, "driver": driver, "driver_cuda": driver_cuda}
    if not gpu:
        return Finding(GROUP, "torch", OK, built, facts=facts)
    if cuda is None:
        todo = "pip install --force-reinstall torch, from an index with builds for CUDA"
        return Finding(GROUP, "torch", BAD, f"{built}, but this machine has a GPU", todo, facts)
    major, minor = (int(part) for part in cuda.split(".")[:2])
    oldest, has = OLDEST_DRIVERS.get(major), int(driver.split(".")[0]) if driver and driver[0].isdecimal() else None
    if oldest is not None and has is not None and has < oldest:
        sentence = f"{built}: needs driver {oldest} or newer, and this one is {driver}"
        return Finding(GROUP, "torch", BAD, sentence, "update the driver, or install a torch for an older CUDA", facts)
    if driver_cuda and tuple(map(int, driver_cuda.split(".")[:2])) < (major, minor):
        sentence = f"{built}, newer than the driver's {driver_cuda}: runs, but code cannot be compiled for another GPU"
        return Finding(GROUP, "torch", NOTE, sentence, f"update the driver to one for CUDA {cuda}", facts)
    return Finding(GROUP, "torch", OK, built, facts=facts)


def _required() -> Iterator[Finding]:
    """Yield what pyproject.toml requires and is missing or too old."""
    wanted = tomllib.loads(PROJECT.read_text())["project"]["dependencies"] if PROJECT.exists() else []
    wrong = []
    for line in wanted:
        name, least = re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?.*", line).groups()  # type: ignore[union-attr]
        found = installed(name)
        if found is None or (least and _numbers(found) < _numbers(least)):
            wrong.append(f"{name} {found or 'missing'}" + (f" (needs {least})" if least else ""))
    if wrong:
        yield Finding(GROUP, "required packages", BAD, ", ".join(wrong), "pip install -r requirements.txt")
    elif wanted:
        yield Finding(GROUP, "required packages", OK, f"{len(wanted)} of {len(wanted)} installed")


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def package_findings(gpu: bool) -> Iterator[Finding]:
    """Yield what each optional package buys on this machine, and how to install it."""
    for package in PACKAGES:
        found = installed(package.name)
        facts = {"version": found, "used": package.used, "on_gpu": package.on_gpu}
        gain = package.buys + (f" ({package.measured})" if package.measured else "")
        if not package.used:
            sentence = "nothing: this program does not use it"
        elif package.on_gpu and not gpu:
            sentence = f"nothing on a CPU; on a GPU {gain}"
        else:
            sentence = gain + (" (not measured here)" if package.on_gpu and not package.measured else "")
        missing = found is None and package.used and (gpu or not package.on_gpu)
        todo = f"pip install {package.install or package.name}" if missing else ""
        name = f"{package.name} {found or 'missing'}"
        yield Finding(OPTIONAL, name, NOTE if missing else OK, sentence, todo, facts)
