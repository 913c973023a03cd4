"""Load a trained model of any location to compute with it: generation, perplexity, lm-eval."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron.config.compute import BATCH_INVARIANT, ComputeConfig
from megatron.config.conditions import broken_rules, rules
from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.convert.sources import WHOLE, SourceOptions, open_source
from megatron.convert.tokenizer_files import by_huggingface_names, find_tokenizer_files
from megatron.convert.weight_source import ModelSource, fill_weights
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.launch import init_distributed
from megatron.distributed.mesh import Mesh
from megatron.inference.text import Codec, InferenceError, load_tokenizer, open_codec, stop_ids
from megatron.kernels.registry import Kernels, select_kernels
from megatron.layers.context import DTYPES, BuildContext
from megatron.model.gpt import GPTChunk, build_gpt
from megatron.pipeline.plan import resolve_pipeline
from megatron.training.build_model import build_mesh, choose_device
from megatron.training.frozen_models import FrozenModel


@dataclass(frozen=True)
class PretrainedModel:
    """A model on disk, with its tokenizer."""

    source: ModelSource
    files: Mapping[str, bytes]  # of the tokenizer, by their names in a Hugging Face folder
    codec: Codec
    stop_ids: frozenset[int]  # tokens that end a text

    @property
    def model(self) -> ModelConfig:
        """The architecture."""
        return self.source.model

    def build(self, mesh: Mesh, dtype: str | None, device: torch.device, batch_invariant: bool = False) -> GPTChunk:
        """Build the model and read this rank's shards of the weights.

        Args:
            mesh: the groups of the ranks.
            dtype: as of :meth:`build_frozen`.
            device: of this rank.
            batch_invariant: compute with the kernels of ``--batch-invariant``.

        Raises:
            UserError: if these kernels cannot be used.
        """
        stored = DTYPES[dtype or self.source.precision]
        kernels = select_kernels((BATCH_INVARIANT,), device, stored)[0] if batch_invariant else Kernels()
        context = BuildContext(mesh, GradAccumulator(), stored, device, draw_initial_values=False, kernels=kernels)
        chunk = build_gpt(self.model, TrainingConfig(), context)
        fill_weights(chunk.specs, chunk.params, self.source)
        return chunk.eval()

    def load_tokenizer(self, folder: str | Path | None = None) -> Any:
        """Return the tokenizer of transformers, from another folder if one is given; see `load_tokenizer`."""
        files = self.files if folder is None else by_huggingface_names(find_tokenizer_files(Path(folder)))
        return load_tokenizer(files, self.model)

    def build_frozen(
        self, parallel: ParallelConfig, dtype: str | None, device_name: str, timeout: timedelta
    ) -> FrozenModel:
        """Join the other ranks, and build this rank's part of the model in a layout. Collective.

        Args:
            parallel: sizes of the layout; data parallelism is what they leave.
            dtype: of weights and activations, a choice of ``--params-dtype``; None for that of the source.
            device_name: a choice of ``--device``.
            timeout: of collectives.

        Raises:
            UserError: if the model does not divide over such a layout.
        """
        launch, device = Launch.read(os.environ), choose_device(device_name)
        init_distributed(None, timeout, device)
        config = RunConfig(
            model=self.model,
            parallel=resolve_pipeline(self.model, parallel),
            precision=PrecisionConfig(params_dtype=dtype or self.source.precision),
            compute=ComputeConfig(kernels=("torch",)),
        )
        if problems := _division_problems(config, launch.world_size):
            raise UserError(problems)
        mesh = build_mesh(config, launch.rank, launch.world_size)
        return FrozenModel.build(config, mesh, device, self.source)

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a prompt; an empty prompt becomes the end-of-document token."""
        ids = self.codec.encode(text)
        return ids if ids or self.codec.end is None else [self.codec.end]


def open_pretrained(load: str, options: SourceOptions = WHOLE) -> PretrainedModel:
    """Open the model of ``--load``, with its tokenizer.

    Raises:
        InferenceError: if a tokenizer cannot be read.
        CheckpointError, UserError: as :func:`open_source`.
    """
    source = open_source(load, options)
    small = source.small_files()
    if source.config_file is not None:
        small = {**small, source.config_file.name: source.config_file}
    files = by_huggingface_names(small)
    codec = open_codec(files)
    return PretrainedModel(source, files, codec, stop_ids(files, codec))


def _division_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """Return the problems of sharding heads and MLP over the tensor-parallel ranks."""
    of_mlp = broken_rules(config, (rule for rule in rules() if rule.condition.endswith("%tensor_model_parallel_size")))
    return [*config.model.check_heads_divide(config, world_size), *of_mlp]


def check_tensor_parallel_size(model: ModelConfig, tp: int, world_size: int) -> None:
    """Raise InferenceError unless the model can be sharded over ``tp`` ranks, which must be all ranks."""
    if tp != world_size:
        ranks = "1 process" if world_size == 1 else f"{world_size} processes"
        seen = f"--tensor-model-parallel-size {tp} on {ranks}: every process holds one shard of the model"
        raise InferenceError(seen, f"torchrun --nproc-per-node {tp} tools/generate.py")

    def find_errors(tp: int) -> list[str]:
        config = RunConfig(model=model, parallel=ParallelConfig(tensor_model_parallel_size=tp))
        return [problem.sentence for problem in _division_problems(config, tp)]

    errors = find_errors(tp)
    if errors:
        fits = next(n for n in range(tp, 0, -1) if not find_errors(n))
        raise InferenceError("; ".join(errors), f"torchrun --nproc-per-node {fits} tools/generate.py")
