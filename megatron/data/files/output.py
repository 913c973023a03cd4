"""Whether a pair of token files may be written where a person wants it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from megatron.data.errors import DataError
from megatron.data.tokenizers.record import FOLDER, RECORD

ALL = ("bin", "idx", RECORD, FOLDER)
"""What a dataset consists of: its files and folder are called so after the prefix and a dot."""


def check_new(prefixes: Iterable[str], overwrite: bool) -> None:
    """Refuse prefixes that have something, unless it is to be overwritten.

    Raises:
        DataError: naming what is there.
    """
    found = [path for prefix in prefixes for suffix in ALL if os.path.lexists(path := f"{prefix}.{suffix}")]
    if found and not overwrite:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise DataError(f"{found[0]} is there already{more}", "--overwrite", "another --output-prefix")
