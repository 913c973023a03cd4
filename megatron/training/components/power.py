"""Energy of a run in its log lines, where it can be read: counters of GPUs (NVML), or of processors (Linux's powercap).

Both count joules in hardware, so nothing is sampled. A GPU's counter is that of the whole board, a processor's that of
the whole package, with whatever else runs on it. What cannot be read is left out, on all ranks together.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron.config.launch import Launch
from megatron.distributed import comm
from megatron.training.component import Component
from megatron.training.loggers.base import Metrics
from megatron.training.trainer import Trainer

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"  # of the driver

EnergyCounter = Callable[[], float]
"""Return joules since some moment; raise OSError or ValueError if they cannot be read."""


class PowerMeter(Component):
    """Adds the power and the energy of all ranks since the last log line, and leaves a run where one cannot read it."""

    def __init__(self, trainer: Trainer) -> None:
        """Find the counters of this rank."""
        self._trainer = trainer
        self._counters = energy_counters(trainer.device)

    def on_train_start(self) -> None:
        """Start counting, or leave the run; collective."""
        self._read_at, self._joules = time.perf_counter(), read_all(self._counters)
        if not math.isfinite(self._sum(self._joules)):
            self._trainer.components.remove(self)

    def metrics(self) -> Metrics:
        """Return energy and power since the last log line; nothing if a counter has failed. Collective."""
        now, joules = time.perf_counter(), read_all(self._counters)
        used, seconds = joules - self._joules, now - self._read_at
        self._read_at, self._joules = now, joules
        total = self._sum(used)
        return {"energy-joules": total, "power-watts": total / seconds} if math.isfinite(total) else {}

    def _sum(self, value: float) -> float:
        """Return the sum over all ranks."""
        world = self._trainer.mesh.world
        with world.meter.paused():
            values = torch.tensor(value, dtype=torch.float64, device=self._trainer.device)
            return float(comm.all_reduce(values, world))


def read_all(counters: Sequence[EnergyCounter] | None) -> float:
    """Return the joules of all counters; NaN if there should be one, or one cannot be read."""
    if counters is None:
        return math.nan
    try:
        return math.fsum(counter() for counter in counters)
    except (OSError, ValueError):
        return math.nan


def energy_counters(device: torch.device) -> list[EnergyCounter] | None:
    """Return the counters of this rank: of its GPU, or on the first rank of a node of its processors; None without."""
    if device.type == "cuda":
        return nvml_counters(str(torch.cuda.get_device_properties(device).uuid)) or None
    return powercap_counters(POWERCAP) or None if Launch.read(os.environ).local_rank == 0 else []


def powercap_counters(folder: Path) -> list[EnergyCounter]:
    """Return the counters of the processor packages below ``folder``; those that cannot be read are left out."""
    found: list[EnergyCounter] = []
    for zone in sorted(folder.glob("intel-rapl:*")):  # AMD's processors, too
        with suppress(OSError, ValueError):
            if re.fullmatch(r"intel-rapl:\d+", zone.name) and (zone / "name").read_text().startswith("package"):
                counter = PowercapCounter(zone)
                counter()
                found.append(counter)
    return found


class PowercapCounter:
    """Joules of one processor package; the file of the kernel begins anew at a limit."""

    def __init__(self, zone: Path) -> None:
        """Read the folder of a package."""
        self._file = zone / "energy_uj"
        self._limit = int((zone / "max_energy_range_uj").read_text())
        self._last, self._wraps = 0, 0

    def __call__(self) -> float:
        """Return the joules so far; a counter is read more often than it begins anew, after minutes or more."""
        now = int(self._file.read_text())
        self._wraps += now < self._last
        self._last = now
        return (now + self._wraps * self._limit) / 1e6


def nvml_counters(uuid: str) -> list[EnergyCounter]:
    """Return the counter of the GPU with a UUID; none without NVML, or if the GPU (or a slice of one) has none."""
    try:
        library = ctypes.CDLL(NVML)
    except OSError:
        return []
    handle = ctypes.c_void_p()
    name = (uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
        return []

    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        if status := library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
            raise OSError(f"NVML error {status}")
        return millijoules.value / 1000

    counters: list[Any] = [read]
    return counters if math.isfinite(read_all(counters)) else []
