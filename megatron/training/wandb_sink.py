"""The numbers of a run in Weights & Biases: one curve, however often the run is killed and started again.

What the client was handed is not yet on a disk or a server: it writes every few seconds, and a killed node takes the
rest along. So a journal has every record. A start asks how far the curve goes, hands over what the journal has beyond
it, and leaves out the steps that are there already and are taken again.
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

TIMEOUT_SECONDS = 25.0  # for the first and the last answer of the server; less than a sink's patience


def folder_of(options: LoggingConfig) -> Path:
    """Where the client's files and the journal lie."""
    return Path(options.wandb_save_dir or options.run_dir or ".") / "wandb"


def journal_of(options: LoggingConfig, run_id: str) -> Path:
    """The journal of the run ``run_id``."""
    return folder_of(options) / f"journal-{run_id}.jsonl"


def notes_on_the_journal(options: LoggingConfig, run_id: str) -> list[str]:
    """What to say where an earlier start's journal should be and is not; ``run_id`` is empty for a run that begins."""
    if not run_id or options.wandb_project is None or turned_off() or journal_of(options, run_id).exists():
        return []
    return [
        f"Weights & Biases: {folder_of(options)} has no journal of this run, {run_id}. If its earlier starts reported "
        "from another folder (--wandb-save-dir, --run-dir), name that one: else rows that they had not handed over are "
        "missing, and offline the steps that are taken again are there twice"
    ]


class Wandb:
    """One row per log step, over iterations; the values of an evaluation or a health report go into its row."""

    def __init__(
        self,
        options: LoggingConfig,
        config: Mapping[str, Any],
        run_id: str,
        iteration: int,
        past: Past,
        say: Callable[[str], None],
    ) -> None:
        """Open the run ``run_id``, or go on with it after ``iteration`` steps.

        Args:
            options: project, entity, names.
            config: shown as the run's configuration.
            run_id: as in the checkpoints.
            iteration: steps taken; what was reported beyond them is of steps that are now taken again.
            past: what the starts before had to report; its rows are taken out of it.
            say: told where the curve is to be found.

        Raises:
            NotOpenedError: when the package is missing, nobody is logged in, or the server does not answer.
        """
        self._run = _open(options, config, run_id)
        self._begin, self._step = iteration, iteration
        self._row: Row = {}
        self._restarts = past.starts
        self._reported = self._last_step(folder_of(options), run_id, max(past.rows, default=-1))
        for step in sorted(step for step in past.rows if self._reported < step <= iteration):
            self._report(past.rows[step], step)
        past.rows.clear()  # of a long run they are many
        if past.starts or iteration:
            self._run.summary["error"] = ""  # that of the start before, which this one goes on from
        self._say_where(say)

    def _last_step(self, files: Path, run_id: str, journaled: int) -> int:
        """The last step of the curve: what the server says, or the files; else all that was handed over."""
        if not self._run.offline:
            return int(self._run.starting_step) - 1
        try:
            return last_step_on_disk(files, run_id)
        except Exception:  # another version may write otherwise; a gap in the curve is better than steps twice
            return journaled

    def _say_where(self, say: Callable[[str], None]) -> None:
        if self._run.disabled:
            say(
                "Weights & Biases is turned off by its settings: once it is on, a start hands over what the journal has"
            )
            return
        say(f"Weights & Biases: {self._how_to_send() if self._run.offline else self._run.url}")
        if self._reported > self._begin:
            reported = self._reported
            say(f"Weights & Biases has this run up to step {reported} and continues there from step {reported + 1}")

    def _how_to_send(self) -> str:
        """The command that sends the files of all starts: each has a folder, named by the time and the run."""
        folder = quote(str(Path(self._run.dir).parent.parent))
        return f"offline, a folder for each start; all are sent by: wandb sync {folder}/offline-run-*-{self._run.id}"

    def record(self, values: Values) -> None:
        """Add to the row of the step, and hand over the row before it."""
        numbers = scalars(values)
        step = int(numbers["iteration"])
        if self._begin < step <= self._reported:
            self._row = {}
            return
        if step > self._step:
            self.flush()
        self._step = step
        self._row |= row_of(numbers)

    def event(self, values: Values) -> None:
        """Show an error in the run's summary."""
        if values.get("event") == "error":
            self._run.summary["error"] = str(values.get("text", ""))

    def flush(self) -> None:
        """Hand over the row. One of the step before the first waits for the next: that step may have its row."""
        if self._row and self._step > self._begin:
            self._report(self._row, self._step)
            self._row = {}

    def _report(self, row: Row, step: int) -> None:
        extra = {"samples vs steps": row["consumed-samples"]} if "consumed-samples" in row else {}
        self._run.log({**row, **extra, "restarts": self._restarts}, step=step, commit=True)
        self._reported = step

    def close(self, failed: bool) -> None:
        """Hand over the last row and wait for the server, not for ever.

        Raises:
            TimeoutError: when it takes too long.
        """
        self.flush()
        self._run.finish(exit_code=1 if failed else 0)


def _open(options: LoggingConfig, config: Mapping[str, Any], run_id: str) -> Any:
    """Open the run.

    Raises:
        NotOpenedError: with what mends it.
    """
    try:
        return _opened(options, config, run_id)
    except Exception as error:  # the client's own are of many kinds
        raise NotOpenedError(refusal(error, journal_of(options, run_id))) from error


def _opened(options: LoggingConfig, config: Mapping[str, Any], run_id: str) -> Any:
    import wandb

    check_mode()
    settings = wandb.Settings(
        init_timeout=TIMEOUT_SECONDS,
        finish_timeout=TIMEOUT_SECONDS,
        finish_timeout_raises=True,
        console="off",  # a print must not wait for another process
        silent=True,  # and nobody is asked to log in while the run goes on
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
