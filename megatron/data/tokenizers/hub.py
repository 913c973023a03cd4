"""Download tokenizers from the Hugging Face hub."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from megatron.data.errors import DataError


def is_hub_name(name: str) -> bool:
    """Return True if ``name`` has the form ``org/name`` and is not a local path."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name)) and not Path(name).exists()


@cache
def fetch(name: str, files: tuple[str, ...]) -> Path:
    """Return a local folder with the given files of ``org/name``, downloaded unless cached.

    The hub is queried once per process. ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME`` and ``HF_HUB_OFFLINE`` apply.

    Raises:
        DataError: if the files cannot be obtained.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise DataError(
            f"{name} is not a local folder, and huggingface_hub is not installed", "pip install huggingface_hub"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:  # many classes: of the hub, the network and the disk
        wanted = " ".join(f"--include '{file}'" for file in files)
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"{name} is not a local folder, and downloading it from the hub failed: {first[0]}",
            f"where there is a network: hf download {name} {wanted} --local-dir DIR, then --tokenizer-model DIR",
            "HF_TOKEN=... for a gated model",
        ) from error
