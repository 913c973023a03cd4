"""Changes of a trained model between two runs, computed box by box.

Each change is a `WeightSource` over another one: a box of its tensors is computed from boxes of the tensors below. So
changes combine, and memory holds one block at a time whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.arguments.sources import resolve, to_dict
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format import split_box
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.config.attention_pattern import format_layers, split_layers
from megatron.config.model import ModelConfig
from megatron.config.option import Role
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import format_selected_layers, listed
from megatron.convert.huggingface.config import check_model_config
from megatron.convert.huggingface.convert import new_checkpoint, raise_if_overflow
from megatron.convert.saved_model import SavedModel
from megatron.convert.weight_source import BLOCK_ELEMENTS
from megatron.distributed.comm import Group
from megatron.distributed.random import initialize
from megatron.distributed.sharding import Box, ShardSpec
from megatron.layers.context import DTYPES
from megatron.layers.parameters import gpt

T = TypeVar("T")

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors with a row per token."""


class Model(Protocol):
    """Weights with their architecture."""

    @property
    def model(self) -> ModelConfig:
        """The architecture, with the vocabulary size."""

    @property
    def specs(self) -> Mapping[str, ShardSpec]:
        """Specs of all weights, by global name."""

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor."""


class AveragedModels:
    """The mean of several models of one architecture, as in model soups (arXiv 2203.05482)."""

    def __init__(self, models: Sequence[SavedModel]) -> None:
        """Take the mean of ``models``.

        Raises:
            CheckpointError: when their architectures differ.
        """
        self._models = models
        self.model, self.specs = models[0].model, models[0].specs
        expected = _architecture(self.model)
        for other in models[1:]:
            found = _architecture(other.model)
            if found != expected:
                which = [
                    f"{name} {found[name]} and {expected[name]}" for name in found if found[name] != expected[name]
                ]
                pair = f"{other.manifest.path} and {models[0].manifest.path}"
                raise CheckpointError(f"{pair} are different models: {listed(which)}")

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the mean, computed in fp64."""
        total = torch.zeros(box.size, dtype=torch.float64)
        for model in self._models:
            total += model.read(name, view, box)
        return total / len(self._models)


def _architecture(model: ModelConfig) -> dict[str, Any]:
    """Return the options that determine what a model computes."""
    whole = resolve(RunConfig(model=model), 1)
    settings = (each for each in SETTINGS.values() if each.section == "model")
    return {s.name: s.value_in(whole) for s in settings if s.option.role in (Role.SHAPE, Role.FUNCTION)}


