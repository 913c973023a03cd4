"""Measure training steps on one GPU beside `transformers`, in nine minutes, or run the tests of `tests/gpu`.

    python -m benchmarks.gpu                        # all cases, on a machine with a GPU
    python -m benchmarks.gpu --cases 1B-s2048 --minutes 4
    python -m benchmarks.gpu --tests                # the tests instead
    python -m benchmarks.gpu --rehearse             # tiny models, on a CPU

Every case compares our step, eager and at its fastest, with that of `transformers` at its fastest. The results go to
`gpu.json`, `gpu.md` and `gpu_profile_CASE.txt` in `--output`, after every case. A later run on the same machine adds to
them: what it does not measure again stays.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record

ROOT = Path(__file__).parents[1]
CASES = ("124M-s1024", "1B-s2048", "1B-s4096", "8B-shape-s8192")
SPEEDUP = 1.2
"""Goal: tokens per second, relative to the fastest `transformers`."""

CASE_SECONDS = 90.0
"""Seconds that a case needs for a comparison. Fewer cases are measured if time is short."""

GRACE = 20.0
"""Seconds after its time until a case is killed."""

PUBLISHED = {
    "8B-shape-s8192": "torchtitan publishes 6,667 tokens/s per GPU for all 32 layers (33% to 39% MFU): bf16, FSDP and "
    "torch.compile on 8 H100 (96 GB, 2.4 TB/s, 500 W), local batch 2, selective activation checkpointing, 2024-12 "
    "(github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md)"
}
"""Figures of others, measured elsewhere."""

Values = dict[str, Any]


def test(seconds: float, rehearse: bool, log: Path) -> str:
    """Run the tests for one GPU; return pytest's last line. ``log`` receives all output."""
    command = [sys.executable, "-m", "pytest", "-o", "minversion=8", "-m", "gpu", "-v", "--tb=short", "tests/gpu"]
    environment = os.environ | ({"REHEARSE": "1"} if rehearse else {})
    with log.open("w") as out:
        tests = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            tests.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(tests.pid, signal.SIGKILL)  # with the processes that tests have started
            tests.wait()
            return f"stopped after {seconds:.0f} s: see {log.name}"
    lines = log.read_text().strip().splitlines()
    return lines[-1].strip("= ") if lines else "no output"


def measure(case: str, seconds: float, rehearse: bool) -> Values:
    """Measure a case in its own process; return what it has written, also if it fails."""
    failure = None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "case.json")
        command = [sys.executable, "-m", "benchmarks.gpu_case", case, "--seconds", f"{seconds:.0f}", "--out", str(out)]
        command += ["--rehearse"] * rehearse
        try:
            ended = subprocess.run(command, cwd=ROOT, timeout=seconds + GRACE, check=False)
            failure = str(ended.returncode) if ended.returncode else None
        except subprocess.TimeoutExpired:
            failure = "out of time"
        found: Values = {"case": case}
        try:
            found |= json.loads(out.read_text()) if out.exists() else {}
        except ValueError as error:
            failure = f"{failure or 0}, and its results cannot be read: {error}"
    return found | ({"failure": failure} if failure else {})


