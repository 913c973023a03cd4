from __future__ import annotations

from pathlib import Path

from megatron.training.loggers.run_folder import IncidentLogger


def test_a_person_reads_what_happened_when(tmp_path: Path) -> None:
    path = tmp_path / "incidents.md"
    at = {"time": 86400.0}
    first = IncidentLogger(path)
    first.event(0, "start", {"run-id": "abcd1234", "world-size": 8, **at})
    first.log(5, {"skipped-iterations": [3, 5], **at})
    first.log(6, {"skipped-iterations": [], **at})
    first.event(6, "note", {"text": "not an incident", **at})
    first.event(6, "warning", {"text": "the disk\nis full", **at})
    first.event(7, "error", {"text": "NonFiniteError: loss", **at})
    first.close()
    second = IncidentLogger(path)
    job = {"epoch": 3, "slurm-job": "17", "slurm-restart": 2, "nodes": "n[1-3]"}
    second.event(4, "start", {"run-id": "", "world-size": 1, **job, **at})
    second.event(5, "stop", {"text": "stopped by signal 15", **at})
    second.close()
    lines = path.read_text().splitlines()
    ended = [lines.pop(4), lines.pop()]
    assert lines == [
        "- 1970-01-02 00:00:00 step 0: started on 8 ranks, run abcd1234",
        "- 1970-01-02 00:00:00 step 5: skipped the updates of steps 3, 5",
        "- 1970-01-02 00:00:00 step 6: warning: the disk is full",
        "- 1970-01-02 00:00:00 step 7: error: NonFiniteError: loss",
        "- 1970-01-02 00:00:00 step 4: started again on 1 rank, start 3 of this run, Slurm job 17 restart 2, on n[1-3]",
        "- 1970-01-02 00:00:00 step 5: stopped by signal 15",
    ]
    assert [line.partition(" step ")[2] for line in ended] == ["7: ended by an error", "5: ended in good order"]
