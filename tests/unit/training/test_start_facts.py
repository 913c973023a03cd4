from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

from megatron.training.startup import MAX_NODE_LIST_CHARS, start_facts, start_phrase
from tests.runs import records, start, tiny_run

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_STEP_NODELIST": "node[1-3]",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "17", "TORCHELASTIC_RESTART_COUNT": "1"}


def test_a_start_by_hand_has_nothing_to_say() -> None:
    assert start_facts({}, None) == {}
    assert start_phrase({}) == ""
    assert start_phrase(start_facts({}, 1)) == "start 1 of this run"


def test_the_nodes_are_those_that_the_step_runs_on() -> None:
    facts = start_facts(SLURM | TORCHRUN, 7)
    assert facts == {
        "epoch": 7,
        "slurm-job": "17",
        "slurm-restart": 2,
        "torchrun-run": "17",
        "torchrun-restart": 1,
        "nodes": "node[1-3]",
    }
    assert start_phrase(facts) == "start 7 of this run, Slurm job 17 restart 2, torchrun restart 1, on node[1-3]"


def test_the_first_start_of_a_job_counts_no_restart() -> None:
    assert start_phrase(start_facts({"SLURM_JOB_ID": "17"}, None)) == "Slurm job 17 restart 0"
    assert "torchrun-restart" not in start_facts(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0"}, None)


def test_a_long_list_of_nodes_is_cut_short_in_sentences_only() -> None:
    nodes = "node[" + ",".join(str(number) for number in range(1, 200, 2)) + "]"
    facts = start_facts(SLURM | {"SLURM_STEP_NODELIST": nodes}, None)
    assert facts["nodes"] == nodes
    assert len(start_phrase(facts).partition(" on ")[2]) == MAX_NODE_LIST_CHARS


def test_the_first_line_and_the_records_name_the_job(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, f"--save {tmp_path}/saved")
    with patch.dict(os.environ, SLURM):
        printed = start(config)
    assert printed.out.splitlines()[0] == "start 1 of this run, Slurm job 17 restart 2, on node[1-3]"
    (event,) = [record for record in records(tmp_path, "event") if record["event"] == "start"]
    assert (event["slurm-job"], event["epoch"]) == ("17", 1)
    assert "Slurm job 17 restart 2" in (tmp_path / "incidents.md").read_text().splitlines()[0]
