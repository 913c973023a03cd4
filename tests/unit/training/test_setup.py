"""Device of a rank, torch.distributed, and prefetching."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config.errors import UserError
from megatron.data.errors import DataError
from megatron.training.build import build_trainer, choose_device, join_distributed
from tests.runs import tiny_run

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
SLURM = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *SLURM):
        monkeypatch.delenv(name, raising=False)


def torchrun(monkeypatch: pytest.MonkeyPatch, local_rank: int, local_size: int) -> None:
    values = (local_rank, local_size, local_rank, local_size, "127.0.0.1")
    for name, value in zip(VARIABLES, values):
        monkeypatch.setenv(name, str(value))


def srun(monkeypatch: pytest.MonkeyPatch, local_rank: int, machines: int = 1) -> None:
    for name, value in zip(SLURM, (0, local_rank, 8, local_rank, machines)):
        monkeypatch.setenv(name, str(value))


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Pretend that this machine has ``count`` GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.parametrize(("name", "count", "device"), [("auto", 0, "cpu"), ("cpu", 8, "cpu"), ("auto", 8, "cuda:3")])
def test_the_device_of_a_rank(monkeypatch: pytest.MonkeyPatch, name: str, count: int, device: str) -> None:
    gpus(monkeypatch, count)
    torchrun(monkeypatch, 3, 8)
    assert choose_device(name) == torch.device(device)


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    with pytest.raises(UserError, match=r"E207 --device cuda, but torch \S+ finds no GPU\n  fix: --device cpu"):
        choose_device("cuda")


@pytest.mark.parametrize("local_rank", [0, 3])
def test_two_ranks_never_share_a_gpu(monkeypatch: pytest.MonkeyPatch, local_rank: int) -> None:
    gpus(monkeypatch, 2)
    torchrun(monkeypatch, local_rank, 4)
    sentence = r"E207 this machine runs at least 4 ranks, but has 2 GPUs\n  fix: torchrun --nproc-per-node 2 \|"
    with pytest.raises(UserError, match=sentence):
        choose_device("auto")


def test_a_rank_of_srun_may_see_its_own_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    srun(monkeypatch, 5)
    gpus(monkeypatch, 1)
    assert choose_device("cuda") == torch.device("cuda:0")
    gpus(monkeypatch, 8)
    assert choose_device("cuda") == torch.device("cuda:5")
    gpus(monkeypatch, 4)
    with pytest.raises(UserError, match="at least 6 ranks, but has 4 GPUs"):
        choose_device("cuda")


def test_a_backend_that_cannot_serve_the_device_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, 0)
    torchrun(monkeypatch, 1, 2)
    config = tiny_run(tmp_path, "--device auto --distributed-backend nccl", 2)
    with pytest.raises(UserError, match="E206 the nccl backend cannot serve CPUs"):
        join_distributed(config)


def test_ranks_without_an_address_of_rank_0_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    srun(monkeypatch, 1, machines=2)
    with pytest.raises(UserError, match="E009"):
        join_distributed(tiny_run(tmp_path, "--global-batch-size 8", world_size=8))


def test_a_single_process_needs_no_address(tmp_path: Path) -> None:
    assert join_distributed(tiny_run(tmp_path)) == (0, 1)
    assert not torch.distributed.is_initialized()


def taken(folder: Path, ahead: bool, flags: str = "") -> list[object]:
    """Return what a run reads in each step: tokens, samples, the step that keys dropout, the digest."""
    trainer, printed = build_trainer(tiny_run(folder, flags), 0, 1), []
    while trainer.iteration < trainer.total_steps:
        size, batches = trainer.next_batch_size, trainer.next_batches()
        if ahead:
            trainer.prefetch()
        printed += [(b.tokens.tolist(), b.sample_ids.tolist(), b.step) for b in batches]
        printed.append(trainer.digest_read)
        trainer.iteration += 1
        trainer.consumed_samples += size
    assert trainer.prefetched is None
    return printed


@pytest.mark.parametrize("flags", ["", "--rampup-batch-size 2 1 6 --train-samples 20 --set training.train_iters=null"])
def test_reading_ahead_changes_nothing_that_is_read(flags: str, tmp_path: Path) -> None:
    assert taken(tmp_path, ahead=True, flags=flags) == taken(tmp_path, ahead=False, flags=flags)


def test_reading_ahead_is_timed(tmp_path: Path) -> None:
    """Otherwise slow data would not show in the time of the batch generator."""
    trainer = build_trainer(tiny_run(tmp_path), 0, 1)
    trainer.prefetch()
    assert trainer.timers.read(1)["batch-generator"] > 0.0


def test_an_error_while_prefetching_is_raised_at_the_step_that_needs_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_trainer(tiny_run(tmp_path), 0, 1)
    trainer.next_batches()
    before = trainer.digest_read
    refuse = DataError("sample 4 cannot be read")
    with monkeypatch.context() as patch:
        patch.setattr(type(trainer.data), "micro_batch", lambda *arguments: (_ for _ in ()).throw(refuse))
        trainer.prefetch()
        assert (trainer.prefetched, trainer.digest_read) == (None, before)
        with pytest.raises(DataError, match="sample 4"):
            trainer.next_batches()
