from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.arguments.cli import parse
from megatron.arguments.sources import to_yaml
from tests.kit.runs import FLAGS
from tools.lib.run_differences import Change, RunFolder, changed_facts, changed_options, compare_steps, read_run


def line(step: int, **changes: Any) -> dict[str, Any]:
    values = {"lm loss": 3.0 / step, "grad-norm": 1.0 / step, "samples-digest": f"{step:016x}", "batch-size": 4}
    consumed = {"consumed-samples": 4 * step, "consumed-tokens": 64 * step}
    return {"iteration": step, "skipped-iterations": [], **consumed, **values, **changes}


def run_of(*lines: dict[str, Any]) -> RunFolder:
    return RunFolder(Path("run"), lines={one["iteration"]: one for one in lines})


def folder(path: Path, lines: list[Any], flags: str = "", **files: str) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text(to_yaml(parse(f"{FLAGS} {flags}".split(), {}).config))
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


QUANTITIES = ("lm loss", "grad-norm", "consumed-samples", "batch-size", "skipped-iterations")


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(1, 12), st.data())
def test_one_changed_value_is_found_where_it_is(steps: int, data: st.DataObject) -> None:
    at, name = data.draw(st.integers(1, steps)), data.draw(st.sampled_from(QUANTITIES))
    other: Any = [at] if name == "skipped-iterations" else 99
    if name in ("lm loss", "grad-norm"):
        other = math.nextafter(line(at)[name], 9.0)
    a = run_of(*map(line, range(1, steps + 1)))
    b = run_of(*(line(i, **({name: other} if i == at else {})) for i in range(1, steps + 1)))
    found = compare_steps(a, b)
    assert (found.differs_at, found.before(at), found.before(None)) == (at, at - 1, steps)
    assert found.changes == (Change(name, line(at)[name], other),)
    assert (found.digests, found.digest_differs_at, compare_steps(a, a).differs_at) == (True, None, None)


def test_digests_of_samples_differ_by_themselves() -> None:
    a = run_of(*map(line, range(1, 5)))
    b = run_of(*(line(i, **({"samples-digest": "f"} if i > 2 else {})) for i in range(1, 5)))
    found = compare_steps(a, b)
    assert (found.differs_at, found.digest_differs_at, found.before(found.digest_differs_at)) == (None, 3, 2)
    assert not compare_steps(a, run_of(line(1), line(2, **{"samples-digest": None}))).digests


def test_a_tolerance_is_relative_and_not_for_samples() -> None:
    a, b = run_of(line(1)), run_of(line(1, **{"lm loss": 3.0 * (1 + 1e-6)}))
    assert compare_steps(a, b, 1e-5).differs_at is None
    assert compare_steps(a, b, 1e-7).differs_at == 1
    assert compare_steps(a, run_of(line(1, **{"batch-size": 5})), tolerance=10.0).differs_at == 1


def test_means_of_other_steps_are_not_compared() -> None:
    """A loss is the mean since the line before; the other values belong to one step."""
    every, second = run_of(*map(line, range(1, 5))), run_of(line(2, **{"lm loss": 9.0}), line(4, **{"lm loss": 9.0}))
    assert compare_steps(every, second).differs_at is None
    assert compare_steps(every, run_of(line(2), line(4, **{"grad-norm": 9.0}))).differs_at == 4


def test_a_loss_that_is_not_finite_is_one_in_both_or_differs() -> None:
    a, b = run_of(line(1, **{"lm loss": None})), run_of(line(1))
    assert compare_steps(a, a).differs_at is None
    assert compare_steps(a, b, tolerance=1.0).changes == (Change("lm loss", None, 3.0),)


def test_steps_discarded_by_a_restart_do_not_count(tmp_path: Path) -> None:
    lost = [line(3, **{"lm loss": 9.0}), line(4, **{"lm loss": 9.0})]
    again = [{"event": "start", "iteration": 2, "consumed-tokens": 64}, line(3)]
    path = folder(
        tmp_path / "a", [{"event": "start", "iteration": 0, "consumed-tokens": 0}, line(1), line(2), *lost, *again]
    )
    assert read_run(path).lines == {i: line(i) for i in (1, 2, 3)}


def test_lines_that_a_crash_cut_off_are_reported(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", [line(1), 3])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "lm lo')
    run = read_run(path)
    assert (list(run.lines), run.missing) == ([1], [f"{path / 'metrics.jsonl'}: 2 lines cannot be read"])


def test_changed_options_are_reported_with_their_role(tmp_path: Path) -> None:
    a = read_run(folder(tmp_path / "a", []))
    b = read_run(folder(tmp_path / "b", [], "--lr 2e-2 --exit-interval 3 --seed 7 --kernels torch"))
    assert changed_options(a, b) == [
        Change("--exit-interval", None, 3, counts=False, of_one_start=True),
        Change("--seed", 1234, 7),
        Change("--kernels", ("auto",), ("torch",), counts=False),
        Change("--lr", 0.01, 0.02),
    ]


def test_options_of_other_versions(tmp_path: Path) -> None:
    """An option that did not exist yet was as its default is now; one that is not known any more is compared."""
    paths = [folder(tmp_path / name, []) for name in "ab"]
    tree = yaml.safe_load((paths[1] / "config.yaml").read_text())
    del tree["compute"]["kernels"]
    (paths[1] / "config.yaml").write_text(yaml.safe_dump(tree | {"warp": {"warp_drive": True}}))
    assert changed_options(*map(read_run, paths)) == [Change("warp_drive", None, True)]


def test_facts_are_reported_and_do_not_count(tmp_path: Path) -> None:
    facts = [json.dumps({"git_commit": commit, "packages": {"torch": "2.13"}}) for commit in ("abc", "def")]
    a, b = (read_run(folder(tmp_path / name, [], environment_json=text)) for name, text in zip("ab", facts))
    assert changed_facts(a, b) == [Change("git_commit", "abc", "def", counts=False)]


@pytest.mark.parametrize(
    ("name", "text", "reported"),
    [
        ("config.yaml", None, "{} has no config.yaml"),
        ("config.yaml", "a: [", "{}/config.yaml cannot be read: while parsing a flow node"),
        ("config.yaml", "- 1", "{}/config.yaml cannot be read: "),
        ("metrics.jsonl", None, "{}/metrics.jsonl does not exist: "),
        ("environment.json", "{", "{}/environment.json cannot be read: "),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_reported(
    tmp_path: Path, name: str, text: str | None, reported: str
) -> None:
    path = folder(tmp_path / "a", [line(1)])
    (path / name).unlink(missing_ok=True)
    if text is not None:
        (path / name).write_text(text)
    (sentence,) = read_run(path).missing
    assert sentence.startswith(reported.format(path))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Change("lm loss", 1.0, 1.5), "lm loss: 1.0 | 1.5 (relative 3.3e-01)"),
        (Change("lm loss", None, 1.5), "lm loss: nothing | 1.5"),
        (Change("--seed", 1, 2), "--seed: 1 | 2"),
        (Change("uncommitted changes", "x\n" * 5, None), "uncommitted changes: 5 lines, 10 characters | nothing"),
    ],
)
def test_the_description_of_a_change(change: Change, text: str) -> None:
    assert str(change) == text
