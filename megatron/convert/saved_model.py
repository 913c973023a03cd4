"""Access to the weights of a checkpoint, and import of a Hugging Face folder into a checkpoint.

`SavedModel` checks that a checkpoint holds exactly the weights of the model that its configuration describes, and
reads them box by box. `import_huggingface` writes a checkpoint of step 0 one block at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.arguments.compatibility import unknown_options
from megatron.arguments.sources import from_dict, resolve, to_dict
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest, split_box
from megatron.checkpoint.load import CheckpointReader
from megatron.checkpoint.object_store import Location
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.config.model import ModelConfig
from megatron.config.run import PrecisionConfig, RunConfig
from megatron.convert.errors import check_model_config, raise_if_any
from megatron.convert.huggingface.config import SPECIAL_TOKEN_IDS, read_config
from megatron.convert.huggingface.weight_map import build_on_meta
from megatron.convert.huggingface.weights import BLOCK_ELEMENTS, HuggingFaceWeights, read_model_config
from megatron.distributed.comm import Group
from megatron.distributed.sharding import Box, ShardSpec
from megatron.layers.build import DTYPES

ProgressCallback = Callable[[str, int, int], None]
"""Progress callback: (name of the last tensor, elements done, total elements)."""

TOKENIZER_PREFIX = "tokenizer/"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Tokenizer files of a Hugging Face folder; a checkpoint stores them under ``TOKENIZER_PREFIX``."""

GENERATION_CONFIG_FILE = "generation_config.json"

EMA_PREFIX = "optim.ema."
"""Prefix of the names of averaged weights in a checkpoint."""


def open_checkpoint(path: Location, step: int | None = None) -> tuple[Manifest, list[str]]:
    """Open a checkpoint folder, or the newest valid checkpoint (or that of ``step``) in a ``--save`` folder.

    Returns:
        The manifest, and notes for the user: which checkpoint it is, which newer ones were skipped and why, and
        options in it that this version does not know.

    Raises:
        CheckpointError: when there is none, or a newer version wrote it.
        DamagedCheckpointError: when it is damaged.
    """
    manifest, skipped = CheckpointFolder(path).newest(step)
    notes = [f"from {manifest.path}, step {manifest.state.get('iteration')}"]
    notes += [f"passed over {found.path}: {found.problem}" for found in skipped]
    unknown = unknown_options(manifest.config)
    if unknown:
        notes.append(f"it has options that this version does not know: {', '.join(unknown)}")
    return manifest, notes


