"""Everything to be known about this code on one GPU, in one command of nine minutes.

    python -m benchmarks.gpu                        # on a machine with a GPU
    python -m benchmarks.gpu --cases 1B-s2048 --skip-tests --minutes 4
    python -m benchmarks.gpu --cases                # the tests alone
    python -m benchmarks.gpu --rehearse             # in miniature, on a CPU

First the tests of `tests/gpu`; then, case by case, the speed of a training step, eager and at its best, beside that of
`transformers` at its best. What is found goes to `gpu.json`, `gpu.md` and `gpu_profile_CASE.txt` under `--output`,
after every case, so that a run that is ended keeps what it has. A later run on the same machine adds to it: what it
does not measure again stays.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES = ("124M-s1024", "1B-s2048", "1B-s4096", "8B-shape-s8192")
SPEEDUP = 1.2
"""Times as fast as `transformers` at its best: what is aimed at."""

TESTS_SECONDS = 120.0
"""For the tests, at most, where cases follow."""

CASE_SECONDS = 90.0
"""What a case needs for a verdict: rather fewer cases than none that has one."""

ALONE = "of time"
TESTS = {ALONE: ["tests/gpu/test_timers.py"], "others": ["tests/gpu", "--ignore=tests/gpu/test_timers.py"]}
"""Arguments for pytest, in this order."""

TEST_PROCESSES = 6
"""That share the GPU for the other tests."""

GRACE = 20.0
"""Seconds that a case may take beyond its share before it is ended."""

Values = dict[str, Any]


def test(seconds: float, rehearse: bool, log: Path) -> str:
    """Run the tests for one GPU; returns their summary, and leaves all of their output in ``log``.

    Those that measure time come first and alone; the others share the GPU.
    """
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "--show-capture=no"]
    environment = os.environ | ({"REHEARSE": "1"} if rehearse else {})
    end, summaries = time.monotonic() + seconds, []
    log.write_text("")
    for name, tests in TESTS.items():
        together: list[str] = []
        if name != ALONE and importlib.util.find_spec("xdist") is not None:
            together = ["-n", str(TEST_PROCESSES)]  # most of their time goes into compiling, on the host
            cores = str(max(1, (os.cpu_count() or 1) // TEST_PROCESSES))  # each would take all of them
            environment |= {"OMP_NUM_THREADS": cores, "TORCHINDUCTOR_COMPILE_THREADS": cores}
        summaries.append(f"{name}: {_tested([*command, *tests, *together], environment, end - time.monotonic(), log)}")
    return "; ".join(summaries)


def _tested(command: Sequence[str], environment: Mapping[str, str], seconds: float, log: Path) -> str:
    """Return the summary of a pytest run, or its last line after ``seconds``."""
    before = log.stat().st_size
    with log.open("a") as out:
        tests = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            tests.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            through = Counter(re.findall(r"\b(PASSED|FAILED|ERROR)\b", log.read_text()[before:]))
            counts = ", ".join(f"{count} {word.lower()}" for word, count in through.items()) or "none through"
            return f"ended after {seconds:.0f} s, by then {counts}: see {log.name}"
        finally:
            if tests.poll() is None:  # their workers, too, would share the GPU with what is measured next
                os.killpg(tests.pid, signal.SIGKILL)
                tests.wait()
    lines = log.read_text()[before:].strip().splitlines()
    return lines[-1].strip("= ") if lines else "no output"


def measure(case: str, seconds: float, rehearse: bool) -> Values:
    """Measure a case in a process of its own; return the results it has written by its end."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "case.json")
        command = [sys.executable, "-m", "benchmarks.gpu_case", case, "--seconds", f"{seconds:.0f}", "--out", str(out)]
        try:
            ended = subprocess.run(
                [*command, *["--rehearse"] * rehearse], cwd=ROOT, timeout=seconds + GRACE, check=False
            ).returncode
            failure = str(ended) if ended else None
        except subprocess.TimeoutExpired:
            failure = "ended: out of time"
        found: Values = {"case": case}
        try:
            found |= json.loads(out.read_text()) if out.exists() else {}
        except ValueError as error:
            failure = f"{failure or 0}, and its results cannot be read: {error}"
    return found | ({"failure": failure} if failure else {})


