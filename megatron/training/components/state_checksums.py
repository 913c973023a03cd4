"""Checksums of main parameters and moments in a checkpoint, from device to device.

The checksums of files begin when a tensor is written. These are taken on the device when a checkpoint is composed, and
compared with what has been loaded. Every element counts by its place in the global tensor (``box_digest``), and every
tensor by its name, so they know no layout, and differ where parts or tensors are exchanged.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.distributed import comm
from megatron.training.checkpoint_contents import tensors_to_save
from megatron.training.component import Component
from megatron.training.digests import box_digest
from megatron.training.trainer import Trainer

MAIN = "main"
"""Kind of the main parameters."""


class StateChecksums(Component):
    """Saves a checksum of each kind of state, and compares it after loading. Older checkpoints have none."""

    name = "digests"

    def __init__(self, trainer: Trainer) -> None:
        """Take the checksums of what ``trainer`` saves."""
        self._trainer = trainer

    def state_dict(self) -> Mapping[str, str]:
        """Return a checksum by kind and dtype; collective."""
        trainer = self._trainer
        kinds = {"", *trainer.optimizer.state()}
        sums: dict[str, torch.Tensor] = {}
        for name, tensor in tensors_to_save(trainer).items():
            kind = name.split(".", 2)[1] if name.startswith("optim.") else ""
            for part in tensor.parts if kind in kinds else ():
                found = box_digest(part.resolve(), part.box)
                key = f"{kind or MAIN} {str(tensor.dtype).removeprefix('torch.')}"
                sums[key] = sums.get(key, 0) + found * (zlib.crc32(name.encode()) << 1 | 1)
        mine = dict(zip(sums, torch.stack([*sums.values()]).tolist())) if sums else {}
        by_rank = comm.all_gather_objects(mine, trainer.mesh.world)
        totals: dict[str, int] = {}
        for each in by_rank:
            for key, value in each.items():
                totals[key] = (totals.get(key, 0) + value) % 2**64
        return {key: f"{totals[key]:016x}" for key in sorted(totals)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Compare the checksums of what was loaded; collective.

        Raises:
            DamagedCheckpointError: on every rank, if one differs.
        """
        loaded = self.state_dict()
        differing = [key for key in state if key in loaded and loaded[key] != state[key]]
        if differing:
            raise DamagedCheckpointError(
                f"{', '.join(differing)}: what was loaded is not what the devices had when the checkpoint was saved"
            )
