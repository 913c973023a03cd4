"""The data lines of ``--check-config``, for files written here."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.arguments.cli import parse
from megatron.data.errors import DataError
from megatron.data.loader import DataSource, build_data
from megatron.data.preview import MAX_DATASETS_SHOWN, data_fingerprints, preview_data
from tests.unit.data import pairs

ROOT = Path(__file__).parents[3]
MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "25"]
RUN = [*MODEL, "--vocab-size", "300", "--train-iters", "10", "--global-batch-size", "4"]  # 1,000 tokens


def write(prefix: Path, documents: int, tokens: int = 10) -> str:
    return str(pairs.write(prefix, [*[[7] * tokens] * documents, []]))


def reported(*argv: str) -> list[str]:
    return preview_data(parse([*RUN, *argv], {}).config, 1)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("harm", ["cut", "magic", "empty"])
def test_invalid_datasets_are_refused_as_at_the_start(harm: str) -> None:
    index = Path(write(Path("a"), 5) + ".idx")
    content = index.read_bytes()
    index.write_bytes({"cut": content[:-1], "magic": b"x" + content[1:], "empty": b""}[harm])
    with pytest.raises(DataError, match=r"a\.idx"):
        reported("--data-path", "a")


def test_datasets_of_a_blend_have_their_shares_and_epochs() -> None:
    write(Path("a"), 100), write(Path("b"), 10)  # 1,000 and 100 tokens
    shares = "data       of each dataset train 90%, valid 10%"
    one = "           a: 101 documents, 1,000 tokens, 1.1 epochs"  # 1,000 of 900
    assert reported("--data-path", "a", "--split", "9,1") == [shares, one]
    weighted = reported("--data-path", "30", "a", "10", "b", "--split", "9,1")
    assert weighted == [
        shares,
        "           75% a: 101 documents, 1,000 tokens, 0.83 epochs",
        "           25% b: 11 documents, 100 tokens, 2.8 epochs",
    ]
    by_size = reported("--train-data-path", "a", "b", "--valid-data-path", "b")
    assert by_size == [
        "train      90.9% a: 101 documents, 1,000 tokens, 0.91 epochs",
        "           9.09% b: 11 documents, 100 tokens, 0.91 epochs",
        "valid      b: 11 documents, 100 tokens",
    ]


def test_a_prefix_without_loss_is_reported() -> None:
    write(Path("a"), 100)
    pattern = ("--data-path", "a", "--split", "9,1", "--attention-pattern")
    assert reported(*pattern, "prefix:3")[-1] == "documents  no loss on the first 2 labels, which the prefix shows"
    assert reported(*pattern, "prefix:1") == reported(*pattern[:-1])


def test_validation_sets_are_named() -> None:
    write(Path("a"), 100), write(Path("b"), 10)
    sets = ["--multiple-validation-sets", "--validation-set-names", "wiki", "encyclopedia"]
    assert (
        reported("--data-path", "a", "b", *sets, "--split", "8,1,1")[-1]
        == "valid      each by itself: wiki, encyclopedia"
    )
    whole = reported("--train-data-path", "a", "--valid-data-path", "a", "b", *sets)
    assert whole[1] == "valid      wiki: a: 101 documents, 1,000 tokens"
    assert whole[2] == "valid      encyclopedia: b: 11 documents, 100 tokens"


@pytest.mark.parametrize("flag", ["--data-path", "--train-data-path"])
def test_only_a_few_of_many_datasets_are_listed(flag: str) -> None:
    write(Path("pair"), 1000, 50)
    names = [f"x{i}" for i in range(500)]
    for name in names:
        Path(f"{name}.idx").symlink_to("pair.idx"), Path(f"{name}.bin").symlink_to("pair.bin")
    rows = reported(flag, *names, "--eval-iters", "0")
    assert len(rows) <= MAX_DATASETS_SHOWN + 2
    assert rows[-1].strip() == "and 492 more"
    rows = reported("--train-data-path", "x0", "--valid-data-path", *names, "--multiple-validation-sets")
    assert rows[-1].strip().endswith("valid:x14 and 485 more")


# --- what the start would refuse ---


def at_the_start(*argv: str) -> DataSource:
    config = parse([*RUN, *argv], {}).config
    return build_data(config.data, config.training, config.model.vocab, 1)


@pytest.mark.parametrize(
    "argv",
    [
        ("--data-path", "a", "--split", "999,1,0"),
        ("--data-path", "tiny"),
        ("--data-path", "tiny", "--split", "4,1,0"),
        ("--train-data-path", "a", "--valid-data-path", "none"),
        ("--data-path", "a", "tiny", "--multiple-validation-sets", "--split", "99,1,0"),
    ],
    ids=" ".join,
)
def test_a_part_without_data_is_refused_as_at_the_start(argv: tuple[str, ...]) -> None:
    write(Path("a"), 100), write(Path("tiny"), 5), write(Path("none"), 0)
    argv = (*argv, "--eval-iters", "1")
    try:
        at_the_start(*argv)
        expected = None
    except DataError as error:
        expected = str(error)
    try:
        reported(*argv)
        message = None
    except DataError as error:
        message = str(error)
    assert message == expected


def test_splits_that_the_start_leaves_out_are_noted() -> None:
    write(Path("a"), 100)
    argv = ("--data-path", "a", "--eval-iters", "1")
    (note,) = [row for row in reported(*argv) if row.startswith("note ")]
    assert note in at_the_start(*argv).summary()
    assert note.startswith("note       the test data of a have 0 tokens")
    assert len(reported("--data-path", "a", "--eval-iters", "0")) == 2


def test_large_parts_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path("a"), 1000)
    monkeypatch.setattr("megatron.data.preview.file_segment_builders", pytest.fail)
    assert len(reported("--data-path", "a", "--split", "8,1,1", "--eval-iters", "1")) == 2


def test_document_masks_are_described_as_at_the_start() -> None:
    write(Path("a"), 100)
    argv = ("--data-path", "a", "--split", "8,1,1", "--reset-attention-mask", "--eod-mask-loss")
    (row,) = [row for row in reported(*argv, "--eod-id", "7") if row.startswith("documents ")]
    assert row in at_the_start(*argv, "--eod-id", "7").summary()
    with pytest.raises(DataError, match="--reset-attention-mask needs the id that ends a document"):
        reported(*argv)


@pytest.mark.parametrize("split", [(), ("--split", "1,0,0")])
def test_many_epochs_are_noted_as_at_the_start(split: tuple[str, ...]) -> None:
    for name, documents, reads in (("a", 10, 10), ("b", 20, 5), ("c", 25, 0)):
        write(Path(name), documents)
        argv = ("--data-path" if split else "--train-data-path", name, *split)
        notes = [row for row in reported(*argv) if row.startswith("note ")]
        assert notes == [row for row in at_the_start(*argv).summary() if row.startswith("note ")]
        assert [note.partition(";")[0] for note in notes] == [f"note       training reads {name} {reads}.0 times"][
            :reads
        ]


@pytest.mark.parametrize(
    "flags",
    [
        "--data-path a --split 8,1,1 --eval-iters 1",
        "--data-path 3 a 1 b --split 9,1",
        "--data-path a b --split 1",
        "--train-data-path 0.7 a 0.3 b --valid-data-path b --eval-iters 1",
        "--mock-data",
    ],
)
def test_fingerprints_match_the_samples_of_a_run(flags: str) -> None:
    write(Path("a"), 100), write(Path("b"), 90, tokens=11)
    config = parse([*RUN, *flags.split()], {}).config
    built = build_data(config.data, config.training, config.model.vocab, 1).fingerprints
    assert data_fingerprints(config, 1) == built
    write(Path("a"), 99, tokens=12)
    assert (data_fingerprints(config, 1) == built) == config.data.mock_data
