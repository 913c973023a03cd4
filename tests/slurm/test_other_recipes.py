"""Other recipes on a real Slurm: text to tokens, evaluation, a Hugging Face model, elastic replicas."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.training.loggers.run_folder import METRICS_FILE, read_json_lines
from tests.slurm.cluster import ENDED, REPOSITORY, Cluster
from tests.slurm.training import SMALL, Training


@pytest.mark.slow  # a quarter of a minute of waiting for Slurm
def test_a_job_array_makes_the_parts_of_a_corpus_and_a_job_after_it_puts_them_together(cluster: Cluster) -> None:
    corpus, run = cluster.root / "texts", cluster.root / "tokens"
    (corpus / "more").mkdir(parents=True)
    texts = {f"{name}.md": f"This is page {name}.\n" for name in ("a", "b", "c", "more/a")}
    for name, text in texts.items():
        (corpus / name).write_text(text)
    environ = {"SMALL": "1", "RUN": str(run), "CORPUS": str(corpus)}
    # The job that merges is submitted by the array's first task: this is how its log gets out of the repository.
    environ["SBATCH_OUTPUT"] = str(cluster.root / "jobs" / "%j.log")
    cluster.sbatch("--array=0-1", "slurm/preprocess_array.sh", environ=environ)
    cluster.until(lambda: set(cluster.named("merge")) <= ENDED and bool(cluster.named("merge")), "the merge has ended")
    assert cluster.named("preprocess") + cluster.named("merge") == ["COMPLETED"] * 3
    tokens = IndexedDataset(run / "corpus_text_document")
    assert sorted(bytes(tokens[i][:-1].tolist()).decode() for i in range(len(tokens))) == sorted(texts.values())


@pytest.mark.slow  # half a minute
@pytest.mark.parametrize("shape", [SMALL], indirect=True)
def test_a_checkpoint_is_evaluated_in_another_layout_and_converted(undisturbed: Training, cluster: Cluster) -> None:
    environ = {"SMALL": "1", "RUN": str(undisturbed.folder), "ITERS": "2", "RANKS_PER_NODE": "2"}
    evaluation = cluster.sbatch("--nodes=1", "slurm/evaluate.sh", environ=environ)
    conversion = cluster.sbatch("slurm/convert_to_hf.sh", "--no-check", environ=environ)
    assert cluster.wait(evaluation)["JobState"] == "COMPLETED"
    assert re.search(f"validation at {SMALL.steps}: loss", cluster.log(evaluation))
    assert cluster.wait(conversion)["JobState"] == "COMPLETED"
    assert json.loads((undisturbed.folder / "hf" / "config.json").read_text())["n_layer"] == 4


TINY = (
    "--mock-data --vocab-size 31 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 8 "
    "--seq-length 8 --device cpu --lr 1e-3 --global-batch-size 6 --train-iters 100000"
)


@pytest.mark.slow  # a minute and a half, most of it to start replicas
def test_elastic_replicas_return_in_their_jobs_or_on_other_nodes(cluster: Cluster) -> None:
    """The script of docs/elastic.md, with replicas of one rank."""
    page = (REPOSITORY / "docs" / "elastic.md").read_text()
    (text,) = re.findall(r"```bash\n(#!/usr/bin/env bash\n#SBATCH.*?)```", page, re.DOTALL)
    run, script, server = cluster.root / "elastic", cluster.root / "elastic.sh", "198.18.0.1:29400"
    script.write_text(text)
    run.mkdir()
    (run / "secret").write_text("0123456789abcdef")
    host = f"python tools/diloco_server.py --host 198.18.0.1 --port 29400 --secret-file {run}/secret"
    cluster.login("bash", "-c", f"{host} >{run}/server.txt 2>&1 </dev/null &")
    small = ["--array=0-1", "--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0"]
    job = cluster.sbatch(*small, str(script), *TINY.split(), environ={"RUN": str(run), "SERVER": server})

    def lines(index: int) -> list[dict[str, Any]]:
        path = run / f"replica-{index}" / METRICS_FILE
        return [line for line in read_json_lines(path) if line] if path.exists() else []

    def step(index: int) -> int:
        return max((int(line["iteration"]) for line in lines(index) if "lm loss" in line), default=0)

    def returns(index: int) -> int:
        return sum(line.get("kind") == "replica-back" for line in lines(index))

    def node(index: int) -> str:
        return cluster.login("squeue", "--noheader", "--array", f"--jobs={job}_{index}", "--format=%N").strip()

    def goes_on_and_returns(index: int) -> None:
        other = 1 - index
        since, before = step(other), returns(other)
        cluster.until(lambda: step(other) > since + 20, "the other replica goes on")
        cluster.until(lambda: returns(other) > before, "it reports the return")

    cluster.until(lambda: min(step(0), step(1)) > 10, "both train")
    first = node(1)
    cluster.on(first, "kill", "-9", *map(str, cluster.processes(first, "python pretrain_gpt.py")))
    goes_on_and_returns(1)
    assert node(1) == first
    for index in (1, 0):
        lost = node(index)
        cluster.power_off(lost)
        goes_on_and_returns(index)
        assert node(index) != lost
