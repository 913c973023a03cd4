"""Weights filled box by box: every rank gets what it would have been initialised with, and padding is zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.run import TrainingConfig
from megatron.convert.huggingface.weights import fill_weights
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.sharding import Box
from megatron.layers.context import BuildContext
from megatron.model.gpt import build_gpt
from tests.solo import Solo, one_rank_mesh, tiny

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama-gqa": {"position_embedding_type": "rope", "activation": "swiglu", "num_query_groups": 2},
    "untied-mqa": {"untie_embeddings_and_output_weights": True, "num_query_groups": 1},
}


class WholeTensors:
    """Tensors in memory, in another dtype than the model's."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        return self.tensors[name].view(view)[box.slices].double()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_rank_gets_its_part(name: str, tp: int) -> None:
    config = tiny(**CONFIGS[name])
    solo = Solo.build(config, torch.float32)
    whole = {n: p.detach()[: solo.chunk.specs[n].shape[0]] for n, p in solo.params.items()}
    for rank in range(tp):
        mesh = one_rank_mesh()
        mesh._groups[("tp",)] = Group(tuple(range(tp)), rank)
        chunk = build_gpt(config, TrainingConfig(), BuildContext(mesh, GradAccumulator(), torch.float32))
        expected = {n: p.detach().clone() for n, p in chunk.params.items()}
        for parameter in chunk.params.values():
            torch.nn.init.constant_(parameter, 7.0)
        fill_weights(chunk.specs, chunk.params, WholeTensors(whole))
        for n, parameter in chunk.params.items():
            assert torch.equal(parameter, expected[n]), n
