"""The weights of a checkpoint as a model, and a checkpoint made of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.boxes import cut
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.parts import GlobalTensor, Part
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.remote import Location
from megatron.checkpoint.store import write
from megatron.config.compare import unknown_options
from megatron.config.hf import SPECIAL_IDS, read_config
from megatron.config.resolve import resolve
from megatron.config.run import PrecisionConfig, RunConfig
from megatron.config.sources import from_dict, to_dict
from megatron.convert.blocks import BLOCK_ELEMENTS
from megatron.convert.complaints import refuse, refuse_impossible
from megatron.convert.hf_folder import HFSource, read_model
from megatron.model.hf import shapes_only
from megatron.parallel.build import DTYPES
from megatron.parallel.comm import Group
from megatron.parallel.shard import Box, ShardSpec

Report = Callable[[str, int, int], None]
"""Called with what was written last, elements written so far, and elements in all."""

TOKENIZER = "tokenizer/"
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
"""What a Hugging Face folder may hold of its tokenizer; a checkpoint has them under ``TOKENIZER``."""

GENERATION = "generation_config.json"

AVERAGE = "optim.ema."
"""What the name of a weight's moving average begins with in a checkpoint."""


def open_checkpoint(path: Location, step: int | None = None) -> tuple[Manifest, list[str]]:
    """A checkpoint by its own folder, or the newest valid one (or that of ``step``) of a ``--save`` folder.

    Returns:
        It, and what people should know: which one it is, which newer ones were passed over and why, which of its
        options are not known here.

    Raises:
        CheckpointError: when there is none, or a newer version wrote it.
        DamagedError: when it is damaged.
    """
    manifest, passed_over = Checkpoints(path).newest(step)
    notes = [f"from {manifest.path}, step {manifest.state.get('iteration')}"]
    notes += [f"passed over {found.path}: {found.problem}" for found in passed_over]
    unknown = unknown_options(manifest.config)
    notes += [f"it has options that this version does not know: {', '.join(unknown)}"] if unknown else []
    return manifest, notes


class SavedModel:
    """The weights in a checkpoint.

    Attributes:
        manifest: of the checkpoint.
        model: its shape, with the size of its vocabulary.
        specs: of all its tensors, by global name.
        precision: the name of the type that the run computed in.
    """

    def __init__(self, manifest: Manifest, average: bool = False) -> None:
        """Check that the checkpoint holds the weights of the model it describes, and no others.

        Args:
            manifest: of the checkpoint.
            average: read the moving average of the weights in their place.

        Raises:
            CheckpointError: when an average is wanted and it has none; when its configuration has no model, or one
                with options that this version does not know, which could change what it computes; or naming tensors
                that are missing, unknown or of another shape.
            UserError: when its configuration has values that are none, or that do not fit together.
        """
        self.manifest = manifest
        config = _described(manifest)
        self.precision = config.precision.params_dtype
        words = manifest.tensors.get("embedding.word_embeddings.weight")
        size = config.model.vocab_size if words is None else words.shape[0]
        self.model = replace(config.model, vocab_size=size)
        refuse_impossible(manifest.path, self.model)
        self.specs = shapes_only(self.model).specs
        self._reader, self._prefix = CheckpointReader(manifest), AVERAGE if average else ""
        self._check()

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """The elements of ``box`` of a tensor, at the precision of their masters.

        Args:
            name: global name.
            view: of the tensor's spec, which the box refers to.
            box: wanted.

        Raises:
            ValueError: when ``view`` is not the tensor's.
            DamagedError: when what is read is not what was written.
        """
        stored = self._prefix + name
        if view != self._reader.view(stored):
            raise ValueError(f"{stored} is viewed {list(self._reader.view(stored))}, not {list(view)}")
        return self._reader.read(stored, box)

    def _check(self) -> None:
        tensors = self.manifest.tensors
        if self._prefix:
            stored = {n.removeprefix(AVERAGE): record for n, record in tensors.items() if n.startswith(AVERAGE)}
            if not stored:
                seen = f"{self.manifest.path} has no average of the weights: its run did not keep one, with --ema-decay"
                raise CheckpointError(seen, "drop --ema")
        else:
            stored = {name: record for name, record in tensors.items() if not name.startswith("optim.")}
        shapes = {name: (spec.shape, spec.view) for name, spec in self.specs.items()}
        common = shapes.keys() & stored.keys()
        complaints = {
            "lacks": shapes.keys() - stored.keys(),
            "holds tensors that its model does not have": stored.keys() - shapes.keys(),
            "holds tensors of another shape than its model's": {
                name for name in common if shapes[name] != (stored[name].shape, stored[name].view)
            },
        }
        refuse(self.manifest.path, complaints)


