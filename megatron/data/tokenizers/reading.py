"""A file of a tokenizer, read whole."""

from __future__ import annotations

from pathlib import Path

from megatron.data.errors import DataError


def read_file(path: Path, *fixes: str) -> bytes:
    """The content of a file.

    Args:
        path: of the file.
        fixes: what to say besides when it cannot be read.

    Raises:
        DataError: when there is none, or it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"there is no {path}", *fixes) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", *fixes) from error
