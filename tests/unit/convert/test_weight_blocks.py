from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.convert.huggingface import weights
from megatron.convert.huggingface.weights import read_in_blocks
from megatron.distributed.sharding import Box


class Remembering:
    """A tensor, and the boxes that were asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.asked = tensor, list[Box]()

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        self.asked.append(box)
        return self.tensor.view(view)[box.slices]


@pytest.mark.parametrize("limit", [1, 7, 24, 10**6])
def test_a_box_is_read_in_blocks_and_converted(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BLOCK_ELEMENTS", limit)
    source = Remembering(torch.randn(6, 4, 5).to(torch.bfloat16))
    box = Box((1, 0, 2), (4, 3, 3))
    out = read_in_blocks(source, "x", (6, 4, 5), box, torch.float32)
    assert torch.equal(out, source.tensor[box.slices].float())
    assert sum(asked.numel for asked in source.asked) == box.numel
    assert max(asked.numel for asked in source.asked) <= limit
