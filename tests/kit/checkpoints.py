"""Checkpoints of small models as files, without a training run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.arguments.sources import to_dict
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.data.tokenizers import huggingface
from megatron.distributed.comm import Group
from megatron.model.gpt import GPTChunk

BYTES = {
    f"tokenizer/{name}": content
    for name, content in huggingface.make_tokenizer_files(huggingface.byte_tokenizer()).items()
}
"""The files of a tokenizer whose ids are bytes, and 256 the end of a document."""


def save_model(
    chunk: GPTChunk, folder: Path, step: int = 0, files: Mapping[str, bytes] = BYTES, params_dtype: str = "fp32"
) -> Path:
    """A checkpoint of a model on one rank, its weights only, in the ``--save`` folder ``folder``."""
    tensors = {}
    for name, parameter in chunk.params.items():
        spec = chunk.specs[name]
        view = parameter.detach().view(spec.local_view)
        parts = tuple(TensorPart(piece.global_box, view[piece.local_box.slices]) for piece in spec.pieces)
        tensors[name] = GlobalTensor(spec.shape, spec.view, parameter.dtype, parts)
    config = RunConfig(model=chunk.config, precision=PrecisionConfig(params_dtype=params_dtype))
    state: dict[str, Any] = {"iteration": step, "consumed_samples": 0}
    path = folder / CheckpointFolder(folder).path(step).name
    save_sharded(path, tensors, state, to_dict(config), Group(), dict(files))
    return path
