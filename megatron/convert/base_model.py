"""The model that adapters belong to: found by its location, recognised by its digest in checkpoints of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import xxhash

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.location import Location, parse_location
from megatron.checkpoint.tensor_file import tensor_bytes
from megatron.config.errors import Problem, UserError
from megatron.config.schemes import FRAMEWORK_PREFIXES, HUGGING_FACE_PREFIX, PEFT_PREFIX, split_scheme
from megatron.config.text import shell_word
from megatron.convert.huggingface.config import model_folder, read_model_config
from megatron.convert.huggingface.weights import open_files

SAMPLE_BYTES = 4096
"""Bytes at the start, in the middle and at the end of each tensor of Hugging Face that its digest covers."""


@dataclass(frozen=True)
class BaseModel:
    """A checkpoint, or the folder of a Hugging Face model."""

    # The checkpoint, ``hf:DIR`` or ``hf:ORG/NAME``, which does not depend on the current folder.
    location: str
    # Of a checkpoint, the shapes and checksums of its weights, as they were written in chunks; of a folder, the
    # architecture and samples of every tensor.
    digest: str

    @property
    def record(self) -> dict[str, str]:
        """The record of the base in a checkpoint of adapters."""
        return {"location": self.location, "digest": self.digest}

    @classmethod
    def find(cls, location: str) -> BaseModel:
        """Open ``hf:DIR``, a checkpoint, or the newest one in a folder.

        Raises:
            CheckpointError: when there is none.
            UserError: when it holds adapters, or is not a supported model of Hugging Face.
        """
        scheme, name = split_scheme(location)
        if scheme == PEFT_PREFIX:
            raise UserError([Problem("E806", f"{location} holds adapters, not a model", ("hf:DIR",))])
        if scheme in FRAMEWORK_PREFIXES:
            converted = f"python tools/convert_checkpoint.py --load {shell_word(location)} --save NEW"
            sentence = f"{location} is a checkpoint of another program, from which adapters do not start"
            raise UserError([Problem("E806", sentence, (converted,))])
        if scheme == HUGGING_FACE_PREFIX:
            folder = model_folder(name)
            place = folder.absolute() if folder == Path(name) else name
            return cls(f"{HUGGING_FACE_PREFIX}{place}", _folder_digest(folder))
        manifest, _ = CheckpointFolder(parse_location(name)).newest()
        path = manifest.path
        if base := manifest.state.get("base"):
            sentence = f"{path} holds adapters of {base['location']}, not a model"
            merge = f"python tools/edit_checkpoint.py --load {shell_word(str(path))} --merge --save NEW"
            folders = shell_word(str(path)), shell_word(str(base["location"]))
            continued = f"--load {folders[0]} --resume-mode weights-only --pretrained-checkpoint {folders[1]}"
            raise UserError([Problem("E806", sentence, (merge, continued))])
        return cls(str(path.absolute() if isinstance(path, Path) else path), _manifest_digest(manifest))

    def check_adapters(self, manifest: Manifest) -> str:
        """Check that the adapters of a checkpoint belong to this model; return where it was.

        Raises:
            UserError: when they belong to other weights.
        """
        saved = recorded_base(manifest)
        if saved.digest != self.digest:
            changed = saved.location == self.location
            other = "have changed" if changed else f"are not those of {self.location}"
            sentence = f"{manifest.path} holds adapters of {saved.location}, whose weights {other}"
            fix = f"--pretrained-checkpoint {'AN_EXACT_COPY' if changed else shell_word(saved.location)}"
            raise UserError([Problem("E818", sentence, (fix,))])
        return saved.location


def recorded_base(manifest: Manifest) -> BaseModel:
    """Return the model that a checkpoint of adapters names.

    Raises:
        CheckpointError: when it names none.
    """
    record = manifest.state.get("base")
    if not isinstance(record, Mapping) or not all(isinstance(record.get(key), str) for key in ("location", "digest")):
        raise CheckpointError(f"{manifest.path} holds adapters, but its manifest does not name their model")
    return BaseModel(record["location"], record["digest"])


def find_recorded_base(manifest: Manifest, pretrained: str | None = None) -> BaseModel:
    """Find the model that the adapters of a checkpoint belong to, in ``pretrained`` or where it was.

    Raises:
        CheckpointError: when it is not there.
        UserError: when another model is.
    """
    location = recorded_base(manifest).location
    fix = f"--pretrained-checkpoint {'ITS_LOCATION' if pretrained is None else shell_word(location)}"
    try:
        if pretrained is None and _is_elsewhere(parse_location(location), manifest.path):
            text = f"it is in a store that only the checkpoint names, {location}; to read it there, name it yourself"
            raise CheckpointError(text)  # a stranger's checkpoint must not choose where this machine sends requests
        base = BaseModel.find(pretrained or location)
    except (CheckpointError, UserError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{manifest.path} holds adapters of a model that cannot be read: {reason}", fix
        ) from error
    base.check_adapters(manifest)
    return base


def _is_elsewhere(location: Location, checkpoint: Location) -> bool:
    """Return True for a location in a store, unless the checkpoint is in the same bucket."""
    if isinstance(location, Path) or isinstance(checkpoint, Path):
        return not isinstance(location, Path)
    return (location.scheme, location.bucket) != (checkpoint.scheme, checkpoint.bucket)


def _manifest_digest(manifest: Manifest) -> str:
    digest = xxhash.xxh3_64()
    for name, record in sorted(manifest.tensors.items()):
        if not name.startswith("optim."):
            chunks = [(chunk.box, chunk.xxh3) for chunk in record.chunks]
            digest.update(repr((name, record.dtype, record.shape, chunks)).encode())
    return digest.hexdigest()


def _folder_digest(folder: Path) -> str:
    model, digest = read_model_config(folder), xxhash.xxh3_64()
    changed = [(f.name, value) for f in fields(model) if (value := getattr(model, f.name)) != f.default]
    digest.update(repr(changed).encode())
    for name, file in sorted(open_files(folder).items()):
        content = tensor_bytes(file.tensor(name))
        digest.update(repr((name, file.dtype(name), file.shape(name))).encode())
        for start in (0, len(content) // 2, max(0, len(content) - SAMPLE_BYTES)):
            digest.update(content[start : start + SAMPLE_BYTES])
    return digest.hexdigest()
