"""The path of a step names no feature: features meet it at seams. The counts that are left may only fall."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from tools import trace_step

FEATURES = {
    "adapters": r"lora|dora|adapter",
    "quantised weights": r"quantiz|quantis",
    "FP8": r"fp8|float8",
    "offload": r"offload|on_host",
    "gradient compression": r"compress|powersgd|top_?k\b|int8",
    "DiLoCo": r"diloco|\bouter\b",
    "moving average": r"\bema\b|averaged",
    "Muon": r"muon",
    "context parallelism": r"\bcp\b|context_parallel",
    "experts": r"router|expert|\bmoe\b",
    "spikes and non-finite": r"spike|halted",
    "NEFTune": r"neftune",
    "multi-token prediction": r"mtp|multi_token|later_tokens",
}
"""Words of features, as regular expressions."""

CEILING = {
    "adapters": 0,
    "quantised weights": 0,
    "FP8": 0,
    "offload": 1,
    "gradient compression": 11,
    "DiLoCo": 2,
    "moving average": 3,
    "Muon": 0,
    "context parallelism": 13,
    "experts": 0,
    "spikes and non-finite": 5,
    "NEFTune": 3,
    "multi-token prediction": 0,
}
"""Lines of code on the path of a step that name a feature: lower a number when it falls."""

MAX_FILES = 39
"""Files that a step passes through, its log line included."""


def test_no_more_lines_of_the_step_name_a_feature() -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        status, trace = trace_step.trace_run([])
    assert status == 0
    files = {Path(code.co_filename) for code in trace.calls["step"]}
    assert len(files) <= MAX_FILES
    found = {}
    for feature, words in FEATURES.items():
        found[feature] = sum(bool(re.search(words, line, re.I)) for file in files for line in code_lines(file))
    assert found == CEILING, "a number that rose needs a seam; one that fell is the new ceiling"


def code_lines(file: Path) -> list[str]:
    """Return the lines of a module without docstrings and comments."""
    text = re.sub(r'"""(?:.|\n)*?"""', "", file.read_text())
    return [re.sub(r"#.*", "", line) for line in text.splitlines()]
