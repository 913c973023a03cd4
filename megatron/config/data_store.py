"""Token files in object stores: the options of their local cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.errors import Problem
from megatron.config.option import Need, Run, option

TOKEN_FILES = Need("not mock_data and not plugin_dataset and not chat_data_path", "files of tokens")

CHUNK_BYTES = 256 << 10
"""Bytes that a checksum covers; blocks are multiples of it."""

FEWEST_BLOCKS = 16
"""Blocks that a cache holds at least."""


def is_remote(prefix: str) -> bool:
    """Return True for the URI of a prefix."""
    return "://" in str(prefix)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class DataStoreOptions:
    """Options of the local cache of token files that are read from an object store."""

    data_store_cache: str | None = option(
        None, role="start", needs=TOKEN_FILES, spellings=("--object-storage-cache-path",)
    )
    """Folder on a local disk for what is read of token files in object stores (s3://...), shared by all processes of
    the machine. Default: megatron/tokens in $XDG_CACHE_HOME or ~/.cache."""
    data_store_cache_bytes: int = option(64 << 30, role="start", at_least=1 << 20, needs=TOKEN_FILES)
    """Largest size of the token blocks in data_store_cache; those not used for longest are deleted. The .idx files are
    kept beside them and do not count."""
    data_store_block_bytes: int = option(
        16 << 20, role="start", at_least=CHUNK_BYTES, at_most=1 << 30, needs=TOKEN_FILES
    )
    """Bytes of a .bin that are read from an object store at a time, a multiple of 262144. The manifest of the data has
    checksums for multiples of 16777216 only. Smaller blocks waste less of a cache that is much smaller than the data,
    larger ones need fewer requests."""

    def check_data_store(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that blocks are whole parts with a checksum each, and that the cache holds some."""
        block, held = self.data_store_block_bytes, self.data_store_cache_bytes
        if block % CHUNK_BYTES:
            nearest = max(1, round(block / CHUNK_BYTES)) * CHUNK_BYTES
            sentence = f"--data-store-block-bytes {block} is not a multiple of {CHUNK_BYTES}"
            yield Problem("E515", sentence, (f"--data-store-block-bytes {nearest}",))
        elif held < FEWEST_BLOCKS * block:
            sentence = f"--data-store-cache-bytes {held} holds fewer than {FEWEST_BLOCKS} blocks of {block} bytes"
            yield Problem("E515", sentence, (f"--data-store-cache-bytes {FEWEST_BLOCKS * block}",))
