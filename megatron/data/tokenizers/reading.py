"""Read a tokenizer file."""

from __future__ import annotations

from pathlib import Path

from megatron.data.errors import DataError


def read_file(path: Path, *fixes: str) -> bytes:
    """Return the content of a file.

    Raises:
        DataError: if it cannot be read; the error suggests ``fixes``.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"there is no {path}", *fixes) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", *fixes) from error
