from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron.convert.huggingface.check import LazyWeightLoader


def test_weights_are_there_only_while_a_module_runs() -> None:
    real = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 3)))
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 3)))
    asked: list[str] = []
    lent: list[int] = []

    def load(name: str) -> Tensor:
        asked.append(name)
        return real.get_parameter(name).detach()

    LazyWeightLoader(empty, load)
    for module in (empty[0], empty[2][0]):
        module.register_forward_hook(lambda *_: lent.append(sum(not p.is_meta for p in empty.parameters())))
    x = torch.randn(2, 3)
    with torch.no_grad():
        assert torch.equal(empty(x), real(x))
    assert asked == ["0.weight", "0.bias", "2.0.weight", "2.0.bias"]
    assert lent == [0, 0], "taken back before anybody else is told"
    assert all(p.is_meta for p in empty.parameters())


def test_tied_weight_is_loaded_by_its_other_name() -> None:
    weight = torch.randn(3, 3)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    LazyWeightLoader(empty, {"0.weight": weight}.__getitem__, {"1.weight": "0.weight"})
    x = torch.randn(2, 3)
    torch.testing.assert_close(empty(x), x @ weight.t() @ weight.t())


def test_wrong_shape_is_refused() -> None:
    with torch.device("meta"):
        empty = nn.Linear(3, 4)
    LazyWeightLoader(empty, lambda name: torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"weight is \[4, 3\], its value \[4, 4\]"):
        empty(torch.zeros(3))
