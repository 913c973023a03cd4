"""A trained model from a checkpoint or a Hugging Face folder, ready to be asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.remote import Location, location
from megatron.config.checks import layout
from megatron.config.hf import CONFIG
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import HUGGING_FACE, RunConfig, TrainingConfig
from megatron.convert.checkpoint import (
    GENERATION,
    SavedModel,
    by_their_names,
    carried_by,
    carried_files,
    open_checkpoint,
)
from megatron.convert.hf_folder import HFSource, read_model
from megatron.inference.errors import InferenceError
from megatron.inference.text import Codec, open_codec
from megatron.model.fill import Source, fill
from megatron.model.gpt import GPTChunk, build_gpt
from megatron.parallel.build import DTYPES, BuildContext
from megatron.parallel.grads import GradSink
from megatron.parallel.mesh import Mesh


@dataclass(frozen=True)
class Pretrained:
    """A model at rest.

    Attributes:
        model: its shape.
        dtype: that it was trained in or is stored in.
        source: of its weights.
        codec: of its text.
        stop_ids: tokens that end a text.
        notes: which checkpoint it is from, and what was passed over; nothing to say of a Hugging Face folder.
    """

    model: ModelConfig
    dtype: torch.dtype
    source: Source
    codec: Codec
    stop_ids: frozenset[int]
    notes: tuple[str, ...] = ()

    def build(self, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> GPTChunk:
        """The model on this rank, its part of the weights read.

        Raises:
            DamagedError: when what is read is not what was written.
        """
        context = BuildContext(mesh, GradSink(), dtype, device, initialised=False)
        chunk = build_gpt(self.model, TrainingConfig(), context)
        fill(chunk.specs, chunk.params, self.source)
        return chunk.eval()

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt; an empty one begins where a document ends."""
        ids = self.codec.encode(text)
        return ids if ids or self.codec.end is None else [self.codec.end]


def open_pretrained(load: str, step: int | None = None, average: bool = False) -> Pretrained:
    """The model that ``--load`` names: a folder of checkpoints, one of them, or ``hf:DIR``.

    Args:
        load: as on the command line.
        step: of the checkpoint; None takes the newest valid one.
        average: take the moving average of its weights.

    Raises:
        InferenceError: when ``step`` or ``average`` does not fit ``load``, ``load`` names no folder or a Hugging Face
            folder without ``hf:``, or a tokenizer cannot be read.
        CheckpointError: when there is nothing to load, or not the weights of the model described.
        UserError: when the configuration asks for what is not here.
    """
    if load in ("", HUGGING_FACE):
        raise InferenceError(f"--load '{load}' names no folder", "--load CHECKPOINTS", f"--load {HUGGING_FACE}DIR")
    if not load.startswith(HUGGING_FACE):
        return _from_checkpoint(location(load), step, average)
    if step is not None:
        raise InferenceError(f"--ckpt-step {step}: a Hugging Face folder holds one model", "drop --ckpt-step")
    if average:
        raise InferenceError("--ema: a Hugging Face folder holds one set of weights", "drop --ema")
    return _from_hugging_face(Path(load.removeprefix(HUGGING_FACE)))


def _from_checkpoint(path: Location, step: int | None, average: bool) -> Pretrained:
    if (path / CONFIG).is_file() and not Checkpoints(path).named():
        seen = f"--load {path} is a Hugging Face model, no folder of checkpoints"
        raise InferenceError(seen, f"--load {HUGGING_FACE}{path}")
    manifest, notes = open_checkpoint(path, step)
    saved, files = SavedModel(manifest, average), by_their_names(carried_by(manifest))
    codec = open_codec(files)
    return Pretrained(saved.model, DTYPES[saved.precision], saved, codec, stop_ids(files, codec), tuple(notes))


def _from_hugging_face(folder: Path) -> Pretrained:
    model = read_model(folder)
    source = HFSource(folder, model)
    files = by_their_names({**carried_files(folder), CONFIG: folder / CONFIG})
    codec = open_codec(files)
    return Pretrained(model, source.dtype, source, codec, stop_ids(files, codec))


def stop_ids(files: Mapping[str, bytes], codec: Codec) -> frozenset[int]:
    """Tokens that end a text: those that generation_config.json names, else config.json, else the tokenizer.

    Raises:
        InferenceError: when a file is not the JSON it should be.
    """
    for name in (GENERATION, CONFIG):
        try:
            named = json.loads(files.get(name, b"{}")).get("eos_token_id")
            ids = named if isinstance(named, list) else [named]
            if named is not None:
                return frozenset(int(i) for i in ids)
        except (ValueError, TypeError, AttributeError) as error:
            raise InferenceError(f"{name} does not say which tokens end a text: {error}") from error
    return frozenset() if codec.end is None else frozenset({codec.end})


def check_layout(model: ModelConfig, tp: int, world_size: int) -> None:
    """Whether ``tp`` ranks, which must be all, can share a model's matrices.

    Raises:
        InferenceError: when they cannot.
    """
    if tp != world_size:
        ranks = "1 process" if world_size == 1 else f"{world_size} processes"
        seen = f"--tensor-model-parallel-size {tp} on {ranks}: every process holds one part of the model"
        raise InferenceError(seen, f"torchrun --nproc-per-node {tp} tools/generate.py")
    wrong = _misfits(model, tp)
    if wrong:
        fits = next(n for n in range(tp, 0, -1) if not _misfits(model, n))
        raise InferenceError("; ".join(wrong), f"torchrun --nproc-per-node {fits} tools/generate.py")


def _misfits(model: ModelConfig, tp: int) -> list[str]:
    config = RunConfig(model=model, parallel=ParallelConfig(tensor_model_parallel_size=tp))
    return [problem.sentence for check in (layout.heads, layout.widths) for problem in check(config, tp)]