class WithoutLayers:
    """A model without some of its blocks; the others move up."""

    def __init__(self, source: Model, dropped: Collection[int]) -> None:
        """Drop the blocks with the indices ``dropped``.

        Raises:
            CheckpointError: when there is no such block, or none is left.
        """
        layers = source.model.num_layers
        if unknown := sorted({*dropped} - {*range(layers)}):
            raise CheckpointError(f"the model has no layers {listed(unknown)}: it has {layers}, numbered from 0")
        self._source, self._kept = source, [layer for layer in range(layers) if layer not in dropped]
        if not self._kept:
            raise CheckpointError(f"all {layers} layers would be dropped")
        self.model = self._without(source.model)
        if [*map(self.model.mixers, range(len(self._kept)))] != [*map(source.model.mixers, self._kept)]:
            raise CheckpointError(
                f"without these layers, {self.model.hybrid_layer_pattern} has other blocks than before"
            )
        self.specs = gpt(self.model)

    def _without(self, model: ModelConfig) -> ModelConfig:
        """Return the model of the blocks that are kept."""
        of_pattern, places = model.layer_pattern, self._kept
        if of_pattern is not None:
            ends = (*of_pattern.starts[1:], len(of_pattern.layers))
            places = [at for layer in self._kept for at in range(of_pattern.starts[layer], ends[layer])]

        def kept(items: Sequence[T] | None) -> list[T] | None:
            return None if items is None else [items[at % len(items)] for at in places]

        experts = [*map(model.has_experts, self._kept)]
        patterns = kept(None if model.attention_pattern is None else split_layers(model.attention_pattern))
        symbols = kept(None if of_pattern is None else of_pattern.layers)
        return replace(
            model,
            num_layers=len(self._kept),
            attention_pattern=None if patterns is None else format_layers(patterns),
            no_rope_freq=_text(kept(model.layers_without_rope)),
            window_attn_skip_freq=_text(kept(model.window_layers)),
            token_mixers=tuple(kept(model.token_mixers) or ()) if len(model.token_mixers) > 1 else model.token_mixers,
            moe_layer_freq=None if model.moe_layer_freq is None else format_selected_layers(experts),
            linear_attention_freq=_text(kept(model.selected_linear_layers)),
            hybrid_layer_pattern=None if symbols is None else "".join(symbols),
        )

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Read a tensor of a block under its former number."""
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            name = f"layers.{self._kept[int(number)]}.{rest}"
        return self._source.read(name, view, box)


def _text(layers: Sequence[int] | None) -> str | None:
    return None if layers is None else str([*layers])


class WithVocabulary:
    """A model with more or fewer tokens; the rows of new tokens are the mean of all rows."""

    def __init__(self, source: Model, entries: int) -> None:
        self._source, self._old = source, source.model.vocab
        self.model = replace(source.model, vocab_size=entries)
        self.specs = gpt(self.model)
        self._mean_row = cache(self._compute_mean_row)

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return rows of old tokens unchanged."""
        if name not in VOCABULARY:
            return self._source.read(name, view, box)
        (first, column), (rows, columns) = box.start, box.size
        kept = max(0, min(first + rows, self._old) - first)
        new = self._mean_row(name)[column : column + columns].expand(rows - kept, columns)
        if not kept:
            return new
        old = self._source.read(name, (self._old, view[1]), Box(box.start, (kept, columns)))
        return torch.cat((old.to(new.dtype), new)) if len(new) else old

    def _compute_mean_row(self, name: str) -> Tensor:
        """Return the mean of all rows, ``[hidden]``, in fp32 from sums in fp64."""
        view = (self._old, self.model.hidden_size)
        total = torch.zeros(view[1], dtype=torch.float64)
        for block in split_box(Box((0, 0), view), BLOCK_ELEMENTS):
            columns = slice(block.start[1], block.start[1] + block.size[1])
            total[columns] += self._source.read(name, view, block).sum(0, dtype=torch.float64)
        return (total / self._old).float()


class WithExperts:
    """A dense model whose MLPs become experts (sparse upcycling, arXiv 2212.05055).

    Every expert is a copy of the MLP, and routers are random. The weights of a token's experts sum to 1, so the model
    computes what it did before.
    """

    def __init__(self, source: Model, experts: int, topk: int, seed: int) -> None:
        """Turn every MLP into ``experts`` experts, of which a token uses ``topk``.

        Raises:
            CheckpointError: when the numbers do not fit, the model has experts already, or its MLPs have parameters
                that experts lack.
        """
        if source.model.num_experts is not None:
            raise CheckpointError(f"the model has {source.model.num_experts} experts already")
        if not 2 <= topk <= experts:  # the weight of a single expert is always 1, so its router would not learn
            raise CheckpointError(f"{topk} of {experts} experts per token", "--num-experts 8 --moe-router-topk 2")
        self._source, self._seed = source, seed
        patterns = {
            name: text.replace("-", "E")
            for name in ("hybrid_layer_pattern", "mtp_hybrid_override_pattern")
            if (text := getattr(source.model, name)) is not None
        }
        self.model = replace(
            source.model,
            **patterns,
            num_experts=experts,
            moe_router_topk=topk,
            moe_ffn_hidden_size=source.model.ffn,
            moe_router_pre_softmax=False,
            moe_shared_expert_intermediate_size=None,
        )
        self.specs = gpt(self.model)
        self._router = cache(self._draw_router)
        if unused := source.specs.keys() - {_without_experts(name) for name in self.specs}:
            raise CheckpointError(f"experts have no counterpart for {listed(sorted(unused))}")

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the MLP for every expert."""
        if name not in self._source.specs and _without_experts(name) not in self._source.specs:
            return self._router(name)[box.slices]
        if name in self._source.specs:
            return self._source.read(name, view, box)
        mlp = self._source.read(_without_experts(name), view[1:], Box(box.start[1:], box.size[1:]))
        return mlp.expand(box.size)

    def _draw_router(self, name: str) -> Tensor:
        values = torch.empty(self.specs[name].shape)
        initialize(values, self.specs[name], name, self._seed)
        return values


def _without_experts(name: str) -> str:
    return name.replace(".mlp.experts.", ".mlp.")


class WithHeads:
    """A model with more or fewer heads of multi-token prediction; new ones have initial values."""

    def __init__(self, source: Model, heads: int, seed: int) -> None:
        """Give the model ``heads`` heads; 0 removes all."""
        self._source, self._seed = source, seed
        shared = heads > 0 and source.model.mtp_use_repeated_layer
        self.model = replace(source.model, mtp_num_layers=heads or None, mtp_use_repeated_layer=shared)
        self.specs = gpt(self.model)
        self._new = cache(self._draw)

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Read a tensor, or draw that of a new head."""
        if name in self._source.specs:
            return self._source.read(name, view, box)
        return self._new(name).view(view)[box.slices]

    def _draw(self, name: str) -> Tensor:
        values = torch.zeros(self.specs[name].shape)
        initialize(values, self.specs[name], name, self._seed)
        return values


