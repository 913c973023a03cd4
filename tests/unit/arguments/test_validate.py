from __future__ import annotations

import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.arguments.cli import parse
from megatron.arguments.compatibility import CHANGE_ERRORS
from megatron.arguments.sources import build_config
from megatron.arguments.validate import find_problems
from megatron.config.batch import schedule_lengths
from megatron.config.errors import Problem, UserError
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import DataConfig, OptimizerConfig, TrainingConfig
from megatron.config.settings import SETTINGS
from megatron.convert.huggingface.config import read_model_values
from megatron.distributed.sharding import DenseSharding, Init
from tests.unit.arguments.bad_configs import CASES, GOLDEN, Case

ROOT = Path(__file__).parents[3]
GOOD = build_config({"mock_data": True, "vocab_size": 257, "train_iters": 100, "seq_length": 64})
TOLD = dict(zip([case.title for case in CASES], GOLDEN.read_text().split("\n\n")))


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def refused(argv: list[str], ranks: int) -> tuple[Problem, ...]:
    try:
        parse(argv, {"RANK": "0", "WORLD_SIZE": str(ranks)}, read_model=read_model_values)
    except UserError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_bad_configurations_are_refused_in_these_words(case: Case) -> None:
    assert f"{case.title}\n{case.told()}" == TOLD[case.title].strip("\n")


def test_there_are_enough_of_them_and_every_code_of_a_check_is_met() -> None:
    files = [*(ROOT / "megatron/config").rglob("*.py"), *(ROOT / "megatron/arguments").rglob("*.py")]
    files.append(ROOT / "megatron/convert/huggingface/config.py")
    checks = "".join(path.read_text() for path in files)
    codes = set(re.findall(r'"(E\d{3})"', checks))
    of_checkpoints = {code for code, _ in CHANGE_ERRORS.values()} - {"E821"}  # a config.json may only say another model
    on_export = {"E852"}
    assert len(CASES) >= 40
    assert codes - of_checkpoints - on_export == set(re.findall(r"^(E\d{3}) ", GOLDEN.read_text(), re.MULTILINE))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_what_is_offered_as_a_fix_mends_the_problem(case: Case) -> None:
    argv = shlex.split(f"{case.base} {case.flags}")
    for problem in refused(argv, case.ranks):
        if problem.code <= "E009":  # something must be taken out first, or a name filled in
            continue
        for fix in problem.fixes:
            if fix.startswith("--") and not re.search(r"\b(PREFIX|N)\b", fix):
                left = refused(argv + shlex.split(fix), case.ranks)
                assert problem.sentence not in [p.sentence for p in left], fix


def test_a_good_configuration_has_no_problems() -> None:
    assert find_problems(GOOD, 1) == []


def test_all_problems_are_found_at_once() -> None:
    bad = replace(
        GOOD, model=replace(GOOD.model, num_query_groups=3), training=replace(GOOD.training, train_iters=None)
    )
    assert [p.code for p in find_problems(bad, 1)] == ["E102", "E304"]


def test_checks_leave_out_what_could_not_be_read() -> None:
    bad = replace(GOOD, model=replace(GOOD.model, num_query_groups=3))
    assert find_problems(bad, 1, {"num_query_groups"}) == []
    assert find_problems(bad, 1, {"num_attention_heads"}) == []
    assert [p.code for p in find_problems(bad, 1, {"seq_length"})] == ["E102"]


@pytest.mark.parametrize(
    "data",
    [
        DataConfig(mock_data=True),
        DataConfig(
            data_path=("0.3", "no/a", "0.7", "no/b"), multiple_validation_sets=True, validation_set_names=("a",)
        ),
        DataConfig(train_data_path=("no/a",), valid_data_path=("no/b", "no/c"), multiple_validation_sets=True),
        DataConfig(data_args_path="tests/golden/data_args/zero_weight.txt", split="1,1,1"),
        DataConfig(per_split_data_args_path="tests/golden/data_args/no_train.json", eod_id=3),
    ],
)
def test_no_check_stumbles_over_values_that_could_not_be_read(data: DataConfig) -> None:
    config = replace(GOOD, data=data)
    printed = {problem.code for problem in find_problems(config, 1)} | {"E304"}
    for name in SETTINGS:
        assert {problem.code for problem in find_problems(config, 1, {name})} <= printed, name


def test_a_value_out_of_range_is_told_once() -> None:
    bad = replace(GOOD, model=replace(GOOD.model, num_attention_heads=0, num_query_groups=3))
    assert [p.code for p in find_problems(bad, 1)] == ["E600"]


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8, 12])
def test_heads_are_accepted_exactly_where_they_can_be_sharded(tp: int) -> None:
    for heads, groups in product(range(1, 13), range(1, 13)):
        config = replace(
            GOOD,
            model=ModelConfig(
                num_attention_heads=heads, num_query_groups=groups, kv_channels=2, ffn_hidden_size=24, vocab_size=9
            ),
            parallel=ParallelConfig(tensor_model_parallel_size=tp),
        )
        assert (find_problems(config, tp) == []) == shardable(heads, groups, tp), (heads, groups)


