"""The command line that looks into checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import MANIFEST, MARKER
from megatron.checkpoint.object_store import RemotePath
from megatron.checkpoint.save import save_sharded
from tests.unit.checkpoint.samples import ALONE, Sample, all_of, files_of, forge, partition, save, small
from tools.inspect_checkpoint import main

ROOT = Path(__file__).parents[3]


@pytest.fixture
def runs(tmp_path: Path) -> CheckpointFolder:
    found = CheckpointFolder(tmp_path)
    for iteration in (1, 2):
        save(found.path(iteration), small(), iteration=iteration)
    return found


def test_ls(runs: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (runs.path(2) / MARKER).unlink()
    assert main(["ls", str(runs.folder)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:4] == ["iter_0000002", "step", "2", "-"]
    assert first.endswith("ago  has no COMPLETE: it is not a checkpoint, or its save was interrupted")
    assert second.split()[:5] == ["iter_0000001", "step", "1", "1.13", "KiB"]
    assert second.endswith("s ago  complete")


def test_verify(runs: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(runs.path(2))]) == 0
    assert capsys.readouterr().out == f"{runs.path(2)}: 1.13 KiB in 2 files, as they were written\n"
    path = files_of(runs.path(2)) / "tensors_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(runs.path(2))]) == 1
    out = capsys.readouterr().out
    assert out == f"{runs.path(2)}: damaged\n  {path.name} has flipped bytes (tensor optim.exp_avg.a)\n"
    assert main(["ls", str(runs.folder)]) == 0  # which looks at no more than their length
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["complete"] * 2
    assert main(["verify", str(runs.folder)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{runs.path(1)}: 1.13 KiB")
    (runs.path(1) / MARKER).unlink()
    assert main(["verify", str(runs.path(1))]) == 1


@pytest.mark.parametrize(
    ("command", "path", "sentence"),
    [
        ("ls", "none", "{} does not exist"),
        ("show", "none", "{} does not exist"),
        ("verify", "", "{} does not hold a checkpoint"),
        ("ls", "iter_0000001", "{0} is a checkpoint itself\n  fix: show {0}"),
    ],
)
def test_unsupported_paths_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, path: str, sentence: str
) -> None:
    if path == "iter_0000001":
        save(tmp_path / path, small())
    assert main([command, str(tmp_path / path)]) == 2
    assert capsys.readouterr() == ("", f"inspect_checkpoint: {sentence.format(tmp_path / path)}\n")


def test_leftovers_are_no_damage(runs: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    left = runs.folder / "iter_0000003.tmp"
    (left / "tokenizer").mkdir(parents=True)
    assert main(["verify", str(runs.folder)]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"{left}: left over from a save or a removal that was cut off"
    assert len(others) == 2
    save(runs.path(2), small())
    (runs.path(2) / "attempt-0" / "x").mkdir(parents=True)
    assert main(["verify", str(runs.folder)]) == 0
    assert f"{runs.path(2)}/attempt-0: left over from" in capsys.readouterr().out


def test_a_newer_version_is_not_called_damaged(runs: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    forge(runs.path(2), lambda text: text.replace(b'"version":1', b'"version":2'))
    assert main(["verify", str(runs.folder)]) == 2
    out = capsys.readouterr().out
    assert "damaged" not in out
    assert "written by a newer version" in out
    assert out.endswith("as they were written\n")


def test_show(runs: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(runs.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"{runs.path(2)}: version 1, 1.13 KiB",
        "  a  F32 [24, 5] viewed as [2, 12, 5], 1 chunk",
    ]
    assert "  iteration = 2" in lines
    assert "  model.hidden_size = 5" in lines


def test_show_reports_skipped_checkpoints(runs: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (runs.path(2) / MARKER).unlink()
    assert main(["show", str(runs.folder)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{runs.path(1)}: version 1")
    assert err.startswith(f"passed over {runs.path(2)}: has no COMPLETE")


def test_show_values(runs: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(runs.path(1)), "opt*"]) == 0
    assert capsys.readouterr().out == "optim.exp_avg.a  F32 [24, 5]  min -119  max -0  rms 68.8489\n"
    for pattern, fix in {"b*": f"show {runs.path(1)}, which", "exp_avg": "names match as a whole: '*exp_avg*'"}.items():
        assert main(["show", str(runs.path(1)), pattern]) == 2
        assert f"no tensor that matches {pattern}\n  fix: {fix}" in capsys.readouterr().err


def test_diff(runs: CheckpointFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import random

    one, other = str(runs.path(1)), tmp_path / "other"
    save(tmp_path / "same", small(), iteration=1)
    assert main(["diff", one, str(tmp_path / "same")]) == 0
    assert capsys.readouterr().out == "2 of 2 tensors identical to the bit\n"
    changed = small() | {"b": Sample(torch.ones(3), (3,))}
    changed["a"].tensor[3, 4] += 0.5
    parts = partition((2, 12, 5), random.Random(1), 7)
    save_sharded(
        other, all_of(changed) | {"a": changed["a"].entry(parts)}, {"iteration": 1, "x": [1]}, {"model": {}}, ALONE
    )
    assert main(["diff", one, str(other)]) == 1
    relative = 0.5 / sum(i * i for i in range(120)) ** 0.5
    assert capsys.readouterr().out.splitlines() == [
        "option model: (none) | {}",
        "option model.hidden_size: 5 | (none)",
        "state x: (none) | [1]",
        f"tensor a: max abs 0.5, relative {relative:.3g}",
        f"tensor b: only in {other}",
        "1 of 3 tensors identical to the bit",
    ]


def test_settings_of_one_start_do_not_count_as_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr in {"a": 0.1, "b": 0.1, "c": 0.2}.items():
        config = {"checkpoint": {"save": name}, "logging": {"run_dir": name}, "optimizer": {"lr": lr}}
        state = {"iteration": 1, "run_id": name, "goodput": {"starts": 1 if name == "a" else 2}}
        save_sharded(tmp_path / name, all_of(small()), state, config, ALONE)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        'option checkpoint.save: "a" | "b" (of one start; not counted)',
        'option logging.run_dir: "a" | "b" (of one start; not counted)',
        "state goodput.starts: 1 | 2 (of one run; not counted)",
        'state run_id: "a" | "b" (of one run; not counted)',
        "2 of 2 tensors identical to the bit",
    ]
    assert main(["diff", str(tmp_path / "b"), str(tmp_path / "c")]) == 1
    assert "option optimizer.lr: 0.1 | 0.2\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (torch.zeros(2, 2), "[4] viewed as [4] | [2, 2] viewed as [2, 2]"),
        (torch.tensor([0.0, 1, 2, 3]).double(), "F32 | F64, max abs 0, relative 0"),
        (torch.tensor([0.0, float("nan"), 2, 3]), "max abs nan, relative nan"),
    ],
)
def test_the_difference_of_a_tensor_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: torch.Tensor, line: str
) -> None:
    save(tmp_path / "a", {"w": Sample(torch.arange(4.0), (4,))})
    save(tmp_path / "b", {"w": Sample(values, tuple(values.shape))})
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"tensor w: {line}"
    assert main(["diff", str(tmp_path / "b"), str(tmp_path / "b")]) == 0  # a NaN is identical to itself


def test_unreadable_checkpoints_are_refused(runs: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (files_of(runs.path(2)) / MANIFEST).write_text("{}")
    for command in (["show"], ["diff", str(runs.path(1))]):
        assert main([*command, str(runs.path(2))]) == 2
        assert "does not match manifest.json" in capsys.readouterr().err


def test_ls_needs_no_torch_and_ends_quietly_at_a_closed_pipe(runs: CheckpointFolder) -> None:
    """Without torch, which would need seconds, and without a reader."""
    program = (
        "import runpy, sys\nsys.modules['torch'] = None\nrunpy.run_module('tools.inspect_checkpoint', {}, '__main__')"
    )
    read, write_end = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", program, "ls", str(runs.folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_in_an_object_store(capsys: pytest.CaptureFixture[str]) -> None:
    runs = CheckpointFolder(RemotePath("memory://inspect/run"))
    for iteration in (1, 2):
        save(runs.path(iteration), small(), iteration=iteration)
    (RemotePath("memory://inspect/run/iter_0000003/attempt-1") / "x").write_bytes(b"x")
    assert main(["ls", "memory://inspect/run/"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("has no COMPLETE: it is not a checkpoint, or its save was interrupted")
    assert second.split()[:5] == ["iter_0000002", "step", "2", "1.13", "KiB"]
    assert second.endswith("s ago  complete")
    assert third.endswith("complete")
    assert main(["verify", "memory://inspect/run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "memory://inspect/run/iter_0000003: left over from a save or a removal that was cut off",
        "memory://inspect/run/iter_0000002: 1.13 KiB in 2 files, as they were written",
        "memory://inspect/run/iter_0000001: 1.13 KiB in 2 files, as they were written",
    ]
    assert main(["diff", "memory://inspect/run/iter_0000001", "memory://inspect/run/iter_0000002"]) == 1
    assert capsys.readouterr().out == "state iteration: 1 | 2\n2 of 2 tensors identical to the bit\n"
    assert main(["show", "memory://inspect/run", "a"]) == 0
    assert "a  F32 [24, 5]  min 0" in capsys.readouterr().out
    assert main(["ls", "memory://inspect/nothing"]) == 2
    assert main(["ls", "zz://bucket"]) == 2
    assert "zz:// is not a known kind of store" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "show", "verify", "diff a"])
def test_a_credential_in_a_location_is_refused_and_not_repeated(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "s3://KEY:LEAK@bucket/run"])
    _, err = capsys.readouterr()
    assert ended.value.code == 2
    assert "E014 s3://***@bucket/run holds a credential" in err
    assert "LEAK" not in err
