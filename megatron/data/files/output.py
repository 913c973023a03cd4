"""Refuse to overwrite an existing dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable

from megatron.data.errors import DataError
from megatron.data.tokenizers.record import FOLDER, RECORD

ALL = ("bin", "idx", RECORD, FOLDER)
"""Suffixes of a dataset's files and folder: ``<prefix>.<suffix>``."""


def check_new(prefixes: Iterable[str], overwrite: bool) -> None:
    """Refuse prefixes that already have files, unless ``overwrite``.

    Raises:
        DataError: naming an existing file.
    """
    found = [path for prefix in prefixes for suffix in ALL if os.path.lexists(path := f"{prefix}.{suffix}")]
    if found and not overwrite:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise DataError(f"{found[0]} is there already{more}", "--overwrite", "another --output-prefix")
