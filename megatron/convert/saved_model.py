"""The model in a checkpoint, without the run: its weights, with adapters added, read box by box; tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import local

import torch
from torch import Tensor

from megatron.arguments.compatibility import tensor_differences, unknown_options
from megatron.arguments.sources import from_dict
from megatron.checkpoint.errors import CheckpointError, raise_if_any
from megatron.checkpoint.format import Manifest, split_box, whole_box
from megatron.checkpoint.load import CheckpointReader
from megatron.checkpoint.tensor_file import DTYPES
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.convert.base_model import BaseModel
from megatron.convert.huggingface.config import check_model_config
from megatron.convert.tokenizer_files import SmallFiles, saved_tokenizer_files
from megatron.convert.weight_source import BLOCK_ELEMENTS, ModelSource, WeightSource, fill_in_blocks
from megatron.distributed.sharding import Box, ShardSpec
from megatron.layers.adapter_parameters import adapted_parts, part_of_rows
from megatron.layers.parameters import WORD_EMBEDDINGS, gpt, in_checkpoints

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


def describe_adapters(model: ModelConfig) -> str:
    """Return kind, rank, factor and places of a model's adapters."""
    kind = "DoRA" if model.lora_dora else "LoRA"
    return f"{kind} of rank {model.lora_rank}, scaled by {model.lora_scale:g}, on {' '.join(model.lora_target)}"


class MergedWeights:
    """Weights ``W + s B A`` of LoRA (arXiv 2106.09685), with rows scaled to DoRA's magnitudes (arXiv 2402.09353).

    Sums are computed in fp64, so that what is rounded from them hardly depends on the boxes.
    """

    def __init__(self, base: ModelSource, adapters: WeightSource, model: ModelConfig) -> None:
        """Add adapters to a model.

        Args:
            base: the model without adapters.
            adapters: the adapters.
            model: architecture with the options of the adapters.
        """
        self.base, self.adapters, self.model, self.specs = base, adapters, model, gpt(model)
        self._row_factors = cache(self._compute_row_factors)

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor, in fp64 if there are adapters beside it."""
        if not self.changes(name):
            return self.base.read(name, view, box)
        linear = name.removesuffix(".weight")
        merged = self._sum(linear, box)
        return merged.mul_(self._row_factors(linear)[box.slices[:-1]].unsqueeze(-1)) if self.model.lora_dora else merged

    def changes(self, name: str) -> bool:
        """Return True for a weight with adapters beside it."""
        linear, _, local = name.rpartition(".")
        return local == "weight" and f"{linear}.lora_b" in self.specs

    def fill(self, name: str, view: tuple[int, ...], box: Box, out: Tensor) -> None:
        """As :meth:`read`, into a tensor of shape ``box.size`` and any strides and floating-point type."""
        fill_in_blocks(self, name, view, box, out)

    def adapter(self, name: str) -> Tensor:
        """Return a tensor of the adapters in its stored shape."""
        spec = self.specs[name]
        return self.adapters.read(name, spec.view, whole_box(spec.view)).reshape(spec.shape)

    def adapted_parts(self, linear: str) -> tuple[int, ...]:
        """Return the indices in `linear_parts` of the parts of a linear that have adapters."""
        return adapted_parts(self.model, linear, self.specs[f"{linear}.weight"])

    def magnitudes(self, linear: str) -> Tensor:
        """Return DoRA's magnitude of each row; of rows without adapters the norm that they have."""
        adapted, magnitudes = self._adapted_rows(linear), self.adapter(f"{linear}.lora_magnitude")
        return magnitudes if adapted.all() else magnitudes.where(adapted, self._row_norms(linear).to(magnitudes.dtype))

    def _sum(self, linear: str, box: Box) -> Tensor:
        """Return a box of ``W + s B A`` of a linear, in fp64."""
        weight, high = self.specs[f"{linear}.weight"], self.specs[f"{linear}.lora_a"]
        rank, columns = self.model.lora_rank or 1, box.size[-1]
        a_box = Box((*(0,) * (len(high.view) - 1), box.start[-1]), (*high.view[:-1], columns))
        b_box = Box((*box.start[:-1], 0), (*box.size[:-1], rank))
        a = self.adapters.read(f"{linear}.lora_a", high.view, a_box).double().reshape(-1, columns)
        b = self.adapters.read(f"{linear}.lora_b", (*weight.view[:-1], rank), b_box).double().reshape(-1, 1, rank)
        part_of = torch.tensor(part_of_rows(weight)).view(weight.view[:-1])[box.slices[:-1]]
        own = part_of.reshape(-1, 1, 1) == torch.tensor(self.adapted_parts(linear)).unsqueeze(1)  # [rows, parts, 1]
        base = self.base.read(f"{linear}.weight", weight.view, box).double().reshape(-1, columns)
        return torch.addmm(base, (b * own).flatten(1), a, alpha=self.model.lora_scale).view(box.size)

    def _adapted_rows(self, linear: str) -> Tensor:
        """Return which rows of a linear have adapters, ``[out]``."""
        part_of = torch.tensor(part_of_rows(self.specs[f"{linear}.weight"]))
        return torch.isin(part_of, torch.tensor(self.adapted_parts(linear)))

    def _row_norms(self, linear: str) -> Tensor:
        """Return the 2-norms of the rows of ``W + s B A``, in fp64 ``[out]``."""
        view = self.specs[f"{linear}.weight"].view
        squares = torch.zeros(view[:-1], dtype=torch.float64)
        for block in split_box(whole_box(view), BLOCK_ELEMENTS):
            squares[block.slices[:-1]] += self._sum(linear, block).square_().sum(-1)
        return squares.sqrt().flatten()

    def _compute_row_factors(self, linear: str) -> Tensor:
        """Return DoRA's factor of each row, its magnitude over its norm, in fp64 and the view of the rows.

        That of a row of norm 0 is 1; PEFT's is not a number.
        """
        norms = self._row_norms(linear)
        scaled = self._adapted_rows(linear) & (norms > 0)
        factors = self.adapter(f"{linear}.lora_magnitude") / norms
        return factors.where(scaled, 1.0).view(self.specs[f"{linear}.weight"].view[:-1])


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
        tensors.check(in_checkpoints(gpt(stored)))

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
    compute = manifest.config.get("compute")
    plugins = compute.get("plugin", ()) if isinstance(compute, Mapping) else ()
    return from_dict({"model": manifest.config["model"], "precision": precision, "compute": {"plugin": plugins}})
