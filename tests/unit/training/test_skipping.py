"""Runs that skip samples, documents and steps: killed and resumed, with more to skip, and as the tool shows them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.checkpoint.format import Manifest
from megatron.config.errors import UserError
from megatron.data.document_finder import DocumentFinder
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.skipped_dataset import SampleSkips
from megatron.training.loggers.run_folder import HistoryPoint
from tests.kit.runs import (
    FLAGS,
    Outcome,
    before_step,
    checkpoint,
    differences,
    kill,
    records,
    start,
    steps,
    tiny_phases,
    tiny_run,
)
from tests.unit.checkpoint.samples import forge
from tools import inspect_dataset
from tools.lib.run_differences import open_samples, read_run
from tools.lib.run_samples import RunSamples
from tools.lib.spikes import find_spikes, tail_probability

SAVES = "--micro-batch-size 2 --save-interval 2"


def corpora(folder: Path) -> tuple[str, str]:
    """Write two datasets; return their prefixes."""
    random = np.random.default_rng(2)
    for name in ("wiki", "code"):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for length in random.integers(1, 12, 60):
                writer.add_document(random.integers(0, 31, length).tolist())
    return str(folder / "wiki"), str(folder / "code")


def flags_of(folder: Path, more: str = "") -> str:
    wiki, code = corpora(folder)
    return f"--set data.mock_data=false --data-path 0.7 {wiki} 0.3 {code} --split 1 {SAVES} {more}"


def read(*outcomes: Outcome) -> list[tuple[int, ...]]:
    """The samples that a run has read, in order."""
    by_step = {step: samples for outcome in outcomes for step, samples in outcome.samples.items()}
    return [tokens for step in sorted(by_step) for _, tokens in sorted(by_step[step])]


def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    skips = f"--skip-samples 2:5 9:10 --skip-documents {tmp_path}/wiki:7 --iterations-to-skip 3"
    flags = flags_of(tmp_path, skips)
    whole, parts = (tiny_run(tmp_path / name, f"{flags} --save {tmp_path / name}/s") for name in ("whole", "parts"))
    straight = start(whole)
    killed, again = start(parts, before_step(6, kill)), start(parts)
    assert [straight.status, killed.status, again.status] == [0, None, 0]
    assert {**killed.samples, **again.samples} == straight.samples
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    assert differences(tmp_path / "parts/s/iter_0000006", tmp_path / "whole/s/iter_0000006") == []


def test_a_step_that_is_passed_over_consumes_its_samples_and_changes_nothing_else(tmp_path: Path) -> None:
    """Megatron-LM's numbers count from 1; the log has no line of the step alone."""
    flags = flags_of(tmp_path, "--save-interval 1 --skip-spikes 99 --spike-window 4 --eval-iters 1 --eval-interval 1")
    flags += " --log-health-interval 3"
    plain = start(tiny_run(tmp_path / "plain", flags.replace("--split 1", "--split 8,2")))
    passed = tiny_run(
        tmp_path / "run", f"{flags.replace('--split 1', '--split 8,2')} --iterations-to-skip 3 6 --save {tmp_path}/s"
    )
    outcome = start(passed)
    assert (plain.status, outcome.status) == (0, 0)
    assert outcome.samples == {step: samples for step, samples in plain.samples.items() if step not in (3, 6)}
    for step in (3, 6):
        (before, then), (after, now) = (checkpoint(tmp_path / f"s/iter_{n:07d}") for n in (step - 1, step))
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name].numpy(), after[name].numpy()) for name in before)
        assert now["consumed_samples"] == then["consumed_samples"] + 4
        assert now["spikes"] == then["spikes"]
    assert not [line for line in records(tmp_path / "run", "iteration") if any(n.startswith("health/") for n in line)]
    lines = {line["iteration"]: line for line in records(tmp_path / "run")}
    assert sorted(lines) == [1, 2, 4, 5]
    assert lines[4]["skipped-iterations"] == [3]
    digests = [
        {line["iteration"]: line["samples-digest"] for line in records(tmp_path / name)} for name in ("run", "plain")
    ]
    assert digests[0].items() <= digests[1].items()
    valid = [line["lm loss validation"] for line in records(tmp_path / "run", "lm loss validation")]
    assert (valid[2], valid[5]) == (valid[1], valid[4])


