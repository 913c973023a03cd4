"""Whole runs of a model so small that a step takes milliseconds: what tests of the training loop drive."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.config.arguments import parse
from megatron.config.run import RunConfig
from megatron.training.setup import Trainer

FLAGS = (
    "--mock-data --vocab-size 31 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 "
    "--hidden-dropout 0 --attention-dropout 0 --max-position-embeddings 8 --seq-length 8 --device cpu --lr 1e-2 "
    "--global-batch-size 4 --train-iters 6 --log-interval 1"
)


def tiny_run(folder: Path, flags: str = "", world_size: int = 1) -> RunConfig:
    """The configuration of ``pretrain_gpt.py`` with ``FLAGS`` and more ``flags``; records go to ``folder``."""
    argv = [*FLAGS.split(), *flags.split(), "--run-dir", str(folder)]
    return parse(argv, {"RANK": "0", "WORLD_SIZE": str(world_size)}).config


def records(folder: Path, kind: str = "lm loss") -> list[dict[str, Any]]:
    """The records of a run that have ``kind``: ``lm loss``, ``lm loss validation``, ``text`` (of notes)."""
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
    """Make the output of the first block NaN until the step is counted."""
    step = trainer.iteration

    def spoil(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return output * float("nan") if trainer.iteration == step else None

    trainer.chunk.get_submodule("layers.0").register_forward_hook(spoil)
