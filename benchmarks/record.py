"""Machine and versions of a measurement, and the folder of results."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
"""One page and one file of figures for each benchmark."""


def processor() -> str:
    """Return the name of the processor and the number of cores."""
    name, info = platform.processor(), Path("/proc/cpuinfo")
    if info.exists():  # elsewhere, Linux gives only the architecture
        named = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        name = named[0] if named else name
    return f"{name}, {os.cpu_count()} cores"


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of the packages."""
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def machine(*packages: str) -> dict[str, str]:
    """Return the processor and :func:`versions`."""
    return {"processor": processor()} | versions(*packages)


def conditions(result: Mapping[str, Any]) -> str:
    """Return the last line of a page: processor, load before the start, and versions."""
    load = f"load {result['load']} before the start"
    return f"{result['processor']}, {load}; python {result['python']}, torch {result['torch']}."


def keep(name: str, result: Mapping[str, Any], page: str) -> None:
    """Write the figures of a benchmark and its page into the folder of results."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / f"{name}.md").write_text(page.rstrip("\n") + "\n")
