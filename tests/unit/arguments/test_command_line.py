"""From flags, files, presets and plugins to the values of fields."""

from __future__ import annotations

import importlib
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.arguments.cli import parse
from megatron.arguments.compatibility import compare_configs
from megatron.arguments.help import make_parser
from megatron.arguments.megatron_flags import foreign_flags
from megatron.arguments.presets import PRESETS
from megatron.arguments.sources import (
    build_config,
    flat_values,
    from_checkpoint,
    from_dict,
    from_mapping,
    merge_values,
    read_yaml,
    resolve,
    to_dict,
    to_yaml,
)
from megatron.arguments.validate import choose_cuda_graph
from megatron.config import plugins
from megatron.config.data import DataConfig
from megatron.config.errors import Problem, UserError
from megatron.config.plugins import register, registered
from megatron.config.run import RunConfig
from megatron.config.settings import GROUPS, SETTINGS, SPELLINGS, Setting
from tests.unit.arguments.command import MODEL, RUN, codes, notes, problems, run

ROOT = Path(__file__).parents[3]


def test_names_and_flags_are_unique_over_all_groups() -> None:
    assert len(SETTINGS) == sum("option" in f.metadata for cls in GROUPS.values() for f in fields(cls))
    assert len(SPELLINGS) == sum(len({setting.flag, *setting.constants}) for setting in SETTINGS.values())


def test_without_flags_fields_have_their_defaults() -> None:
    derived = {"num_query_groups", "kv_channels", "ffn_hidden_size", "max_position_embeddings", "global_batch_size"}
    derived |= {"expert_tensor_parallel_size", "num_virtual_stages_per_pipeline_rank", "pipeline_schedule"}
    config, defaults = flat_values(run().config), flat_values(RunConfig())
    given = {"mock_data", "vocab_size", "train_iters"}
    assert {name for name in config if config[name] != defaults[name]} == given | derived
    assert notes() == ""


@pytest.mark.parametrize(
    ("flags", "name", "expected"),
    [
        ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
        ("--openai-gelu", "activation", "gelu_tanh"),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--window-size 127,0", "window_size", 128),
        ("--window-size (127,0)", "window_size", 128),
        ("--window-size=-1,0", "window_size", None),
        ("--window-size -1", "window_size", None),
        ("--window-size null", "window_size", None),
        ("--attention-pattern 'local:64,global*1'", "attention_pattern", "local:64,global*1"),
        ("--window-size 64 --set attention_pattern=local:64,global", "window_size", None),
        ("--attention-pattern local:64 --set window_size=3", "attention_pattern", None),
        ("--rampup-batch-size 1 1 8 --global-batch-size 4", "rampup_batch_size", (1, 1, 8)),
        ("--recompute-activations --recompute-modules mlp core_attn", "recompute_modules", ("mlp", "core_attn")),
        ("--lr=3e-4", "lr", 3e-4),
        ("--lr 1", "lr", 1.0),
        ("--seed 7 --seed 8", "seed", 8),
        ("--overlap-grad-reduce --no-overlap-grad-reduce", "overlap_grad_reduce", False),
        ("--bf16 --params-dtype bf16", "params_dtype", "bf16"),
        ("--set lr=2e-4 seed=3", "lr", 2e-4),
        ("--recompute-activations --set recompute_modules=mlp,layernorm", "recompute_modules", ("mlp", "layernorm")),
        ("--set parallel.sequence_parallel=true", "sequence_parallel", True),
        ("--set loss_scale=null", "loss_scale", None),
        ("--run-dir null", "run_dir", None),
        ("--set data.train_data_path=null", "train_data_path", ()),
    ],
)  # fmt: skip
def test_flags_set_fields(flags: str, name: str, expected: Any) -> None:
    assert flat_values(run(flags.replace("(", "'(").replace(")", ")'")).config)[name] == expected


