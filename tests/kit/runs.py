"""Whole runs for tests of the training loop, with a model so small that a step takes milliseconds."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.arguments.cli import parse
from megatron.checkpoint.format import MARKER, Manifest
from megatron.checkpoint.load import CheckpointReader
from megatron.config.phases import Phase
from megatron.config.run import RunConfig
from megatron.convert.huggingface.config import read_model_values
from megatron.layers.norm import Residual
from megatron.training import checkpointer, main
from megatron.training.callbacks.profiler import is_layer
from megatron.training.loggers.run_folder import git_state
from megatron.training.start import read_start
from megatron.training.trainer import Trainer
from tests.kit.processes import ForkedProgram

T = TypeVar("T")

FLAGS = (
    "--mock-data --vocab-size 31 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 "
    "--hidden-dropout 0 --attention-dropout 0 --max-position-embeddings 8 --seq-length 8 --device cpu --lr 1e-2 "
    "--global-batch-size 4 --train-iters 6 --log-interval 1"
)


def tiny_run(folder: Path, flags: str = "", world_size: int = 1, base: str = FLAGS) -> RunConfig:
    """The configuration of ``pretrain_gpt.py`` with ``base`` and more ``flags``; records go to ``folder``."""
    argv = [*base.split(), *flags.split(), "--run-dir", str(folder)]
    environ = {"RANK": "0", "WORLD_SIZE": str(world_size)}
    return parse(argv, environ, read_model=read_model_values).config


def tiny_phases(folder: Path, phases: Sequence[Mapping[str, Any]], flags: str = "", world_size: int = 1) -> list[Phase]:
    """The phases of ``pretrain_gpt.py`` with ``FLAGS``, more ``flags`` and a file of ``phases``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "phases.yaml"
    file.write_text(json.dumps([*phases]))  # JSON is YAML
    argv = [*FLAGS.replace("--train-iters 6", "").split(), *flags.split(), "--run-dir", str(folder)]
    argv += ["--save", f"{folder}/saved", "--phases", str(file)]
    place = {"RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with patch.dict(os.environ, place):
        return read_start(argv).plan


def records(folder: Path, kind: str = "lm loss") -> list[dict[str, Any]]:
    """The records of a run with ``kind``: ``lm loss``, alone or with ``validation`` or ``test``; ``text`` of notes."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [line for line in lines if kind in line]


def column(folder: Path, name: str, kind: str = "lm loss") -> list[Any]:
    """One value of all records that have ``kind``."""
    return [record[name] for record in records(folder, kind)]


def before_step(number: int, act: Callable[[Trainer], None]) -> AbstractContextManager[Any]:
    """Within it, every trainer calls ``act`` on itself right before it reads the data of step ``number`` (from 1)."""
    original = Trainer.next_batches

    def next_batches(trainer: Trainer) -> Any:
        if trainer.iteration + 1 == number:
            act(trainer)
        return original(trainer)

    return patch.object(Trainer, "next_batches", next_batches)


def spoil_step(trainer: Trainer) -> None:
    """Make the output of this rank's first block NaN until the step is counted."""
    step = trainer.iteration

    def spoil(module: torch.nn.Module, inputs: Any, output: tuple[Residual, Tensor | None]) -> Any:
        residual, losses = output
        return (residual._replace(x=residual.x * torch.nan), losses) if trainer.iteration == step else None

    chunk = next(iter(trainer.chunks.values()))
    block = next(module for name, module in chunk.named_modules() if is_layer(name))
    block.register_forward_hook(spoil)


@contextmanager
def spoiled_sample(tokens: Sequence[int], factor: float = torch.nan) -> Iterator[None]:
    """Multiply the gradient of the embeddings, or by NaN these, of each micro-batch of training with these tokens."""
    original = Trainer.compute

    def compute(trainer: Trainer, batches: Any, loss_grad: Any, *arguments: Any) -> None:
        data, trains = trainer.data.datasets["train"], loss_grad is not None
        spoiled = [trains and any(data[i].tokens.tolist() == [*tokens] for i in each.sample_ids) for each in batches]

        def spoil(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
            if trainer.pipeline.at is None or not spoiled[trainer.pipeline.at.microbatch]:
                return output
            if factor != factor:
                return output * factor
            output.register_hook(lambda gradient: gradient * factor)
            return output

        with ExitStack() as hooks:
            for chunk in trainer.chunks.values() if any(spoiled) else ():
                if chunk.embedding is not None:
                    hooks.enter_context(chunk.embedding.register_forward_hook(spoil))
            original(trainer, batches, loss_grad, *arguments)

    with patch.object(Trainer, "compute", compute):
        yield


def part_of(trainer: Trainer, kind: type[T]) -> T:
    """Return the component of a class."""
    return next(component for component in trainer.components if isinstance(component, kind))


class KilledError(BaseException):
    """Ends a run as ``kill -9`` does, as far as its files show: it is not caught, and nothing more is saved."""


def kill(trainer: Trainer) -> None:
    """Be killed."""
    raise KilledError


def misread(trainer: Trainer) -> None:
    """Read the next step's samples once more, as a reader does that loses its place."""
    trainer.reader._read("train", trainer.consumed_samples, trainer.reader.next_batch_size)


def full_disk(*at: int) -> AbstractContextManager[Any]:
    """The disk takes nothing when these steps are saved."""
    original = checkpointer.save_sharded  # type: ignore[attr-defined]

    def no_space(fd: int, content: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(folder: Path, *arguments: Any) -> Any:
        refusing = patch.object(os, "write", no_space) if int(folder.name[5:]) in at else nullcontext()
        with refusing:
            return original(folder, *arguments)

    return patch.object(checkpointer, "save_sharded", write)


@dataclass
class Outcome:
    """The outcome of one start of a run, seen from outside.

    Attributes:
        status: exit status; None for a run that was killed.
        out: what it wrote to stdout.
        err: what it wrote to stderr.
        samples: by step, the number and the tokens of every sample that this rank read for it.
    """

    status: int | None = None
    out: str = ""
    err: str = ""
    samples: dict[int, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)


def start(
    run: RunConfig | Sequence[Phase],
    event: AbstractContextManager[Any] | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Outcome:
    """Run a configuration, or phases, in this process from start to end, with ``event`` happening; draws no picture.

    Raises:
        AssertionError: if the run starts from scratch although there are whole checkpoints: it ends with the numbers of
            a resumed one, so that a test of resuming would pass.
    """
    plan = [Phase(run)] if isinstance(run, RunConfig) else run
    options = plan[0].config.checkpoint
    saved = [
        path for folder in (options.save, options.load) if folder for path in Path(folder).glob(f"iter_*/{MARKER}")
    ]
    printed, place = Outcome(), {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    no_picture = patch("megatron.training.loggers.run_logger.draw_plots", lambda *arguments: None)
    same_code = patch("megatron.training.loggers.run_folder.git_state", _git_state)
    around = patch.dict(os.environ, place), no_picture, same_code, event or nullcontext(), _noting(printed.samples)
    with ExitStack() as stack, redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        for context in around:
            stack.enter_context(context)
        with suppress(KilledError):
            printed.status = main.run(plan[0].config, plan=plan)
    printed.out, printed.err = out.getvalue(), err.getvalue()
    assert not (saved and "starts from scratch: " in printed.out), f"{saved[-1].parent} was not resumed"
    return printed


_git_state = cache(git_state)  # it runs two programs, which take 20 ms of each start


@contextmanager
def _noting(samples: dict[int, list[tuple[int, tuple[int, ...]]]]) -> Iterator[None]:
    """Note what every step reads."""
    original = Trainer.next_batches

    def next_batches(trainer: Trainer) -> Any:
        batches = original(trainer)
        rows = [zip(b.sample_ids.tolist(), b.tokens.tolist()) for b in batches]
        samples[trainer.iteration + 1] = [(i, tuple(tokens)) for some in rows for i, tokens in some]
        return batches

    with patch.object(Trainer, "next_batches", next_batches):
        yield


NUMBERS = {
    "consumed-samples",
    "lm loss",
    "grad-norm",
    "learning-rate",
    "weight-decay",
    "batch-size",
    "loss-scale",
    "skipped-iterations",
    "lm loss validation",
    "lm loss test",
}
"""The records of a run that are not time or memory."""


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    """``NUMBERS`` of every step and evaluation that a run recorded; what was done twice as it was the last time."""
    taken: dict[int, dict[str, Any]] = {}
    for record in [r for kind in ("lm loss", "lm loss validation", "lm loss test") for r in records(folder, kind)]:
        of = record.get("validation-set", "")
        numbers = {f"{name} {of}".strip(): value for name, value in record.items() if name in NUMBERS}
        taken[record["iteration"]] = taken.get(record["iteration"], {}) | numbers
    return taken


def checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor of a checkpoint, in its stored shape, and its numbers; not who wrote it."""
    manifest = Manifest.open(path)
    reader = CheckpointReader(manifest)
    tensors = {name: reader.read(name).view(reader.shape(name)) for name in reader.names}
    own = ("written_by", "goodput", "run_id")  # what no two runs have in common
    return tensors, {name: value for name, value in manifest.state.items() if name not in own}


def saved_steps(folder: Path) -> list[int]:
    """Steps whose checkpoints are whole."""
    return sorted(Manifest.open(path).state["iteration"] for path in folder.glob("iter_*") if path.suffix == "")


def contents(folder: Path) -> dict[str, bytes]:
    """All files in a folder and those inside it, by their names there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def differences(first: Path, second: Path) -> list[str]:
    """Names of what two checkpoints have that is not the same to the bit."""
    (these, state), (those, other_state) = checkpoint(first), checkpoint(second)
    names = these.keys() | those.keys()
    same = {
        n for n in these.keys() & those.keys() if these[n].dtype == those[n].dtype and _same_bits(these[n], those[n])
    }
    numbers = {n for n in state.keys() | other_state.keys() if state.get(n) != other_state.get(n)}
    return sorted((names - same) | numbers)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b)))


PROCESS_SECONDS = 120.0
"""Limit for a run in a process of its own."""


def run_in_process(
    folder: Path,
    flags: str,
    kill_after: int = 0,
    ready: Callable[[], bool] = lambda: True,
    base: str = FLAGS,
    **environment: str,
) -> int:
    """Start the run in a process of its own, and wait for its end.

    Args:
        folder: its ``--run-dir``.
        flags: more of them.
        kill_after: step after which it waits, and the process and its children get SIGKILL; 0 for never.
        ready: asked again and again when it waits there, until the time has come.
        base: flags that every run has.
        environment: more of its variables.

    Returns:
        The exit status, -9 for a run that was killed.

    Raises:
        TimeoutError: when it takes too long.
    """
    deadline = time.monotonic() + PROCESS_SECONDS
    output = folder.with_name(f"{folder.name}.output")
    with patch.dict(os.environ):
        os.environ.pop("WANDB_SERVICE", None)  # of an earlier start
        program = ForkedProgram(_run_and_wait, folder, kill_after, flags, base, output=output, environment=environment)
    with program:
        while program.poll() is None:
            if kill_after and _reached(folder, kill_after) and ready():
                program.kill()
            elif time.monotonic() > deadline:
                raise TimeoutError(f"the run in {folder} takes more than {PROCESS_SECONDS:.0f} s")
            else:
                time.sleep(0.05)
        return program.wait(0.0)


def _run_and_wait(folder: Path, wait_after: int, flags: str, base: str) -> int:
    """The process itself."""
    waiting = before_step(wait_after + 1 if wait_after else 0, lambda trainer: time.sleep(PROCESS_SECONDS))
    printed = start(tiny_run(folder, flags, base=base), waiting)
    print(printed.out, printed.err, sep="\n")
    return printed.status or 0


def _reached(folder: Path, step: int) -> bool:
    """Return True if the last start of the run has reported ``step``."""
    path = folder / "metrics.jsonl"
    if not path.exists() or not path.read_bytes().endswith(b"\n"):
        return False
    lines = records(folder, "iteration")
    begun = max(i for i, line in enumerate(lines) if line.get("event") == "start")
    return any(line["iteration"] == step for line in lines[begun + 1 :] if "lm loss" in line)
