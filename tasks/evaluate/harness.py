"""Run lm-eval on a model: ``tasks/evaluate/harness.py --model_args load=RUN --tasks lambada``.

The command line is lm-eval's own, with the model ``megatron``. Reads checkpoints and Hugging Face folders without
conversion; under torchrun the model is split.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # if this checkout is not installed

from megatron.checkpoint.errors import CheckpointError
from megatron.config.errors import UserError
from megatron.config.launch import Launch, exit_process
from megatron.config.text import echo
from megatron.inference.text import InferenceError

COMMANDS = ("run", "ls", "validate", "-h", "--help")
"""First arguments of lm-eval's command line; without one it runs tasks."""


def run_harness(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line with the model ``megatron``, unless the arguments name another."""
    from megatron.distributed.launch import call_safely, destroy_distributed
    from megatron.evaluation.harness import RUNNING, language_model_class

    words = [*arguments]
    if words and words[0] not in COMMANDS:
        words.insert(0, "run")
    if words[:1] == ["run"] and not {"-h", "--help", "--model", "-M"} & {word.partition("=")[0] for word in words}:
        words[1:1] = ["--model", "megatron"]
    language_model_class()
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["harness", *words]
    outcome, error = call_safely(cli_evaluate)  # serving ranks leave it with SystemExit
    for shared in RUNNING:
        shared.end(outcome)
    RUNNING.clear()
    if error is not None:
        raise error
    destroy_distributed()


def main(argv: Sequence[str]) -> int:
    """Run lm-eval with these arguments.

    Returns:
        The exit status: 1 if the model cannot be loaded, 2 for invalid arguments.
    """
    launch = Launch()
    try:
        launch = Launch.read(os.environ)
        run_harness(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except (CheckpointError, OSError) as error:
        echo(f"harness: {error}", file=sys.stderr)
        return 1
    except ValueError as error:  # InferenceError and UserError are among them
        missing = str(error).startswith("Tasks not found")  # as lm-eval reports it
        if not missing and not isinstance(error, (InferenceError, UserError)):
            raise
        if launch.local_rank == 0:
            echo(f"harness: {error}" + "\n  fix: --include_path FOLDER" * missing, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
