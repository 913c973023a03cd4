"""TensorBoard and Weights & Biases loggers.

Both show one curve per run, across crashes and restarts: TensorBoard hides the points of repeated steps, and W&B keeps
what it has of the run and receives the steps after it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from megatron.arguments.sources import flat_values
from megatron.checkpoint.durable_files import make_folder
from megatron.config.batch import full_global_batch_size
from megatron.config.logging import LoggingConfig
from megatron.config.privacy import secret_variables
from megatron.config.run import RunConfig
from megatron.layers.parameters import num_parameters
from megatron.training.loggers.base import Metrics, error_summary, scalar_metrics
from megatron.training.loggers.run_folder import environment_info, git_state

TENSORBOARD_FLUSH_SECONDS = 30
WANDB_MODES = ("online", "offline", "disabled", "run", "dryrun", "shared")  # the last three are seldom used
WANDB_TIMEOUT_SECONDS = 25.0  # for opening and finishing a run; less than the timeout of `BackgroundLogger`


TOKENS = "consumed-tokens"
"""Metric on the x axis of Weights & Biases."""

MAX_HEALTH_LAYERS = 8
"""Layers whose health is sent to Weights & Biases, spread evenly; each is a panel per quantity."""


def hyperparameters(config: RunConfig, device_name: str, world_size: int) -> dict[str, Any]:
    """Return all options by name, and facts to compare runs by: parameters, tokens per step, commit, versions."""
    dp = config.parallel.data_parallel_size(world_size)
    environment = environment_info(device_name, world_size)
    packages = environment.pop("packages")
    return {
        **flat_values(config),
        "parameters": num_parameters(config.model),
        "tokens_per_step": full_global_batch_size(config.training, dp) * config.training.seq_length,
        "data_parallel_size": dp,
        "git_commit": git_state(Path(__file__).parent)[0],
        **environment,
        **{f"version_{name}": version for name, version in packages.items()},
    }


class TensorBoardLogger:
    """Writes event files over steps to ``folder``, and over consumed samples to its subfolder ``samples``.

    The latter are named "... vs samples", as in Megatron-LM. They need their own folder because a restart discards the
    points from a step on (``purge_step``), and a folder has one such step.
    """

    def __init__(
        self,
        folder: Path,
        resolved_config: str,
        iteration: int,
        consumed_samples: int,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the event files; points after ``iteration`` steps and ``consumed_samples`` are discarded."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams as make_summaries

        make_folder(folder, private=True)
        self._by_step = SummaryWriter(str(folder), purge_step=iteration + 1, flush_secs=TENSORBOARD_FLUSH_SECONDS)
        self._by_samples = SummaryWriter(
            str(folder / "samples"), purge_step=consumed_samples + 1, flush_secs=TENSORBOARD_FLUSH_SECONDS
        )
        verbatim = "\n".join(f"    {line}" for line in resolved_config.splitlines())  # in Markdown
        self._by_step.add_text("config", verbatim, iteration)
        plain = {name: x if isinstance(x, int | float) else str(x) for name, x in (hparams or {}).items()}
        # not add_hparams(), which adds points to the curves of the metrics
        for summary in make_summaries(plain, {"lm loss": 0.0, "lm loss validation": 0.0}) if plain else ():
            self._by_step._get_file_writer().add_summary(summary)
        self.flush()

    def log(self, step: int, metrics: Metrics) -> None:
        """Add a point to the curve of every metric."""
        samples = int(metrics["consumed-samples"])
        for name, number in scalar_metrics(metrics).items():
            if name not in ("consumed-samples", "consumed-tokens", "time"):
                self._by_step.add_scalar(name, number, step)
                self._by_samples.add_scalar(f"{name} vs samples", number, samples)

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Add errors, warnings, generated samples and the names of phases as text."""
        if kind == "start" and "phase" in fields:
            self._by_step.add_text("phase", fields["phase"], step)
        if kind in ("warning", "incident", "error", "samples"):
            self._by_step.add_text(kind, fields["text"], step)

    def flush(self) -> None:
        """Write buffered points."""
        self._by_step.flush()
        self._by_samples.flush()

    def close(self) -> None:
        """Close the event files."""
        self._by_step.close()
        self._by_samples.close()


