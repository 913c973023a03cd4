from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments.cli import ParsedArguments, make_parser, parse, parse_flags
from megatron.arguments.sources import flat_values, from_mapping, read_yaml
from megatron.config.errors import Problem, UserError
from megatron.config.run import DataConfig, RunConfig
from megatron.config.settings import GROUPS, SETTINGS, FieldType

ROOT = Path(__file__).parents[3]
RUN = ["--mock-data", "--vocab-size", "257", "--train-iters", "100"]


def accepted(*argv: str, ranks: int = 1) -> ParsedArguments:
    return parse([*RUN, *argv], {"RANK": "0", "WORLD_SIZE": str(ranks)})


def value(name: str, *argv: str) -> Any:
    return flat_values(accepted(*argv).config)[name]


def codes(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        accepted(*argv)
    return [problem.code for problem in caught.value.problems]


def test_field_names_and_flags_are_unique_over_all_groups() -> None:
    assert len(SETTINGS) == sum(len(fields(cls)) for cls in GROUPS.values())
    spellings = [spelling for setting in SETTINGS.values() for spelling in setting.spellings]
    assert len(spellings) == len(set(spellings))


def test_nothing_said_gives_the_defaults() -> None:
    message = {"mock_data", "vocab_size", "train_iters"}
    derived = {"num_query_groups", "kv_channels", "ffn_hidden_size", "max_position_embeddings", "global_batch_size"}
    derived |= {"expert_tensor_parallel_size", "num_virtual_stages_per_pipeline_rank", "pipeline_schedule"}
    config, defaults = flat_values(accepted().config), flat_values(RunConfig())
    assert {name for name in config if config[name] != defaults[name]} == message | derived


@pytest.mark.parametrize(
    ("argv", "name", "expected"),
    [
        ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
        ("--swiglu", "activation", "swiglu"),
        ("--squared-relu", "activation", "relu2"),
        ("--openai-gelu", "activation", "gelu_tanh"),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--no-add-bias-linear", "add_bias_linear", False),
        ("--bf16", "params_dtype", "bf16"),
        ("--fp16", "params_dtype", "fp16"),
        ("--fp64", "params_dtype", "fp64"),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--window-size 128", "window_size", 128),
        ("--window-size 127,0", "window_size", 128),
        ("--window-size (127,0)", "window_size", 128),
        ("--window-size=-1,0", "window_size", None),
        ("--window-size null", "window_size", None),
        ("--rampup-batch-size 1 1 8 --global-batch-size 4", "rampup_batch_size", (1, 1, 8)),
        ("--recompute-activations --recompute-modules mlp core_attn", "recompute_modules", ("mlp", "core_attn")),
        ("--lr=3e-4", "lr", 3e-4),
        ("--lr 1", "lr", 1.0),
        ("--seed 7 --seed 8", "seed", 8),
        ("--overlap-grad-reduce --no-overlap-grad-reduce", "overlap_grad_reduce", False),
        ("--no-overlap-grad-reduce --overlap-grad-reduce", "overlap_grad_reduce", True),
        ("--bf16 --params-dtype bf16", "params_dtype", "bf16"),
        ("--set optimizer.lr=2e-4", "lr", 2e-4),
        ("--set lr=2e-4 seed=3", "lr", 2e-4),
        ("--recompute-activations --set recompute_modules=mlp,layernorm", "recompute_modules", ("mlp", "layernorm")),
        ("--set sequence_parallel=true --tensor-model-parallel-size 1", "sequence_parallel", True),
        ("--set loss_scale=null", "loss_scale", None),
        ("--run-dir null", "run_dir", None),
    ],
)  # fmt: skip
def test_flags_set_fields(argv: str, name: str, expected: Any) -> None:
    assert value(name, *argv.split()) == expected


def test_every_boolean_has_both_forms_and_every_other_flag_takes_its_default() -> None:
    for setting in SETTINGS.values():
        if setting.kind.scalar is bool:
            argv = [setting.flag, setting.negative]
        elif setting.default is None or setting.default == ():
            continue
        else:
            argv = [setting.flag, *setting.spell(setting.default).split()[1:]]
            if setting.name == "split":
                argv = [setting.flag, setting.default]
        given = parse_flags(argv).given
        assert given[-1].value() == (False if setting.kind.scalar is bool else setting.default), setting


def test_flags_are_not_abbreviated() -> None:
    assert codes("--num-layer", "3") == ["E001"]


def test_preset_file_flags_and_set_win_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model:\n  num_attention_heads: 16\n  hidden_size: 256\nlr: 2e-3\nmin-lr: 0\n")
    later = tmp_path / "b.yaml"
    later.write_text("training: {seed: 5}\nlr: 3e-3\n")
    argv = ["--set", "model.num_layers=9", "--num-layers", "8", "--hidden-size", "512", "--preset", "tiny-llama"]
    config = flat_values(accepted(*argv, "--config", str(file), str(later)).config)
    assert config["activation"] == "swiglu"  # preset
    assert config["num_attention_heads"] == 16  # file over preset
    assert (config["lr"], config["seed"]) == (3e-3, 5)  # later file over earlier
    assert config["hidden_size"] == 512  # flag over file
    assert config["num_layers"] == 9  # --set over flag


def test_a_later_source_may_say_a_length_in_another_way(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("train_samples: 5000\nlr_warmup_iters: 5\n")
    config = flat_values(parse(["--config", str(file), *RUN, "--lr-warmup-fraction", "0.1"], {}).config)
    assert (config["train_samples"], config["train_iters"]) == (None, 100)
    assert (config["lr_warmup_iters"], config["lr_warmup_fraction"]) == (0, 0.1)
    assert codes("--lr-warmup-iters", "5", "--lr-warmup-fraction", "0.1") == ["E402"]


def test_a_flag_says_where_data_come_from_in_another_way_than_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("data: {train_data_path: [0.3, a, 0.7, b], valid_data_path: c}\n")
    assert parse(["--config", str(file), *RUN], {}).config.data == DataConfig(mock_data=True)
    tree = read_yaml(str(file))
    assert not isinstance(tree, Problem)
    assert from_mapping(tree, "a.yaml").values["train_data_path"] == ("0.3", "a", "0.7", "b")


def test_notes_tell_what_may_not_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run, there = ["--vocab-size", "257", "--train-iters", "100"], "tests/golden/megatron/case0"
    sets = ["--valid-data-path", "1", there, "2", there, "--multiple-validation-sets", "--split", "9,1,0"]
    notes = parse([*run, "--train-data-path", there, *sets, "--eod-id", "3"], {}).notes
    assert notes == (
        f"--valid-data-path contains {there} more than once: every occurrence is read in the same order",
        "the weights of --valid-data-path have no effect: each of its prefixes is a separate validation set",
        "--split has no effect without --data-path",
        "--eod-id has no effect without --reset-position-ids, --reset-attention-mask or --eod-mask-loss",
    )


def test_notes_tell_what_was_ignored_and_why() -> None:
    notes = accepted(
        "--use-flash-attn", "--num-workers", "4", "--sequence-parallel", "--transformer-impl", "local"
    ).notes
    assert len(notes) == 4
    assert notes[0].startswith("ignored: --use-flash-attn because ")
    assert notes[1].startswith("ignored: --num-workers 4 because ")
    assert notes[3] == "--sequence-parallel has no effect without TP above 1"
    assert accepted().notes == ()


def test_notes_on_options_without_effect_count_them_and_leave_out_those_of_a_preset() -> None:
    sgd = accepted("--preset", "tiny-llama", "--optimizer", "sgd")
    assert sgd.config.optimizer.adam_beta2 == 0.95  # of the preset
    assert not any("no effect" in note for note in sgd.notes)
    (note,) = accepted("--optimizer", "sgd", "--adam-beta2", "0.95", "--adam-eps", "1e-6").notes
    assert note == "--adam-beta2 and --adam-eps have no effect without optimizer adam or muon"


@pytest.mark.parametrize("option", ["--lr-factors", "--weight-decay-factors"])
def test_patterns_that_match_no_parameter_are_refused_without_building_the_model(option: str) -> None:
    assert accepted(option, "layers.1.*=2", "*.bias=0", "--check-config").notes == ()
    for flags in (["--check-config"], []):
        with pytest.raises(UserError) as error:
            accepted(option, "layers.2.*=2", "embeding.word_embeddings.weight=0.5", "*.bias=0", *flags)
        first, second = error.value.problems
        assert first.code == second.code == "E407"
        assert f"'layers.2.*' in {option} " in first.sentence
        assert second.fixes == (f"{option} 'embedding.word_embeddings.weight=0.5'",)


def test_patterns_are_matched_before_the_tokenizer_tells_the_size_of_the_vocabulary() -> None:
    base = ["--mock-data", "--tokenizer-type", "ByteTokenizer", "--train-iters", "1", "--lr-factors"]
    untied = parse([*base, "output_layer.*=2", "--untie-embeddings-and-output-weights"], {})
    assert untied.config.model.vocab_size is None
    with pytest.raises(UserError, match="E407"):
        parse([*base, "output_layer.*=2"], {})


def test_megatron_without_biases_is_told_which_gelu() -> None:
    assert any("exact form" in note for note in accepted("--disable-bias-linear").notes)
    assert not any("exact form" in note for note in accepted("--disable-bias-linear", "--swiglu").notes)


def test_a_run_without_a_meeting_point_is_refused_and_can_be_checked() -> None:
    srun = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}
    with pytest.raises(UserError, match=r"E009 srun started 16 ranks[^|]+fix: export MASTER_ADDR=\$\(scontrol"):
        parse(RUN, srun)
    assert parse(RUN, srun | {"MASTER_ADDR": "node1"}).world_size == 16
    assert parse([*RUN, "--check-config"], srun).world_size == 16


def test_a_check_without_ranks_takes_the_fewest_and_says_so() -> None:
    parsed = parse([*RUN, "--check-config", "--tensor-model-parallel-size", "4"], {})
    assert (parsed.check_only, parsed.world_size) == (True, 4)
    assert "checked for 4 ranks" in parsed.notes[0]
    assert parse([*RUN, "--check-config", "--world-size", "6"], {}).world_size == 6


def test_flags_that_are_ignored_for_one_reason_share_a_note() -> None:
    (note,) = accepted("--use-mcore-models", "--transformer-impl", "local").notes
    assert note.startswith("ignored: --use-mcore-models, --transformer-impl local because there is one implementation")


def test_samples_that_fill_no_step_are_noted_and_not_counted() -> None:
    argv = ["--set", "train_iters=null", "--global-batch-size", "64", "--train-samples"]
    parsed = accepted(*argv, "1000")
    assert parsed.notes == ("--train-samples 1,000: the last 40 are not used, because they do not fill a step of 64",)
    assert "\nlength     15 steps, 960 samples, " in parsed.summary()
    assert accepted(*argv, "960").notes == ()


@pytest.mark.parametrize("words", ["auto", "flash_attn", "cudnn", "torch"])
def test_documents_are_recorded_by_what_reads_a_mask(words: str) -> None:
    argv = ("--cuda-graph", "step", "--reset-attention-mask", "--kernels", "compiled", f"attention={words}")
    assert ("E910" in codes(*argv)) is (words in ("auto", "flash_attn"))


@pytest.mark.parametrize(("interval", "told"), [(1, True), (2, False)])
def test_recorded_steps_that_are_all_watched_are_noted(interval: int, told: bool) -> None:
    dropless = ("--hidden-dropout", "0", "--attention-dropout", "0", "--device", "auto", "--run-dir", "runs/a")
    notes = accepted("--cuda-graph", "step", "--log-health-interval", str(interval), *dropless).notes
    assert any("--cuda-graph step has no effect" in note for note in notes) is told


def test_words_belong_to_the_flag_before_them() -> None:
    with pytest.raises(UserError) as caught:
        accepted("--frobnicate", "1", "--bf16", "stray", "--nonsense=2")
    sentences = [problem.sentence for problem in caught.value.problems]
    assert sentences == ["--frobnicate: no such flag", "stray: belongs to no flag", "--nonsense: no such flag"]


def test_a_word_with_one_dash_is_no_value() -> None:
    with pytest.raises(UserError) as refused:
        parse(["--run-dir", "-bf16", "--lr", "-1e-4"], {})
    sentences = {problem.sentence for problem in refused.value.problems}
    assert {"--run-dir: needs a value", "-bf16: belongs to no flag", "--lr -0.0001: must be at least 0"} <= sentences


def test_an_argument_a_boolean_does_not_take_is_an_error() -> None:
    assert codes("--sequence-parallel=yes") == ["E002"]


@pytest.mark.parametrize(
    ("hint", "kind"),
    [
        (int, FieldType(int)),
        (float | None, FieldType(float, optional=True)),
        (tuple[int, int, int] | None, FieldType(int, optional=True, many=True, length=3)),
        (tuple[str, ...], FieldType(str, many=True)),
    ],
)
def test_types_are_read(hint: Any, kind: FieldType) -> None:
    assert FieldType.of(hint) == kind


def test_help_is_grouped_and_shows_single_values() -> None:
    text = make_parser().format_help()
    for group, cls in GROUPS.items():
        assert f"\n{group}:\n  {(cls.__doc__ or '').splitlines()[0]}" in text
    assert "--hidden-size N " in text
    assert "--rampup-batch-size N N N" in text
    assert max(map(len, text.splitlines())) <= 110


def pretrain(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "pretrain_gpt.py", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_checking_is_fast_and_needs_no_torch() -> None:
    before = os.times()
    done = pretrain(*RUN, "--check-config", "--preset", "llama3-70b", "--vocab-size", "128256", "--world-size", "64")
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("config ok\n")
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "megatron.arguments.cli" in imported
    assert imported.isdisjoint({"torch", "transformers", "yaml"})
    computed = after.children_user + after.children_system - before.children_user - before.children_system
    assert 0 < computed < 1, "of the processor's time, whatever else it does"


def test_a_refusal_is_told_without_a_traceback() -> None:
    done = pretrain("--check-config", "--hiden-size", "64")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "E001 --hiden-size: no such flag; did you mean --hidden-size?\n  fix: --hidden-size 64\n" in done.stderr
    assert "Traceback" not in done.stderr
