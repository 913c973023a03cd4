"""Tasks of lm-eval during training and by the command line: the same results in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.arguments.cli import parse
from megatron.config.run import RunConfig
from megatron.convert.huggingface.config import read_model_values
from megatron.evaluation.harness import language_model_class
from megatron.training.callbacks.evaluate_tasks import scalar_results
from tasks.evaluate import harness
from tests.distributed.test_generate import run_tool
from tests.kit.pool import Pool
from tests.kit.runs import records, start
from tests.unit.tasks.local_tasks import TASKS, write_tasks

SCORED = "choices rolling"
ALL = "choices rolling written"

Place = tuple[Path, Path, dict[str, float]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A model of transformers, tasks, and what the model achieves in them by one process."""
    from lm_eval import evaluate  # here, because every worker imports this module
    from lm_eval.tasks import TaskManager

    from tests.unit.tasks.models import save_transformers_model

    folder, tasks = tmp_path_factory.mktemp("llama"), write_tasks(tmp_path_factory.mktemp("tasks"))
    save_transformers_model("llama", folder)
    model = language_model_class().create_from_arg_obj({"load": f"hf:{folder}", "dtype": "fp64"}, {"batch_size": 1})
    loaded = TaskManager(include_path=tasks, include_defaults=False).load([*TASKS])
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
    results = evaluate(model, loaded, bootstrap_iters=0)
    return folder, tasks, scalar_results(results["results"])


def config_of(place: Place, run: Path, flags: str, tasks: str = ALL, ranks: int = 1) -> RunConfig:
    """A run that starts from the model, and learns so little that it stays the same."""
    folder, path, _ = place
    run_flags = (
        f"--load hf:{folder} --resume-mode weights-only --mock-data --device cpu --params-dtype fp64 --lr 1e-30 "
        f"--weight-decay 0 --seq-length 24 --train-iters 4 --micro-batch-size 2 --global-batch-size 4 --run-dir {run} "
        f"--evaluate-tasks {tasks} --evaluate-tasks-interval 2 --evaluate-tasks-path {path} {flags}"
    )
    environ = {"RANK": "0", "WORLD_SIZE": str(ranks)}
    return parse(run_flags.split(), environ, read_model=read_model_values).config


def check(run: Path, place: Place, tasks: str) -> None:
    expected = {name: x for name, x in place[2].items() if name.partition("/")[0] in tasks.split()}
    assert len(expected) == {SCORED: 5, ALL: 6}[tasks]
    lines = records(run, next(iter(expected)))
    assert [line["iteration"] for line in lines] == [2, 4]
    for line in lines:
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-10)


def test_tasks_are_evaluated_during_training(place: Place, tmp_path: Path) -> None:
    printed = start(config_of(place, tmp_path / "run", f"--tensorboard-dir {tmp_path}/board"))
    assert printed.status == 0, printed.err
    check(tmp_path / "run", place, ALL)
    assert f"tasks at 2: choices/acc {place[2]['choices/acc']:.4g} choices/acc_norm" in printed.out
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points = EventAccumulator(str(tmp_path / "board")).Reload().Scalars("written/exact_match")
    assert [point.step for point in points] == [2, 4]


def train(rank: int, ranks: int, config: RunConfig) -> tuple[int | None, str]:
    """Run on one rank; return the exit status and what is printed to stderr."""
    printed = start(config, rank=rank, world_size=ranks)
    return printed.status, printed.err


LAYOUTS = {
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", ALL),
    "zero3-dp2": (2, "--data-parallel-sharding-strategy optim_grads_params", ALL),
    "cp2": (2, "--context-parallel-size 2", ALL),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel", SCORED),
    "vpp": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", SCORED),
}
"""Ranks, flags and tasks."""


SHORT = ("zero3-dp2", "tp2-sp", "vpp")
"""On two ranks, each of which takes seconds to import lm-eval."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.slow) for n in LAYOUTS])
def test_every_layout_of_a_run_evaluates_like_one_process(pool: Pool, place: Place, tmp_path: Path, name: str) -> None:
    ranks, flags, tasks = LAYOUTS[name]
    config = config_of(place, tmp_path, flags, tasks, ranks)
    done = pool.run(ranks, train, config)
    assert [status for status, _ in done] == [0] * ranks, done
    check(tmp_path, place, tasks)


def test_unsupported_evaluation_tasks_are_refused_at_the_start(pool: Pool, place: Place, tmp_path: Path) -> None:
    config = config_of(place, tmp_path, "--tensor-model-parallel-size 2 --sequence-parallel", "written", 2)
    for status, error in pool.run(2, train, config):
        assert status == 2
        assert error.count("E709 --evaluate-tasks written generates text, without --sequence-parallel only") <= 1


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        pytest.param("nothing", "nothing: lm-eval has no such task", marks=pytest.mark.slow),  # reads all of its tasks
        ("broken", "the tasks cannot be loaded"),
    ],
)
def test_tasks_that_do_not_exist_or_load_are_refused(place: Place, tmp_path: Path, tasks: str, sentence: str) -> None:
    # Without a file, datasets searches the working directory.
    data = "dataset_path: json\ndataset_kwargs: {data_files: no.json}"
    (place[1] / "broken.yaml").write_text(f"task: broken\n{data}\noutput_type: loglikelihood\n")
    printed = start(config_of(place, tmp_path, "", tasks))
    (place[1] / "broken.yaml").unlink()
    assert printed.status == 2
    assert f"E709 --evaluate-tasks {tasks}" in printed.err
    assert sentence in printed.err
    assert "Traceback" not in printed.err


def run_harness(rank: int, ranks: int, flags: list[str]) -> tuple[int, str, str]:
    """lm-eval's command line on one rank, with the tasks in files only."""
    from lm_eval.tasks import TaskManager

    init = TaskManager.__init__
    local = {"include_defaults": False}
    with patch.object(TaskManager, "__init__", lambda self, *args, **named: init(self, *args, **named | local)):
        return run_tool(rank, ranks, flags, harness.main)


@pytest.mark.parametrize("sizes", [(1, 1), pytest.param((2, 2), marks=pytest.mark.slow)], ids=["dp2", "tp2-pp2"])
def test_the_command_line_on_several_ranks(pool: Pool, place: Place, tmp_path: Path, sizes: tuple[int, int]) -> None:
    folder, tasks, expected = place
    tp, pp = sizes
    ranks = max(2, tp * pp)
    arguments = f"load=hf:{folder},dtype=fp64,tensor_model_parallel_size={tp},pipeline_model_parallel_size={pp}"
    flags = f"--model_args {arguments} --tasks {','.join(TASKS)} --include_path {tasks} --batch_size 2 --device cpu"
    done = pool.run(ranks, run_harness, [*flags.split(), "--output_path", f"{tmp_path}/out.json"])
    assert [status for status, *_ in done] == [0] * ranks, done
    assert [bool(out) for _, out, _ in done] == [True] + [False] * (ranks - 1)
    (written,) = tmp_path.glob("out*.json")
    assert scalar_results(json.loads(written.read_text())["results"]) == pytest.approx(expected, rel=1e-10)
    wrong = [*flags.replace("--tasks choices", "--tasks missing").split()]
    for status, _, error in pool.run(ranks, run_harness, wrong):
        assert status == 2
        assert error.count("Tasks not found: missing") <= 1
