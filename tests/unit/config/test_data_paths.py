"""Files that a run reads, against an independent copy of Megatron-LM's rules for its arguments."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.config.data_paths import (
    DEFAULT_SPLIT,
    MAX_BLEND_DATASETS,
    Blend,
    DataPathArgs,
    SplitSource,
    blend_problems,
    data_sources,
    read_blend,
    split_shares,
    unique_names,
)
from megatron.config.errors import UserError


def plain(blend: Blend) -> tuple[list[str], list[float] | None]:
    return list(blend.prefixes), None if blend.weights is None else list(blend.weights)


def as_megatron_reads(words: list[str]) -> tuple[list[str], list[float] | None] | None:
    """Prefixes and weights as the format's description has it; None for what it calls an error."""
    if len(words) % 2:
        return words, None
    pairs = [(words[i], words[i + 1]) for i in range(0, len(words), 2)]
    weights = []
    for message, _ in pairs:
        try:
            weights.append(float(message))
        except ValueError:
            weights.append(math.nan)
    unreadable = [math.isnan(weight) for weight in weights]
    if all(unreadable):
        return words, None
    return None if any(unreadable) else ([prefix for _, prefix in pairs], weights)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(["0.3", "1", "2e-3", "7", "a", "b/c", "d.1"]), min_size=1, max_size=7))
def test_lists_are_read_as_by_megatron(words: list[str]) -> None:
    theirs, found = as_megatron_reads(words), list(blend_problems(DataPathArgs(tuple(words), "--data-path")))
    assert (theirs is None) == (found != [])
    assert theirs is None or plain(read_blend(words)) == theirs


WORDS = st.lists(st.sampled_from(["0.3", "0", "-1", "nan", "inf", "1e308", "a", "b", ""]), min_size=1, max_size=6)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(WORDS)
def test_suggested_fixes_are_valid_blends(words: list[str]) -> None:
    for problem in blend_problems(DataPathArgs(tuple(words), "--data-path")):
        for fix in problem.fixes:
            mended = DataPathArgs(tuple(shlex.split(fix)[1:]), "--data-path")
            assert problem.sentence not in [left.sentence for left in blend_problems(mended)], fix


def test_the_forms_of_data_path() -> None:
    def train(*words: str) -> Blend:
        return data_sources(DataConfig(data_path=words))["train"].blend

    assert train("a") == Blend(("a",))
    assert train("1", "a") == Blend(("a",), (1.0,)), "a blend of one"
    assert train("a", "b") == Blend(("a", "b"))
    assert train("a", "b", "c") == Blend(("a", "b", "c"))
    assert train("30", " a ", "7e1", "b") == Blend(("a", "b"), (30.0, 70.0))


def test_a_split_without_weight_has_no_source() -> None:
    blend = Blend(("a",))
    assert data_sources(DataConfig(data_path=("a",))) == dict.fromkeys(
        ("train", "valid", "test"), SplitSource(blend, DEFAULT_SPLIT)
    )
    assert data_sources(DataConfig(data_path=("a",), split="9,0,1")) == dict.fromkeys(
        ("train", "test"), SplitSource(blend, "9,0,1")
    )
    assert list(data_sources(DataConfig(data_path=("a",), split="1"))) == ["train"]
    assert data_sources(DataConfig(mock_data=True)) == {}


def test_splits_of_their_own_files_are_read_whole() -> None:
    data = DataConfig(train_data_path=("1", "a", "2", "b"), test_data_path=("0.5", "c"))
    assert data_sources(data) == {
        "train": SplitSource(Blend(("a", "b"), (1.0, 2.0))),
        "test": SplitSource(Blend(("c",))),
    }


def test_argument_files(tmp_path: Path) -> None:
    text, tree = tmp_path / "blend.txt", tmp_path / "splits.json"
    text.write_text("0.3 a\n0.7\tb\n")
    assert data_sources(DataConfig(data_args_path=str(text), split="1"))["train"].blend == Blend(("a", "b"), (0.3, 0.7))
    tree.write_text(json.dumps({"train": [0.3, "a", 7, "b"], "valid": "c d", "test": None}))
    flags = DataConfig(train_data_path=("0.3", "a", "7", "b"), valid_data_path=("c", "d"))
    assert data_sources(DataConfig(per_split_data_args_path=str(tree))) == data_sources(flags)


