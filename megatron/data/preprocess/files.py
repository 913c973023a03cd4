"""Find the text files of a corpus, in an order that depends only on their names.

`find_text_files` expands files, patterns, folders and datasets, and rejects what would be read twice. `spool_pipes`
copies standard input and pipes to files first. `add_input_flags` adds the flags of both to a tool.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import xxhash

from megatron.checkpoint.durable_files import LockState, try_lock
from megatron.config.files import FOLLOW_LINKS, OUTSIDE, add_links_flag, readable_files, walk_folders
from megatron.config.text import echo, listed
from megatron.data.errors import DataError
from megatron.data.preprocess.remote import InputFile, RemoteFile, fits_pattern, is_uri, list_remote
from megatron.data.preprocess.streams import READ_BYTES, compression_suffix
from megatron.data.preprocess.tables import TABLE_SUFFIXES, hugging_face_files, saved_dataset_files

UNFINISHED = ".part"  # ends the names of files that are written, which a folder does not contribute
JSON_LINES_SUFFIXES = (".jsonl", ".json", ".ndjson")
MAX_LINE_BYTES = 1 << 27  # default of --max-line-bytes
UNSUPPORTED_FORMATS = (".zip", ".tar", ".tgz", ".7z")
UNSUPPORTED_COMPRESSIONS = {
    ".zstd": "mv {0} {1}.zst",
    ".z": "uncompress {0}",
    ".lz4": "lz4 -d {0}",
    ".br": "brotli -d {0}",
}
"""Suffixes of unsupported compressions, and the command that decompresses such a file."""


def is_table(file: InputFile) -> bool:
    """Return True if the name is that of a Parquet or Arrow file, ignoring case."""
    return file.name.lower().endswith(TABLE_SUFFIXES)


def is_plain(file: InputFile) -> bool:
    """Return True for a file that is one document: no table, and no JSON lines, ignoring case and compression."""
    name = uncompressed_name(file).lower().removesuffix(UNFINISHED)
    return not name.endswith(JSON_LINES_SUFFIXES) and not is_table(file)


def uncompressed_name(file: InputFile) -> str:
    """Return the file name without the suffix of its compression."""
    return file.name[: len(file.name) - len(compression_suffix(file))]


def positive_int(text: str) -> int:
    """Convert the value of a flag."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the input flags of a data tool: ``input``, ``json_keys``, ``suffix``, ``exclude`` and more."""
    add = parser.add_argument_group("input").add_argument
    folder_files = "files to read from a folder, in the order of their paths, also if .gz, .zst, .bz2 or .xz follows"
    suffixes = [*JSON_LINES_SUFFIXES, *TABLE_SUFFIXES, ".txt"]
    inputs = (
        "files, quoted patterns, folders, also as s3:// and other URIs, datasets of the hub hf:NAME[:CONFIG][:SPLIT], "
        "standard input (-) or pipes"
    )
    keys = "keys of an object's texts, or columns of a table (text)"
    longest = f"longest line or plain file, in bytes; a longer one is an invalid document ({MAX_LINE_BYTES:,})"
    bad_lines = "at an invalid document: stop (fail), or report it, count it and continue"
    add("--input", nargs="+", required=True, metavar="PATH", help=inputs)
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help=keys)
    add("--suffix", nargs="+", default=suffixes, metavar=".EXT", help=f"{folder_files} ({' '.join(suffixes)})")
    add("--exclude", nargs="+", default=[], metavar="NAME", help="files and folders to skip inside a folder")
    add("--max-line-bytes", type=positive_int, default=MAX_LINE_BYTES, metavar="N", help=longest)
    add("--on-bad-line", choices=("fail", "skip"), default="fail", help=bad_lines)
    add_links_flag(parser)


@contextmanager
def spool_pipes(inputs: Sequence[str], output: str) -> Iterator[list[str]]:
    """Replace standard input (``-``) and pipes among ``inputs`` by copies beside ``output``, removed at the end.

    The copies are JSON lines. Their time is a checksum of the content, so that a run that continues an interrupted one
    recognizes the same content.

    Raises:
        DataError: if another process is writing a copy.
    """
    names: list[str] = []
    copies: list[Path] = []
    files = ExitStack()  # the copies, which stay locked
    try:
        for name in inputs:
            is_pipe = os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name)
            if name == "-" or is_pipe or name.startswith(("/dev/stdin", "/dev/fd/")):
                path = Path(f"{output}.pipe{len(copies)}.jsonl{UNFINISHED}")
                path.parent.mkdir(parents=True, exist_ok=True)
                copy = files.enter_context(path.open("ab"))
                if try_lock(copy) is LockState.HELD:
                    raise DataError(f"{path}: another process is writing it", "another --output-prefix")
                copies.append(path)
                copy.truncate(0)
                digest = xxhash.xxh3_64()
                with open(0 if name == "-" else name, "rb", closefd=name != "-") as pipe:
                    while piece := pipe.read(READ_BYTES):
                        copy.write(piece)
                        digest.update(piece)
                copy.flush()
                os.utime(path, ns=(0, digest.intdigest() % 10**18))
                name = str(path)
            names.append(name)
        yield names
    finally:
        for path in copies:
            path.unlink(missing_ok=True)
        files.close()