def machine() -> dict[str, str]:
    """Return the GPU and versions."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "device": "cpu"}
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found


def standings(case: Mapping[str, Any]) -> dict[str, Values]:
    """Return the figures of each line of the table: of the alternating rounds if it took part, else of its trial."""
    trials = {trial["name"]: trial for trial in case.get("trials", ()) if trial["seconds"]}
    found = {}
    for line, setting in case.get("fastest", {}).items():
        measured = case.get("final", {}).get(line) or trials.get(setting)
        if measured is None:
            continue
        seconds = statistics.median(measured["seconds"])
        rate, peak = case["tokens"] / seconds, case["peak_flops"]
        found[line] = {
            "tokens/s": rate,
            "MFU": rate * case["flops_per_token"] / peak if peak else None,
            "causal": rate * case["flops_per_token_causal"] / peak if peak else None,
            "seconds": seconds,
            "GiB": measured["peak_bytes"] / 2**30,
            "setting": setting,
            "how": "alternating" if line in case.get("final", {}) else "alone",
        }
    return found


def verdict(case: Mapping[str, Any], found: Mapping[str, Values]) -> list[str]:
    """Return the goals, and whether they are met."""
    if "best" not in found:
        return []
    best, lines = found["best"], []
    if best["MFU"] is not None:
        lines.append(f"MFU {best['MFU']:.1%}, goal {case['goal']:.0%}: {_met(best['MFU'] >= case['goal'])}")
    ratios = {line: best["tokens/s"] / other["tokens/s"] for line, other in found.items()}
    if (ratio := ratios.get("transformers")) is not None:
        theirs = [trial["name"] for trial in case["trials"] if trial["implementation"] == "transformers"]
        compiled = any(name.endswith("compiled") for name in theirs)
        reached = _met(ratio >= SPEEDUP) if compiled else "open, as it was not measured compiled"
        lines.append(f"{ratio:.2f} times as fast as transformers, goal {SPEEDUP}: {reached}")
    if (ratio := ratios.get("transformers, fp32 weights")) is not None:
        lines.append(f"{ratio:.2f} times as fast as transformers with fp32 weights under autocast")
    return lines


def _met(yes: bool) -> str:
    return "met" if yes else "not met"


def table(case: Mapping[str, Any]) -> list[str]:
    """Return the Markdown of a case."""
    lines = ["", f"## {case['case']}"]
    if "failure" in case:
        lines += ["", f"The process failed ({case['failure']}). These are its results until then."]
    found = standings(case)
    rows = []
    for line, v in found.items():
        mfu = ["-" if v[name] is None else f"{v[name]:.1%}" for name in ("MFU", "causal")]
        cells = [f"{v['tokens/s']:,.0f}", *mfu, f"{1e3 * v['seconds']:.1f}", f"{v['GiB']:.1f}"]
        rows.append([line, *cells, v["how"], f"`{v['setting']}`"])
    lines += record.table(("", "tokens/s", "MFU", "causal", "ms a step", "GiB", "measured", "setting"), rows)
    notes = [*verdict(case, found), *([PUBLISHED[case["case"]]] if case["case"] in PUBLISHED else [])]
    lines += ["", *(f"* {note}" for note in [*notes, *case.get("notes", ())])]
    trials = []
    for trial in case.get("trials", ()):
        time_of = f"{1e3 * statistics.median(trial['seconds']):.1f}" if trial["seconds"] else trial["error"]
        trials.append([trial["implementation"], f"`{trial['name']}`", time_of, f"{trial['peak_bytes'] / 2**30:.1f}"])
    return [*lines, "", "All trials:", *record.table(("", "setting", "ms a step", "GiB"), trials)]


def write(folder: Path, results: Mapping[str, Any]) -> None:
    """Write the files of results."""
    for case in results["cases"]:
        if profiles := case.pop("profiles", None):
            shown = "\n\n".join(f"==== {line}: one step\n\n{text}" for line, text in profiles.items())
            (folder / f"gpu_profile_{case['case']}.txt").write_text(shown + "\n")
    part = folder / "gpu.json.part"
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(folder / "gpu.json")
    lines = [
        f"# One GPU{' (a rehearsal: the figures mean nothing)' if results['rehearsed'] else ''}",
        "",
        ", ".join(f"{key} {value}" for key, value in results["machine"].items()) + ".",
        "bf16, fused AdamW; a step is all its micro-batches and the update. Medians. MFU is 6N + 12Lhs over the dense",
        "peak of the data sheet; causal MFU leaves out masked scores. Ours has fp32 main parameters and gradients;",
        "transformers has bf16 weights, or fp32 weights under autocast. It runs eagerly, and with the whole model",
        "compiled by `torch.compile(model, dynamic=False)`, without `reduce-overhead`. All trials are listed.",
        "",
        f"Tests (`tests/gpu`): {results['tests']}",
        *(line for case in results["cases"] for line in table(case)),
    ]
    (folder / "gpu.md").write_text("\n".join(lines) + "\n")


def earlier(folder: Path, where: Mapping[str, str], rehearsed: bool) -> Values:
    """Return the results in a folder if they are of this machine, else empty ones."""
    new: Values = {"machine": dict(where), "rehearsed": rehearsed, "tests": "not run", "cases": []}
    try:
        results: Values = json.loads((folder / "gpu.json").read_text())
    except FileNotFoundError:
        return new
    except ValueError:
        results = {}
    if all(results.get(key) == new[key] for key in ("machine", "rehearsed")):
        return results
    print(f"the results in {folder} are of another machine, of a rehearsal, or unreadable: replaced", flush=True)
    return new


def measure_cases(names: Sequence[str], end: float, results: Values, args: argparse.Namespace) -> None:
    """Measure as many of the cases as fit, and write the results after each."""
    needed = 10.0 if args.rehearse else CASE_SECONDS
    for number, name in enumerate(names):
        left = end - time.monotonic()
        if left < needed:
            print(f"{name}: skipped, {left:.0f} s are too few; --cases {name} measures it alone", flush=True)
            continue
        seconds = max(needed, left / (len(names) - number)) - 5
        print(f"{name}: {seconds:.0f} s", flush=True)
        case = measure(name, seconds, args.rehearse)
        measured = {other["case"]: other for other in results["cases"]} | {name: case}
        results["cases"] = [measured[other] for other in CASES if other in measured]
        write(args.output, results)
        print(*(f"  {line}" for line in verdict(case, standings(case))), sep="\n", flush=True)


def main(argv: Sequence[str]) -> int:
    """Measure, or test, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--tests", action="store_true", help="run the tests instead")
    parser.add_argument("--output", type=Path, help="folder; default: $OUT, else benchmarks/results, or a new one")
    parser.add_argument("--rehearse", action="store_true", help="use tiny models, also without a GPU; in a new folder")
    args = parser.parse_args(argv)
    results_folder = tempfile.mkdtemp() if args.rehearse else Path(__file__).parent / "results"
    args.output = args.output or Path(os.environ.get("OUT") or results_folder)
    end, where = time.monotonic() + 60 * args.minutes - GRACE, machine()
    if where["device"] == "cpu" and not args.rehearse:
        print("there is no GPU here; --rehearse measures tiny models on a CPU", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    results = earlier(args.output, where, args.rehearse)
    if args.tests:
        results["tests"] = test(end - time.monotonic(), args.rehearse, args.output / "gpu_tests.txt")
        write(args.output, results)
    else:
        measure_cases(args.cases, end, results, args)
    print((args.output / "gpu.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
