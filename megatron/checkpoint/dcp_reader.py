"""Read checkpoints with torch.distributed.checkpoint, in any program.

Training does not use that library: importing it costs every rank half a second of CPU time.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.checkpoint.format import Manifest, boxes_in_shape
from megatron.checkpoint.load import CheckpointReader
from megatron.checkpoint.tensor_file import DTYPES
from megatron.distributed.sharding import Box


class CheckpointStorageReader(StorageReader):
    """Our checkpoints as a storage reader of torch.distributed.checkpoint.

    ``dcp.load(state_dict, storage_reader=CheckpointStorageReader(Manifest.open(path)))`` fills plain tensors and
    DTensors of the stored shapes by name in any program.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another checkpoint."""
        if checkpoint_id is not None:
            self._manifest = Manifest.open(Path(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: readers are not created from a path."""
        return False

    def read_metadata(self) -> dcp_metadata.Metadata:
        """Return the metadata of every tensor in its stored shape."""
        tensors: dict[str, dcp_metadata.STORAGE_TYPES] = {}
        for name, record in self._manifest.tensors.items():
            boxes = [box for _, box in self._boxes(name)]
            chunks = [dcp_metadata.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)) for box in boxes]
            properties = dcp_metadata.TensorProperties(DTYPES[record.dtype])
            tensors[name] = dcp_metadata.TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
        return dcp_metadata.Metadata(tensors)

    def _boxes(self, name: str) -> list[tuple[Box, Box]]:
        """Return the stored boxes of a tensor, each as a box of the view and one of the stored shape."""
        record = self._manifest.tensors[name]
        return [pair for c in record.chunks for pair in boxes_in_shape(c.box, record.shape, record.view)]

    def set_up_storage_reader(self, metadata: dcp_metadata.Metadata, is_coordinator: bool) -> None:
        """Do nothing: the manifest suffices."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify all items; consecutive items of one chunk need a single read."""
        reader, boxes = CheckpointReader(self._manifest), dict[str, dict[tuple[int, ...], tuple[Box, Box]]]()
        for item in plan.items:
            name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            if name not in boxes:
                boxes[name] = {outer.start: (inner, outer) for inner, outer in self._boxes(name)}
            inner, outer = boxes[name][offset]
            target = planner.resolve_tensor(item).detach()
            content = reader.read(name, inner).reshape(outer.size)
            target.copy_(content[Box(tuple(item.storage_offsets), tuple(item.lengths)).slices])
            planner.commit_tensor(item, target)
        reader.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future
