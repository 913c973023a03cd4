"""Weights & Biases logger: one continuous curve per run, across crashes and restarts.

The client writes its data every few seconds, so a killed node loses the last rows. A journal on disk therefore keeps
every row. At a restart, the logger finds the last step that W&B has, sends the rows of the journal after it, and skips
repeated steps that W&B already has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from megatron.config.reporting import LoggingConfig
from megatron.training.sinks import NotOpenedError, Values, scalars
from megatron.training.wandb_files import last_step_on_disk
from megatron.training.wandb_journal import Past, Row, row_of
from megatron.training.wandb_mode import check_mode, refusal, turned_off

TIMEOUT_SECONDS = 25.0  # for opening and finishing a run; less than the timeout of `BackgroundLogger`


def folder_of(options: LoggingConfig) -> Path:
    """Return the folder of the client's files and the journal."""
    return Path(options.wandb_save_dir or options.run_dir or ".") / "wandb"


def journal_of(options: LoggingConfig, run_id: str) -> Path:
    """Return the path of the run's journal."""
    return folder_of(options) / f"journal-{run_id}.jsonl"


def notes_on_the_journal(options: LoggingConfig, run_id: str) -> list[str]:
    """Return a note if an earlier start's journal is missing; ``run_id`` is empty for a new run."""
    if not run_id or options.wandb_project is None or turned_off() or journal_of(options, run_id).exists():
        return []
    return [
        f"Weights & Biases: {folder_of(options)} has no journal of this run, {run_id}. If earlier starts used another "
        "folder (--wandb-save-dir, --run-dir), use the same one; otherwise rows that they did not send are missing, "
        "and in offline mode repeated steps appear twice"
    ]


class Wandb:
    """Logs one row per log step; metrics of an evaluation or a health report are added to the row of their step."""

    def __init__(
        self,
        options: LoggingConfig,
        config: Mapping[str, Any],
        run_id: str,
        iteration: int,
        past: Past,
        say: Callable[[str], None],
    ) -> None:
        """Open the run ``run_id``, or continue it after ``iteration`` steps.

        Args:
            options: project, entity and names.
            config: configuration shown for the run.
            run_id: the run's ID, as in the checkpoints.
            iteration: steps taken before this start.
            past: the journal of earlier starts; its rows are removed to free memory.
            say: prints where to find the curves.

        Raises:
            LoggerOpenError: if the package is missing, no user is logged in, or the server does not answer.

        """
        self._run = _open(options, config, run_id)
        self._first_step = iteration
        self._step = iteration
        self._row: Row = {}
        self._restarts = past.starts
        self._last_reported = self._last_step(folder_of(options), run_id, max(past.rows, default=-1))
        for step in sorted(step for step in past.rows if self._last_reported < step <= iteration):
            self._report(past.rows[step], step)
        past.rows.clear()
        if past.starts or iteration:
            self._run.summary["error"] = ""  # clear the error of the previous start
        self._print_location(say)

    def _last_step(self, files: Path, run_id: str, last_journaled: int) -> int:
        """Return the last step that W&B has: from the server, or from the client's files if offline."""
        if not self._run.offline:
            return int(self._run.starting_step) - 1
        try:
            return last_step_on_disk(files, run_id)
        except Exception:  # the file format may change with the version; a gap is better than duplicate steps
            return last_journaled

    def _print_location(self, say: Callable[[str], None]) -> None:
        if self._run.disabled:
            say("Weights & Biases is disabled by its settings: the journal is sent at the first start that enables it")
            return
        if self._run.offline:  # the client makes a folder per start, named by the time and the run
            folder = quote(str(Path(self._run.dir).parent.parent))
            command = f"wandb sync {folder}/offline-run-*-{self._run.id}"
            say(f"Weights & Biases: offline; send all starts with: {command}")
        else:
            say(f"Weights & Biases: {self._run.url}")
        if self._last_reported > self._first_step:
            last = self._last_reported
            say(f"Weights & Biases has this run up to step {last} and continues there from step {last + 1}")

    def record(self, values: Values) -> None:
        """Add metrics to the row of their step, and send the row of the previous step."""
        numbers = scalars(values)
        step = int(numbers["iteration"])
        if self._first_step < step <= self._last_reported:
            self._row = {}
            return
        if step > self._step:
            self.flush()
        self._step = step
        self._row |= row_of(numbers)

    def event(self, values: Values) -> None:
        """Write errors to the run's summary."""
        if values.get("event") == "error":
            self._run.summary["error"] = str(values.get("text", ""))

    def flush(self) -> None:
        """Send the row. A row at the start's first iteration is kept, since the earlier start may have sent one."""
        if self._row and self._step > self._first_step:
            self._report(self._row, self._step)
            self._row = {}

    def _report(self, row: Row, step: int) -> None:
        samples = {"samples vs steps": row["consumed-samples"]} if "consumed-samples" in row else {}
        self._run.log({**row, **samples, "restarts": self._restarts}, step=step, commit=True)
        self._last_reported = step

    def close(self, failed: bool) -> None:
        """Send the last row and wait for the server, with a timeout."""
        self.flush()
        self._run.finish(exit_code=1 if failed else 0)


def _open(options: LoggingConfig, config: Mapping[str, Any], run_id: str) -> Any:
    try:
        import wandb

        check_mode()
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
            dir=str(folder_of(options).parent),
            id=run_id,
            resume="allow",
            config=dict(config),
            settings=settings,
        )
    except Exception as error:  # the client raises many types
        raise NotOpenedError(refusal(error, journal_of(options, run_id))) from error
