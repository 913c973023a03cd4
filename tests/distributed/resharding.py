"""Runs that are saved on one layout and resumed on another, drawn at random from the factors of the layout matrix."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.arguments.sources import resolve
from megatron.arguments.validate import find_problems
from megatron.checkpoint.format import Manifest
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from tests.distributed.grid import FACTORS, LAYOUT, MAX_RANKS, SHARING, case_of, layouts, sharings, valid
from tests.distributed.pairwise import Choice
from tests.distributed.resume import AFTER, BEFORE
from tests.kit.cases import SEQ_LENGTH

MODEL = tuple(n for n in FACTORS if n not in (*LAYOUT, *SHARING, "mixers")) + ("layers", "samples", "experts", "biases")
"""Options that stay as they are on the other layout; the rest of what is drawn may change."""

OTHERWISE = ("recompute", "loss_chunk", "overlap", "bucket")
"""Options that may change besides the layout."""

ANY: Choice = MappingProxyType({})


@dataclass(frozen=True)
class Reshard:
    """A run, and the layout on which it goes on: what was drawn, and the configurations."""

    choices: tuple[Choice, Choice]
    before: RunConfig
    after: RunConfig

    def __str__(self) -> str:
        names = ("tp", "pp", "vpp", "schedule", "dp", "zero", "ep", "optimizer")
        return "->".join("-".join(f"{n}{c[n]}".replace(" ", "") for n in names) for c in self.choices)

    @property
    def ranks(self) -> tuple[int, int]:
        """Numbers of ranks before and after."""
        first, second = self.choices
        return ranks_of(first), ranks_of(second)

    @property
    def exact(self) -> bool:
        """Return True if losses match the other layout to fp64 rounding, not to the weights' format."""
        return self.before.precision.params_dtype == "fp64"


def ranks_of(choice: Choice) -> int:
    return int(choice["tp"][0]) * choice["pp"] * choice["dp"]


def draw(
    seed: int,
    ranks: tuple[int, int] | None = None,
    model: Choice = ANY,
    before: Choice = ANY,
    after: Choice = ANY,
    half: bool = False,
    ema: float | None = None,
) -> Reshard:
    """A random model and optimizer, and two random layouts of it.

    Args:
        seed: of everything.
        ranks: before and after; by default any from one to ``MAX_RANKS`` that a layout has.
        model: what is not left to chance, of the factors of the model and its optimizer.
        before: the same of the layout that saves.
        after: and of that which goes on.
        half: whether weights are in bf16, and main parameters stored as remainders.
        ema: decay of an average of the weights.
    """
    chance = random.Random(seed)
    mixers = random.Random(f"mixers {seed}").choice(FACTORS["mixers"])
    offloaded = random.Random(f"offload {seed}").choices((0.0, 0.6, 1.0), k=2)
    while True:
        run = {n: chance.choice(FACTORS[n]) for n in MODEL} | {"documents": "one", "masked": False}
        run |= {"mixers": "attention" if run["block"] == "parallel" else mixers, **model}
        sizes = ranks or [chance.randint(1, MAX_RANKS) for _ in range(2)]
        sides = [_draw_side(chance, run, n, fixed) for n, fixed in zip(sizes, (before, after))]
        first, second = sides
        if first is None or second is None:
            continue
        configs = [_config_of(choice, half, ema, share) for choice, share in zip((first, second), offloaded)]
        if not any(find_problems(config, ranks_of(choice)) for config, choice in zip(configs, (first, second))):
            return Reshard((first, second), *configs)


@cache
def _fits(table: Callable[[], tuple[Choice, ...]], name: str, value: Any) -> np.ndarray:
    """Return, per choice of a table, whether it has a value."""
    return np.array([(ranks_of(choice) if name == "ranks" else choice[name]) == value for choice in table()])