@dataclass(frozen=True)
class Changes:
    """Changes of a model, in the order in which they are made."""

    average: Sequence[SavedModel] = ()  # further models of the mean
    drop_layers: Collection[int] = ()
    vocab_size: int | None = None
    num_experts: int | None = None
    moe_router_topk: int = 2
    heads: int | None = None
    seed: int = 1234  # of the routers and heads

    def apply(self, model: SavedModel) -> Model:
        """Return the changed model.

        Raises:
            CheckpointError: when a change does not apply to the model.
            UserError: when the options of the changed model contradict each other.
        """
        changed: Model = AveragedModels([model, *self.average]) if self.average else model
        if self.drop_layers:
            changed = WithoutLayers(changed, self.drop_layers)
        if self.vocab_size is not None:
            changed = WithVocabulary(changed, self.vocab_size)
        if self.num_experts is not None:
            changed = WithExperts(changed, self.num_experts, self.moe_router_topk, self.seed)
        if self.heads is not None:
            changed = WithHeads(changed, self.heads, self.seed)
        check_model_config(model.manifest.path, changed.model)
        return changed


def change_checkpoint(
    saved: SavedModel, changes: Changes, save: Path, report: Callable[[str, int, int], None], dtype: str | None = None
) -> tuple[Path, ModelConfig]:
    """Write a changed model as a checkpoint of step 0, with the tokenizer files of the first model.

    Args:
        saved: the model to change.
        changes: what to change.
        save: a ``--save`` folder without checkpoints.
        report: called with the name of the last tensor, the bytes done, and their total.
        dtype: ``fp32``, ``bf16`` or ``fp16``: of the stored weights, and in which a run from them computes. None stores
            fp32, to be computed with as before.

    Returns:
        The checkpoint and its model.

    Raises:
        CheckpointError, UserError: when a change does not apply, or the folder holds checkpoints.
        DamagedCheckpointError: when a checksum does not match.
        StorageError: when writing fails.
    """
    path, changed = new_checkpoint(save), changes.apply(saved)
    stored, done = DTYPES[dtype or "fp32"], 0
    total = stored.itemsize * sum(spec.numel for spec in changed.specs.values())

    def part(name: str, spec: ShardSpec, box: Box) -> TensorPart:
        def read() -> Tensor:
            nonlocal done
            exact = changed.read(name, spec.view, box)
            values = exact.to(stored)
            raise_if_overflow(name, values, exact, "--cast bf16")
            done += box.numel * stored.itemsize
            report(name, done, total)
            return values

        return TensorPart(box, read)

    tensors = {}
    for name, spec in changed.specs.items():
        whole = Box((0,) * len(spec.view), spec.view)
        parts = tuple(part(name, spec, block) for block in split_box(whole, BLOCK_ELEMENTS))
        tensors[name] = GlobalTensor(spec.shape, spec.view, stored, parts)
    precision = PrecisionConfig(params_dtype=dtype or saved.precision)
    config = to_dict(resolve(RunConfig(model=changed.model, precision=precision), 1))
    state: dict[str, Any] = {"iteration": 0, "consumed_samples": 0}
    save_sharded(path, tensors, state, config, Group(), saved.small_files())
    return path, changed.model