def test_every_value_is_read_back_from_its_flag() -> None:
    dice = random.Random(0)
    for setting in SETTINGS.values():
        for value in {setting.default, _some_value(setting, dice), _some_value(setting, dice)}:
            flag = setting.spell(value)
            if flag.startswith("--set"):
                words = yaml.safe_load(flag.partition("=")[2])
            else:
                words = shlex.split(flag.replace(f"{setting.flag}=", f"{setting.flag} "))[1:]
            constant = setting.constants.get(flag)
            assert setting.convert(words if constant is None else constant) == value, flag


WORDS = {
    "step_batch_size_schedule": ("0:2", "1.5K:4"),
    "skip_samples": ("0:2", "@a b"),
    "skip_tokens": ("1.5K:4K",),
    "skip_documents": ("a b:7", "web:1-3"),
}
"""Values of options whose words have a form."""


CHOICES = {
    "grad_compression": ["none", "powersgd:4", "topk:1e-3", "int8"],
    "on_spike": ["log", "rewind:7"],
    "on_nonfinite": ["skip", "rewind:7"],
}
"""Values of options of one word that has a form."""


def _some_value(setting: Setting, dice: random.Random) -> Any:
    def scalar() -> Any:
        if setting.option.choices:
            return dice.choice(setting.option.choices)
        if setting.name == "attention_pattern":
            return dice.choice(["global", "local:64*2, global", "dilated:4:2+first:3"])
        if setting.name in ("no_rope_freq", "window_attn_skip_freq", "moe_layer_freq", "linear_attention_freq"):
            return dice.choice(["4", "([0]*3+[1]*1)*9", "[1, 0]"])
        if setting.name in ("hybrid_layer_pattern", "mtp_hybrid_override_pattern"):
            return dice.choice(["*", "-", "-*", "+E"])
        if setting.name in CHOICES:
            return dice.choice(CHOICES[setting.name])
        makers = {
            bool: lambda: dice.random() < 0.5,
            int: lambda: dice.randrange(-(10**12), 10**12),
            float: lambda: dice.uniform(-1, 1) * 10.0 ** dice.randrange(-300, 300),
            str: lambda: dice.choice(["null", "1e-5", "yes", "a b", "~", "0x10", "'", "é: #"]),
        }
        return makers[setting.scalar]()

    if setting.name == "plugin_dataset" or (setting.optional and dice.random() < 0.3):
        return None
    if setting.name in WORDS:
        return WORDS[setting.name]
    if setting.many:
        return tuple(scalar() for _ in range(setting.length or dice.randrange(4)))
    return scalar()


@pytest.mark.parametrize("seed", range(5))
def test_yaml_gives_back_any_configuration(seed: int) -> None:
    dice = random.Random(seed)
    config = build_config({name: _some_value(setting, dice) for name, setting in SETTINGS.items()})
    assert from_dict(yaml.safe_load(to_yaml(config))) == config
    assert from_dict(to_dict(config)) == from_dict(flat_values(config)) == config


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resolved_configuration_can_be_run_again(preset: str, tmp_path: Path) -> None:
    config = run(f"--preset {preset} --vocab-size 300 --train-iters 1000").config
    assert resolve(config, 1) == config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert parse(["--config", str(tmp_path / "config.yaml")], {}).config == config


def test_resolving_writes_every_derived_number_out() -> None:
    config = run("--swiglu --recompute-granularity full --micro-batch-size 3", ranks=2).config
    assert (config.model.num_query_groups, config.model.kv_channels, config.model.ffn_hidden_size) == (4, 32, 320)
    assert (config.model.max_position_embeddings, config.training.global_batch_size) == (1024, 6)
    assert (config.training.recompute_method, config.training.recompute_num_layers) == ("uniform", 1)
    training = replace(config.training, recompute_method="block", recompute_num_layers=None)
    assert resolve(replace(config, training=training), 2).training.recompute_num_layers == config.model.num_layers


def test_preset_file_flags_and_set_win_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model:\n  num_attention_heads: 16\n  hidden_size: 256\nlr: 2e-3\nmin-lr: 0\n")
    (tmp_path / "b.yaml").write_text("training: {seed: 5}\nlr: 3e-3\n")
    flags = "--set model.num_layers=9 --num-layers 8 --hidden-size 512 --preset tiny-llama --config"
    config = flat_values(run(f"{flags} {tmp_path}/a.yaml {tmp_path}/b.yaml").config)
    assert config["activation"] == "swiglu"  # preset
    assert config["num_attention_heads"] == 16  # file over preset
    assert (config["lr"], config["seed"]) == (3e-3, 5)  # later file over earlier
    assert config["hidden_size"] == 512  # flag over file
    assert config["num_layers"] == 9  # --set over flag