def machine() -> dict[str, str]:
    """Return the GPU, driver and library versions."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "device": "cpu"}
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found


def speed(case: Mapping[str, Any], seconds: Sequence[float], peak_bytes: int) -> Values:
    """Of a contestant: tokens per second, MFU by 6N + 12Lhs, seconds of a step and GiB."""
    step = statistics.median(seconds)
    rate = case["tokens"] / step
    mfu = rate * case["flops_per_token"] / case["peak_flops"] if case["peak_flops"] else None
    return {"tokens/s": rate, "MFU": mfu, "seconds": step, "GiB": peak_bytes / 2**30}


def standings(case: Mapping[str, Any]) -> dict[str, Values]:
    """Return the contestants of a case, from their turns or, for those without, from their trials."""
    trials = {trial["name"]: trial for trial in case.get("trials", ()) if trial["seconds"]}
    found = {}
    for name, setting in case.get("winners", {}).items():
        if name in case.get("final", {}):
            measured, how = case["final"][name], "in turns"
        elif setting in trials:
            measured, how = trials[setting], "alone"
        else:
            continue
        found[name] = speed(case, measured["seconds"], measured["peak_bytes"]) | {"setting": setting, "how": how}
    return found


def verdict(case: Mapping[str, Any], found: Mapping[str, Values]) -> list[str]:
    """Goals beside what was reached."""
    lines = []
    best, theirs = found.get("best"), found.get("transformers")
    if best and best["MFU"] is not None:
        lines.append(f"MFU {best['MFU']:.1%}, goal {case['goal']:.0%}: {_met(best['MFU'] >= case['goal'])}")
    if best and theirs:
        ratio = best["tokens/s"] / theirs["tokens/s"]
        rivals = [t for t in case["trials"] if t["whose"] == "transformers" and t["seconds"]]
        judged = any(t["name"].endswith("compiled") for t in rivals)
        reached = _met(ratio >= SPEEDUP) if judged else "open, as it was not measured compiled"
        lines.append(f"{ratio:.2f} times as fast as transformers, goal {SPEEDUP}: {reached}")
    if best and (alike := found.get("transformers, fp32 weights")):
        ratio = best["tokens/s"] / alike["tokens/s"]
        lines.append(f"{ratio:.2f} times as fast as transformers with fp32 weights under autocast")
    return lines


def _met(yes: bool) -> str:
    return "met" if yes else "not met"


def table(case: Mapping[str, Any]) -> list[str]:
    """Return a case as Markdown."""
    lines = ["", f"## {case['case']}", ""]
    if "failure" in case:
        lines += [f"The process ended with {case['failure']}; its results up to then follow.", ""]
    found = standings(case)
    lines += ["| | tokens/s | MFU | ms a step | GiB | measured | setting |", "|---|---|---|---|---|---|---|"]
    for name, v in found.items():
        mfu = f"{v['MFU']:.1%}" if v["MFU"] is not None else "-"
        figures = f"{v['tokens/s']:,.0f} | {mfu} | {1e3 * v['seconds']:.1f} | {v['GiB']:.1f}"
        lines.append(f"| {name} | {figures} | {v['how']} | `{v['setting']}` |")
    lines += ["", *(f"* {line}" for line in verdict(case, found)), *(f"* {note}" for note in case.get("notes", ()))]
    lines += ["", "All settings that were tried:", "", "| whose | setting | ms a step | GiB |", "|---|---|---|---|"]
    for trial in case.get("trials", ()):
        time_of = f"{1e3 * statistics.median(trial['seconds']):.1f}" if trial["seconds"] else trial["error"]
        lines.append(f"| {trial['whose']} | `{trial['name']}` | {time_of} | {trial['peak_bytes'] / 2**30:.1f} |")
    return lines


def write(folder: Path, results: Mapping[str, Any]) -> None:
    """Write the files of results."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in results["cases"]:
        if "profiles" in case:
            shown = "\n\n".join(f"==== {name}: one step\n\n{text}" for name, text in case["profiles"].items())
            (folder / f"gpu_profile_{case['case']}.txt").write_text(shown + "\n")
    kept = [{key: value for key, value in case.items() if key != "profiles"} for case in results["cases"]]
    part = folder / "gpu.json.part"
    part.write_text(json.dumps(dict(results) | {"cases": kept}, indent=1) + "\n")
    part.replace(folder / "gpu.json")
    rehearsed = " (a rehearsal in miniature: the figures mean nothing)" if results["rehearsed"] else ""
    lines = [
        f"# One GPU{rehearsed}",
        "",
        ", ".join(f"{key} {value}" for key, value in results["machine"].items()) + ".",
        "bf16, fused AdamW; a step is all its micro-batches and the update. Medians. MFU is 6N + 12Lhs over the dense",
        "peak of the data sheet. Ours keeps fp32 main parameters and gradients; transformers keeps bf16 weights, or",
        "fp32 weights under autocast. transformers runs eagerly and with the whole model compiled by",
        "`torch.compile(model, dynamic=False)`, without `reduce-overhead`; tables show the micro-batch sizes tried.",
        "",
        f"Tests (`tests/gpu`): {results['tests']}",
    ]
    lines += [line for case in results["cases"] for line in table(case)]
    (folder / "gpu.md").write_text("\n".join(lines) + "\n")


