from __future__ import annotations

from pathlib import Path

from megatron.training.loggers.run_folder import IncidentLogger


def test_a_person_reads_what_happened_when(tmp_path: Path) -> None:
    path = tmp_path / "incidents.md"
    at = {"time": 86400.0}
    first = IncidentLogger(path)
    first.event({"event": "start", "iteration": 0, "run-id": "abcd1234", "world-size": 8, **at})
    first.record({"iteration": 5, "skipped-iterations": [3, 5], **at})
    first.record({"iteration": 6, "skipped-iterations": [], **at})
    first.event({"event": "note", "iteration": 6, "text": "not an incident", **at})
    first.event({"event": "warning", "iteration": 6, "text": "the disk\nis full", **at})
    first.event({"event": "error", "iteration": 7, "text": "NonFiniteError: loss", **at})
    first.close(True)
    second = IncidentLogger(path)
    job = {"epoch": 3, "slurm-job": "17", "slurm-restart": 2, "nodes": "n[1-3]"}
    second.event({"event": "start", "iteration": 4, "run-id": "", "world-size": 1, **job, **at})
    second.event({"event": "stop", "iteration": 5, "text": "stopped by signal 15", **at})
    second.close(False)
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