def test_a_later_source_replaces_exclusive_options(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "train_samples: 50\nlr_warmup_iters: 5\ndata: {train_data_path: [0.3, a, 0.7, b], valid_data_path: c}"
    )
    config = run(f"--config {file} --lr-warmup-fraction 0.1").config
    assert (config.training.train_samples, config.training.train_iters) == (None, 100)
    assert (config.optimizer.lr_warmup_iters, config.optimizer.lr_warmup_fraction) == (0, 0.1)
    assert config.data == DataConfig(mock_data=True)
    assert codes("--lr-warmup-iters 5 --lr-warmup-fraction 0.1") == ["E402"]
    assert merge_values([{"train_iters": 1, "train_samples": 2}]) == {"train_iters": 1, "train_samples": 2}
    files = {"train_data_path": ("a",), "valid_data_path": ("b",)}
    assert merge_values([files, {"valid_data_path": ("c",)}]) == files | {"valid_data_path": ("c",)}, "they go together"
    assert merge_values([files, {"data_args_path": "c"}]) == {"data_args_path": "c"}
    assert merge_values([{"mock_data": True}, {"data_path": ()}]) == {"mock_data": True, "data_path": ()}


def test_names_may_be_nested_flat_or_hyphenated() -> None:
    nested = {"model": {"hidden-size": 8, "num_layers": "3"}, "parallel": None}
    layer = from_mapping(nested | {"lr": "1e-5", "data-path": "x", "optimizer": "sgd", "test_data_path": None}, "f")
    expected = {"hidden_size": 8, "num_layers": 3, "lr": 1e-5, "data_path": ("x",), "optimizer": "sgd"}
    assert layer.values == expected | {"test_data_path": ()}
    assert layer.problems == []


@pytest.mark.parametrize(
    ("tree", "code"),
    [
        ({"hiden_size": 3}, "E005"),
        ({"optimizer": {"hidden_size": 3}}, "E005"),
        ({"model": 3}, "E005"),
        ({"hidden_size": 3.5}, "E002"),
        ({"hidden_size": True}, "E002"),
        ({"hidden_size": None}, "E002"),
        ({"hidden_size": [8, 8]}, "E002"),
        ({"sequence_parallel": "yes"}, "E002"),
        ({"lr": float("inf")}, "E002"),
        ({"lr": 10**400}, "E002"),
        ({"split": 1}, "E002"),
        ({"rampup_batch_size": [1, 2]}, "E002"),
        ({"normalization": "Batch"}, "E002"),
        ({"lr": 1.0, "optimizer": {"lr": 2.0}}, "E003"),
    ],
)
def test_entries_that_cannot_be_read(tree: dict[str, Any], code: str) -> None:
    assert [problem.code for problem in from_mapping(tree, "f").problems] == [code]
    with pytest.raises(UserError) as caught:
        from_dict(tree | {"nothing": 0})
    assert len(caught.value.problems) == 2, "all at once"


@pytest.mark.parametrize("content", [b"lr: [1", b"- 1\n", b"# nothing\n", b"\xff\xfe\x00"])
def test_files_that_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(content)
    problem = read_yaml(str(tmp_path / "a.yaml"))
    assert isinstance(problem, Problem)
    assert problem.code == "E006"
    assert [found.code for found in problems(f"--config {tmp_path}/a.yaml")] == ["E006"], "nothing that may be in it"
    assert [found.code for found in problems(f"--config {tmp_path}/b.yaml")] == ["E006"]


@pytest.mark.parametrize("word", ["--hepl", "--help-al", "--verison", "--check-confg"])
def test_misspelled_flags_that_end_a_program_are_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    (problem,) = problems(f"--preset tiny-llama --mock-data --vocab-size 64 --train-iters 1 {word}")
    assert problem.code == "E001"
    assert problem.fixes[0] in ("--help", "--help-all", "--version", "--check-config")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("word", "fix"), [("paralel", "--help parallel"), ("nowhere", "--help"), ("lr", "--help")])