def shardable(heads: int, groups: int, tp: int) -> bool:
    if heads % groups or heads % tp:
        return False
    try:
        DenseSharding(0, tp).qkv(groups, heads // groups, (2, 8), Init())
    except ValueError:
        return False
    return True


def test_files_that_exist_are_accepted(tmp_path: Path) -> None:
    prefix = str(tmp_path / "corpus")
    config = replace(GOOD, data=DataConfig(data_path=(prefix,)))
    (tmp_path / "corpus.idx").touch()
    assert [p.sentence for p in find_problems(config, 1)] == [f"--data-path: {prefix}.bin does not exist"]
    (tmp_path / "corpus.bin").touch()
    assert find_problems(config, 1) == []


def test_other_data_of_the_folder_is_offered(tmp_path: Path) -> None:
    (tmp_path / "corpus.idx").touch()
    config = replace(GOOD, data=DataConfig(data_path=(str(tmp_path / "korpus"),)))
    assert [p.fixes for p in find_problems(config, 1)] == [(f"--data-path {tmp_path / 'corpus'}",)]


def test_what_preprocessing_wrote_is_offered_first(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "corpus_text_document"):
        (tmp_path / f"{name}.idx").touch()
    config = replace(GOOD, data=DataConfig(train_data_path=("3", str(tmp_path / "corpus"), "4", str(tmp_path / "a"))))
    first, _ = find_problems(config, 1)
    assert len(first.fixes) == 3
    assert first.fixes[0] == f"--train-data-path 3 {tmp_path}/corpus_text_document 4 {tmp_path}/a"


def test_a_text_is_offered_as_what_was_made_of_it(tmp_path: Path) -> None:
    for name in ("a.idx", "web_text_document.idx", "web.jsonl.gz"):
        (tmp_path / name).touch()
    web = tmp_path / "web"
    config = replace(GOOD, data=DataConfig(data_path=(f"{web}.jsonl.gz",)))
    command = f"python tools/preprocess_data.py --input {web}.jsonl.gz --output-prefix {web}"
    [problem] = find_problems(config, 1)
    assert problem.fixes == (f"--data-path {web}_text_document", f"{command} --tokenizer-type ByteTokenizer")


def test_a_text_that_is_there_is_what_token_files_are_made_of(tmp_path: Path) -> None:
    (tmp_path / "web.txt").touch()
    [problem] = find_problems(replace(GOOD, data=DataConfig(data_path=(f"{tmp_path}/web_text_document",))), 1)
    assert f"--input {tmp_path}/web.txt --output-prefix {tmp_path}/web " in problem.fixes[0]


@pytest.mark.parametrize("flag", ["--data-path", "--load", "--save", "--data-args-path", "--load hf:"])
def test_a_name_too_long_for_any_file_is_no_file(flag: str) -> None:
    spelling, _, prefix = flag.partition(" ")
    problems_of_files = refused(["--vocab-size", "9", "--train-iters", "1", spelling, prefix + "x" * 5000], 1)
    assert {problem.code for problem in problems_of_files} <= {"E501", "E503", "E507", "E801", "E850"}


def test_a_number_may_be_the_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("7.bin", "7.idx"):
        (tmp_path / name).touch()
    assert find_problems(replace(GOOD, data=DataConfig(data_path=("7",))), 1) == []
    assert [p.code for p in find_problems(replace(GOOD, data=DataConfig(data_path=("8",))), 1)] == ["E502"]
    assert [p.code for p in find_problems(replace(GOOD, data=DataConfig(data_path=("7", "8"))), 1)] == ["E503"]


def test_every_stage_of_a_ramp_is_shared_by_the_ranks() -> None:
    for start, increment, full, micro, ranks in product((2, 4, 6), (2, 3, 4), (8, 12, 16), (1, 2), (1, 2)):
        training = TrainingConfig(
            micro_batch_size=micro, global_batch_size=full, rampup_batch_size=(start, increment, 100), train_iters=10
        )
        sizes = range(start, full + 1, increment)
        fits = full in sizes and all(size % (micro * ranks) == 0 for size in sizes) and start < full
        found = find_problems(replace(GOOD, training=training), ranks)
        assert (found == []) == fits, (training, ranks, found)


SCHEDULES = st.fixed_dictionaries(
    {"lr_decay_style": st.sampled_from(["linear", "cosine", "inverse-square-root", "WSD"])},
    optional={
        "lr_decay_iters": st.integers(1, 30),
        "lr_wsd_decay_samples": st.integers(1, 60),
        "lr_warmup_fraction": st.floats(0, 0.99),
        "lr_warmup_samples": st.integers(0, 60),
        "lr_warmup_iters": st.integers(0, 30),
    },
)


@given(SCHEDULES, st.integers(1, 20), st.integers(1, 4))
def test_schedules_are_accepted_exactly_where_their_parts_fit(said: dict[str, Any], iters: int, batch: int) -> None:
    training = TrainingConfig(train_iters=iters, global_batch_size=batch)
    config = replace(GOOD, training=training, optimizer=OptimizerConfig(**said))
    codes = {p.code for p in find_problems(config, 1)}
    if codes & {"E402", "E601"}:
        return
    warmup, decay, final, _ = schedule_lengths(config, 1)
    fits = warmup < decay and (final is None or final <= decay - warmup)
    complete = said["lr_decay_style"] != "WSD" or final is not None
    assert (codes == set()) == (fits and complete)
    assert codes <= {"E403", "E404"}


def test_unresolved_and_resolved_configurations_are_judged_alike() -> None:
    argv = "--mock-data --vocab-size 257 --train-iters 10 --tensor-model-parallel-size 2"
    parsed = parse(argv.split(), {"RANK": "0", "WORLD_SIZE": "4"})
    assert find_problems(parsed.config, parsed.world_size) == []


def test_problems_read_as_people_are_told() -> None:
    problem = Problem("E017", "80 layers do not fill PP16", ("--num-layers 96", "--num-layers 64"))
    assert str(problem) == "E017 80 layers do not fill PP16\n  fix: --num-layers 96 | --num-layers 64"
    assert str(UserError([problem])).endswith("\n1 problem; docs/troubleshooting.md explains the codes")
