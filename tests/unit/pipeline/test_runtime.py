"""The runtime on ranks that are threads: gradients, evaluation, what is kept, what an error says."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from megatron.parallel.comm import Channel
from megatron.pipeline.schedules import SCHEDULES
from tests.pipelines import SEED, Ends, batches_of, in_threads, pipeline_of, plain_loop, program_of


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 3), (2, 4), (3, 7), (4, 4)])
def test_gradients_are_those_of_a_plain_loop(name: str, ranks: int, microbatches: int) -> None:
    program, ends, seed = program_of(name, ranks, microbatches), Ends(), torch.tensor(SEED)

    def work(rank: int, roads: Mapping[tuple[int, int], Channel]) -> None:
        pipeline_of(program, rank, roads, ends).run(program.ranks[rank], batches_of(microbatches), seed)

    in_threads(program, work)
    expected = plain_loop(program.stages, microbatches)
    for stage, gradient in expected.items():
        torch.testing.assert_close(ends.gradients[stage], gradient, rtol=1e-12, atol=1e-12)
        assert ends.counts[stage] == microbatches