def test_help_of_no_section_is_refused(word: str, fix: str) -> None:
    (problem,) = problems(f"--help {word}")
    assert (problem.code, problem.fixes) == ("E002", (fix,))
    assert all(group in problem.sentence for group in GROUPS)


def test_arguments_belong_to_the_flag_before_them() -> None:
    found = problems("--frobnicate 1 --bf16 stray --nonsense=2")
    assert [problem.sentence.partition(":")[0] for problem in found] == ["--frobnicate", "stray", "--nonsense"]
    sentences = {p.sentence for p in problems("--run-dir -bf16 --lr -1e-4")}
    assert {
        "--run-dir: needs a value",
        "-bf16: belongs to no flag; booleans take --x and --no-x",
        "--lr -0.0001: must be at least 0",
    } <= sentences
    assert codes("--sequence-parallel=yes") == ["E002"]
    assert codes("--num-layer 3") == ["E001"], "flags are not abbreviated"


def test_ranks_to_check_for() -> None:
    argv = f"{MODEL} {RUN}".split()
    srun = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}
    with pytest.raises(UserError, match="E009"):
        parse(argv, srun)
    assert parse(argv, srun | {"MASTER_ADDR": "node1"}).world_size == 16
    assert parse([*argv, "--check-config"], srun).world_size == 16
    parsed = parse([*argv, "--check-config", "--tensor-model-parallel-size", "4"], {})
    assert (parsed.check_only, parsed.world_size) == (True, 4)
    assert "checked for 4 ranks" in parsed.notes[0]
    assert parse([*argv, "--check-config", "--world-size", "6"], {}).world_size == 6


def test_help_is_grouped_and_shows_single_values() -> None:
    text = make_parser().format_help()
    for group, cls in GROUPS.items():
        assert f"\n{group}:\n  {(cls.__doc__ or '').splitlines()[0]}" in text
    assert "--rampup-batch-size N N N" in text
    assert max(map(len, text.splitlines())) <= 110
    assert "--no-x" in text
    words = set(re.findall(r"--[\w-]+", text))
    negated = {f"--no-{setting.flag.removeprefix('--')}" for setting in SETTINGS.values()}
    assert not SPELLINGS.keys() - words - negated


def helped(capsys: pytest.CaptureFixture[str], argv: str, module: str = "pretrain_gpt") -> str:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main(argv.split())
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_and_sections_and_everything_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    short = helped(capsys, "--help")
    assert len(short.splitlines()) < 120
    words = {"--num-layers", "--data-path", "--load", "--run-dir", "--bf16", "--check-config", "--help-all", "--lr"}
    assert words <= set(re.findall(r"--[\w-]+", short))
    section = helped(capsys, "--lr 1 -h optimizer")
    shown = {setting.flag for setting in SETTINGS.values() if f"\n  {setting.flag} " in section}
    assert shown == {setting.flag for setting in SETTINGS.values() if setting.group == "optimizer"}
    assert helped(capsys, "--help-all") == make_parser().format_help()
    assert helped(capsys, "--help --lr 1") == short == helped(capsys, "--help", "pretrain_hybrid")
    assert helped(capsys, "--version --lr") == f"megatron-pretrain {metadata.version('megatron-pretrain')}\n"


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("sft", "--num-epochs N [^[]*\\[3\\]"),
        ("dpo", "--dpo-beta X [^[]*\\[0.1\\]"),
        ("distill", "--distillation-top-k N [^[]*\\[32\\]"),
    ],
)
def test_help_of_fine_tuning_is_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, own: str
) -> None:
    text = helped(capsys, "--help", f"tasks.finetune.{name}")
    assert text.startswith(f"usage: {name}.py ")
    assert "Pretrain a GPT" not in text
    assert re.search(own, " ".join(text.split()))
    assert re.search(r"--lr X .*\[(2e-05|1e-06)\]", text), f"of {name}.yaml"
    assert f"\n  python tasks/finetune/{name}.py --" in text
    assert len(text.splitlines()) < 125
    assert "dpo" in name or "--dpo-beta" not in text
    monkeypatch.setattr(sys, "argv", [f"megatron {name}"])  # as of an installed package
    text = helped(capsys, "--help", f"tasks.finetune.{name}")
    assert text.startswith(f"usage: megatron {name} ")
    assert f"\n  megatron {name} --" in text
    assert ".py --" not in text.rpartition("example:")[2]


