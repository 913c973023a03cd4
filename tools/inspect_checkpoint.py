"""Inspect checkpoints: ``python tools/inspect_checkpoint.py ls SAVE | verify PATH | show PATH [PATTERN] | diff A B``.

PATH is a checkpoint such as SAVE/iter_0000100, or a folder of them: then its newest complete one (all, for verify).
Either may be in an object store: s3://BUCKET/RUN. Memory use is that of one or two chunks.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.checkpoint.errors import CheckpointError, NewerVersionError, strip_folder
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import MARKER, Manifest
from megatron.checkpoint.location import Location
from megatron.checkpoint.publish import is_complete
from megatron.config.errors import UserError
from megatron.config.text import echo, format_bytes
from tools.lib.locations import location_argument

if TYPE_CHECKING:
    from megatron.checkpoint.load import CheckpointReader

EQUAL, DIFFERENT, UNREADABLE = 0, 1, 2
PER_RUN_STATE = ("run_id", "goodput")
"""State that differs between any two runs."""


def list_checkpoints(args: argparse.Namespace) -> int:
    """Print the checkpoints of a folder, newest first, and why incomplete ones are incomplete."""
    checkpoints = open_folder(args.folder)
    if checkpoints.is_checkpoint:
        raise CheckpointError(f"{args.folder} is a checkpoint itself", f"show {args.folder}")
    found = checkpoints.candidates()
    if not found:
        echo(f"no checkpoint in {args.folder}")
    for item in found:
        size = format_bytes(item.manifest.total_bytes) if item.manifest else "-"
        if isinstance(item.path, Path):
            changed = item.path.stat().st_mtime
        else:
            changed = (item.path / MARKER).modified() if is_complete(item.path) else time.time()
        age = format_age(time.time() - changed)
        echo(f"{item.path.name:18} step {item.iteration:<8} {size:>9}  {age:>12}  {item.problem or 'complete'}")
    return EQUAL


def verify(args: argparse.Namespace) -> int:
    """Verify the checksums of a checkpoint, or of every checkpoint in a folder."""
    checkpoints = open_folder(args.path)
    left = checkpoints.leftovers
    for path in left:
        echo(f"{path}: left over from a save or a removal that was cut off")
    paths = [path for _, path in checkpoints.named() if path not in left]
    if checkpoints.is_checkpoint:
        paths = [args.path]
    if not paths:
        raise CheckpointError(f"{args.path} does not hold a checkpoint")
    return max([verify_one(path) for path in paths])


def verify_one(path: Location) -> int:
    """Verify one checkpoint and print the result."""
    from megatron.checkpoint.verify import list_damage

    try:
        manifest = Manifest.open(path)
        problems = [strip_folder(path, problem) for problem in list_damage(manifest)]
    except NewerVersionError as error:
        echo(error)
        return UNREADABLE
    except CheckpointError as error:
        problems = [strip_folder(path, error)]
    if problems:
        echo("\n  ".join([f"{path}: damaged", *problems]))
        return DIFFERENT
    chunks = [chunk for record in manifest.tensors.values() for chunk in record.chunks]
    unknown = sum(not chunk.xxh3 for chunk in chunks)
    how = f"{unknown} of {len(chunks)} chunks without checksums" if unknown else "as they were written"
    echo(f"{path}: {format_bytes(manifest.total_bytes)} in {len(manifest.files)} files, {how}")
    return EQUAL


def show(args: argparse.Namespace) -> int:
    """Print the contents of a checkpoint, or statistics of the tensors that match a pattern."""
    manifest = open_newest(args.path)
    if args.pattern is not None:
        return show_values(manifest, args.pattern)
    echo(f"{manifest.path}: version {manifest.version}, {format_bytes(manifest.total_bytes)}")
    for name, record in manifest.tensors.items():
        view = "" if record.view == record.shape else f" viewed as {list(record.view)}"
        chunks = f"{len(record.chunks)} chunk{'s' * (len(record.chunks) != 1)}"
        echo(f"  {name}  {record.dtype} {list(record.shape)}{view}, {chunks}")
    for title, data in (("state", manifest.state), ("config", manifest.config)):
        echo(title)
        for key, value in flatten(data):
            echo(f"  {key} = {json.dumps(value)}")
    for name, file in manifest.files.items():
        echo(f"{name}  {format_bytes(file.bytes)}")
    return EQUAL


def show_values(manifest: Manifest, pattern: str) -> int:
    """Print minimum, maximum and root mean square of matching tensors."""
    from megatron.checkpoint.load import CheckpointReader
    from megatron.checkpoint.verify import summarize_tensor

    reader = CheckpointReader(manifest)
    names = [name for name in reader.names if fnmatch(name, pattern)]
    if not names:
        fix = f"show {manifest.path}, which lists them"
        if any(pattern in name for name in reader.names):
            fix = f"names match as a whole: '*{pattern}*'"
        raise CheckpointError(f"{manifest.path} has no tensor that matches {pattern}", fix)
    for name in names:
        record, (low, high, rms) = manifest.tensors[name], summarize_tensor(reader, name)
        echo(f"{name}  {record.dtype} {list(record.shape)}  min {low:.6g}  max {high:.6g}  rms {rms:.6g}")
    return EQUAL


def diff(args: argparse.Namespace) -> int:
    """Print the differences of two checkpoints: options, state, tensors.

    Options of a single start, such as the save folder, and state that always differs are printed but not counted.
    """
    from megatron.checkpoint.load import CheckpointReader
    from megatron.config.option import Role
    from megatron.config.settings import SETTINGS

    a, b = open_newest(args.a), open_newest(args.b)
    differ = False
    for key, text in different_values(a.config, b.config):
        setting = SETTINGS.get(key.rpartition(".")[2])
        of_a_start = setting is not None and setting.option.role is Role.START
        echo(f"option {key}: {text}" + (" (of one start; not counted)" if of_a_start else ""))
        differ |= not of_a_start
    for key, text in different_values(a.state, b.state):
        of_a_run = key.partition(".")[0] in PER_RUN_STATE
        echo(f"state {key}: {text}" + (" (of one run; not counted)" if of_a_run else ""))
        differ |= not of_a_run
    identical, readers = 0, (CheckpointReader(a), CheckpointReader(b))
    for name in sorted(a.tensors.keys() | b.tensors.keys()):
        line = describe_tensor_difference(*readers, name)
        if line is None:
            identical += 1
        else:
            echo(line)
            differ = True
    echo(f"{identical} of {len(a.tensors.keys() | b.tensors.keys())} tensors identical to the bit")
    return DIFFERENT if differ else EQUAL


def different_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and both values of differing entries of two nested mappings."""
    left, right = dict(flatten(a)), dict(flatten(b))
    for key in sorted(left.keys() | right.keys()):
        values = [json.dumps(side[key]) if key in side else "(none)" for side in (left, right)]
        if values[0] != values[1]:
            yield key, " | ".join(values)


