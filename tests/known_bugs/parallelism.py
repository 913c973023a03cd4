"""Bugs of gradients, losses and random numbers on several ranks."""

from __future__ import annotations

from tests.distributed import detect, faults
from tests.known_bugs.bug import KnownBug

BUGS = {
    "row-parallel-bias": KnownBug(
        reports=("a placeholder until the first report is entered",),
        kind="Tensor parallelism",
        bug="the bias of a row-parallel linear was added on each rank before the sum",
        check="two ranks with TP 2 against one process: loss, norm, every gradient and weight",
        detector=detect.DETECTORS["tp2"],
        plant=faults.bias_added_by_every_rank,
    ),
}