def test_fine_tuning_starts_from_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module("tasks.finetune.sft").main(["--chat-data-path", "x"]) == 2
    error = capsys.readouterr().err
    assert "--pretrained-checkpoint hf:DIR" in error
    assert "--preset" not in error


def _pretrain(*argv: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    command = [sys.executable, "-X", "importtime", "pretrain_gpt.py", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done, {line.split("|")[-1].strip() for line in done.stderr.splitlines()}


def test_checking_is_fast_and_needs_no_torch() -> None:
    before = os.times()
    flags = ["--preset", "llama3-70b", "--vocab-size", "128256", "--world-size", "64"]
    done, imported = _pretrain(*RUN.split(), "--check-config", *flags)
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("config ok\n")
    assert "megatron.arguments.cli" in imported
    assert imported.isdisjoint({"torch", "transformers", "yaml"})
    computed = after.children_user + after.children_system - before.children_user - before.children_system
    assert 0 < computed < 1, "of the processor's time, whatever else it does"


def test_a_refusal_has_no_traceback() -> None:
    done, _ = _pretrain("--check-config", "--hiden-size", "64")
    assert (done.returncode, done.stdout) == (2, "")
    assert "E001 --hiden-size: no such flag; did you mean --hidden-size?\n  fix: --hidden-size 64\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with plugins; what they register and import is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_registered", {kind: {} for kind in plugins.KINDS})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for name in ("mine", "yours"):
        text = "from megatron.config.plugins import register\n\n@register('optimizer', '{}')\nclass Mine: ...\n"
        (tmp_path / f"{name}_plugin.py").write_text(text.format(name))
    (tmp_path / "broken_plugin.py").write_text("raise OSError('no\\ndisk')")
    (tmp_path / "needy_plugin.py").write_text("import not_installed")
    (tmp_path / "run.yaml").write_text(
        "optimizer: {optimizer: yours}\ncompute: {plugin: [mine_plugin, yours_plugin]}\n"
    )
    modules = set(sys.modules)
    foreign_flags.cache_clear()
    yield tmp_path
    foreign_flags.cache_clear()
    for name in set(sys.modules) - modules:
        if name.endswith("_plugin"):
            del sys.modules[name]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "flags",
    [
        "--config run.yaml",
        "--set 'compute.plugin=mine_plugin yours_plugin' optimizer.optimizer=yours",
        "--plugin yours_plugin --optimizer yours --plugin mine_plugin",
    ],
)
def test_plugins_of_every_source_extend_the_choices(flags: str) -> None:
    assert codes("--optimizer yours") == ["E002"]
    config = run(flags).config
    assert config.optimizer.optimizer == "yours"
    assert set(config.compute.plugin) == {"mine_plugin", "yours_plugin"}
    assert set(registered("optimizer")) == {"mine", "yours"}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_plugin", "no such module"),
        ("mine_plugin.py", "not a file"),
        ("broken_plugin", "OSError: no disk"),
        ("needy_plugin", "ModuleNotFoundError"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_the_only_problem(name: str, words: str) -> None:
    (problem,) = problems(f"--optimizer mine --plugin {name} mine_plugin")
    assert problem.code == "E914"
    assert words in problem.sentence


@pytest.mark.usefixtures("folder")
def test_plugins_by_entry_point_and_their_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(**_: Any) -> list[metadata.EntryPoint]:
        return [metadata.EntryPoint("ours", "mine_plugin", plugins.ENTRY_POINTS)]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    flags = "--optimizer mine --plugin ours --exp-avg-dtype bf16 --sgd-momentum 0.5"
    assert notes(flags).startswith("--exp-avg-dtype has no effect without")
    monkeypatch.setattr(registered("optimizer")["mine"], "state_kinds", ("exp_avg",), raising=False)
    assert run(flags).config.optimizer.exp_avg_dtype == "bf16"
    assert "no effect" not in notes(flags)


@pytest.mark.usefixtures("folder")
def test_names_are_registered_once_and_kinds_are_known() -> None:
    register("optimizer", "a")(int)
    register("optimizer", "a")(int)
    with pytest.raises(ValueError, match="two plugins"):
        register("optimizer", "a")(float)
    with pytest.raises(ValueError, match="no kind"):
        register("optimiser", "a")


GATED = '''
from dataclasses import dataclass
from megatron.config.errors import Problem
from megatron.config.option import MegatronOption, option
from megatron.config.plugins import register

@register("model_options", "gated")
@dataclass(frozen=True)
class Gated:
    """Gates of a plugin's mixer."""

    gated_width: int = option(8, role="shape", at_least=1, megatron=MegatronOption(values={"0": "null"}))
    gated_heads: int = option(2, role="shape", at_least=1, spellings=("--number-of-gates",), needs="gated_on")
    gated_on: bool = option(False, role="function", aliases={"--use-mup": True})
    refused = """
    gated_on and gated_width%gated_heads
    E213 {gated_width} channels of gates do not divide over {gated_heads} heads
      fix: --gated-width {gated_width%gated_heads} | --gated-heads {gated_width*1}

    gated_on and cuda_graph=step
    E907 gates are not captured
      fix: --cuda-graph none
    """

    def check_gates(self, config, world_size):
        if self.gated_on and self.gated_width > config.model.hidden_size:
            yield Problem("E213", "gates are wider than the model")

    def note_gates(self, config, world_size):
        if self.gated_on:
            yield "gates are on"

    def row_model(self, config, world_size):
        return f"{self.gated_heads} gates" if self.gated_on else ""
'''


@pytest.mark.usefixtures("folder")
def test_options_of_a_plugins_model_are_checked_and_saved_with_the_model() -> None:
    """One file brings options, rules, a check, a note, a row of the summary, and spellings of Megatron-LM."""
    Path("gated_plugin.py").write_text(GATED)
    saved_without = to_dict(run().config)
    flags = "--plugin gated_plugin --use-mup --number-of-gates 4"
    parsed = run(flags)
    assert parsed.config.model.plugin(registered("model_options")["gated"]).gated_heads == 4
    assert "gates are on" in parsed.notes
    assert "; 4 gates\n" in parsed.summary()
    (problem,) = problems(f"{flags} --gated-width 6")
    assert (problem.code, problem.choices) == ("E213", ("--gated-width 4", "--gated-width 8", "--gated-heads 6"))
    assert codes(f"{flags} --set model.gated_width=400") == codes(f"{flags} --gated-width 400") == ["E213"]
    config = run(f"{flags} --hidden-dropout 0 --attention-dropout 0").config
    assert choose_cuda_graph(config, 1) == ("none", "gates are not captured")
    assert "of --use-mup is not implemented" in problems(f"{flags} --mup-base-head-dim 8")[0].sentence
    assert "ignored: --mup-base-head-dim 8 because it has no effect" in notes(
        "--plugin gated_plugin --mup-base-head-dim 8"
    )
    saved = to_dict(parsed.config)
    assert saved["model"]["gated_heads"] == 4
    assert from_dict(saved) == parsed.config
    assert from_checkpoint(saved).values["gated_heads"] == 4
    assert compare_configs(saved, parsed.config, "weights-only").problems == ()
    other = run(f"{flags} --number-of-gates 8").config
    assert [p.code for p in compare_configs(saved, other, "weights-only").problems] == ["E821"]
    assert compare_configs(saved_without, run("--plugin gated_plugin --gated-heads 8").config, "exact").problems == ()


def test_a_models_options_need_their_plugin() -> None:
    config = run().config
    saved = to_dict(config)
    saved["model"]["gated_heads"] = 4
    assert [problem.code for problem in compare_configs(saved, config, "weights-only").problems] == ["E822"]
