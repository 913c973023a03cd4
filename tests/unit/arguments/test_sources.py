from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.arguments.cli import parse
from megatron.arguments.presets import PRESETS
from megatron.arguments.sources import (
    build_config,
    flat_values,
    from_assignments,
    from_dict,
    from_mapping,
    merge_values,
    read_yaml,
    resolve,
    to_dict,
    to_yaml,
)
from megatron.config.errors import Problem, UserError
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS, Setting


def some_value(setting: Setting, dice: random.Random) -> Any:
    def scalar() -> Any:
        if setting.option.choices:
            return dice.choice(setting.option.choices)
        words = ["null", "1e-5", "yes", "a b", "~", "0x10", "'", "é: #"]
        makers = {
            bool: lambda: dice.random() < 0.5,
            int: lambda: dice.randrange(-(10**12), 10**12),
            float: lambda: dice.uniform(-1, 1) * 10.0 ** dice.randrange(-300, 300),
            str: lambda: dice.choice(words),
        }
        return makers[setting.kind.scalar]()

    if setting.kind.optional and dice.random() < 0.3:
        return None
    if setting.kind.many:
        return tuple(scalar() for _ in range(setting.kind.length or dice.randrange(4)))
    return scalar()


@pytest.mark.parametrize("seed", range(20))
def test_yaml_gives_back_any_configuration(seed: int) -> None:
    dice = random.Random(seed)
    config = build_config({name: some_value(setting, dice) for name, setting in SETTINGS.items()})
    assert from_dict(yaml.safe_load(to_yaml(config))) == config
    assert from_dict(to_dict(config)) == config
    assert from_dict(flat_values(config)) == config


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resolved_configuration_can_be_run_again(preset: str, tmp_path: Path) -> None:
    argv = ["--preset", preset, "--mock-data", "--vocab-size", "300", "--train-iters", "1000"]
    config = parse(argv, {}).config
    assert resolve(config, 1) == config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert parse(["--config", str(tmp_path / "config.yaml")], {}).config == config


def test_resolving_writes_every_derived_number_out() -> None:
    argv = "--mock-data --vocab-size 300 --train-iters 9 --swiglu --recompute-granularity full --micro-batch-size 3"
    config = parse(argv.split(), {"RANK": "0", "WORLD_SIZE": "2"}).config
    assert (config.model.num_query_groups, config.model.kv_channels, config.model.ffn_hidden_size) == (4, 32, 320)
    assert (config.model.max_position_embeddings, config.training.global_batch_size) == (1024, 6)
    assert (config.training.recompute_method, config.training.recompute_num_layers) == ("uniform", 1)
    training = replace(config.training, recompute_method="block", recompute_num_layers=None)
    assert resolve(replace(config, training=training), 2).training.recompute_num_layers == config.model.num_layers


def test_names_may_be_nested_flat_or_hyphenated() -> None:
    nested = {"model": {"hidden-size": 8, "num_layers": "3"}, "parallel": None}
    layer = from_mapping(nested | {"lr": "1e-5", "data-path": "x", "optimizer": "sgd"}, "f")
    assert layer.values == {"hidden_size": 8, "num_layers": 3, "lr": 1e-5, "data_path": ("x",), "optimizer": "sgd"}
    assert layer.problems == []


@pytest.mark.parametrize(
    ("tree", "code", "sentence"),
    [
        ({"hiden_size": 3}, "E005", "f: there is no option hiden_size"),
        ({"optimizer": {"hidden_size": 3}}, "E005", "f: there is no option optimizer.hidden_size"),
        ({"model": 3}, "E005", "f: model is a group of options, not 3"),
        ({"hidden_size": 3.5}, "E002", "f: model.hidden_size: 3.5 is not a whole number"),
        ({"hidden_size": True}, "E002", "f: model.hidden_size: True is not a whole number"),
        ({"hidden_size": None}, "E002", "f: model.hidden_size: needs a value"),
        ({"sequence_parallel": "yes"}, "E002", "f: parallel.sequence_parallel: 'yes' is not true or false"),
        ({"lr": float("inf")}, "E002", "f: optimizer.lr: inf is not a number"),
        ({"split": 1}, "E002", "f: data.split: 1 is not text (put it in quotes)"),
        ({"rampup_batch_size": [1, 2]}, "E002", "f: training.rampup_batch_size: takes 3 values, not 2"),
        ({"lr": 1.0, "optimizer": {"lr": 2.0}}, "E003", "f: lr is set twice, by group and flat"),
        ({"normalization": "Batch"}, "E002", "f: model.normalization: 'Batch' is not one of LayerNorm, RMSNorm"),
    ],
)
def test_what_cannot_be_read_is_told(tree: dict[str, Any], code: str, sentence: str) -> None:
    (problem,) = from_mapping(tree, "f").problems
    assert (problem.code, problem.sentence) == (code, sentence)


@pytest.mark.parametrize("name", ["data_path", "recompute_modules"])
def test_a_list_may_be_emptied(name: str) -> None:
    assert from_mapping({name: None}, "f").values == {name: ()}
    assert from_assignments([f"{name}=null"]).values == {name: ()}
    assert SETTINGS[name].spell(()) == f"--set {SETTINGS[name].key}=null"


def test_from_dict_tells_everything_at_once() -> None:
    with pytest.raises(UserError) as caught:
        from_dict({"hiden_size": 3, "model": {"num_layers": "x"}})
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"lr: [1", "is not YAML"),
        (b"- 1\n- 2\n", "must hold 'name: value' lines"),
        (b"", "must hold 'name: value' lines"),
        (b"\xff\xfe\x00", "not a UTF-8 text file"),
    ],
)
def test_files_that_cannot_be_read(content: bytes, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    problem = read_yaml(str(file))
    assert isinstance(problem, Problem)
    assert problem.code == "E006"
    assert sentence in problem.sentence


def test_a_file_that_only_has_comments_says_nothing_useful(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# nothing\n")
    problem = read_yaml(str(file))
    assert isinstance(problem, Problem)
    assert problem.code == "E006"


def test_layers() -> None:
    assert merge_values([{"lr": 1, "seed": 1}, {"lr": 2}]) == {"lr": 2, "seed": 1}
    assert merge_values([{"train_iters": 1}, {"train_samples": 2}]) == {"train_samples": 2}
    assert merge_values([{"train_iters": 1, "train_samples": 2}]) == {"train_iters": 1, "train_samples": 2}
    assert merge_values([{"data_path": ("a",)}, {"mock_data": False}]) == {"data_path": ("a",), "mock_data": False}
    files = {"train_data_path": ("a",), "valid_data_path": ("b",)}
    assert merge_values([files, {"valid_data_path": ("c",)}]) == files | {"valid_data_path": ("c",)}, "they go together"
    for other in ({"data_path": ("c",)}, {"data_args_path": "c"}, {"per_split_data_args_path": "c"}):
        assert merge_values([files, other]) == other
        assert merge_values([other, files]) == files
    assert merge_values([{"mock_data": True}, {"data_path": ()}]) == {"mock_data": True, "data_path": ()}
    assert build_config({}) == RunConfig()
