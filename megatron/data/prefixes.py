"""Prefixes of token files: paths, or URIs of an object store."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.data_store import DataStoreOptions, is_remote

if TYPE_CHECKING:
    from megatron.data.token_store import RemotePrefix, TokenStore

_options = [DataStoreOptions()]  # of this process


def use_data_store(options: DataStoreOptions, prefixes: Iterable[str]) -> None:
    """Read object stores with ``options`` from now on, and open those of the ``prefixes`` that are in one."""
    _options[0] = options
    if remote := [prefix for prefix in prefixes if is_remote(prefix)]:
        _token_store().open_all(remote)


def remote_prefix(prefix: str | Path) -> RemotePrefix | None:
    """Open a prefix in an object store, whose small files are copied to the local cache; None for a path.

    Raises:
        DataError: if the prefix lacks an object, or the store fails.
        UserError: if the URI holds credentials.
    """
    return _token_store().open(str(prefix)) if is_remote(str(prefix)) else None


def local_prefix(prefix: str | Path) -> str:
    """Return the prefix of the files beside ``.bin``: the same for a path, that of their copies for a URI."""
    remote = remote_prefix(prefix)
    return str(prefix) if remote is None else remote.local


def has_remote_data() -> bool:
    """Return True if this process has opened a prefix in a store with its present options."""
    return "megatron.data.token_store" in sys.modules and bool(_token_store().opened)


def _token_store() -> TokenStore:
    from megatron.data.token_store import token_store  # local files need none of its libraries

    return token_store(_options[0])
