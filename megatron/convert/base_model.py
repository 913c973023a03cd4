"""The model that adapters belong to: found by its location, recognised by its digest in checkpoints of adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from megatron.checkpoint.errors import CheckpointError, raise_if_any
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.location import parse_location
from megatron.config.run import HUGGING_FACE_PREFIX
from megatron.convert.huggingface.config import CONFIG_FILE, model_folder

SAMPLE_BYTES = 1 << 20
"""Bytes at either end of a weight file of Hugging Face that its digest covers."""


@dataclass(frozen=True)
class BaseModel:
    """A checkpoint, or the folder of a Hugging Face model."""

    source: Manifest | Path
    # Of a checkpoint, the shapes and checksums of its weights; of a folder, config.json and samples of its weights.
    digest: str

    # The checkpoint, ``hf:DIR`` or ``hf:ORG/NAME``, which does not depend on the current folder.
    location: str

    @property
    def record(self) -> dict[str, str]:
        """What a checkpoint of adapters stores."""
        return {"location": self.location, "digest": self.digest}

    @classmethod
    def find(cls, location: str) -> BaseModel:
        """Open ``hf:DIR``, a checkpoint, or the newest one in a folder.

        Raises:
            CheckpointError: when there is none, or it holds adapters.
            UserError: when there is no such folder of Hugging Face.
        """
        if location.startswith(HUGGING_FACE_PREFIX):
            name = location.removeprefix(HUGGING_FACE_PREFIX)
            folder = model_folder(name)
            place = folder.absolute() if folder == Path(name) else name
            return cls(folder, _folder_digest(folder), f"{HUGGING_FACE_PREFIX}{place}")
        manifest, _ = CheckpointFolder(parse_location(location)).newest()
        path = manifest.path
        return cls(manifest, manifest_digest(manifest), str(path.absolute() if isinstance(path, Path) else path))


def manifest_digest(manifest: Manifest) -> str:
    """Return the digest of a checkpoint's weights.

    Raises:
        CheckpointError: when it holds adapters, not a whole model.
    """
    if base := manifest.state.get("base"):
        seen = f"{manifest.path} holds adapters of {base['location']}, not a model"
        raise CheckpointError(seen, f"--pretrained-checkpoint {base['location']}")
    digest = xxhash.xxh3_64()
    for name, record in sorted(manifest.tensors.items()):
        if not name.startswith("optim."):
            chunks = [(chunk.box, chunk.xxh3) for chunk in record.chunks]
            digest.update(repr((name, record.dtype, record.shape, chunks)).encode())
    return digest.hexdigest()


def _folder_digest(folder: Path) -> str:
    digest = xxhash.xxh3_64()
    files = sorted(folder.glob("*.safetensors"))
    raise_if_any(folder, {"lacks": [] if files else ["*.safetensors"]})
    try:
        digest.update((folder / CONFIG_FILE).read_bytes())
        for path in files:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLE_BYTES))
                file.seek(max(0, size - SAMPLE_BYTES))
                digest.update(file.read())
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
