"""Environment variables that a run sets for CUDA, NCCL, gloo and Inductor."""

from __future__ import annotations

import pytest

from megatron.config.errors import UserError
from megatron.training.environment import ALLOCATOR, CONNECTIONS, default_variables, ranks_per_node, set_variables
from tests.unit.arguments.command import run

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SHORT = "--hidden-dropout 0 --attention-dropout 0"


@pytest.mark.parametrize(
    ("flags", "ranks", "queues", "segments"),
    [
        (SHORT, 1, "32", False),
        (f"{SHORT} --cuda-graph none", 1, "32", True),
        ("--hidden-dropout 0.1", 1, "32", True),
        (TP2, 2, "1", True),
        (f"{TP2} {SHORT}", 2, "1", False),
        (PP2, 2, "32", True),
        (f"{TP2} {PP2}", 4, "32", True),
    ],
)
def test_defaults_follow_the_layout_and_the_graphs(flags: str, ranks: int, queues: str, segments: bool) -> None:
    found = default_variables(run(flags, ranks).config, ranks, {}, 16, cuda=True)
    assert found[CONNECTIONS] == queues
    assert (found.get(ALLOCATOR[0]) == "expandable_segments:True") is segments
    assert found["NCCL_GRAPH_REGISTER"] == "0"
    assert "TORCH_GLOO_LAZY_INIT" not in found


def test_a_config_file_counts_as_flags_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("config") / "pp.yaml"
    file.write_text("parallel:\n  tensor_model_parallel_size: 2\n  pipeline_model_parallel_size: 2\n")
    assert default_variables(run(f"--config {file}", 4).config, 4, {}, 16, cuda=True)[CONNECTIONS] == "32"


def test_existing_variables_are_kept() -> None:
    config = run("").config
    environ = {CONNECTIONS: "8", "PYTORCH_CUDA_ALLOC_CONF": "", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8" in set_variables(config, True, environ)
    assert environ == {**environ, CONNECTIONS: "8", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    assert ALLOCATOR[0] not in environ


def test_a_pipeline_with_one_queue_is_refused() -> None:
    config = run(PP2, 2).config
    with pytest.raises(UserError, match="E916 CUDA_DEVICE_MAX_CONNECTIONS=1 cannot"):
        set_variables(config, True, {CONNECTIONS: "1"})
    assert set_variables(config, False, {CONNECTIONS: "1"})
    assert set_variables(run(TP2, 2).config, True, {CONNECTIONS: "1"})


@pytest.mark.parametrize(("ranks", "lazy"), [(1, False), (64, False), (65, True), (1024, True)])
@pytest.mark.parametrize("cuda", [False, True])
def test_gloo_connects_every_pair_of_few_ranks_only(ranks: int, lazy: bool, cuda: bool) -> None:
    found = default_variables(run("").config, ranks, {}, 16, cuda)
    assert (found.get("TORCH_GLOO_LAZY_INIT") == "1") is lazy


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_NTASKS": "20", "SLURM_LOCALID": "1", "MASTER_ADDR": "n1"}


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}, 8),
        (SRUN, 2),
    ],
)
def test_cores_are_divided_among_the_ranks_of_a_node(environ: dict[str, str], ranks: int) -> None:
    assert ranks_per_node(environ) == ranks
    threads = default_variables(run("").config, 1, environ, 100, cuda=True)["TORCHINDUCTOR_COMPILE_THREADS"]
    assert threads == str(min(32, 100 // ranks))
