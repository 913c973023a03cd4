"""Locations of checkpoints: paths on a disk, or in an object store (see `megatron.contrib.object_store`).

A location that is not a ``Path`` is in a store. The module for stores is imported when the first URI is parsed, so
training on disks needs none of its libraries.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote

from megatron.config.checkpoint import MEGATRON_PREFIX
from megatron.config.errors import UserError, credential_problem
from megatron.config.privacy import redact

if TYPE_CHECKING:
    from megatron.contrib.object_store import RemotePath

Location: TypeAlias = "Path | RemotePath"
"""Path of a checkpoint, on disk or in an object store."""

URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://(.*)", re.DOTALL)


def parse_location(text: str | Location) -> Location:
    """Parse the value of an option: a path, with or without ``megatron:``, or a URI such as ``s3://bucket/run``.

    Raises:
        UserError: if the URI holds credentials.
    """
    if not isinstance(text, str):
        return text
    text = text.removeprefix(MEGATRON_PREFIX)
    match = URI.fullmatch(text)
    if match is None:
        return Path(text)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return Path("/" + unquote(rest.removeprefix("localhost")).lstrip("/"))
    if redact(text, certain=True) != text:
        raise UserError([credential_problem(text)])
    from megatron.contrib.object_store import RemotePath

    return RemotePath(f"{scheme}://{rest.strip('/')}")


def local_path(path: Location) -> Path:
    """Return a location that must be on disk as a ``Path``."""
    if not isinstance(path, Path):
        raise TypeError(f"{path} is not on a disk")
    return path
