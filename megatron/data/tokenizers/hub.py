"""Tokenizers by their name on the Hugging Face hub."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from megatron.data.errors import DataError


def is_hub_name(name: str) -> bool:
    """Whether ``name`` looks like ``org/name`` and is not a path of this machine."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name)) and not Path(name).exists()


@cache
def fetch(name: str, files: tuple[str, ...]) -> Path:
    """A folder with those of the ``files`` that ``org/name`` has: from the local cache, else downloaded into it.

    The hub is asked once, and then no more as long as the process lives.
    ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME`` and ``HF_HUB_OFFLINE`` are heeded.

    Raises:
        DataError: when it cannot be had.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise DataError(
            f"huggingface_hub is needed for {name}: there is no such folder here", "pip install huggingface_hub"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:  # of the hub's, the network's and the disk's many kinds
        wanted = " ".join(f"--include '{file}'" for file in files)
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"{name} is no folder here, and the hub does not give it: {first[0]}",
            f"where there is a network: hf download {name} {wanted} --local-dir DIR, then --tokenizer-model DIR",
            "HF_TOKEN=... for one that needs permission",
        ) from error
