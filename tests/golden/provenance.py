"""The line of a kept log that names its date, commit and machine."""

from __future__ import annotations

import platform
import subprocess
import time
from pathlib import Path

import torch


def provenance() -> str:
    """Return date, commit, version of torch and machine."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    return f"{time.strftime('%Y-%m-%d')}, commit {commit.strip()}, torch {torch.__version__}, {platform.machine()}"
