"""Checkpoint folders and Hugging Face models: refusals, and the options that a run takes from its start point."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments.checks.checkpoint import holds_checkpoints
from megatron.arguments.cli import ParsedArguments, parse
from megatron.arguments.compatibility import compare_configs
from megatron.arguments.presets import PRESETS
from megatron.arguments.sources import to_dict, to_yaml
from megatron.checkpoint import object_store
from megatron.checkpoint.object_store import RemotePath
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.errors import Problem, UserError
from megatron.convert.huggingface.config import read_model_values
from tests.unit.arguments.command import MODEL, RUN, codes, problems, run

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("ckpt/iter_0000100", "other"):
        (tmp_path / folder).mkdir(parents=True)


@pytest.mark.parametrize(
    "flags",
    [
        "--save new/and/deep",
        "--save ckpt --load ckpt --save-interval 10 --keep-last 2 --keep-every 100",
        "--save new --load ./new",  # the first start of a command that is started again and again
        "--save new --load ckpt --finetune",
        "--save ckpt --override-opt_param-scheduler --load ckpt",
        "--save new --load ckpt/iter_0000100 --ckpt-step 100",
        "--load ckpt --ckpt-step 0",
        "--save new --local-save /disk/{node}/a --local-save-interval 10",
        "--save ckpt --load gone",  # the run once began there; it resumes from its own
        "--save ckpt --lr-warmup-samples 200",  # judged when the step to resume from is known
        "--load ckpt/iter_0000100 --lr-warmup-samples 200",
    ],
)
def test_accepted_folders(flags: str) -> None:
    assert codes(flags) == []


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--local-save here --local-save-interval 5", "E804"),
        ("--save new --local-save here", "E804"),
        ("--local-save ''", "E804"),
        ("--save new --local-save ./new --local-save-interval 5", "E804"),
        ("--save new --local-save 'a/{host}' --local-save-interval 5", "E804"),
        ("--save new --save-hf-interval 4", "E805"),
        ("--save new --save-hf-interval 4 --save-interval 3", "E805"),
        ("--save memory://a/b --save-hf-interval 4 --save-interval 2", "E805"),
        ("--lr-warmup-samples 200 --save other", "E403"),
        ("--lr-warmup-samples 200 --save new --load other", "E403"),
        ("--load link --save ckpt --finetune", "E803"),
    ],
)
def test_refused_folders(flags: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    (problem,) = problems(flags)
    assert problem.code == code
    assert problem.fixes


def test_invalid_folders_are_refused_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert codes("--load a b --save c d --finetune") == ["E002", "E002"]
    fixes = problems("--load ckpt/iter_0000100 --ckpt-step 200")[0].fixes
    assert fixes == ("--load ckpt", "--set checkpoint.ckpt_step=null")
    fix = problems("--load ckpt/iter_0000100 --save ckpt --finetune")[0].fixes[0]
    assert fix == "--load ckpt/iter_0000100 --save ckpt-new"
    assert codes(f"--finetune {fix}") == []
    Path("ckpt/latest_checkpointed_iteration.txt").write_text("100")
    assert codes("--load ckpt") == ["E801"]
    assert [(p.code, p.fixes) for p in problems("--load ckpt --save ckpt")] == [("E802", ("--save ckpt-new",))]
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "other" and real(path, mode))
    assert codes("--save other/deep/er") == ["E802"]


@pytest.mark.parametrize(
    ("flags", "code", "fix"),
    [
        ("--save zz://b/run", "E802", "pip install"),
        ("--load gs://b/run", "E801", "pip install gcsfs"),
        ("--save s3://", "E802", "--save s3://BUCKET/RUN"),
        ("--save memory://r/iter_0000100", "E802", "--save memory://r"),
        ("--save memory://r --check-config --world-size 2", "E802", "--save A_FOLDER"),
        ("--load memory://r/iter_5 --ckpt-step 6", "E803", "--load memory://r"),
        ("--save memory://r --local-save s3://b/x --local-save-interval 5", "E804", "--save s3://b/x"),
    ],
)
def test_places_in_object_stores(flags: str, code: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "find_spec", lambda name: None if name == "gcsfs" else name)
    (problem,) = problems(flags)
    assert problem.code == code
    assert problem.fixes[0].startswith(fix)


def test_object_stores_may_hold_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    place = RemotePath("memory://checks/run")
    assert codes(f"--save {place} --load {place} --save-interval 10") == []
    assert not holds_checkpoints(str(place))
    (place / "iter_0000100" / "COMPLETE").write_bytes(b"")
    assert holds_checkpoints(str(place))
    assert holds_checkpoints(f"{place}/iter_0000100")

    def silent(path: RemotePath) -> list[RemotePath]:
        with object_store.translate_errors(path):
            raise TimeoutError

    monkeypatch.setattr(RemotePath, "folders", silent)
    assert holds_checkpoints("memory://another")  # it may; opening it reports the error


def test_a_missing_library_is_reported_once() -> None:
    """Not also as a checkpoint that cannot be found."""

    def recall(options: object) -> None:
        raise UserError([Problem("E811", "checkpoints cannot be found")])

    assert codes("--save zz://b/run", recall=recall) == ["E802"]
    assert codes("--save new --micro-batch-size 0", recall=recall) == ["E811", "E600"]


# the model of a checkpoint

START = "--mock-data --train-iters 10"
SHAPE = "--num-layers 3 --hidden-size 48 --num-attention-heads 4 --num-query-groups 2 --swiglu --vocab-size 300"
REST = "--normalization RMSNorm --norm-epsilon 1e-6 --window-size 7 --seq-length 64 --hidden-dropout 0"
SAVED: dict[str, Any] = to_dict(run(f"{SHAPE} {REST} --lr 5e-3", base=START).config)


def resumed(flags: str = "", saved: Mapping[str, Any] | None = SAVED) -> ParsedArguments:
    return run(f"--load ckpt --save runs/b {flags}", base=START, recall=lambda options: saved)


def test_the_model_and_nothing_else_comes_from_the_checkpoint() -> None:
    parsed = resumed("--resume-mode weights-only")
    assert to_dict(parsed.config)["model"] == SAVED["model"]
    (printed,) = [note for note in parsed.notes if note.startswith("taken from the checkpoint's model")]
    assert all(flag in printed for flag in ("--norm-epsilon 1e-06", "--window-size 7", "--seq-length 64"))
    assert "--vocab-size" not in printed
    assert (parsed.config.optimizer.lr, parsed.config.training.train_iters) == (1e-4, 10)
    assert parsed.config.training.seq_length == 64, "samples are not longer than the model's positions"
    assert resumed(f"{SHAPE} {REST}").notes == resumed(f"{SHAPE} {REST}", saved=None).notes
    with pytest.raises(UserError, match="E105"):
        resumed("--seq-length 128")


def test_every_source_overrides_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "window.yaml").write_text("window_size: 9\n")
    assert resumed("--config window.yaml").config.model.window_size == 9
    assert resumed("--set window_size=null").config.model.window_size is None
    assert resumed("--preset tiny-gpt2").config.model.num_layers != 3
    now = resumed("--num-layers 5 --resume-mode weights-only").config
    assert [problem.code for problem in compare_configs(SAVED, now, "weights-only").problems] == ["E821"]


@pytest.mark.parametrize("model", [{"hidden_size": "wide"}, {"of_the_future": 3}, {"lr": 3.0}, {"hidden_size": None}])
def test_unreadable_values_of_a_checkpoint_are_left_to_the_comparison(model: dict[str, Any]) -> None:
    config = resumed(saved={"model": {"vocab_size": 300, "num_layers": 3} | model}).config
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (3, 128, 1e-4)
    for empty in ({}, {"model": 3}, {"model": {}}):
        assert resumed(f"{MODEL} --vocab-size 300", saved=empty) == resumed(f"{MODEL} --vocab-size 300", saved=None)


def test_the_search_for_a_checkpoint_gets_all_sources(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("checkpoint: {load: runs/a, ckpt_step: 3}\n")
    asked: list[CheckpointConfig] = []
    run(f"{MODEL} --config run.yaml --save runs/b --set ckpt_step=4", recall=lambda options: asked.append(options))
    assert [(c.load, c.save, c.ckpt_step) for c in asked] == [("runs/a", "runs/b", 4)]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_command_makes_the_same_run_again(preset: str) -> None:
    flags = f"--preset {preset} --vocab-size 300 --save runs/a --save-interval 5"
    first = run(flags)
    assert run(flags, recall=lambda options: to_dict(first.config)) == first


@pytest.mark.parametrize("seed", range(10))
def test_a_command_without_flags_of_the_model_has_the_same_model(seed: int) -> None:
    dice = random.Random(seed)
    values: dict[str, Any] = {
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
        "seq_length": 64,
    }
    sets = " ".join(f"{name}={'null' if value is None else str(value).lower()}" for name, value in values.items())
    saved = to_dict(run(f"--set {sets}", base=START).config)
    assert to_dict(resumed(saved=saved).config)["model"] == saved["model"]


# --load hf:DIR

LLAMA: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "hf_llama" / "config.json").read_text())
GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 32, "vocab_size": 301}
OWN = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
MIXTRAL = {key: value for key, value in LLAMA.items() if not key.endswith("_bias")} | OWN


def started(flags: str = "", model: dict[str, Any] = LLAMA) -> ParsedArguments:
    Path("config.json").write_text(json.dumps(model))
    return run(f"--load hf:. {flags}", base=START, read_model=read_model_values)


def refused(flags: str = "", model: dict[str, Any] = LLAMA) -> list[str]:
    with pytest.raises(UserError) as caught:
        started(flags, model)
    return [problem.code for problem in caught.value.problems]


def test_no_flag_is_needed_for_a_hugging_face_model() -> None:
    parsed = started()
    model = parsed.config.model
    assert (model.num_layers, model.hidden_size, model.ffn, model.kv_groups, model.vocab) == (2, 32, 80, 2, 257)
    assert (model.normalization, model.activation, model.norm_epsilon) == ("RMSNorm", "swiglu", 1e-6)
    assert (model.position_embedding_type, model.hidden_dropout) == ("rope", 0.0)
    Path("again.yaml").write_text(to_yaml(parsed.config))
    again = parse(["--config", "again.yaml"], {}, read_model=partial(read_model_values))
    assert again.config == parsed.config
    experts = started("--moe-aux-loss-coeff 0.01", MIXTRAL).config.model
    assert (experts.num_experts, experts.moe_router_topk, experts.expert_ffn) == (4, 2, 80)


def test_no_source_may_contradict_the_shape_of_a_hugging_face_model() -> None:
    Path("dropout.yaml").write_text("hidden_dropout: 0.3\n")
    Path("layers.yaml").write_text("num_layers: 5\n")
    assert started("--config dropout.yaml").config.model.hidden_dropout == 0.3
    assert started("--num-layers 2 --kv-channels 8").config.model.num_layers == 2
    for flags in ("--config layers.yaml", "--set model.num_layers=5", "--num-experts 4"):
        assert refused(flags) == ["E821"]
    assert refused("--preset tiny-gpt2 --seq-length 8") == ["E821"]
    assert refused("--moe-shared-expert-intermediate-size 64", MIXTRAL) == ["E821"]
    assert refused("--max-position-embeddings 512", GPT2) == ["E821"]
    longer = started("--rotary-base 1e6 --max-position-embeddings 512 --seq-length 512")
    assert longer.notes == ("--rotary-base: config.json 10000 -> now 1e+06",)
    flags = "--hidden-size 64 --disable-bias-linear --activation gelu"
    (problem,) = problems(f"--load hf:. {flags}", base=START, read_model=read_model_values)
    assert started(f"{flags} {problem.fixes[0]}").config == started().config


def test_sequences_and_presets_of_a_hugging_face_model() -> None:
    assert started().config.training.seq_length == 64
    assert started("--seq-length 16").config.training.seq_length == 16
    assert refused("--seq-length 128") == ["E105"]
    assert started(model=LLAMA | {"max_position_embeddings": 131072}).config.training.seq_length == 1024
    small = GPT2 | {"n_layer": 2, "n_embd": 64, "n_positions": 256}
    plain, preset = started(model=small), started("--preset tiny-gpt2", small)
    assert (plain.config.model.hidden_dropout, preset.config.model.hidden_dropout) == (0.1, 0.0)
    assert (preset.config.optimizer.adam_beta2, preset.config.training.seq_length) == (0.95, 256)


def test_an_unreadable_model_hides_no_other_problem() -> None:
    assert refused("--num-layers 5 --lr fast --global-batch-size 3 --micro-batch-size 2") == ["E002", "E301", "E821"]
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{")
    flags = "--load hf:broken --seq-length 0 --tensor-model-parallel-size 7"
    assert codes(flags, base=START, read_model=read_model_values) == ["E850", "E600", "E202"]
    flags = "--load hf:gone --save runs/b"
    assert codes(flags, base=START) == ["E850"]
    assert run(flags, base=START, recall=lambda options: SAVED).config.model.norm_epsilon == 1e-6


def test_checking_a_hugging_face_model_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    argv = [*RUN.split(), "--check-config", "--load", f"hf:{tmp_path}", "--save", str(tmp_path / "new")]
    command = [sys.executable, "-X", "importtime", "pretrain_gpt.py", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {line.split("|")[-1].strip() for line in done.stderr.splitlines()}.isdisjoint({"torch", "transformers"})
