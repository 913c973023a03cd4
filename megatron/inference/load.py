"""Load a trained model from a checkpoint or a Hugging Face folder for inference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.arguments.checks.model import check_heads_divide, check_mlp_divides
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.location import parse_location
from megatron.config.errors import UserError
from megatron.config.files import parse_json
from megatron.config.launch import Launch
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import HUGGING_FACE_PREFIX, ComputeConfig, PrecisionConfig, RunConfig, TrainingConfig
from megatron.convert.huggingface.check import check_tokenizer
from megatron.convert.huggingface.config import (
    CONFIG_FILE,
    build_config_json,
    model_folder,
    read_model_config,
    refuse_outside_links,
)
from megatron.convert.huggingface.convert import special_token_ids
from megatron.convert.huggingface.weights import HuggingFaceWeights, WeightSource, fill_weights
from megatron.convert.saved_model import (
    GENERATION_CONFIG_FILE,
    MODEL_SUFFIX,
    TOKENIZER_FILES,
    SavedModel,
    by_huggingface_names,
    find_tokenizer_files,
    open_checkpoint,
    saved_tokenizer_files,
)
from megatron.data.tokenizers.huggingface import load_with_transformers
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.mesh import Mesh
from megatron.inference.text import Codec, InferenceError, open_codec
from megatron.layers.context import DTYPES, BuildContext
from megatron.model.gpt import GPTChunk, build_gpt
from megatron.pipeline.plan import resolve_pipeline
from megatron.training.build_model import build_mesh
from megatron.training.scoring import FrozenModel


@dataclass(frozen=True)
class PretrainedModel:
    """A model on disk."""

    model: ModelConfig
    dtype: torch.dtype  # of training, or of the stored weights
    source: WeightSource  # of the weights
    files: Mapping[str, bytes]  # of the tokenizer, by their names in a Hugging Face folder
    codec: Codec
    stop_ids: frozenset[int]  # tokens that end a text
    notes: tuple[str, ...] = ()  # which checkpoint was chosen, and which were skipped

    def build(self, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> GPTChunk:
        """Build the model and read this rank's shards of the weights."""
        context = BuildContext(mesh, GradAccumulator(), dtype, device, draw_initial_values=False)
        chunk = build_gpt(self.model, TrainingConfig(), context)
        fill_weights(chunk.specs, chunk.params, self.source)
        return chunk.eval()

    def build_frozen(
        self, parallel: ParallelConfig, launch: Launch, dtype: str | None, device: torch.device
    ) -> FrozenModel:
        """Build this rank's part of the model in a layout. Collective over all ranks, which have joined.

        Args:
            parallel: sizes of the layout; data parallelism is what they leave.
            launch: of this process.
            dtype: of weights and activations, a choice of ``--params-dtype``; None for that of :attr:`dtype`.
            device: of this rank.

        Raises:
            UserError: if the model does not divide over such a layout.
        """
        dtype = dtype or next(name for name, known in DTYPES.items() if known == self.dtype)
        config = RunConfig(
            model=self.model,
            parallel=resolve_pipeline(self.model, parallel),
            precision=PrecisionConfig(params_dtype=dtype),
            compute=ComputeConfig(kernels=("torch",)),
        )
        problems = [p for check in (check_heads_divide, check_mlp_divides) for p in check(config, launch.world_size)]
        if problems:
            raise UserError(problems)
        mesh = build_mesh(config, launch.rank, launch.world_size)
        return FrozenModel.build(config, mesh, device, self.source)

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a prompt; an empty prompt becomes the end-of-document token."""
        ids = self.codec.encode(text)
        return ids if ids or self.codec.end is None else [self.codec.end]


def open_pretrained(
    load: str,
    step: int | None = None,
    average: bool = False,
    follow_links: bool = False,
    pretrained: str | None = None,
) -> PretrainedModel:
    """Open the model of ``--load``.

    Args:
        load: a folder of checkpoints, one checkpoint, or ``hf:DIR``, or ``hf:ORG/NAME`` on the hub.
        step: step of the checkpoint; None for the newest valid one.
        average: use the moving average of the weights.
        follow_links: also read files to which links lead out of a Hugging Face folder.
        pretrained: the model that adapters belong to, if it is no longer where it was.

    Raises:
        InferenceError: if the arguments are invalid, or a tokenizer cannot be read.
        CheckpointError: if there is no valid checkpoint, or its weights do not match its model.
        UserError: if the configuration of a Hugging Face folder is not supported.
    """
    if load in ("", HUGGING_FACE_PREFIX):
        raise InferenceError(
            f"--load '{load}' names no folder", "--load CHECKPOINTS", f"--load {HUGGING_FACE_PREFIX}DIR"
        )
    if not load.startswith(HUGGING_FACE_PREFIX):
        path = parse_location(load)
        if (path / CONFIG_FILE).is_file() and not CheckpointFolder(path).named():
            seen = f"--load {path} is a Hugging Face model, not a folder of checkpoints"
            raise InferenceError(seen, f"--load {HUGGING_FACE_PREFIX}{path}")
        manifest, notes = open_checkpoint(path, step)
        saved = SavedModel(manifest, average, pretrained, follow_links)
        files = by_huggingface_names(saved_tokenizer_files(manifest))
        codec = open_codec(files)
        return PretrainedModel(
            saved.model, DTYPES[saved.precision], saved, files, codec, stop_ids(files, codec), tuple(notes)
        )
    if step is not None:
        raise InferenceError(f"--ckpt-step {step}: a Hugging Face folder holds one model", "drop --ckpt-step")
    if average:
        raise InferenceError("--ema: a Hugging Face folder holds one set of weights", "drop --ema")
    if pretrained is not None:
        raise InferenceError(
            "--pretrained-checkpoint: a Hugging Face folder holds no adapters", "drop --pretrained-checkpoint"
        )
    folder = model_folder(load.removeprefix(HUGGING_FACE_PREFIX))
    if not follow_links:
        refuse_outside_links(folder)
    model = read_model_config(folder)
    source = HuggingFaceWeights(folder, model)
    files = by_huggingface_names({**find_tokenizer_files(folder), CONFIG_FILE: folder / CONFIG_FILE})
    codec = open_codec(files)
    return PretrainedModel(model, source.dtype, source, files, codec, stop_ids(files, codec))


def stop_ids(files: Mapping[str, bytes], codec: Codec) -> frozenset[int]:
    """Return the tokens that end a text, from generation_config.json, else config.json, else the tokenizer."""
    for name in (GENERATION_CONFIG_FILE, CONFIG_FILE):
        try:
            named = parse_json(files.get(name, b"{}")).get("eos_token_id")
            ids = named if isinstance(named, list) else [named]
            if named is not None:
                return frozenset(int(i) for i in ids)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise InferenceError(f"{name}: eos_token_id cannot be read: {error}") from error
    return frozenset() if codec.end is None else frozenset({codec.end})


def load_tokenizer(files: Mapping[str, bytes], model: ModelConfig) -> Any:
    """Return the tokenizer in these files, as ``transformers`` loads it from the model's Hugging Face folder.

    Raises:
        InferenceError: if there is none, or it cannot be read.
    """
    if not any(name in TOKENIZER_FILES or name.endswith(MODEL_SUFFIX) for name in files):
        raise InferenceError("the model has no tokenizer, which texts need", "--tokenizer-model DIR")
    try:
        if CONFIG_FILE not in files:  # of a checkpoint: what its export would hold
            config = build_config_json(model, special=special_token_ids(files, model.vocab))
            files = check_tokenizer(files, config) | {CONFIG_FILE: json.dumps(config).encode()}
        return load_with_transformers(files)
    except Exception as error:  # whatever the class that transformers chooses finds wrong with the files
        raise InferenceError(f"the tokenizer cannot be loaded: {error}", "--tokenizer-model DIR") from error


def check_tensor_parallel_size(model: ModelConfig, tp: int, world_size: int) -> None:
    """Raise InferenceError unless the model can be sharded over ``tp`` ranks, which must be all ranks."""
    if tp != world_size:
        ranks = "1 process" if world_size == 1 else f"{world_size} processes"
        seen = f"--tensor-model-parallel-size {tp} on {ranks}: every process holds one shard of the model"
        raise InferenceError(seen, f"torchrun --nproc-per-node {tp} tools/generate.py")

    def find_errors(tp: int) -> list[str]:
        config = RunConfig(model=model, parallel=ParallelConfig(tensor_model_parallel_size=tp))
        checks = (check_heads_divide, check_mlp_divides)
        return [problem.sentence for check in checks for problem in check(config, tp)]

    errors = find_errors(tp)
    if errors:
        fits = next(n for n in range(tp, 0, -1) if not find_errors(n))
        raise InferenceError("; ".join(errors), f"torchrun --nproc-per-node {fits} tools/generate.py")
