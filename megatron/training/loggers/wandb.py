"""Weights & Biases logger: one continuous curve per run, across crashes and restarts.

The client writes its data every few seconds, so a killed node loses the last rows. A journal on disk (`WandbJournal`)
therefore keeps every row. At a restart, `WandbLogger` finds the last step that W&B has, from the server or from the
client's files if offline, sends the rows of the journal after it, and skips repeated steps that W&B already has.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from megatron.config.run import LoggingConfig
from megatron.training.loggers.base import LoggerOpenError, Metrics, error_summary, scalar_metrics
from megatron.training.loggers.run_folder import JsonLinesLogger, read_json_lines

WANDB_MODES = ("online", "offline", "disabled", "run", "dryrun", "shared")  # the last three are seldom used
TIMEOUT_SECONDS = 25.0  # for opening and finishing a run; less than the timeout of `BackgroundLogger`
IMPLICIT_METRICS = ("iteration", "time")

FILE_HEADER_BYTES = 7
FRAGMENT_HEADER = struct.Struct("<IHB")  # checksum, length, type
BLOCK_BYTES = 32 * 1024
LAST_FRAGMENTS = (1, 4)  # types of fragments that end a record: the only one, the last one

WandbRow = dict[str, float]


def wandb_disabled(variables: Mapping[str, str] = os.environ) -> bool:
    """Return True if ``WANDB_MODE`` disables Weights & Biases."""
    return variables.get("WANDB_MODE") == "disabled"


def check_wandb_mode(variables: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if ``WANDB_MODE`` is unknown."""
    mode = variables.get("WANDB_MODE")
    if mode and mode not in WANDB_MODES:
        raise ValueError(f"WANDB_MODE={mode} is unknown: the modes are {', '.join(WANDB_MODES[:3])}")


def wandb_folder(options: LoggingConfig) -> Path:
    """Return the folder of the client's files and the journal."""
    return Path(options.wandb_save_dir or options.run_dir or ".") / "wandb"


def journal_path(options: LoggingConfig, run_id: str) -> Path:
    """Return the path of the run's journal."""
    return wandb_folder(options) / f"journal-{run_id}.jsonl"


def missing_journal_notes(options: LoggingConfig, run_id: str) -> list[str]:
    """Return a note if an earlier start's journal is missing; ``run_id`` is empty for a new run."""
    if not run_id or options.wandb_project is None or wandb_disabled() or journal_path(options, run_id).exists():
        return []
    return [
        f"Weights & Biases: {wandb_folder(options)} has no journal of this run, {run_id}. If earlier starts used "
        "another folder (--wandb-save-dir, --run-dir), use the same one; otherwise rows that they did not send are "
        "missing, and in offline mode repeated steps appear twice"
    ]


@dataclass
class JournalContent:
    """Content of the journal before this start."""

    starts: int = 0  # number of earlier starts
    rows: dict[int, WandbRow] = field(default_factory=dict)  # by step, from the latest start that took the step


