"""Where and from what a kept log was made."""

from __future__ import annotations

import platform
import subprocess
import time
from pathlib import Path

import torch


def provenance() -> str:
    """Date, commit and machine, for the head of a log."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    return f"{time.strftime('%Y-%m-%d')}, commit {commit.strip()}, torch {torch.__version__}, {platform.machine()}"
