"""What figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """Name of the processor, and how many cores there are."""
    name, info = platform.processor(), Path("/proc/cpuinfo")
    if info.exists():  # Linux says no more than the architecture elsewhere
        named = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        name = named[0] if named else name
    return f"{name}, {os.cpu_count()} cores"