def find_text_files(
    inputs: Sequence[str],
    suffixes: Collection[str],
    exclude: Collection[str],
    follow_links: bool = False,
    note: Callable[[str], object] = echo,
) -> list[InputFile]:
    """Return the files named by ``inputs``: files, glob patterns like ``data/*.jsonl``, folders, or ``hf:NAME``.

    A folder contributes all files below it that end in one of ``suffixes`` (ignoring case, compressed or not), sorted
    by path, without files and folders named in ``exclude``. Patterns are sorted too. An existing file name is never
    treated as a pattern. Folders and patterns contribute each file once, without what `readable_files` leaves out,
    which a ``note`` names. A folder written by `save_to_disk` of Hugging Face `datasets` contributes the rows of the
    dataset. Inputs that match no file, unsupported formats, and documents that would be read twice are errors.
    """
    files: list[InputFile] = []
    for name in inputs:
        remote = is_uri(name)
        files += _find_remote(name, suffixes, exclude) if remote else _find(name, suffixes, exclude, follow_links, note)
    seen: dict[str, InputFile] = {}
    for file in files:
        _check_format(file)
        other = seen.setdefault(os.path.realpath(file) if isinstance(file, Path) else str(file), file)
        if other is not file:
            why = f"{file} is given twice" if file == other else f"{file} is {other}, which is given too"
            fix = "name it once; to repeat a corpus, give it a weight: pretrain_gpt.py --data-path 2 PREFIX"
            raise DataError(f"--input: {why}: its documents would be read twice", fix)
    return files


def _find_remote(name: str, suffixes: Collection[str], exclude: Collection[str]) -> list[RemoteFile]:
    wanted = tuple(suffix.lower() for suffix in suffixes)
    found = list_remote(name, lambda path: _ends_in(Path(path), wanted), exclude)
    if not found:
        raise _no_files(name, suffixes)
    if len(found) > 1:
        _refuse_copies(found)
    return found


def _find(
    name: str, suffixes: Collection[str], exclude: Collection[str], follow_links: bool, note: Callable[[str], object]
) -> list[Path]:
    unread: list[str] = []
    folder = None
    if os.path.isdir(name):
        folder = Path(name)
        found = _walk(folder, suffixes, exclude, follow_links, unread)
    elif name.startswith("hf:"):
        found = hugging_face_files(name)
    elif os.path.isfile(name):
        found = [Path(name)]
    else:
        folder = Path(re.split(r"[^/]*[*?[]", name)[0])
        found = [path for path in _match(name, folder, follow_links, unread) if not os.path.isdir(path)]
    if folder is not None:
        found = readable_files(folder, found, follow_links, unread)
        _refuse_copies(found)
    fixes = [FOLLOW_LINKS] if any(OUTSIDE in each for each in unread) else []
    summary = f"--input {name}: {len(unread):,} not read: {listed(unread)}"
    if not found:
        raise DataError(summary, *fixes) if unread else _no_files(name, suffixes)
    if unread:
        note("; ".join([summary, *(f"{fix} reads what is {OUTSIDE}" for fix in fixes)]))
    return found


def _no_files(name: str, suffixes: Collection[str]) -> DataError:
    why = f"no file below it ends in {' or '.join(suffixes)}" if os.path.isdir(name) else "there is no such file"
    return DataError(f"--input {name}: {why}", "--input FILE.jsonl", "--input FOLDER --suffix .txt")


def _check_format(file: InputFile) -> None:
    suffix = file.suffix.lower()
    failure = f"{file}: {file.suffix} files are not supported"
    if suffix in UNSUPPORTED_FORMATS:
        raise DataError(failure, "write its documents as lines of a .jsonl file")
    if suffix in UNSUPPORTED_COMPRESSIONS:
        name, unpacked = shlex.quote(str(file)), shlex.quote(str(file.with_suffix("")))
        raise DataError(failure, UNSUPPORTED_COMPRESSIONS[suffix].format(name, unpacked))


def _walk(
    folder: Path, suffixes: Collection[str], exclude: Collection[str], follow_links: bool, unread: list[str]
) -> list[Path]:
    wanted = tuple(suffix.lower() for suffix in suffixes)
    found: list[Path] = []
    for path, folders, names in walk_folders(folder, exclude, follow_links, unread):
        files = [Path(path, name) for name in names if name not in exclude]
        if saved := saved_dataset_files(Path(path)):
            files, folders[:] = saved, []
        found += [file for file in files if _ends_in(file, wanted)]
    return found


def _match(pattern: str, folder: Path, follow_links: bool, unread: list[str]) -> list[Path]:
    """Return the paths that match a pattern; ``**``, which follows every link in `glob`, walks as in a folder."""
    parts = Path(pattern).relative_to(folder).parts
    if "**" not in parts:
        return [*map(Path, glob.glob(pattern))]
    walk = walk_folders(folder, (), follow_links, unread)
    files = (Path(path, name) for path, _, names in walk for name in names)
    return [file for file in files if fits_pattern(file.relative_to(folder).parts, parts)]


def _ends_in(file: InputFile, wanted: tuple[str, ...]) -> bool:
    names = [file.name.lower(), uncompressed_name(file).lower()]
    if file.suffix.lower() in UNSUPPORTED_COMPRESSIONS:
        names.append(file.stem.lower())
    return any(name.endswith(wanted) for name in names)


def _refuse_copies(files: Collection[InputFile]) -> None:
    """Raise DataError for files that differ only in their compression."""
    seen: dict[InputFile, InputFile] = {}
    for file in sorted(files, key=str):
        other = seen.setdefault(file.with_name(uncompressed_name(file)), file)
        if other != file:
            why = f"{file} lies beside {other}: the same documents would be read twice"
            raise DataError(why, f"--exclude {shlex.quote(file.name)}", "name both files with --input")