def _described(manifest: Manifest) -> RunConfig:
    """The model and the precision of the run that wrote a checkpoint; options it does not name have their defaults."""
    config = manifest.config
    groups = {name: config.get(name) for name in ("model", "precision")}
    strange = [f"config.{name} {json.dumps(group)}" for name, group in groups.items() if not isinstance(group, Mapping)]
    refuse(manifest.path, {"has in its manifest what is no group of options": strange})
    unknown = [option for option in unknown_options(config) if option.startswith("model.")]
    refuse(manifest.path, {"has a model with options that this version does not know": unknown}, "update this program")
    precision = {k: v for k, v in config["precision"].items() if k == "params_dtype"}
    return from_dict({"model": config["model"], "precision": precision})


def import_hf(folder: Path, path: Path, report: Report) -> None:
    """Write a checkpoint of step 0, weights only, from a Hugging Face folder.

    Args:
        folder: with config.json and safetensors files.
        path: the checkpoint's own folder.
        report: told after each part that is read.

    Raises:
        UserError: when config.json asks for what is not here.
        CheckpointError: when weights are missing, not used or misshapen.
        StorageError: when the disk refuses.
    """
    model = read_model(folder)
    source = HFSource(folder, model)
    precision = PrecisionConfig(params_dtype=next(name for name, dtype in DTYPES.items() if dtype == source.dtype))
    config = resolve(RunConfig(model=model, precision=precision), 1)
    progress = Progress(report, sum(spec.numel for spec in source.specs.values()))
    tensors = {name: _entry(source, name, spec, progress) for name, spec in source.specs.items()}
    state = {"iteration": 0, "consumed_samples": 0}
    files: dict[str, Path | bytes] = {GENERATION: _special_ids(folder), **carried_files(folder)}
    write(path, tensors, state, to_dict(config), Group(), files)


def _special_ids(folder: Path) -> bytes:
    """The ids of config.json as a generation_config.json, for folders that are older than that file."""
    config = read_config(folder)
    return json.dumps({name: config[name] for name in SPECIAL_IDS if config.get(name) is not None}).encode()


def carried_files(folder: Path) -> dict[str, Path]:
    """Small files of a Hugging Face folder that a checkpoint keeps, by their names in the checkpoint."""
    files = {**{TOKENIZER + name: folder / name for name in TOKENIZER_FILES}, GENERATION: folder / GENERATION}
    return {name: path for name, path in files.items() if path.is_file()}


def carried_by(manifest: Manifest) -> dict[str, bytes]:
    """The content of the same files, as a checkpoint keeps them.

    Raises:
        DamagedError: when one is missing or changed.
    """
    known = (*(TOKENIZER + name for name in TOKENIZER_FILES), GENERATION)
    return {name: manifest.read_file(name) for name in known if name in manifest.files}


def by_their_names(carried: Mapping[str, Path | bytes]) -> dict[str, bytes]:
    """The content of such files by their names in a Hugging Face folder."""
    contents = {name: file if isinstance(file, bytes) else file.read_bytes() for name, file in carried.items()}
    return {name.removeprefix(TOKENIZER): content for name, content in contents.items()}


class Progress:
    """Counts elements and tells of them."""

    def __init__(self, report: Report, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def add(self, name: str, elements: int) -> None:
        """Count what was done last."""
        self._done += elements
        self._report(name, self._done, self._total)


def _entry(source: HFSource, name: str, spec: ShardSpec, progress: Progress) -> GlobalTensor:
    """Parts that are read when they are written, so that one of them exists at a time."""

    def part(box: Box) -> Part:
        def read() -> Tensor:
            values = source.read(name, spec.view, box).to(torch.float32)
            progress.add(name, box.numel)
            return values

        return Part(box, read)

    return GlobalTensor(spec.shape, spec.view, torch.float32, tuple(part(box) for box in _boxes(source, name)))


def _boxes(source: HFSource, name: str) -> Iterator[Box]:
    for box in source.boxes(name):
        yield from cut(box, BLOCK_ELEMENTS)