def earlier(folder: Path, where: Mapping[str, str], rehearsed: bool) -> Values:
    """Return the results of an earlier run in the folder if it was on the same machine, else empty results."""
    new: Values = {"machine": dict(where), "rehearsed": rehearsed, "tests": "left out", "cases": []}
    try:
        results: Values = json.loads((folder / "gpu.json").read_text())
    except FileNotFoundError:
        return new
    except ValueError:
        results = {}
    if all(results.get(key) == new[key] for key in ("machine", "rehearsed")):
        return results
    print(f"the results in {folder} are of another machine, a rehearsal, or unreadable, and are replaced", flush=True)
    return new


def main(argv: Sequence[str]) -> int:
    """Test, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder")
    parser.add_argument("--rehearse", action="store_true", help="in miniature, on a CPU; the figures mean nothing")
    args = parser.parse_args(argv)
    end = time.monotonic() + 60 * args.minutes - GRACE
    where = machine()
    if where["device"] == "cpu" and not args.rehearse:
        print("there is no GPU here; --rehearse runs everything in miniature on a CPU", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    results = earlier(args.output, where, args.rehearse)
    if not args.skip_tests:
        left = end - time.monotonic()
        log = args.output / "gpu_tests.txt"
        results["tests"] = test(min(left, TESTS_SECONDS) if args.cases else left, args.rehearse, log)
        print(f"tests: {results['tests']}", flush=True)
    for number, case in enumerate(args.cases):
        left, needed = end - time.monotonic(), 10.0 if args.rehearse else CASE_SECONDS
        if number and left < needed:
            print(f"{case}: left out, as {left:.0f} s are too few; --skip-tests --cases {case} measures it alone")
            continue
        fitting = max(1, min(len(args.cases) - number, int(left / needed)))
        seconds = max(10.0, left / fitting - 5)
        print(f"{case}: {seconds:.0f} s", flush=True)
        found = measure(case, seconds, args.rehearse)
        measured = {other["case"]: other for other in results["cases"]} | {case: found}
        results["cases"] = [measured[name] for name in CASES if name in measured]
        write(args.output, results)
        for line in verdict(found, standings(found)):
            print(f"  {line}", flush=True)
    write(args.output, results)
    print((args.output / "gpu.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