def test_a_resumed_run_skips_more_of_what_lies_ahead(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = flags_of(tmp_path, f"--save {folder}/s")
    first = start(tiny_run(folder, f"{flags} --skip-samples 1:3 --exit-interval 4"))
    assert Manifest.open(folder / "s/iter_0000004").state["data"]["stretches"]["skipped"] == [1, 3]
    refused = start(tiny_run(folder, f"{flags} --skip-samples 1:3 10:20"))
    assert refused.status == 2
    assert "E542 the samples 10:18 to skip have been consumed: this start continues at 18" in refused.err
    assert "--skip-samples 18:20" in refused.err
    again = start(tiny_run(folder, f"{flags} --skip-samples 18:21"))  # what was skipped stays so
    assert open_samples(read_run(folder)).skipped.to_list() == [1, 3, 18, 21]
    assert "skips 5 of the first 29 training samples, 3 of them ahead" in again.out
    plain = read(start(tiny_run(tmp_path / "plain", f"{flags.split(' --save ')[0]} --train-iters 8")))
    assert read(first, again) == [plain[place] for place in range(29) if place not in (1, 2, 18, 19, 20)]


def test_a_changed_record_of_skipped_places_is_noticed(tmp_path: Path) -> None:
    flags = flags_of(tmp_path, f"--save {tmp_path}/run/s --skip-samples 1:3")
    start(tiny_run(tmp_path / "run", f"{flags} --exit-interval 4"))
    forge(tmp_path / "run/s/iter_0000004", lambda content: content.replace(b'"skipped":[1,3]', b'"skipped":[2,4]'))
    again = start(tiny_run(tmp_path / "run", flags.replace("--skip-samples 1:3", "")))
    assert again.status == 2
    assert "E815" in again.err


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert inspect_dataset.main(["--json", *argv]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def check_readers(folder: Path, last: int) -> None:
    """Compare the steps that read each document with the samples of each step."""
    run, finder, expected = RunSamples.of_folder(folder), DocumentFinder(0), dict[tuple[str, int], set[int]]()
    for step in range(1, last + 1):
        found = run.at(step)
        for span in (span for i in found.numbers() for span in found.source.datasets["train"].spans(i) if span.tokens):
            expected.setdefault((span.source, finder.document(span)), set()).add(step)
    assert len(expected) > 5
    assert run.steps_that_read(expected, last) == expected
    one = min(expected)
    assert run.steps_that_read([one], last) == {one: expected[one]}


def test_the_tool_shows_what_each_step_has_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also in a run that was resumed with more to skip, of which an earlier start was not aware."""
    folder = tmp_path / "run"
    flags = flags_of(tmp_path, f"--save {folder}/s --rampup-batch-size 2 2 6 --global-batch-size 4 --log-interval 2")
    first = start(tiny_run(folder, f"{flags} --skip-samples 1:3 --exit-interval 4"))
    again = start(tiny_run(folder, f"{flags} --skip-samples 1:3 20:21"))
    files = {prefix: IndexedDataset(prefix) for prefix in (f"{tmp_path}/wiki", f"{tmp_path}/code")}
    for step, samples in {**first.samples, **again.samples}.items():
        found = shown(capsys, "--run", str(folder), "--step", str(step), "--tokens", "99")
        assert [facts["sample"] for facts in found] == [number for number, _ in samples]
        for facts, (_, tokens) in zip(found, samples):
            assert [i for part in facts["documents"] for i in part["ids"]][:-1] == [*tokens]  # without the last label
            for part in facts["documents"]:
                document = files[part["source"]].get(part["document"])  # a sequence each
                assert part["ids"] == document[part["first"] : part["first"] + part["tokens"]].tolist()
                assert part["of"] == len(document)
        assert {facts["checked"] for facts in found} == {True}
        assert [facts["micro_batch"] for facts in found] == [i // 2 for i in range(len(samples))]
    check_readers(folder, len(first.samples) + len(again.samples))
    # from the flags of a run that has not started
    (facts,) = shown(capsys, "--step", "1", "--samples", "1", "--", *f"{FLAGS} {flags}".split())
    assert facts["place"] == 1
    assert not facts["checked"]


def test_the_tool_shows_the_steps_of_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second phase has its own data, with places of their own; the third continues to read them."""
    folder = tmp_path / "run"
    flags = flags_of(tmp_path, "--position-embedding-type rope --max-position-embeddings 16").split()
    long = {"seq_length": 16, "skip_samples": ["1:3"]}
    phases: list[dict[str, Any]] = [
        {"name": "main", "tokens": 64},
        {"name": "long", "tokens": 128, **long},
        {"name": "end", "tokens": 64, **long, "lr": 1e-3},
    ]
    outcome = start(tiny_phases(folder, phases, " ".join([*flags, "--skip-samples", "end/11:12"])))
    assert (outcome.status, sorted(outcome.samples)) == (0, [1, 2, 3, 4, 5])
    for words, said in {
        "1:3": "E340 --skip-samples with --phases: .* --skip-samples end/A:B",
        "mid/1:3": "E340 --skip-samples names the phase mid, and .* has main, long, end",
    }.items():
        with pytest.raises(UserError, match=f"(?s){said}"):
            tiny_phases(folder, phases, " ".join([*flags, "--skip-samples", words]))
    places = []
    for step, samples in outcome.samples.items():
        found = shown(capsys, "--run", str(folder), "--step", str(step), "--tokens", "99")
        assert [facts["sample"] for facts in found] == [number for number, _ in samples]
        for facts, (_, tokens) in zip(found, samples):
            assert [i for part in facts["documents"] for i in part["ids"]][:-1] == [*tokens]
            assert facts["checked"]
        places += [facts["place"] for facts in found]
    assert places == [*range(8), 0, *range(3, 11), *range(12, 15)]
    check_readers(folder, 5)
    # the file of places of a step holds in its phase, in which more is skipped, and not in the others
    file = tmp_path / "bad.txt"
    assert inspect_dataset.main(["--run", str(folder), "--step", "3", "--exclude", str(file)]) == 0
    assert f"--skip-samples end/11:12 end/1:3 @{file}" in capsys.readouterr().err
    again = tiny_phases(folder, phases, " ".join([*flags, "--skip-samples", f"@{file}", "end/20:21"]))
    skipped = [[*SampleSkips(phase.config.data, 16, phase=phase.name).ranges] for phase in again]
    assert skipped == [[], [(0, 6)], [(1, 3), (20, 21)]]


def test_the_tool_refuses_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = flags_of(tmp_path)
    start(tiny_run(tmp_path / "run", flags))
    for end in ("bin", "idx"):
        (tmp_path / f"wiki.{end}").write_bytes((tmp_path / f"code.{end}").read_bytes())
    assert inspect_dataset.main(["--run", str(tmp_path / "run"), "--step", "2"]) == 1
    assert "the training data are not those that the run has read before step 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--step 1", "give either --run RUN_DIR or, after --, the flags of a run"),
        ("--run absent --step 1", "absent is not the folder of a run"),
        ("--run absent", "give the steps to show, or --spike"),
        ("--spike -- --mock-data", "--spike needs the log of a run"),
        ("--run absent --spike --window 0", "--window at least 1"),
    ],
)
def test_wrong_flags_of_the_tool(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_dataset.main(flags.split()) in (1, 2)
    assert said in capsys.readouterr().err


# ---- Spikes


def line(iteration: int, loss: float | None, norm: float = 1.0) -> HistoryPoint:
    return HistoryPoint("training", iteration, {"lm loss": loss, "grad-norm": norm})


def test_spikes_by_the_robust_score() -> None:
    """With the median 3 and a median deviation of 0.1, z = (x - 3) / 0.14826."""
    lines = [line(n, 3 + (n % 5 - 2) / 10) for n in range(1, 21)]
    assert find_spikes(lines, 6, 64) == []
    lines += [line(21, 3.9), line(22, 4.5), line(23, 3.95), line(24, 3.0), line(25, None), line(26, 3.0)]
    lines += [line(27, 3.0, norm=1.01)]
    first, second, third = find_spikes(lines, 6, 64)
    assert (first.first, first.peak, first.last) == (21, 22, 23)
    assert first.scores["lm loss"] == pytest.approx(1.5 / 0.14826, rel=1e-6)
    assert (second.first, second.peak, second.scores["lm loss"]) == (25, 25, float("inf"))
    assert (third.first, third.scores["grad-norm"]) == (27, pytest.approx(10.0))  # at least 0.1 % of the median
    assert [spike.first for spike in find_spikes(lines, 6.1, 64)] == [22, 25, 27]


def test_the_chance_of_spikes_by_counting_all_outcomes() -> None:
    """Of 5 steps that read a document, at least k are among 3 of 10 steps."""
    outcomes = [sum(step < 3 for step in steps) for steps in itertools.product(range(10), repeat=5)]
    for k in range(7):
        assert tail_probability(k, 5, 0.3) == pytest.approx(sum(n >= k for n in outcomes) / 10**5, rel=1e-12)
    assert tail_probability(2, 2, 1.0) == 1
    assert tail_probability(3000, 6000, 0.5) == pytest.approx(0.505, abs=1e-3)


@pytest.mark.slow
def test_the_samples_of_a_bad_document_are_excluded_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All documents count upwards; one counts downwards."""
    with IndexedDatasetWriter(tmp_path / "up", np.uint16) as writer:
        for document in range(60):
            ids = np.arange(document, document + 62) % 31
            writer.add_document((ids[::-1] if document == 33 else ids).tolist())
    folder = tmp_path / "run"
    flags = (
        f"--set data.mock_data=false --data-path {tmp_path}/up --split 1 --micro-batch-size 4 "
        f"--train-iters 100 --lr 2e-2 --lr-decay-style constant --save {folder}/s --save-interval 10"
    )
    assert start(tiny_run(folder, flags)).status == 0
    run = RunSamples.of_folder(folder)
    held = run.starts[0].open().datasets["train"].places_of({f"{tmp_path}/up": np.array([33])})
    tool = ["--run", str(folder), "--spike", "--window", "16", "--deviations", "8"]
    spikes = shown(capsys, *tool)
    heights = [max(spike["scores"].values()) for spike in spikes]
    assert heights == sorted(heights, reverse=True)
    assert sorted(spike["first"] for spike in spikes) == [
        step for step in sorted({*(held // 4 + 1).tolist()}) if 50 < step <= 100
    ]
    assert inspect_dataset.main([*tool, "--exclude", f"{tmp_path}/bad.txt"]) == 0
    printed = capsys.readouterr()
    bad = f"{tmp_path}/up:33"
    steps_of = {*(held // 4 + 1).tolist()} & {*range(1, 101)}
    found = f"document {bad}: {len(spikes)} of the {len(steps_of)} steps that read it are spikes (by chance "
    assert found in printed.out.splitlines()[len(spikes)]
    assert f"leave it out with --skip-documents {bad}" in printed.out
    assert "to go on from step 80 without them" in printed.err
    command = printed.err.splitlines()[-1]
    again = start(tiny_run(Path(f"{folder}-skip1"), f"{flags} {command[command.index(' --load') :]}"))
    assert again.status == 0
    assert f"resumed from {folder}/s/iter_0000080" in again.out
    losses = {record["iteration"]: record["lm loss"] for record in records(Path(f"{folder}-skip1"))}
    assert min(spike["values"]["lm loss"] for spike in spikes) > 2.5
    assert max(losses.values()) < 1.5