def test_every_validation_set_has_a_source() -> None:
    data = DataConfig(valid_data_path=("x/wiki", "x/web"), train_data_path=("a",), multiple_validation_sets=True)
    assert data_sources(data) == {
        "train": SplitSource(Blend(("a",))),
        "valid:wiki": SplitSource(Blend(("x/wiki",))),
        "valid:web": SplitSource(Blend(("x/web",))),
    }
    cut = DataConfig(
        data_path=("0.3", "a", "0.7", "b"), multiple_validation_sets=True, validation_set_names=("one", "two")
    )
    sources = data_sources(cut)
    assert list(sources) == ["train", "valid:one", "valid:two", "test"]
    assert sources["valid:two"] == SplitSource(Blend(("b",)), DEFAULT_SPLIT)
    assert sources["train"].blend.weights == (0.3, 0.7)


@pytest.mark.parametrize(
    ("prefixes", "names"),
    [
        (["wiki"], ["wiki"]),
        (["data/wiki/text_document", "data/web/text_document"], ["wiki-text_document", "web-text_document"]),
        (["a/x", "b/x", "a/y"], ["a-x", "b-x", "a-y"]),
        (["a", "b/a"], ["a", "b-a"]),
        (["a", "a", "b/a", "a"], ["a", "a-2", "b-a", "a-3"]),
        (["a-2", "a", "a"], ["a-2", "a", "a-3"]),
        (["../my texts", "../a:b"], ["my-texts", "a-b"]),
        (["/a", "b/a"], ["a", "b-a"]),
    ],
)
def test_names_of_sets_are_unique(prefixes: list[str], names: list[str]) -> None:
    assert list(unique_names(prefixes)) == names
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["", "my texts", "a:b", "en/wiki"])
def test_a_name_is_one_word(name: str) -> None:
    sets = {"train_data_path": ("a",), "valid_data_path": ("b", "c"), "multiple_validation_sets": True}
    with pytest.raises(UserError) as caught:
        data_sources(DataConfig(**sets, validation_set_names=("x", name)))
    (problem,) = caught.value.problems
    assert (problem.code, problem.fixes[0]) == ("E506", "--validation-set-names b c")


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=3).filter(any))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_shares_of_a_split_match_numpy(weights: list[float]) -> None:
    """As Megatron-LM divides, to the bit: the last one may decide where a dataset is cut."""
    text = ",".join(f"{weight:f}" for weight in weights)
    read = np.array([float(word) for word in text.split(",")] + [0.0] * (3 - len(weights)))
    if read.any():
        assert split_shares(text) == tuple((read / read.sum()).tolist())


@pytest.mark.parametrize("text", ["", "a", "1,2,3,4", "-1,2", "1e3,1", "0,0,0", "1,,1", "nan"])
def test_invalid_splits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not up to three numbers|has no weight above 0"):
        split_shares(text)


def test_all_problems_are_reported_at_once() -> None:
    data = DataConfig(
        train_data_path=("0", "a", "1", "b"),
        valid_data_path=("1", "c", "d", "e"),
        multiple_validation_sets=True,
        validation_set_names=("x", "x"),
    )
    with pytest.raises(UserError) as caught:
        data_sources(data)
    assert [problem.code for problem in caught.value.problems] == ["E502", "E502", "E506"]
    for bad in (DataConfig(), DataConfig(mock_data=True, data_path=("a",)), DataConfig(data_path=("a",), split="x")):
        with pytest.raises(UserError):
            data_sources(bad)


def test_a_blend_has_a_largest_number_of_sources() -> None:
    most = tuple(f"p{i}" for i in range(MAX_BLEND_DATASETS))
    assert list(blend_problems(DataPathArgs(most, "--data-path"))) == []
    assert [p.code for p in blend_problems(DataPathArgs((*most, "q"), "--data-path"))] == ["E502"]
