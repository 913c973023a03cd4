"""GPUs and memory of this machine, found without torch: from device files, drivers and control groups."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path("/")

DEVICE_FILES = ("dev/nvidiactl", "dev/nvidia[0-9]*", "proc/driver/nvidia", "dev/kfd", "dev/dxg")
"""Files of the drivers of NVIDIA, AMD and Windows' Linux, as patterns."""

PRODUCT_NAMES = "sys/class/drm/card*/device/product_name"
"""Files in which AMD's driver has the product names of its GPUs, as a pattern."""

CUDA_DRIVER, NVML = "libcuda.so.1", "libnvidia-ml.so.1"


def has_no_gpu(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> bool:
    """Return True if torch can certainly not use a GPU here: it has no CUDA, or there is none, or all are hidden."""
    with suppress(PackageNotFoundError):
        if version("torch").endswith("+cpu"):
            return True
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return True
    return not any(any(root.glob(pattern)) for pattern in DEVICE_FILES) and _load(CUDA_DRIVER) is None


def _load(library: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None


class _NvmlMemory(ctypes.Structure):
    """``nvmlMemory_t``, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_memory_bytes() -> int | None:
    """Return the memory of this machine's largest GPU; None if NVIDIA's management library does not know it."""
    nvml, count, sizes = _load(NVML), ctypes.c_uint(), list[int]()
    with suppress(AttributeError):  # the library has no such function
        if nvml is None or nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        for index in range(count.value):
            device, memory = ctypes.c_void_p(), _NvmlMemory()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
                return None
            if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
                return None
            sizes.append(int(memory.total))
    return max(sizes, default=None)


def gpu_name(root: Path = ROOT) -> str | None:
    """Return the product name of this machine's first GPU as its driver reports it; None if no driver does."""
    nvml, device, text = _load(NVML), ctypes.c_void_p(), ctypes.create_string_buffer(96)
    with suppress(AttributeError):  # the library has no such function
        if nvml is not None and not (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(device))
            or nvml.nvmlDeviceGetName(device, text, ctypes.c_uint(len(text)))
        ):
            return text.value.decode(errors="replace")
    for path in sorted(root.glob(PRODUCT_NAMES)):
        with suppress(OSError, UnicodeDecodeError):
            if name := path.read_text().strip():
                return name
    return None


def memory_bytes(root: Path = ROOT) -> int | None:
    """Return the memory that processes of this control group may use, and the machine's swap; None if unknown."""
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        sizes = {name: int(number) << 10 for name, number, *_ in lines}
        found, swap = [sizes["MemTotal:"]], sizes.get("SwapTotal:", 0)
    except (OSError, ValueError, KeyError):  # not Linux
        return None
    for folder in _control_groups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # "max"
                found.append(int((folder / name).read_text()))
    return min(found) + swap


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups of this process that may limit its memory, of versions 1 and 2."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                mount = root / "sys/fs/cgroup" / controllers
                # in a container the path may be that of the host, of which only the container's own part is mounted
                yield from (mount / part.relative_to("/") for part in (Path(path), *Path(path).parents))
