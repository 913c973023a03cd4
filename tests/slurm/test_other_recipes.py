"""The recipes around training, with ``SMALL=1`` on a real Slurm: text to tokens, evaluation, a Hugging Face model."""

from __future__ import annotations

import json
import re

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from tests.slurm.cluster import ENDED, Cluster
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


@pytest.mark.parametrize("shape", [SMALL], indirect=True)
def test_a_checkpoint_is_evaluated_in_another_layout_and_converted(undisturbed: Training, cluster: Cluster) -> None:
    environ = {"SMALL": "1", "RUN": str(undisturbed.folder), "ITERS": "2", "RANKS_PER_NODE": "2"}
    evaluation = cluster.sbatch("--nodes=1", "slurm/evaluate.sh", environ=environ)
    conversion = cluster.sbatch("slurm/convert_to_hf.sh", "--no-check", environ=environ)
    assert cluster.wait(evaluation)["JobState"] == "COMPLETED"
    assert re.search(f"validation at {SMALL.steps}: loss", cluster.log(evaluation))
    assert cluster.wait(conversion)["JobState"] == "COMPLETED"
    assert json.loads((undisturbed.folder / "hf" / "config.json").read_text())["n_layer"] == 4
