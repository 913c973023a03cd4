"""A preprocessing that is ended at any moment, and continued by the same command."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import pytest

from megatron.data.errors import DataError
from megatron.data.preprocess import encode as encode_module
from megatron.data.preprocess.encode import PreprocessOptions, write_dataset
from megatron.data.tokenizers.huggingface import ByteTokenizer
from megatron.data.tokenizers.tokenizer import TokenizerOptions
from tests.unit.data.preprocess.test_preprocess import RecordingListener

KEYS = ("text", "title")
SUFFIXES = ("bin", "idx", "manifest.json", "origins", "tokens.json")
NAMES = sorted(f"out_{key}_document.{suffix}" for key in KEYS for suffix in SUFFIXES)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreprocessOptions:
    """Lines in about 18 blocks; the state is saved after each."""
    monkeypatch.setattr(encode_module, "SAVE_SECONDS", 0)
    draw = Random(1)
    files = [tmp_path / "in" / f"{number}.jsonl" for number in range(3)]
    files[0].parent.mkdir()
    for file in files:
        records = [{"text": "x" * draw.randrange(90), "title": str(draw.random())} for _ in range(60)]
        file.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n \n")
    return PreprocessOptions(files, KEYS, str(tmp_path / "out"), TokenizerOptions("ByteTokenizer"), block_bytes=1000)


def moved(plan: PreprocessOptions, name: str) -> PreprocessOptions:
    """The plan with its output in a folder of this name."""
    return replace(plan, prefix=str(Path(plan.prefix).parent / name / "out"))


def output(plan: PreprocessOptions) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(plan.prefix).parent.glob("out*"))}


def run(plan: PreprocessOptions, check: Callable[[], None] = lambda: None) -> list[str]:
    messages = RecordingListener()
    write_dataset(plan, ByteTokenizer(), messages, check)
    return messages.output


def killed_at(plan: PreprocessOptions, last: int | None) -> int:
    """Run in a process that gets SIGKILL at change ``last`` of the disk; return the number of changes it made."""
    receive, send = os.pipe()
    process = os.fork()
    if process == 0:
        changes = count()

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **options: object) -> object:
                if next(changes) == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **options)

            return call

        for name in ("fsync", "rename", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            run(plan)
            os.write(send, next(changes).to_bytes(4, "big"))
        finally:
            os._exit(0)
    os.close(send)
    os.waitpid(process, 0)
    with open(receive, "rb") as result:
        return int.from_bytes(result.read(), "big")


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_kill_is_continued_to_the_same_bytes(
    plan: PreprocessOptions, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """At each change of the disk, from the only save, after the last block, to the end of the publication."""
    monkeypatch.setattr(encode_module, "SAVE_SECONDS", 1e9)
    whole = moved(plan, "whole")
    changes = killed_at(whole, None)
    expected = output(whole)
    assert sorted(expected) == NAMES
    continued = ""
    for last in range(0, changes, step):
        again = moved(plan, str(last))
        assert killed_at(again, last) == 0
        continued += str(int("continuing an interrupted run after" in "".join(run(again))))
        assert output(again) == expected, last
    assert re.fullmatch("0{6,16}1{20,}0{6,18}" if step == 1 else "0{2,5}1{7,}0{2,6}", continued)


@pytest.mark.slow
def test_many_kills_of_one_run(plan: PreprocessOptions) -> None:
    plan = replace(plan, block_bytes=200)
    whole, again, draw = moved(plan, "whole"), moved(plan, "again"), Random(2)
    run(whole)
    kills = 0
    while not killed_at(again, draw.randrange(38, 88)):
        kills += 1
    assert kills >= 15
    assert output(again) == output(whole)


class EndedError(Exception):
    """Ends a run."""


def interrupted(plan: PreprocessOptions, blocks: int = 9) -> None:
    calls = count()

    def check() -> None:
        if next(calls) == blocks:
            raise EndedError

    with pytest.raises(EndedError):
        run(plan, check)


def test_processed_input_is_not_read_again(plan: PreprocessOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(plan, 10)
    read: list[Path] = []
    cut = encode_module.split_into_blocks

    def watched(files: Sequence[Path], *args: object) -> object:
        read.extend(files)
        return cut(files, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(encode_module, "split_into_blocks", watched)
    printed = run(plan)
    assert re.fullmatch(r"continuing an interrupted run after 1\d\d documents, 1 of 3 files", printed[1])
    assert read == plan.files[1:]
    assert not list(Path(plan.prefix).parent.glob("*.part"))


def test_another_run_does_not_continue_it(plan: PreprocessOptions) -> None:
    interrupted(plan)
    before = output(plan)
    others = {
        "--append-eod": replace(plan, append_eod=True),
        "--input": replace(plan, files=plan.files[:2]),
        "--json-keys": replace(plan, keys=("text",)),
    }
    for flag, other in others.items():
        with pytest.raises(DataError, match=rf"an interrupted run had other {flag}\n  fix: .* \| --overwrite to"):
            run(other)
        assert output(plan) == before
    os.utime(plan.files[2], ns=(0, 0))
    with pytest.raises(DataError, match="other --input"):
        run(plan)
    printed = run(replace(plan, overwrite=True))
    assert printed[1] == "starting over, because an interrupted run had other --input"
    whole = moved(plan, "whole")
    run(whole)
    assert output(plan) == output(whole)


def test_a_bad_line_is_passed_over_by_the_run_that_continues(plan: PreprocessOptions) -> None:
    with plan.files[2].open("a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match=r"2\.jsonl:63 is not JSON"):
        run(plan)
    skipping = replace(plan, skip_bad=True)
    printed = run(skipping)
    assert printed[1].startswith("continuing an interrupted run after ")
    assert printed[2].startswith(f"passed over: {plan.files[2]}:63 is not JSON")
    whole = moved(skipping, "whole")
    run(whole)
    assert output(plan) == output(whole)


def test_a_run_that_passed_lines_over_is_not_continued_by_one_that_fails(plan: PreprocessOptions) -> None:
    plan.files[0].write_text("{\n" + plan.files[0].read_text())
    interrupted(replace(plan, skip_bad=True))
    with pytest.raises(DataError, match="an interrupted run had other --on-bad-line"):
        run(plan)


def test_two_runs_of_one_prefix_do_not_mix(plan: PreprocessOptions) -> None:
    calls = count()

    def check() -> None:
        if next(calls) == 9:
            with pytest.raises(DataError, match="another process is writing it\n  fix: wait"):
                run(plan)

    run(plan, check)
    assert sorted(output(plan)) == NAMES
