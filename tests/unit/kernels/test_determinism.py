"""Settings under which equal runs are equal to the bit, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron.config.errors import UserError
from megatron.kernels.compile import make_deterministic
from tests.solo import Solo, random_batch, tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory
    yield
    cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


def test_nothing_happens_unless_it_is_wanted() -> None:
    environ: dict[str, str] = {}
    assert make_deterministic(False, CUDA, environ) == []
    assert environ == {}
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_gpu_gets_what_cublas_and_nccl_need() -> None:
    environ: dict[str, str] = {}
    assert len(make_deterministic(True, CUDA, environ)) == 1
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"}
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "a warning would not stop the run"
    assert torch.backends.cudnn.deterministic
    make_deterministic(True, CUDA, environ)  # what it has set itself is right


@pytest.mark.parametrize("value", [":16:8", ":4096:8"])
@pytest.mark.parametrize("algorithms", ["Ring", "ring,tree", "^NVLS", "^nvlstree,nvls", "CollnetChain"])
def test_other_settings_that_do_are_kept(value: str, algorithms: str) -> None:
    environ = {"CUBLAS_WORKSPACE_CONFIG": value, "NCCL_ALGO": algorithms}
    make_deterministic(True, CUDA, environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": value, "NCCL_ALGO": algorithms}


@pytest.mark.parametrize("algorithms", ["NVLS", "Ring,NVLSTree", "^Ring"])
def test_settings_that_do_not_are_all_refused(algorithms: str) -> None:
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "NCCL_ALGO": algorithms}
    with pytest.raises(UserError) as caught:
        make_deterministic(True, CUDA, environ)
    assert [problem.code for problem in caught.value.problems] == ["E902", "E902"]
    assert not torch.are_deterministic_algorithms_enabled()
    make_deterministic(True, CPU, environ)  # which asks neither


def test_a_step_uses_no_operation_that_torch_would_refuse() -> None:
    """With all that a model can have: dropout, documents, a window, grouped heads, a z loss."""
    config = tiny(
        hidden_dropout=0.1,
        attention_dropout=0.1,
        num_query_groups=2,
        window_size=5,
        z_loss_coeff=1e-3,
        position_embedding_type="rope",
        qk_layernorm=True,
    )
    batch = random_batch(config, documents=torch.tensor([[0] * 7 + [1] * 9, [0] * 16]))

    def norms() -> list[float]:
        solo = Solo.build(config, torch.float32)
        return [solo.step([batch])[1].grad_norm.item() for _ in range(2)]

    before = norms()
    make_deterministic(True, CPU, {})
    assert norms() == before
