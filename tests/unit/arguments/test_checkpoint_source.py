"""The model of the checkpoint that a run starts from, as a source of its options."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments.cli import ParsedArguments, parse
from megatron.arguments.compatibility import compare_configs
from megatron.arguments.presets import PRESETS
from megatron.arguments.sources import flat_values, to_dict
from megatron.config.errors import UserError
from megatron.config.run import CheckpointConfig

RUN = ("--mock-data", "--train-iters", "10")
SHAPE = "--num-layers 3 --hidden-size 48 --num-attention-heads 4 --num-query-groups 2 --swiglu --vocab-size 300"
REST = "--normalization RMSNorm --norm-epsilon 1e-6 --window-size 7 --seq-length 64 --hidden-dropout 0"
SAVED: dict[str, Any] = to_dict(parse([*RUN, *SHAPE.split(), *REST.split(), "--lr", "5e-3"], {}).config)


def going_on(*flags: str, saved: Mapping[str, Any] | None = SAVED) -> ParsedArguments:
    return parse([*RUN, "--load", "runs/a", "--save", "runs/b", *flags], {}, lambda options: saved)


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)


def test_no_flag_is_needed_for_the_model_and_what_comes_from_the_checkpoint_is_told() -> None:
    parsed = going_on("--resume-mode", "weights-only")
    assert to_dict(parsed.config)["model"] == SAVED["model"]
    (printed,) = [note for note in parsed.notes if note.startswith("taken from the checkpoint's model")]
    assert "--norm-epsilon 1e-06" in printed
    assert "--window-size 7" in printed
    assert "--vocab-size" not in printed


def test_nothing_but_the_model_comes_from_it() -> None:
    config = going_on().config
    assert (config.optimizer.lr, config.training.train_iters) == (1e-4, 10)


def test_a_command_that_says_the_whole_model_is_told_nothing() -> None:
    assert going_on(*SHAPE.split(), *REST.split()).notes == going_on(*SHAPE.split(), *REST.split(), saved=None).notes


def test_every_source_comes_after_it(tmp_path: Path) -> None:
    (tmp_path / "window.yaml").write_text("window_size: 9\n")
    assert going_on("--config", str(tmp_path / "window.yaml")).config.model.window_size == 9
    assert going_on("--set", "window_size=null").config.model.window_size is None
    assert going_on("--preset", "tiny-gpt2").config.model.num_layers != 3


def test_a_flag_that_contradicts_the_shape_is_left_to_the_comparison() -> None:
    now = going_on("--num-layers", "5", "--resume-mode", "weights-only").config
    assert [problem.code for problem in compare_configs(SAVED, now, "weights-only").problems] == ["E821"]


def test_samples_are_no_longer_than_what_the_model_knows() -> None:
    assert going_on().config.training.seq_length == 64
    assert "--seq-length 64" in going_on().notes[0]
    with pytest.raises(UserError, match="E105 samples of 128 tokens exceed the model's 64 positions"):
        going_on("--seq-length", "128")


@pytest.mark.parametrize("model", [{"hidden_size": "wide"}, {"of_the_future": 3}, {"lr": 3.0}, {"hidden_size": None}])
def test_what_this_version_cannot_read_is_left_to_the_comparison(model: dict[str, Any]) -> None:
    parsed = going_on(saved={"model": {"vocab_size": 300, "num_layers": 3} | model})
    assert (parsed.config.model.num_layers, parsed.config.model.hidden_size) == (3, 128)
    assert parsed.config.optimizer.lr == 1e-4


@pytest.mark.parametrize("saved", [{}, {"model": 3}, {"model": {}}])
def test_a_configuration_without_a_model_says_nothing(saved: dict[str, Any]) -> None:
    flags = ("--vocab-size", "300")
    assert going_on(*flags, saved=saved) == going_on(*flags, saved=None)


def test_a_checkpoint_comes_before_the_hugging_face_model_that_the_run_began_with(tmp_path: Path) -> None:
    argv = [*RUN, "--load", f"hf:{tmp_path}/gone", "--save", "runs/b"]
    assert flat_values(parse(argv, {}, lambda options: SAVED).config)["norm_epsilon"] == 1e-6
    with pytest.raises(UserError, match="E850"):
        parse(argv, {})


def test_the_search_is_told_what_files_and_flags_say_together(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("checkpoint: {load: runs/a, ckpt_step: 3}\n")
    asked: list[CheckpointConfig] = []
    argv = [
        *RUN,
        "--config",
        str(tmp_path / "run.yaml"),
        "--vocab-size",
        "9",
        "--save",
        "runs/b",
        "--set",
        "ckpt_step=4",
    ]
    parse(argv, {}, lambda options: asked.append(options))
    assert [(c.load, c.save, c.ckpt_step) for c in asked] == [("runs/a", "runs/b", 4)]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_command_makes_the_same_run_again(preset: str) -> None:
    argv = ["--preset", preset, *RUN, "--vocab-size", "300", "--save", "runs/a", "--save-interval", "5"]
    first = parse(argv, {})
    assert parse(argv, {}, lambda options: to_dict(first.config)) == first


@pytest.mark.parametrize("seed", range(40))
def test_a_command_without_any_flag_of_the_model_has_the_same_model(seed: int) -> None:
    """Whatever model it is, its samples as long as the default or as what it knows."""
    dice = random.Random(seed)
    flags: dict[str, Any] = {
        "num_layers": dice.choice([1, 3]),
        "num_attention_heads": 4,
        "num_query_groups": dice.choice([1, 2, 4]),
        "hidden_size": 32 * dice.choice([1, 3]),
        "kv_channels": dice.choice([6, 8]),
        "max_position_embeddings": dice.choice([64, 5000]),
        "position_embedding_type": dice.choice(["learned_absolute", "rope"]),
        "activation": dice.choice(["gelu", "swiglu", "relu2"]),
        "window_size": dice.choice([None, 5]),
        "add_bias_linear": dice.random() < 0.5,
        "untie_embeddings_and_output_weights": dice.random() < 0.5,
        "vocab_size": 300,
    }
    length = min(flags["max_position_embeddings"], 1024)
    argv = [f"--set=model.{name}={'null' if value is None else str(value).lower()}" for name, value in flags.items()]
    saved = to_dict(parse([*RUN, *argv, "--seq-length", str(length)], {}).config)
    assert to_dict(going_on(saved=saved).config)["model"] == saved["model"]
