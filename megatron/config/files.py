"""Read files that anybody may have made: regular ones only, of limited size and depth, and inside their folder."""

from __future__ import annotations

import argparse
import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from megatron.config.text import clipped, format_bytes, listed

SMALL_FILE_BYTES = 16 << 20
"""Limit for configurations and records."""

TABLE_FILE_BYTES = 1 << 28
"""Limit for tokenizers and for indices of weights, of which the largest known have 40 MB."""

YAML_BYTES, YAML_VALUES = 1 << 20, 10_000
"""Limits for YAML, of which about 200 kB or 10,000 values are read in a second."""

MAX_DIGITS = 400
"""Limit for a number in YAML: one in base 60 takes quadratic time."""

MAX_DEPTH = 32
"""Objects and arrays inside one another."""


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file for reading; raise OSError if it is a pipe or a device, from which reading may never end."""
    return open(path, "rb", opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # without waiting for the other end of a pipe
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    reason = (errno.EISDIR, os.strerror(errno.EISDIR)) if stat.S_ISDIR(kind) else (errno.EINVAL, "Not a regular file")
    raise OSError(*reason, path)


def read_small(path: str | Path, limit: int = SMALL_FILE_BYTES) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes; raise OSError for any other."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= limit:
            return file.read(size)
    raise OSError(errno.EFBIG, f"Larger than {format_bytes(limit)}", str(path))


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text; raise ValueError if it is invalid or nested more than `MAX_DEPTH` deep."""
    try:
        return raise_if_deep(json.loads(content))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(content: bytes) -> Any:
    """Return the value of a YAML text; raise ValueError if it is invalid, too large, or has an alias or a key twice.

    Aliases are refused because a few of them expand to any size.
    """
    import yaml  # slow to import, and seldom needed

    class Loader(yaml.SafeLoader):
        values = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.values += 1
            if self.values > YAML_VALUES:
                raise ValueError(f"it has more than {YAML_VALUES:,} values")
            event = self.peek_event()
            line = f"line {event.start_mark.line + 1}"
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"{line} has the alias *{clipped(event.anchor)}; write out what it stands for")
            node = super().compose_node(parent, index)
            if problem := _node_problem(node):
                raise ValueError(f"{line} {problem}")
            return node

    if len(content) > YAML_BYTES:
        raise ValueError(f"it is larger than {format_bytes(YAML_BYTES)}")
    try:
        return raise_if_deep(yaml.load(content.decode(), Loader))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not a UTF-8 text file") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def _node_problem(node: Any) -> str:
    """Return what is wrong with a node of YAML, as a predicate of its line, or ""."""
    if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
        return f"has a number of more than {MAX_DIGITS} digits"
    keys = [key.value for key, _ in node.value if isinstance(key.value, str)] if node.id == "mapping" else []
    twice = [key for key, times in Counter(keys).items() if times > 1]
    return f"begins a block that has {listed(twice)} twice; leave one of them" if twice else ""


def raise_if_deep(value: Any) -> Any:
    """Return a value of JSON; raise ValueError if it is nested more than `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        nodes = (node for node in level if isinstance(node, dict | list))
        level = [child for node in nodes for child in (node.values() if isinstance(node, dict) else node)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def describe_outside_links(folder: Path, files: Iterable[Path] | None = None, suffixes: Collection[str] = ()) -> str:
    """Return which links lead out of ``folder`` (`outside_links`), or "".

    The content of their targets would come into checkpoints, which are passed on.

    Args:
        folder: the folder.
        files: files that are read. Default: those in the folder, or those of them with one of the ``suffixes``.
        suffixes: of file names, with a dot. Default: all.
    """
    if files is None:
        try:
            files = [file for file in sorted(folder.iterdir()) if not suffixes or file.suffix in suffixes]
        except OSError as error:
            return f"{folder} cannot be searched for links that lead out of it: {error.strerror}"
    outside = outside_links(folder, files)
    return f"links lead out of {folder}: {listed([*outside.values()])}" if outside else ""


def outside_links(folder: Path, files: Iterable[Path]) -> dict[Path, str]:
    """Return the files that lie outside ``folder``, and of the hub's cache if it is there, as ``link -> target``."""
    root = Path(os.path.realpath(folder))
    caches = (above.parents[1] / "blobs" for above in (root, *root.parents) if above.parent.name == "snapshots")
    inside = (root, *caches)
    outside = {}
    for file in files:
        target = Path(os.path.realpath(file))
        if not any(target.is_relative_to(place) for place in inside):
            outside[file] = f"{file} -> {os.readlink(file) if os.path.islink(file) else target}"
    return outside


OUTSIDE = "outside of it"


def walk_folders(
    folder: Path, exclude: Collection[str], follow_links: bool, unread: list[str]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what `os.walk` does, each folder once, without folders named in ``exclude``.

    Links to folders outside, unless ``follow_links``, and folders that cannot be read are appended to ``unread``.

    Raises:
        OSError: if ``folder`` itself cannot be read.
    """

    def skip(error: OSError) -> None:
        if error.filename == str(folder):
            raise error
        unread.append(f"{error.filename} ({error.strerror})")

    visited = {os.path.realpath(folder)}
    for path, folders, names in os.walk(folder, onerror=skip, followlinks=follow_links):
        below = sorted((Path(path, name) for name in folders if name not in exclude), key=os.path.islink)
        if follow_links:
            real = {os.path.realpath(each): each for each in reversed(below)}  # preferably under its own name
            below = [each for place, each in real.items() if place not in visited]
            visited.update(real)
        else:
            links = outside_links(folder, filter(os.path.islink, below))
            unread += [f"{link} ({OUTSIDE})" for link in links.values()]
        folders[:] = [each.name for each in below]
        yield path, folders, names


def readable_files(folder: Path, files: Iterable[Path], follow_links: bool, unread: list[str]) -> list[Path]:
    """Return the regular files inside ``folder`` that this user can read, sorted and each once.

    The others are appended to ``unread`` with the reason. With ``follow_links``, files outside are returned too.
    """
    unique: dict[str, Path] = {}
    for file in sorted(files, key=lambda file: (os.path.islink(file), file)):  # preferably under a name that is no link
        try:
            why = "" if stat.S_ISREG(os.stat(file).st_mode) else "not a regular file"
        except OSError as error:
            why = str(error.strerror)
        if not why and not os.access(file, os.R_OK):
            why = os.strerror(errno.EACCES)
        outside = {} if why or follow_links else outside_links(folder, [file])
        if why or outside:
            unread.append(f"{outside.get(file, file)} ({why or OUTSIDE})")
        else:
            unique.setdefault(os.path.realpath(file), file)
    return sorted(unique.values(), key=str)


FOLLOW_LINKS = "--follow-links"


def add_links_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flag of a tool that allows such links."""
    parser.add_argument(FOLLOW_LINKS, action="store_true", help="also read files to which links lead out of a folder")
