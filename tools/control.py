"""Ask a running job for an act: ``python tools/control.py RUN_DIR save``, and print the answer.

The run reads the request after its current step, on all ranks alike. Exit status 0 if it was carried out, 1 if it was
refused, 2 if it is none, 3 if the run has ended, or has not answered in time; the request is withdrawn then.
"""

from __future__ import annotations

import argparse
import errno
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # if this checkout is not installed

from megatron.config.files import parse_json
from megatron.config.text import echo
from megatron.training.control import COMMANDS, CONTROL_FILE, ID_MARK, parse_request
from megatron.training.loggers.run_folder import INCIDENTS_FILE, METRICS_FILE

CARRIED_OUT, REFUSED, INVALID, UNANSWERED = 0, 1, 2, 3
"""Exit statuses."""

POLL_SECONDS = 0.2

NO_HARD_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems without hard links, such as FAT and some of FUSE."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    width = 2 + max(map(len, map(usage, COMMANDS)))
    parser = argparse.ArgumentParser(
        prog="control.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="requests:\n" + "\n".join(f"  {usage(word):<{width}}{COMMANDS[word].meaning}" for word in COMMANDS),
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="--run-dir of the run")
    parser.add_argument("request", nargs="+", metavar="REQUEST", help="what it is asked for, and a number")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds to wait (default: 600)")
    return parser


def usage(word: str) -> str:
    """Return a request with its argument."""
    command = COMMANDS[word]
    if command.words:
        return f"{word} {'|'.join(command.words)}"
    number = "N" if not command.default else f"[N={command.default}]"
    return f"{word} {number}" if command.limits else word


def main(argv: Sequence[str]) -> int:
    """Send the request, wait for the answer; return the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    text, folder = " ".join(args.request), Path(args.run_dir)
    try:
        parse_request(text)
    except ValueError as error:
        parser.error(str(error))
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        parser.error(f"{metrics} does not exist: {folder} is not the --run-dir of a run")
    if end := last_end(folder / INCIDENTS_FILE):
        echo(f"the run has {end}, and reads no requests until it is started again", file=sys.stderr)
        return UNANSWERED
    name, offset = secrets.token_hex(4), metrics.stat().st_size
    deadline = time.monotonic() + args.timeout
    file = folder / CONTROL_FILE
    try:
        if not write_request(file, f"{text} {ID_MARK}{name}\n", deadline):
            echo(f"{file} holds another request that the run has not read", file=sys.stderr)
            return UNANSWERED
        while (answer := find_answer(metrics, offset, name)) is None:
            if time.monotonic() > deadline:
                withdrawn = withdraw(file, name)
                state = (
                    "has not read the request, which is withdrawn" if withdrawn else "has read it, without an answer"
                )
                echo(f"the run {state}; is it running? requests are read after each step", file=sys.stderr)
                return UNANSWERED
            time.sleep(POLL_SECONDS)
    except OSError as error:
        echo(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        withdraw(file, name)
        return 128 + signal.SIGINT
    echo(str(answer["text"]))
    return CARRIED_OUT if answer.get("done") else REFUSED


def last_end(journal: Path) -> str:
    """Return how the last start of a run has ended, such as ``ended in good order``; empty if it has not."""
    with suppress(OSError):
        for line in reversed(journal.read_text(encoding="utf-8").splitlines()):
            text = line.partition(": ")[2]
            if text.startswith("ended "):
                return text
            if text.startswith(("started", "an evaluation alone")):
                break
    return ""


def write_request(file: Path, line: str, deadline: float) -> bool:
    """Put a line into the control file once there is none; return False if the one that is there is not read."""
    own = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    own.write_text(line)
    try:
        while time.monotonic() <= deadline:
            with suppress(FileExistsError):
                try:
                    os.link(own, file)  # at once, so that the run does not read half of it
                except OSError as error:
                    if error.errno not in NO_HARD_LINKS:
                        raise
                    with file.open("x") as new:  # the run looks twice at an empty file
                        new.write(line)
                return True
            time.sleep(POLL_SECONDS)
        return False
    finally:
        own.unlink()


def find_answer(metrics: Path, offset: int, name: str) -> dict[str, object] | None:
    """Return the event that answers request ``name``, after ``offset`` bytes of the run's records."""
    with metrics.open("rb") as file:
        file.seek(offset)
        for line in file:
            if name.encode() in line and line.endswith(b"\n"):
                found = parse_json(line)
                if found.get("event") == "control" and found.get("id") == name:
                    return dict(found)
    return None


def withdraw(file: Path, name: str) -> bool:
    """Remove the request if the run has not read it; return whether."""
    own = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    with suppress(OSError):
        if name in file.read_text():
            file.rename(own)  # the run may have taken it meanwhile, and another person may have asked
            try:
                if name in own.read_text():
                    return True
                os.link(own, file)
            finally:
                own.unlink()
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
