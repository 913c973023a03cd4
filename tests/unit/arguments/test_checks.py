"""The checks of whole configurations; the messages are in the golden file of bad configurations."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.arguments.cli import flags_config, parse, parse_flags, separate_choices
from megatron.arguments.compatibility import CHANGE_ERRORS
from megatron.arguments.sources import build_config
from megatron.arguments.validate import choose_cuda_graph, find_problems, is_met
from megatron.config.batch import schedule_lengths
from megatron.config.conditions import holds, rules, value_of
from megatron.config.data import DataConfig
from megatron.config.data_paths import SOURCE_OPTIONS
from megatron.config.errors import Problem, UserError
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import PIPELINE_SCHEDULES, ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.training import TrainingConfig
from megatron.convert.huggingface.config import read_model_values
from megatron.distributed.sharding import DenseSharding, Init
from megatron.pipeline import plan
from megatron.pipeline.actions import PipelineSchedule, ScheduleError
from megatron.pipeline.schedules import make_schedule
from tests.kit.short import one_in
from tests.unit.arguments.bad_configs import GOLDEN, NOTES, read
from tests.unit.arguments.command import MODEL, RUN, codes, notes, problems, run

ROOT = Path(__file__).parents[3]
GOOD = build_config({"mock_data": True, "vocab_size": 257, "train_iters": 100, "seq_length": 64})


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def found(config: RunConfig, ranks: int = 1, doubtful: set[str] | None = None) -> list[str]:
    return [problem.code for problem in find_problems(config, ranks, doubtful or set())]


@pytest.mark.parametrize("path", [GOLDEN, NOTES], ids=lambda path: path.stem)
def test_answers_match_the_golden_files(path: Path) -> None:
    cases = read(path)
    assert {case.title: case.answer() for case in cases} == {case.title: text for case, text in cases.items()}


def test_every_code_of_a_check_is_in_the_golden_file() -> None:
    files = [*(ROOT / "megatron/config").rglob("*.py"), *(ROOT / "megatron/arguments").rglob("*.py")]
    files.append(ROOT / "megatron/convert/huggingface/config.py")
    used = set(re.findall(r"\b(E\d{3})\b", "".join(path.read_text() for path in files)))
    # a config.json gives another model, so E821 is in the golden file
    of_checkpoints = {code for code, _ in CHANGE_ERRORS.values()} - {"E821"}
    elsewhere = of_checkpoints | {"E013", "E341", "E852"}  # of checkpoints, files and transformers
    assert used - elsewhere == set(re.findall(r"^(E\d{3}) ", GOLDEN.read_text(), re.MULTILINE))


@pytest.mark.parametrize("part", one_in(4, range(4)))
def test_every_fix_solves_its_problem(part: int) -> None:
    """Of a quarter of the cases."""
    for case in list(read(GOLDEN))[part::4]:
        for problem in problems(case.flags, case.ranks, "", read_model=read_model_values):
            if (
                problem.code <= "E009" or problem.code == "E014"
            ):  # something must be taken out first, or a name filled in
                continue
            for fix in (*problem.fixes, *problem.choices):
                if fix.startswith("--") and not re.search(r"\b(PREFIX|N)\b", fix):
                    left = problems(f"{case.flags} {fix}", case.ranks, "", read_model=read_model_values)
                    assert problem.sentence not in [p.sentence for p in left], (case.title, fix)


STATES_WHAT_WAS_MEANT = ("E001", "E002", "E004", "E011", "E014", "E104", *(code for code, _ in CHANGE_ERRORS.values()))
"""Codes of problems whose fix gives a value that is missing, was misspelt, or comes from the start point."""


def of_model_and_data(line: str) -> dict[str, Any]:
    """Return the model and the data that the flags of a command line ask for, without any check."""
    config = flags_config(parse_flags(shlex.split(line)))
    names = [name for group in SOURCE_OPTIONS for name in group]
    names += [
        n for n, s in SETTINGS.items() if s.group == "model" or s.option.role.value in ("shape", "function", "data")
    ]
    values = {name: SETTINGS[name].value_in(config) for name in names}
    return values | {"hybrid_layer_pattern": (values["hybrid_layer_pattern"] or "").replace("|", "")}  # cuts: a layout


def test_no_fix_changes_the_model_or_the_data() -> None:
    tried = 0
    for case in read(GOLDEN):
        line = case.flags
        for problem in problems(case.flags, case.ranks, "", read_model=read_model_values):
            missing = "is not supported" in problem.sentence or "no such flag" in problem.sentence
            assert not (missing and any(fix.startswith("drop ") for fix in problem.fixes))
            if problem.code in STATES_WHAT_WAS_MEANT or "--set" in line or "--config" in line:
                continue
            before = of_model_and_data(line)
            for fix in problem.fixes:
                dropped = re.fullmatch(r"drop (--[\w-]+)", fix)
                after = re.sub(rf"{dropped[1]}(?![\w-])[^-]*(?= --|$)", "", line) if dropped else f"{line} {fix}"
                if dropped or fix.startswith("--"):
                    changed = {n: v for n, v in of_model_and_data(after).items() if v != before[n] and before[n]}
                    files = {n: v for n, v in changed.items() if not re.search("[.](bin|idx)| ", str(before[n]))}
                    assert not files, (problem, fix)
                    tried += 1
    assert tried > 100


def test_a_planted_change_is_a_choice() -> None:
    config = run("--num-query-groups 2").config
    fixes = ("--num-query-groups 4", "drop --num-query-groups", "--num-query-groups 2", "--lr 1", "--no-mock-data")
    split = separate_choices(Problem("E102", "", fixes), config, {"num_query_groups", "mock_data"}, set())
    assert (split.fixes, split.choices) == (fixes[2:4], (*fixes[:2], fixes[4]))


def test_problems_are_found_at_once_and_each_mistake_once() -> None:
    three_groups = replace(GOOD.model, num_query_groups=3)
    assert found(GOOD) == []
    assert found(replace(GOOD, model=three_groups, training=replace(GOOD.training, train_iters=None))) == [
        "E102",
        "E304",
    ]
    assert found(replace(GOOD, model=replace(three_groups, num_attention_heads=0))) == ["E600"]
    bad = replace(GOOD, model=three_groups)
    assert found(bad, 1, {"num_query_groups"}) == found(bad, 1, {"num_attention_heads"}) == []
    assert found(bad, 1, {"seq_length"}) == ["E102"]
    resolved = run("--tensor-model-parallel-size 2", ranks=4)
    assert found(resolved.config, 4) == []


@pytest.mark.parametrize(
    "data",
    [
        DataConfig(mock_data=True),
        DataConfig(
            data_path=("0.3", "no/a", "0.7", "no/b"), multiple_validation_sets=True, validation_set_names=("a",)
        ),
        DataConfig(data_args_path="tests/golden/data_args/zero_weight.txt", split="1,1,1"),
        DataConfig(per_split_data_args_path="tests/golden/data_args/no_train.json", eod_id=3),
    ],
)
def test_no_check_fails_on_a_value_that_could_not_be_read(data: DataConfig) -> None:
    config = replace(GOOD, data=data)
    printed = {*found(config), "E304"}
    for name in SETTINGS:
        assert set(found(config, 1, {name})) <= printed, name


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
def test_heads_are_accepted_exactly_where_they_can_be_sharded(tp: int) -> None:
    def shardable(heads: int, groups: int) -> bool:
        if heads % groups or heads % tp:
            return False
        try:
            DenseSharding(0, tp).qkv(groups, heads // groups, (2, 8), Init())
        except ValueError:
            return False
        return True

    for heads, groups in product((1, 2, 3, 4, 6, 8, 9, 12), range(1, 13)):
        shape = {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": 2, "ffn_hidden_size": 24}
        parallel = ParallelConfig(tensor_model_parallel_size=tp)
        config = replace(GOOD, model=ModelConfig(**shape, vocab_size=9), parallel=parallel)
        assert (found(config, tp) == []) == shardable(heads, groups), (heads, groups)


def test_every_stage_of_a_ramp_is_shared_by_the_ranks() -> None:
    for start, increment, full, micro, ranks in product((2, 4, 6), (2, 3, 4), (8, 12, 16), (1, 2), (1, 2)):
        ramp = (start, increment, 100)
        training = TrainingConfig(
            micro_batch_size=micro, global_batch_size=full, rampup_batch_size=ramp, train_iters=10
        )
        sizes = range(start, full + 1, increment)
        fits = full in sizes and all(size % (micro * ranks) == 0 for size in sizes) and start < full
        assert (found(replace(GOOD, training=training), ranks) == []) == fits, (training, ranks)


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


@settings(max_examples=50, deadline=None)
@given(SCHEDULES, st.integers(1, 20), st.integers(1, 4))
def test_schedules_are_accepted_exactly_where_their_parts_fit(given: dict[str, Any], iters: int, batch: int) -> None:
    training = TrainingConfig(train_iters=iters, global_batch_size=batch)
    config = replace(GOOD, training=training, optimizer=OptimizerConfig(**given))
    reported = set(found(config))
    if "E402" in reported:
        return
    warmup, decay, final, _ = schedule_lengths(config, 1)
    final = final if given["lr_decay_style"] == "WSD" else None
    fits = warmup < decay and (final is None or final <= decay - warmup)
    complete = given["lr_decay_style"] != "WSD" or final is not None
    assert (reported == set()) == (fits and complete)
    assert reported <= {"E403", "E404"}


def test_files_that_exist_are_accepted_and_similar_ones_suggested(tmp_path: Path) -> None:
    def fixes(**paths: tuple[str, ...]) -> list[tuple[str, ...]]:
        return [problem.fixes for problem in find_problems(replace(GOOD, data=DataConfig(**paths)), 1)]

    prefix = str(tmp_path / "corpus")
    for name in ("corpus.idx", "corpus.bin", "7.idx", "7.bin"):
        assert fixes(data_path=(prefix,)) != [] or name.startswith("7")
        (tmp_path / name).touch()
    assert fixes(data_path=(prefix,)) == fixes(data_path=(f"{tmp_path}/7",)) == []
    assert f"--data-path {prefix}" in fixes(data_path=(str(tmp_path / "korpus"),))[0]
    (nothing_near,) = fixes(data_path=(f"{tmp_path}/zebra",))
    assert nothing_near[0].startswith("python tools/preprocess_data.py")
    for name in ("a", "b", "web_text_document"):
        (tmp_path / f"{name}.idx").touch()
    first = fixes(train_data_path=("3", f"{tmp_path}/web", "4", prefix))[0]
    assert first == (f"--train-data-path 3 {tmp_path}/web_text_document 4 {prefix}",), "what preprocessing wrote"
    for name in ("web.jsonl.gz", "new.jsonl.gz"):
        (tmp_path / name).touch()
    assert fixes(data_path=(f"{tmp_path}/web.jsonl.gz",)) == [(f"--data-path {tmp_path}/web_text_document",)]
    command = f"python tools/preprocess_data.py --input {tmp_path}/new.jsonl.gz --output-prefix {tmp_path}/new"
    ((given,),) = fixes(data_path=(f"{tmp_path}/new.jsonl.gz",))
    assert given.startswith(f"{command} --append-eod --tokenizer-type HuggingFaceTokenizer --tokenizer-model ")
    folder = tmp_path / "of_text"
    folder.mkdir()
    (folder / "web.txt").touch()
    [reported] = fixes(data_path=(f"{folder}/web_text_document",))
    assert f"--input {folder}/web.txt --output-prefix {folder}/web " in reported[0]


def test_a_pretrained_model_is_where_the_folder_that_is_saved_to_starts(tmp_path: Path) -> None:
    """As in Megatron-LM, in which --load comes first if it holds checkpoints. Another folder is a second start."""
    (tmp_path / "base").mkdir()
    (tmp_path / "other/iter_0000003").mkdir(parents=True)
    model = f"--save {tmp_path}/own --pretrained-checkpoint {tmp_path}/base"
    start = run(f"{model} --load {tmp_path}/own").config.resume_options
    assert (start.load, start.resume_mode) == (f"{tmp_path}/base", "weights-only")
    for load, fix in (("none", "drop --load"), ("other", "drop --pretrained-checkpoint")):
        (found,) = problems(f"{model} --load {tmp_path / load}")
        assert (found.code, found.fixes) == ("E806", (fix,))


def test_a_number_may_be_the_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("7.bin", "7.idx"):
        (tmp_path / name).touch()
    for words, expected in ((("7",), []), (("8",), ["E502"]), (("7", "8"), ["E503"])):
        assert found(replace(GOOD, data=DataConfig(data_path=words))) == expected


@pytest.mark.parametrize("flag", ["--data-path", "--load", "--save", "--data-args-path", "--load hf:", "--stop-file"])
def test_a_name_too_long_for_any_file_is_no_file(flag: str) -> None:
    long = flag + ("" if flag.endswith(":") else " ") + "x" * 5000
    reported = codes(long, base=f"{MODEL} --vocab-size 9 --train-iters 1", read_model=read_model_values)
    assert set(reported) <= {"E501", "E503", "E507", "E801", "E850"}


@pytest.mark.parametrize(
    ("flags", "ranks", "mode", "why"),
    [
        ("--micro-batch-size 32", 1, "step", "tokens x"),
        ("--micro-batch-size 64", 1, "step", ""),
        ("--micro-batch-size 65 --global-batch-size 65", 1, "none", "slower than the host"),
        ("--micro-batch-size 65 --global-batch-size 65 --tensor-model-parallel-size 2", 2, "step", ""),
        ("--use-distributed-optimizer", 2, "step", ""),
        ("--use-distributed-optimizer --overlap-param-gather", 2, "none", "--overlap-param-gather"),
        ("--data-parallel-sharding-strategy optim_grads_params", 2, "none", "ZeRO-3"),
        ("--hidden-dropout 0.1", 1, "none", "dropout"),
        ("--pipeline-model-parallel-size 2", 2, "none", "pipeline"),
        ("--num-experts 4 --disable-bias-linear", 1, "step", ""),
        ("--reset-attention-mask --eod-id 0", 1, "none", "documents"),
        ("--reset-attention-mask --eod-id 0 --kernels torch", 1, "none", "documents"),
        ("--context-parallel-size 2", 2, "none", "context parallelism"),
        ("--attention-pattern local:64,chunked:64", 1, "none", "--attention-pattern"),
        ("--window-size 64", 1, "step", ""),
        ("--distributed-backend gloo", 2, "none", "gloo"),
        ("--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1", 1, "none", "weight-decay"),
        ("--cuda-graph none", 1, "none", ""),
    ],
)
def test_graphs_by_default_are_of_short_steps_that_can_be_captured(flags: str, ranks: int, mode: str, why: str) -> None:
    sizes = "--hidden-size 512 --seq-length 1024 --hidden-dropout 0 --attention-dropout 0"
    config = run(f"{sizes} {flags}", ranks).config
    chosen, reason = choose_cuda_graph(config, ranks)
    assert chosen == mode
    assert why in reason
    assert choose_cuda_graph(config, ranks, cuda=False)[0] == "none"


def test_only_a_flag_that_is_given_is_dropped() -> None:
    learned = "--position-embedding-type learned_absolute"
    of_preset = problems(f"--preset tiny-deepseek {learned}")
    typed = problems(f"--preset tiny-deepseek {learned} --mtp-num-layers 1")
    assert [each.choices[-1] for each in (*of_preset, *typed)] == [
        "--set model.mtp_num_layers=null",
        "drop --mtp-num-layers",
    ]


def test_a_stop_file_needs_a_folder_and_a_name(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    for good in (f"{tmp_path}/stop", f"{tmp_path}/there", "stop"):
        assert codes(f"--stop-file {good}") == []
    for bad in ("''", str(tmp_path), f"{tmp_path}/none/stop", f"{tmp_path}/there/stop", "s3://bucket/stop"):
        assert codes(f"--stop-file {bad}") == ["E311"]
    assert problems(f"--stop-file {tmp_path}/a/b/stop")[0].fixes == (f"mkdir -p {tmp_path}/a/b",)


@pytest.mark.parametrize(
    ("save", "eval_iters", "count"), [("SAVED", 1, 0), ("SAVED", 0, 1), ("EMPTY", 1, 1), ("EMPTY", 0, 2)]
)
def test_an_evaluation_needs_weights_and_batches(tmp_path: Path, save: str, eval_iters: int, count: int) -> None:
    (tmp_path / "SAVED/iter_0000003").mkdir(parents=True)
    assert codes(f"--skip-train --save {tmp_path}/{save} --eval-iters {eval_iters}") == ["E312"] * count


def test_ranks_of_torchrun_that_hold_no_whole_models() -> None:
    def reported(flags: str, nodes: int) -> tuple[str, ...]:
        environ = {"RANK": "0", "WORLD_SIZE": str(nodes * 4), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
        argv = f"{MODEL} {RUN} --num-layers 8 --num-attention-heads 8 {flags}".split()
        with pytest.raises(UserError) as refused:
            parse(argv, environ)
        (problem,) = refused.value.problems
        return (problem.code, problem.sentence, *problem.fixes)

    code, sentence, *fixes = reported("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4", nodes=3)
    assert (code, fixes[:2]) == ("E202", ["torchrun --nnodes 2", "torchrun --nnodes 4"])
    assert sentence.endswith("TP x PP = 8: 3 nodes of 4, and whole models need a multiple of 2")
    assert reported("--pipeline-model-parallel-size 8", nodes=1)[2:4] == (
        "torchrun --nnodes 2",
        "--pipeline-model-parallel-size 4",
    )
    by_number = reported("--pipeline-model-parallel-size 8 --check-config --world-size 12", nodes=1)
    assert not any("--nnodes" in fix for fix in by_number)
    heads = "--num-attention-heads 8 --tensor-model-parallel-size"
    assert problems(f"{heads} 4 --check-config --world-size 6")[0].fixes[0] == "--tensor-model-parallel-size 2"


MUON = "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --optimizer muon --use-distributed-optimizer"


def test_notes_on_matrices_that_are_not_sharded() -> None:
    assert notes(f"{MUON} --global-batch-size 16", 16) == ""
    assert notes(MUON, 64, base="--mock-data --train-iters 1 --tokenizer-type ByteTokenizer") == ""
    for ranks in (32, 64):
        """Eight blocks of 12 h^2 elements, the largest matrices of 4 h^2: there must be room for one on every rank."""
        padding = re.search(r"are ([\d.]+) times as large", notes(MUON, ranks))
        assert padding is not None
        assert float(padding[1]) == pytest.approx(ranks * 4 / (8 * 12), abs=0.06)
        assert notes(f"{MUON} --num-distributed-optimizer-instances {ranks // 4}", ranks) == ""
    assert "compare --data-parallel-sharding-strategy optim" in notes(
        f"{MUON} --data-parallel-sharding-strategy optim_grads", 4
    )


def test_notes_on_compressed_gradients() -> None:
    """Of matrices int8 sends 17 bytes for 64, and PowerSGD a few vectors."""
    assert "--grad-compression int8 has no effect: there is one data-parallel rank" in notes("--grad-compression int8")
    assert re.search(r"to other replicas instead of .* \(3\.8 times less\)", notes("--grad-compression int8", 4))
    instances = "--use-distributed-optimizer --num-distributed-optimizer-instances 2"
    reported = notes(f"--grad-compression powersgd:1 {instances}", 4)
    less = re.search(r"to other instances instead of .* \(([\d.]+) times less\)", reported)
    assert less is not None
    assert float(less[1]) > 10


def test_notes_on_sharded_gradients_and_instances() -> None:
    """Three micro-batches, all in fp32: three reduce-scatters and a gather, where ZeRO-1 has one of each."""
    flags = "--num-layers 8 --hidden-size 256 --data-parallel-sharding-strategy optim_grads --global-batch-size"
    reported = notes(f"{flags} 12", 4)
    assert "each of 3 micro-batches" in reported
    ours, theirs = (float(number) for number in re.findall(r"([\d.]+) MiB", reported))
    assert ours / theirs == pytest.approx((3 + 1) / 2, rel=1e-3)
    assert notes(f"{flags} 4", 4) == ""
    reported = notes(f"{flags.replace('optim_grads', 'optim_grads_params')} 12 --overlap-param-gather", 4)
    ours, kept, theirs = (float(number) for number in re.findall(r"([\d.]+) MiB", reported))
    assert kept / theirs == pytest.approx((3 + 1) / 2, rel=1e-3), "three reduce-scatters and a gather"
    assert ours / theirs == pytest.approx((3 + 3 * 2) / 2, rel=0.1), "where a block is not kept, two gathers each"
    assert "--overlap-param-gather has no effect" in reported
    assert notes(f"{MUON} --data-parallel-sharding-strategy optim_grads_params", 16) == "", "no matrix is whole"
    sharded = "--use-distributed-optimizer --num-distributed-optimizer-instances"
    for ranks, instances in ((1, 1), (4, 1), (4, 2), (4, 4)):
        assert ("shards nothing" in notes(f"{sharded} {instances}", ranks)) is (ranks == instances)
    for instances in (3, 8):
        assert problems(f"{sharded} {instances}", 4)[0].fixes == ("--num-distributed-optimizer-instances 2",)


@pytest.mark.parametrize("name", PIPELINE_SCHEDULES)
def test_every_schedule_takes_every_batch_of_a_ramp(name: str) -> None:
    for ranks in (1, 4):
        flags = f"--pipeline-model-parallel-size {ranks} --pipeline-schedule {name} --num-layers 12 --eval-iters 1"
        parallel = run(f"{flags} --global-batch-size 7 --rampup-batch-size 1 2 20", ranks).config.parallel
        assert parallel.pipeline_schedule == name
        assert parallel.num_virtual_stages_per_pipeline_rank == (plan.required_virtual_stages(parallel) or 1)


def test_a_resolved_pipeline_passes_again() -> None:
    flags = "--pipeline-model-parallel-size 2 --num-layers 8"
    layers = f"{flags} --num-layers-per-virtual-pipeline-stage 2"
    parallel = run(layers, 2).config.parallel
    chosen = (parallel.num_virtual_stages_per_pipeline_rank, parallel.pipeline_schedule)
    assert chosen == (2, "interleaved")
    again = f"--num-virtual-stages-per-pipeline-rank {chosen[0]} --pipeline-schedule {chosen[1]}"
    assert run(f"{layers} {again}", 2).config.parallel == parallel


def test_the_batch_that_a_schedule_file_cannot_run_is_named_with_its_first_sample(tmp_path: Path) -> None:
    make_schedule("1f1b", 2, 1, 4).save(tmp_path / "four.csv")
    flags = f"--pipeline-model-parallel-size 2 --pipeline-schedule {tmp_path}/four.csv --global-batch-size"
    assert codes(f"{flags} 8", 4) == []
    for batch, start, fixes in (
        ("4", "global batch 4: ", ("--global-batch-size 8",)),
        (
            "12 --rampup-batch-size 8 4 10",
            "global batch 12 from sample 16 on: ",
            ("--global-batch-size 8", "drop --rampup-batch-size"),
        ),
        ("8 --rampup-batch-size 4 4 10", "global batch 4 from sample 0 on: ", ("drop --rampup-batch-size",)),
    ):
        (problem,) = problems(f"{flags} {batch}", 4)
        assert (problem.code, problem.sentence[: len(start)], problem.fixes) == ("E211", start, fixes)


def test_the_schedule_of_an_evaluation_is_proven_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: PipelineSchedule, evaluation: bool = False) -> None:
        if evaluation:
            raise ScheduleError("no way forward")

    monkeypatch.setattr(plan, "validate_program", refuse)
    plan.validated_program.cache_clear()
    monkeypatch.setattr(plan, "peak_counts", lambda parallel, count: None)
    assert codes("--pipeline-model-parallel-size 2 --num-layers 2 --global-batch-size 3 --eval-iters 1", 2) == ["E211"]
    plan.validated_program.cache_clear()


@pytest.mark.parametrize("number", [2**63, 10**30, 10**3000])
def test_a_mistyped_number_of_many_digits_is_answered(number: int) -> None:
    assert codes(f"--exit-interval {number}") == ["E002"]


def test_conditions_name_fields() -> None:
    """Every rule and every need can be read; none of the rules refuses the defaults."""
    for rule in rules():
        assert not holds(rule.condition, GOOD)
        for name in re.findall(r"{(\w+)|[+%*-](\w+)}", " ".join([rule.sentence, *rule.fixes])):
            assert "".join(name).isdecimal() or value_of("".join(name), GOOD) is not ...
    for setting in SETTINGS.values():
        for need in setting.option.needs:
            assert is_met(need, GOOD) in (True, False)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("train_iters", True),
        ("not train_iters", False),
        ("decoupled_lr", True),  # 0 is a value
        ("data_path", False),
        ("save or train_iters and mock_data", True),
        ("save or train_iters and not mock_data", False),
        ("optimizer=adam|lion", True),
        ("optimizer!=adam|lion", False),
        ("optimizer!=sgd", True),
        ("seq_length>64", False),
        ("seq_length>=64", True),
        ("seq_length>num_layers", True),
        ("seq_length>max_position_embeddings", False),  # which is not set
        ("not seq_length>max_position_embeddings", True),
    ],
)
def test_conditions(condition: str, expected: bool) -> None:
    config = replace(GOOD, optimizer=replace(GOOD.optimizer, decoupled_lr=0.0))
    assert holds(condition, config) == expected
