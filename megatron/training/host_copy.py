"""Copy small tensors to the host without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A small tensor on its way to the host, copied without waiting for the device."""

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy."""
        self._event = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = tensor.clone()

    def read(self) -> Any:
        """Return the values as Python numbers; wait for them if they have not arrived."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._values.tolist()