def describe_tensor_difference(a: CheckpointReader, b: CheckpointReader, name: str) -> str | None:
    """Describe how a tensor differs; None if it is identical to the bit."""
    from megatron.checkpoint.verify import compare_tensors

    for here, there in ((a, b), (b, a)):
        if name not in there.manifest.tensors:
            return f"tensor {name}: only in {here.manifest.path}"
    records = [side.manifest.tensors[name] for side in (a, b)]
    if len({(record.shape, record.view) for record in records}) == 2:
        return f"tensor {name}: {' | '.join(f'{list(r.shape)} viewed as {list(r.view)}' for r in records)}"
    found = compare_tensors(a, b, name)
    if found.identical:
        return None
    types = "" if records[0].dtype == records[1].dtype else f"{records[0].dtype} | {records[1].dtype}, "
    return f"tensor {name}: {types}max abs {found.largest:.3g}, relative {found.relative:.3g}"


def open_newest(path: Location) -> Manifest:
    """Return a checkpoint, or the newest complete one of a folder, and report newer ones that were skipped."""
    manifest, passed_over = open_folder(path).newest()
    for found in passed_over:
        echo(f"passed over {found.path}: {found.problem}", file=sys.stderr)
    return manifest


def open_folder(path: Location) -> CheckpointFolder:
    """Return a folder of checkpoints; CheckpointError if it does not exist."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    return CheckpointFolder(path)


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with dotted names."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def format_age(seconds: float) -> str:
    """Format an age."""
    for unit, factor in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= factor:
            return f"{seconds / factor:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "ls", help="list a folder of checkpoints; complete means that all files have their full length"
    )
    command.add_argument("folder", type=location_argument, metavar="SAVE")
    command.set_defaults(run=list_checkpoints)
    command = commands.add_parser(
        "verify", help="check every byte against the checksums; exit status 1 if damaged, 2 if there is nothing to read"
    )
    command.add_argument("path", type=location_argument, metavar="PATH")
    command.set_defaults(run=verify)
    command = commands.add_parser("show", help="tensors, state and options, or values of tensors")
    command.add_argument("path", type=location_argument, metavar="PATH")
    command.add_argument("pattern", nargs="?", metavar="PATTERN", help="whole names, such as 'layers.0.*' or '*bias'")
    command.set_defaults(run=show)
    command = commands.add_parser("diff", help="compare two; exit status 1 if they differ, 2 if one is unreadable")
    command.add_argument("a", type=location_argument, metavar="A")
    command.add_argument("b", type=location_argument, metavar="B")
    command.set_defaults(run=diff)
    return top


def main(argv: Sequence[str]) -> int:
    """Run a command and return the exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (CheckpointError, UserError, OSError) as error:
        echo(f"inspect_checkpoint: {error}", file=sys.stderr)
        return UNREADABLE


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit quietly in ``ls SAVE | head``
    sys.exit(main(sys.argv[1:]))