class WandbLogger:
    """Logs one row per step, which evaluations and health reports of the step join. Panels are drawn over tokens.

    The run is resumed by its id. Steps that W&B already has, from a start that was killed after its last checkpoint,
    are not logged again. Online the server names the last one. Offline nothing does, and ``wandb sync`` would append
    repeated steps to the curve: the step of the last complete row is therefore kept in a file.
    """

    def __init__(
        self,
        options: LoggingConfig,
        config: Mapping[str, Any],
        run_id: str,
        iteration: int,
        print_line: Callable[[str], None],
    ) -> None:
        """Open or continue the run ``run_id``; ``log`` gets steps after ``iteration``, and late evaluations of it."""
        folder = Path(options.wandb_save_dir or options.run_dir or ".") / "wandb"
        self._run = _open_wandb(options, config, run_id, folder)
        self._run.define_metric(TOKENS)
        self._run.define_metric("*", step_metric=TOKENS)
        layers = int(config.get("num_layers", 0))
        chosen = {round(i * (layers - 1) / (MAX_HEALTH_LAYERS - 1)) for i in range(MAX_HEALTH_LAYERS)}
        self._hidden_layers = {f"layers.{layer}" for layer in {*range(layers)} - chosen}
        self._first_step = iteration
        self._last_step_file = folder / f"last-step-{run_id}"
        self._last_step = int(self._run.starting_step) - 1
        if self._run.offline:
            with suppress(OSError, ValueError):
                self._last_step = int(self._last_step_file.read_text())
        self._row_step = self._last_step  # of the row that is being filled
        self._restarts = 0
        self._failed = False
        if iteration:
            self._run.summary["error"] = ""  # clear the error of the previous start
        if self._run.disabled:
            where = "disabled by its settings"
        elif self._run.offline:  # the client makes a folder per start, named by the time and the run
            where = f"offline; send all starts with: wandb sync {quote(str(folder))}/offline-run-*-{run_id}"
        else:
            where = self._run.url
        print_line(f"Weights & Biases: {where}")
        if self._last_step > iteration:
            last = self._last_step
            print_line(f"Weights & Biases has this run up to step {last} and continues there from step {last + 1}")

    def log(self, step: int, metrics: Metrics) -> None:
        """Add metrics to the row of their step; the client sends it when the next row begins."""
        step = max(step, self._first_step + 1)  # a late evaluation joins the first row: its own step has been sent
        if step <= self._last_step:
            return
        self._complete_row(step)
        self._restarts = metrics["starts"] - 1 if "starts" in metrics else self._restarts
        row: dict[str, Any] = {name: value for name, value in scalar_metrics(metrics).items() if name != "time"}
        row |= {name: metrics[name] for name in ("phase",) if name in metrics}
        # W&B groups panels by the text before "/": a group per quantity
        row = {
            re.sub("^health/", "health-", name): value
            for name, value in row.items()
            if not (name.startswith("health/") and name.rpartition("/")[2] in self._hidden_layers)
        }
        samples = {"samples vs steps": row["consumed-samples"]} if "consumed-samples" in row else {}
        self._run.log({**row, **samples, "restarts": self._restarts}, step=step)

    def _complete_row(self, next_step: int) -> None:
        """Note the step of the last row if the next one begins."""
        if next_step > self._row_step:
            with suppress(OSError):
                self._last_step_file.write_text(str(self._row_step))
            self._row_step = next_step

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Write errors to the run's summary, and generated samples to the row of their step."""
        if kind == "error":
            self._failed = True
            self._run.summary["error"] = fields["text"]
        elif kind == "samples" and step > self._last_step:
            import wandb

            table = wandb.Table(columns=["prompt", "continuation"], data=fields["continuations"])
            self._run.log({"samples": table, TOKENS: fields[TOKENS]}, step=step)

    def close(self) -> None:
        """Send the last row and wait for the server, with a timeout."""
        self._complete_row(self._row_step + 1)
        self._run.finish(exit_code=1 if self._failed else 0)


def _open_wandb(options: LoggingConfig, config: Mapping[str, Any], run_id: str, folder: Path) -> Any:
    """Return the client's run, continued if it exists."""
    import wandb

    if (mode := os.environ.get("WANDB_MODE", "online")) not in WANDB_MODES:
        raise ValueError(f"WANDB_MODE={mode} is unknown: the modes are {', '.join(WANDB_MODES[:3])}")
    make_folder(folder, private=True)  # the client would use a temporary folder instead
    # The client records all variables of Slurm, and those of plugins; both may be needed elsewhere in this process.
    hidden = {name: os.environ.pop(name) for name in secret_variables(os.environ) if re.search("SLURM|SPANK", name)}
    try:
        return wandb.init(
            project=options.wandb_project,
            entity=options.wandb_entity,
            group=options.wandb_group,
            tags=options.wandb_tags or None,
            notes=options.wandb_notes,
            name=options.wandb_exp_name or (Path(options.run_dir).resolve().name if options.run_dir else None),
            dir=str(folder.parent),
            id=run_id,
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(
                init_timeout=WANDB_TIMEOUT_SECONDS,
                finish_timeout=WANDB_TIMEOUT_SECONDS,
                finish_timeout_raises=True,
                console="off",  # printing must not block on the client's process
                silent=True,  # no interactive login
            ),
        )
    except Exception as error:  # the client raises many types
        why, fix = error_summary(error), "WANDB_MODE=offline writes to this disk"
        if "wandb login" in why:
            why, fix = "no user is logged in", "wandb login, or WANDB_MODE=offline"
        raise RuntimeError(f"{why}: {fix}") from error
    finally:
        os.environ.update(hidden)