class WandbJournal:
    """Writes one line of JSON per record. The client's own file lacks the rows that it had not written at a crash."""

    def __init__(self, path: Path, iteration: int, warn: Callable[[str], None]) -> None:
        """Read the existing journal and append a start after ``iteration`` steps."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.past = read_journal(path)
            self._file = JsonLinesLogger(path, warn)
        except OSError as error:
            reason = f"{path} cannot be written ({error.strerror}), and logging requires it"
            raise OSError(f"{reason}: --wandb-save-dir ANOTHER_FOLDER") from error
        self._file.write({"start": iteration})

    def log(self, step: int, metrics: Metrics) -> None:
        """Append the metrics."""
        self._file.write({"iteration": step, **scalar_metrics(metrics)})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path) -> JournalContent:
    """Read the journal; empty if there is none."""
    past = JournalContent()
    first_step = 0
    start_of_row: dict[int, int] = {}
    for line in read_json_lines(path) if path.exists() else ():
        if line is None or not {"start", "iteration"} & line.keys():
            continue
        if "start" in line:
            past.starts += 1
            first_step = int(line["start"])
            continue
        step = int(line["iteration"])
        row = to_row(line)
        # an evaluation before a start's first step belongs to the last step of the previous start
        if start_of_row.get(step) == past.starts or step == first_step:
            row = past.rows.get(step, {}) | row
        past.rows[step] = row
        start_of_row[step] = past.starts
    return past


def to_row(numbers: Mapping[str, Any]) -> WandbRow:
    """Return the metrics that are sent to W&B."""
    return {name: number for name, number in numbers.items() if number is not None and name not in IMPLICIT_METRICS}


class WandbLogger:
    """Logs one row per log step; metrics of an evaluation or a health report are added to the row of their step."""

    def __init__(
        self,
        options: LoggingConfig,
        config: Mapping[str, Any],
        run_id: str,
        iteration: int,
        past: JournalContent,
        print_line: Callable[[str], None],
    ) -> None:
        """Open the run, or continue it.

        Args:
            options: project, entity and names.
            config: configuration shown for the run.
            run_id: as in the checkpoints.
            iteration: steps taken before this start.
            past: the journal of earlier starts; its rows are removed to free memory.
            print_line: prints where to find the curves.

        Raises:
            LoggerOpenError: if the package is missing, no user is logged in, or the server does not answer.

        """
        self._run = _open(options, config, run_id)
        self._first_step = iteration
        self._step = iteration
        self._row: WandbRow = {}
        self._failed = False
        self._restarts = past.starts
        self._last_reported = max(past.rows, default=-1)
        if not self._run.offline:
            self._last_reported = int(self._run.starting_step) - 1
        else:
            with suppress(Exception):  # the file format may change with the version; a gap is better than a duplicate
                self._last_reported = last_step_on_disk(wandb_folder(options), run_id)
        for step in sorted(step for step in past.rows if self._last_reported < step <= iteration):
            self._report(past.rows[step], step)
        past.rows.clear()
        if past.starts or iteration:
            self._run.summary["error"] = ""  # clear the error of the previous start
        self._print_location(print_line)

    def _print_location(self, print_line: Callable[[str], None]) -> None:
        if self._run.disabled:
            when = "at the first start that enables it"
            print_line(f"Weights & Biases is disabled by its settings: the journal is sent {when}")
            return
        if self._run.offline:  # the client makes a folder per start, named by the time and the run
            folder = quote(str(Path(self._run.dir).parent.parent))
            command = f"wandb sync {folder}/offline-run-*-{self._run.id}"
            print_line(f"Weights & Biases: offline; send all starts with: {command}")
        else:
            print_line(f"Weights & Biases: {self._run.url}")
        if self._last_reported > self._first_step:
            last = self._last_reported
            print_line(f"Weights & Biases has this run up to step {last} and continues there from step {last + 1}")

    def log(self, step: int, metrics: Metrics) -> None:
        """Add metrics to the row of their step, and send the row of the previous step."""
        if self._first_step < step <= self._last_reported:
            self._row = {}
            return
        if step > self._step:
            self.flush()
        self._step = step
        self._row |= to_row(scalar_metrics(metrics))

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Write errors to the run's summary."""
        if kind == "error":
            self._failed = True
            self._run.summary["error"] = fields["text"]

    def flush(self) -> None:
        """Send the row. A row at the start's first iteration is kept, since the earlier start may have sent one."""
        if self._row and self._step > self._first_step:
            self._report(self._row, self._step)
            self._row = {}

    def _report(self, row: WandbRow, step: int) -> None:
        samples = {"samples vs steps": row["consumed-samples"]} if "consumed-samples" in row else {}
        self._run.log({**row, **samples, "restarts": self._restarts}, step=step, commit=True)
        self._last_reported = step

    def close(self) -> None:
        """Send the last row and wait for the server, with a timeout."""
        self.flush()
        self._run.finish(exit_code=1 if self._failed else 0)


def _open(options: LoggingConfig, config: Mapping[str, Any], run_id: str) -> Any:
    try:
        import wandb

        check_wandb_mode()
        settings = wandb.Settings(
            init_timeout=TIMEOUT_SECONDS,
            finish_timeout=TIMEOUT_SECONDS,
            finish_timeout_raises=True,
            console="off",  # printing must not block on the client's process
            silent=True,  # no interactive login
        )
        name = options.wandb_exp_name or (Path(options.run_dir).resolve().name if options.run_dir else None)
        return wandb.init(
            project=options.wandb_project,
            entity=options.wandb_entity,
            name=name,
            dir=str(wandb_folder(options).parent),
            id=run_id,
            resume="allow",
            config=dict(config),
            settings=settings,
        )
    except Exception as error:  # the client raises many types
        raise LoggerOpenError(open_failure_message(error, journal_path(options, run_id))) from error


def open_failure_message(error: Exception, journal: Path) -> str:
    """Return why the client could not be opened, a fix, and where the rows are kept."""
    why = error_summary(error)
    if isinstance(error, ModuleNotFoundError):
        why, fix = f"it needs a package that is not installed ({error.name})", "pip install wandb"
    elif "wandb login" in why:
        why, fix = "no user is logged in", "wandb login, or WANDB_MODE=offline"
    elif isinstance(error, ValueError):
        fix = "WANDB_MODE=offline"
    else:
        fix = "WANDB_MODE=offline writes to this disk"
    return f"{why}: {fix}; {journal} keeps the rows and sends them when this run is resumed from a checkpoint"


def last_step_on_disk(folder: Path, run_id: str) -> int:
    """Return the last step of all starts of the run in the files under ``folder``; -1 if there is none."""
    from wandb.proto import wandb_internal_pb2

    last = -1
    for path in folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb"):
        for data in leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]
            if record.HasField("history"):
                last = max(last, record.history.step.num)
    return last


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a ``.wandb`` file, up to one cut off by a crash.

    The file has a header of seven bytes and then the LevelDB log format: blocks of 32 KiB of fragments, each with
    checksum, length, type and data. A record is one or more fragments.
    """
    position = FILE_HEADER_BYTES
    record = b""
    while position + FRAGMENT_HEADER.size <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < FRAGMENT_HEADER.size:  # padding at the end of a block
            position += left_in_block
            continue
        _, length, kind = FRAGMENT_HEADER.unpack_from(data, position)
        start = position + FRAGMENT_HEADER.size
        position = start + length
        if kind == 0 or position > len(data):
            return
        record += data[start:position]
        if kind in LAST_FRAGMENTS:
            yield record
            record = b""
