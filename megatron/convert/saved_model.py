"""The model in a checkpoint, without the run: its weights, read box by box, and its tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import local

import torch
from torch import Tensor

from megatron.arguments.compatibility import tensor_differences, unknown_options
from megatron.arguments.sources import from_dict
from megatron.checkpoint.errors import CheckpointError, raise_if_any
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.load import CheckpointReader
from megatron.checkpoint.tensor_file import DTYPES
from megatron.config.run import RunConfig
from megatron.convert.adapters import MergedWeights
from megatron.convert.base_model import BaseModel
from megatron.convert.huggingface.config import check_model_config
from megatron.convert.tokenizer_files import SmallFiles, saved_tokenizer_files
from megatron.convert.weight_source import ModelSource
from megatron.distributed.sharding import Box, ShardSpec
from megatron.layers.parameters import WORD_EMBEDDINGS, gpt, trainable

EMA_PREFIX = "optim.ema."
"""Prefix of the names of averaged weights in a checkpoint."""


class StoredTensors:
    """The tensors of a checkpoint whose names have a prefix, read box by box from any thread."""

    def __init__(self, manifest: Manifest, prefix: str = "") -> None:
        self._manifest, self._prefix = manifest, prefix
        self._readers = local()  # one for each thread

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor, in the precision of the main params.

        Raises:
            ValueError: when ``view`` is not that of the tensor.
            DamagedCheckpointError: when a checksum does not match.
        """
        out = torch.empty(box.size, dtype=DTYPES[self._manifest.tensors[self._prefix + name].dtype])
        self.fill(name, view, box, out)
        return out

    def fill(self, name: str, view: tuple[int, ...], box: Box, out: Tensor) -> None:
        """As :meth:`read`, into a tensor of shape ``box.size`` and any strides and floating-point type."""
        stored = self._prefix + name
        if not hasattr(self._readers, "reader"):
            self._readers.reader = CheckpointReader(self._manifest)
        reader: CheckpointReader = self._readers.reader
        if view != reader.view(stored):
            raise ValueError(f"{stored} is viewed {list(reader.view(stored))}, not {list(view)}")
        reader.fill([(stored, box, out)])

    def check(self, specs: Mapping[str, ShardSpec]) -> None:
        """Check names and shapes. Optimizer state other than the average is ignored."""
        stored = {
            name.removeprefix(self._prefix): (record.shape, record.view)
            for name, record in self._manifest.tensors.items()
            if (name.startswith(EMA_PREFIX) if self._prefix else not name.startswith("optim."))
        }
        if self._prefix and not stored:
            seen = f"{self._manifest.path} has no average of the weights, because its run had no --ema-decay"
            raise CheckpointError(seen, "drop --ema")
        raise_if_any(self._manifest.path, tensor_differences(specs, stored))


class SavedModel:
    """The weights of a checkpoint, read box by box; adapters are added to the weights of their base."""

    config_file: Path | None = None

    def __init__(
        self,
        manifest: Manifest,
        average: bool = False,
        base: tuple[BaseModel, ModelSource] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """Check that the checkpoint holds exactly the weights of the model that its configuration describes.

        Args:
            manifest: manifest of the checkpoint.
            average: read the moving average of the weights instead of the weights.
            base: the model that adapters belong to, if the checkpoint holds adapters.
            notes: on the checkpoint.

        Raises:
            CheckpointError: when there is no moving average; when the configuration has no model, or a model with
                unknown options, which could change what it computes; when tensors are missing, unknown or of another
                shape.
            UserError: when the configuration has values that are invalid or contradict each other.
        """
        config, tensors = read_run_config(manifest), StoredTensors(manifest, EMA_PREFIX if average else "")
        self.manifest, self.average, self.notes = manifest, average, notes
        self.precision = config.precision.params_dtype  # that the run computed in
        self.base = None if base is None else base[0]
        self.merged: MergedWeights | None = None  # the adapters, and the weights of the base
        self._weights: StoredTensors | MergedWeights = tensors
        if base is None:
            words = manifest.tensors.get(WORD_EMBEDDINGS)
            vocab_size = (config.model.vocab_size or 1) if words is None or not words.shape else words.shape[0]
            stored = replace(config.model, vocab_size=vocab_size)
        else:
            stored = replace(config.model, vocab_size=base[1].model.vocab_size)
            self._weights = self.merged = MergedWeights(base[1], tensors, stored)
        self.model = stored if base is None else stored.base
        check_model_config(manifest.path, self.model)
        self.specs: Mapping[str, ShardSpec] = gpt(self.model)
        tensors.check(trainable(gpt(stored)))

    def small_files(self) -> SmallFiles:
        """Return the tokenizer files and generation settings in the checkpoint."""
        return saved_tokenizer_files(self.manifest)

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor, in the precision of the main params.

        Raises:
            ValueError: when ``view`` is not that of the tensor.
            DamagedCheckpointError: when a checksum does not match.
        """
        return self._weights.read(name, view, box)

    def fill(self, name: str, view: tuple[int, ...], box: Box, out: Tensor) -> None:
        """As :meth:`read`, into a tensor of shape ``box.size`` and any strides and floating-point type."""
        self._weights.fill(name, view, box, out)


def read_run_config(manifest: Manifest) -> RunConfig:
    """Return model and precision of the run that wrote a checkpoint. Options that it lacks have their defaults."""
    groups = {name: manifest.config.get(name) for name in ("model", "precision")}
    invalid = [f"config.{name} {json.dumps(group)}" for name, group in groups.items() if not isinstance(group, Mapping)]
    raise_if_any(manifest.path, {"has in its manifest what is no group of options": invalid})
    unknown = [option for option in unknown_options(manifest.config) if option.startswith("model.")]
    findings = {"has a model with options that this version does not know": unknown}
    raise_if_any(manifest.path, findings, "update this program")
    precision = {k: v for k, v in manifest.config["precision"].items() if k == "params_dtype"}
    return from_dict({"model": manifest.config["model"], "precision": precision})
