"""Verify every byte of a checkpoint against its checksums."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.checkpoint.chunks import ChunkReader
from megatron.checkpoint.errors import DamagedError
from megatron.checkpoint.manifest import Chunk, Manifest


def damage(manifest: Manifest) -> Iterator[str]:
    """Yield one message per damaged place of a checkpoint; reads all of it, one block at a time."""
    reader = ChunkReader(manifest)
    for name in manifest.tensors:
        try:
            manifest.prove(name)
        except DamagedError as error:
            yield str(error)
    chunks: dict[str, list[tuple[str, Chunk]]] = {file: [] for file in manifest.files}
    for name, record in manifest.tensors.items():
        for chunk in record.chunks:
            chunks[chunk.file].append((name, chunk))
    for file in manifest.files:
        try:
            reader.prove_head(file)
        except DamagedError as error:
            yield str(error)
        inside = sorted(chunks[file], key=lambda item: item[1].offset)
        yield from _uncovered(manifest, file, [chunk for _, chunk in inside])
        for name, chunk in inside:
            try:
                reader.prove(name, chunk)
            except DamagedError as error:
                yield str(error)
    reader.close()


def _uncovered(manifest: Manifest, file: str, chunks: list[Chunk]) -> Iterator[str]:
    """Yield the byte ranges of a file that no checksum, or more than one, covers."""
    record = manifest.files[file]
    starts = [*(chunk.offset for chunk in chunks), record.bytes]
    ends = [record.head, *(chunk.offset + chunk.bytes for chunk in chunks)]
    for end, start in zip(ends, starts):
        if end != start:
            yield f"{manifest.folder / file}: bytes {end} to {start} have no checksum, or two"