def _draw_side(chance: random.Random, run: Choice, ranks: int, fixed: Choice) -> Choice | None:
    """A layout of the run on so many ranks, and other ways to compute it; None if there is none."""
    wanted = {**run, **{name: chance.choice(FACTORS[name]) for name in OTHERWISE}, **fixed}
    for table, more in ((layouts, {"ranks": ranks}), (sharings, {})):
        given = {name: wanted[name] for name in table()[0] if name in wanted}
        found = np.flatnonzero(np.logical_and.reduce([_fits(table, *item) for item in (given | more).items()]))
        if not len(found):
            return None
        wanted |= table()[chance.choice(found)]
    return wanted if valid(wanted) else None


def _config_of(choice: Choice, half: bool, ema: float | None, offloaded: float) -> RunConfig:
    """The run of a choice, on generated samples, with a share of the optimizer's state in host memory."""
    config = case_of(choice).config()
    weights_too = offloaded == 1.0 and config.parallel.zero_stage == 3 and config.optimizer.optimizer != "muon"
    training = replace(config.training, global_batch_size=choice["samples"], train_iters=BEFORE + AFTER)
    optimizer = replace(config.optimizer, lr=1e-2, lr_warmup_iters=1, ema_decay=ema, store_param_remainders=half)
    if offloaded:
        optimizer = replace(optimizer, optimizer_cpu_offload=True, optimizer_offload_fraction=offloaded)
    parallel = replace(config.parallel, param_cpu_offload=weights_too)
    precision = replace(config.precision, params_dtype="bf16") if half else config.precision
    config = replace(config, parallel=parallel, training=training, optimizer=optimizer, precision=precision)
    return resolve(config, ranks_of(choice))


def saving(config: RunConfig, folder: Path) -> RunConfig:
    """The run, with its checkpoints in ``folder``."""
    return replace(config, checkpoint=CheckpointConfig(save=str(folder)))


def loading(config: RunConfig, folder: Path) -> RunConfig:
    """The run, begun with the checkpoint in ``folder``."""
    return replace(config, checkpoint=CheckpointConfig(load=str(folder)))


def times_written(manifest: Manifest) -> dict[str, Tensor]:
    """Of every tensor, in its view, how many times each element is in the checkpoint, counted one by one."""
    found = {}
    for name, record in manifest.tensors.items():
        count = torch.zeros(record.view, dtype=torch.int8)
        for chunk in record.chunks:
            count[chunk.box.slices] += 1
        found[name] = count
    return found


def bytes_of_files(manifest: Manifest) -> dict[str, int]:
    """Bytes of tensors in every file, by its name; proves that they overlap nowhere and end where the file does.

    Raises:
        AssertionError: when they do not.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    for record in manifest.tensors.values():
        for chunk in record.chunks:
            spans.setdefault(chunk.file, []).append((chunk.offset, chunk.bytes))
    for file, found in spans.items():
        found.sort()
        ends = [offset + n for offset, n in found]
        assert all(end == start for end, (start, _) in zip(ends, found[1:])), f"{file} has holes, or bytes twice"
        assert ends[-1] == Path(str(manifest.folder), file).stat().st_size
    return {file: sum(n for _, n in found) for file, found in spans.items()}


LARGE = ModelConfig(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=2000,
    max_position_embeddings=SEQ_LENGTH,
    add_bias_linear=False,
)
"""A model whose matrices are large beside its vectors and the ends of buckets."""


def large_run(model: Mapping[str, Any], parallel: Mapping[str, Any], optimizer: str = "adam") -> RunConfig:
    """A run of it on some layout, of which nothing but the saving is of interest."""
    training = TrainingConfig(seq_length=SEQ_LENGTH, global_batch_size=12, train_iters=1, device="cpu")
    return RunConfig(
        replace(LARGE, **model),
        ParallelConfig(**parallel),
        PrecisionConfig(params_dtype="fp32"),
        training,
        optimizer=OptimizerConfig(optimizer=optimizer),
        data=DataConfig(mock_data=True),
    )