class SavedModel:
    """The weights of a checkpoint, read box by box."""

    manifest: Manifest
    model: ModelConfig  # architecture, with the vocabulary size
    specs: Mapping[str, ShardSpec]  # of all weights, by global name
    precision: str  # data type that the run computed in, such as bf16

    def __init__(self, manifest: Manifest, average: bool = False) -> None:
        """Check that the checkpoint holds exactly the weights of the model that its configuration describes.

        Args:
            manifest: manifest of the checkpoint.
            average: read the moving average of the weights instead of the weights.

        Raises:
            CheckpointError: when there is no moving average; when the configuration has no model, or a model with
                unknown options, which could change what it computes; or when tensors are missing, unknown or of another
                shape.
            UserError: when the configuration has values that are invalid or contradict each other.
        """
        self.manifest = manifest
        config = _read_config(manifest)
        self.precision = config.precision.params_dtype
        words = manifest.tensors.get("embedding.word_embeddings.weight")
        vocab_size = config.model.vocab_size if words is None else words.shape[0]
        self.model = replace(config.model, vocab_size=vocab_size)
        check_model_config(manifest.path, self.model)
        self.specs = build_on_meta(self.model).specs
        self._reader = CheckpointReader(manifest)
        self._prefix = EMA_PREFIX if average else ""
        self._check()

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor, in the precision of the main params.

        Args:
            name: global name.
            view: view of the tensor's spec, in which the box is given.
            box: elements to read.

        Raises:
            ValueError: when ``view`` is not that of the tensor.
            DamagedCheckpointError: when a checksum does not match.
        """
        stored = self._prefix + name
        if view != self._reader.view(stored):
            raise ValueError(f"{stored} is viewed {list(self._reader.view(stored))}, not {list(view)}")
        return self._reader.read(stored, box)

    def _check(self) -> None:
        tensors = self.manifest.tensors
        if self._prefix:
            stored = {n.removeprefix(EMA_PREFIX): record for n, record in tensors.items() if n.startswith(EMA_PREFIX)}
            if not stored:
                seen = f"{self.manifest.path} has no average of the weights, because its run had no --ema-decay"
                raise CheckpointError(seen, "drop --ema")
        else:
            stored = {name: record for name, record in tensors.items() if not name.startswith("optim.")}
        shapes = {name: (spec.shape, spec.view) for name, spec in self.specs.items()}
        common = shapes.keys() & stored.keys()
        findings = {
            "lacks": shapes.keys() - stored.keys(),
            "holds tensors that its model does not have": stored.keys() - shapes.keys(),
            "holds tensors of another shape than its model's": {
                name for name in common if shapes[name] != (stored[name].shape, stored[name].view)
            },
        }
        raise_if_any(self.manifest.path, findings)


def _read_config(manifest: Manifest) -> RunConfig:
    """Return model and precision of the run that wrote a checkpoint. Options that it lacks have their defaults."""
    config = manifest.config
    groups = {name: config.get(name) for name in ("model", "precision")}
    invalid = [f"config.{name} {json.dumps(group)}" for name, group in groups.items() if not isinstance(group, Mapping)]
    raise_if_any(manifest.path, {"has in its manifest what is no group of options": invalid})
    unknown = [option for option in unknown_options(config) if option.startswith("model.")]
    raise_if_any(
        manifest.path, {"has a model with options that this version does not know": unknown}, "update this program"
    )
    precision = {k: v for k, v in config["precision"].items() if k == "params_dtype"}
    return from_dict({"model": config["model"], "precision": precision})


def import_huggingface(folder: Path, path: Path, report: ProgressCallback) -> None:
    """Write the weights of a Hugging Face folder as a checkpoint of step 0.

    Args:
        folder: folder with config.json and safetensors files.
        path: folder of the new checkpoint.
        report: progress callback.

    Raises:
        UserError: when config.json has unsupported options.
        CheckpointError: when tensors are missing, unused or of another shape.
        StorageError: when writing fails.
    """
    model = read_model_config(folder)
    source = HuggingFaceWeights(folder, model)
    precision = PrecisionConfig(params_dtype=next(name for name, dtype in DTYPES.items() if dtype == source.dtype))
    config = resolve(RunConfig(model=model, precision=precision), 1)
    progress = ConversionProgress(report, sum(spec.numel for spec in source.specs.values()))
    tensors = {name: _entry(source, name, spec, progress) for name, spec in source.specs.items()}
    state = {"iteration": 0, "consumed_samples": 0}
    # old folders have no generation_config.json, but the ids of special tokens in config.json
    settings = read_config(folder)
    special_ids = {name: settings[name] for name in SPECIAL_TOKEN_IDS if settings.get(name) is not None}
    files: dict[str, Path | bytes] = {
        GENERATION_CONFIG_FILE: json.dumps(special_ids).encode(),
        **find_tokenizer_files(folder),
    }
    save_sharded(path, tensors, state, to_dict(config), Group(), files)


def find_tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the small files of a Hugging Face folder that a checkpoint stores, by their names in the checkpoint."""
    files = {
        **{TOKENIZER_PREFIX + name: folder / name for name in TOKENIZER_FILES},
        GENERATION_CONFIG_FILE: folder / GENERATION_CONFIG_FILE,
    }
    return {name: path for name, path in files.items() if path.is_file()}


def saved_tokenizer_files(manifest: Manifest) -> dict[str, bytes]:
    """Return the content of the same files in a checkpoint.

    Raises:
        DamagedCheckpointError: when one is missing or changed.
    """
    known = (*(TOKENIZER_PREFIX + name for name in TOKENIZER_FILES), GENERATION_CONFIG_FILE)
    return {name: manifest.read_file(name) for name in known if name in manifest.files}


def by_huggingface_names(carried: Mapping[str, Path | bytes]) -> dict[str, bytes]:
    """Return the content of these files by their names in a Hugging Face folder."""
    contents = {name: file if isinstance(file, bytes) else file.read_bytes() for name, file in carried.items()}
    return {name.removeprefix(TOKENIZER_PREFIX): content for name, content in contents.items()}


class ConversionProgress:
    """Counts converted elements and reports them."""

    def __init__(self, report: ProgressCallback, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def add(self, name: str, elements: int) -> None:
        """Count the elements of a tensor that has been converted."""
        self._done += elements
        self._report(name, self._done, self._total)


def _entry(source: HuggingFaceWeights, name: str, spec: ShardSpec, progress: ConversionProgress) -> GlobalTensor:
    """Return a tensor whose parts are read only when they are written, so that one part at a time is in memory."""

    def part(box: Box) -> TensorPart:
        def read() -> Tensor:
            values = source.read(name, spec.view, box).to(torch.float32)
            progress.add(name, box.numel)
            return values

        return TensorPart(box, read)

    parts = tuple(part(block) for box in source.boxes(name) for block in split_box(box, BLOCK_ELEMENTS))
    return GlobalTensor(spec.shape, spec.view, torch.float32, parts)
