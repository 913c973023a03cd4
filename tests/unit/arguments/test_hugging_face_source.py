"""``--load hf:DIR`` as a source of the model's options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments.cli import ParsedArguments, parse
from megatron.arguments.sources import flat_values, to_yaml
from megatron.config.errors import UserError
from megatron.convert.huggingface.config import read_model_values

ROOT = Path(__file__).parents[3]
LLAMA: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "hf_llama" / "config.json").read_text())
GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 32, "vocab_size": 301}
RUN = ("--mock-data", "--train-iters", "10")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def started(folder: Path, *flags: str) -> ParsedArguments:
    return parse([*RUN, "--load", f"hf:{folder}", *flags], {}, read_model=read_model_values)


def codes(folder: Path, *flags: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        started(folder, *flags)
    return [problem.code for problem in caught.value.problems]


def test_no_other_flag_is_needed_for_the_model(folder: Path) -> None:
    model = started(folder).config.model
    assert (model.num_layers, model.hidden_size, model.ffn, model.kv_groups, model.vocab) == (2, 32, 80, 2, 257)
    assert (model.normalization, model.activation, model.norm_epsilon) == ("RMSNorm", "swiglu", 1e-6)
    assert (model.position_embedding_type, model.hidden_dropout) == ("rope", 0.0)


OWN = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
MIXTRAL = {key: value for key, value in LLAMA.items() if not key.endswith("_bias")} | OWN


def test_experts_are_the_models_and_no_flag_says_others(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    model = started(folder, "--moe-aux-loss-coeff", "0.01").config.model
    assert (model.num_experts, model.moe_router_topk, model.expert_ffn) == (4, 2, 80)
    assert codes(folder, "--moe-shared-expert-intermediate-size", "64") == ["E821"]
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert codes(folder, "--num-experts", "4") == ["E821"]


def test_samples_are_no_longer_than_what_the_model_knows(folder: Path) -> None:
    assert started(folder).config.training.seq_length == 64
    assert started(folder, "--seq-length", "16").config.training.seq_length == 16
    assert codes(folder, "--seq-length", "128") == ["E105"]
    (folder / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 131072}))
    assert started(folder).config.training.seq_length == 1024


def test_every_source_comes_after_it_but_none_may_say_another_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "dropout.yaml").write_text("hidden_dropout: 0.3\n")
    (tmp_path / "layers.yaml").write_text("num_layers: 5\n")
    assert started(folder, "--config", str(tmp_path / "dropout.yaml")).config.model.hidden_dropout == 0.3
    assert codes(folder, "--config", str(tmp_path / "layers.yaml")) == ["E821"]
    assert codes(folder, "--set", "model.num_layers=5") == ["E821"]
    assert codes(folder, "--preset", "tiny-gpt2", "--seq-length", "8") == ["E821"]
    assert started(folder, "--num-layers", "2", "--kv-channels", "8").config.model.num_layers == 2


def test_it_may_come_from_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"checkpoint: {{load: 'hf:{folder}'}}\n")
    assert (
        parse([*RUN, "--config", str(tmp_path / "run.yaml")], {}, read_model=read_model_values).config.model.hidden_size
        == 32
    )


def test_a_preset_of_the_same_model_brings_the_settings_of_its_paper(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(GPT2 | {"n_layer": 2, "n_embd": 64, "n_positions": 256}))
    plain, preset = started(folder), started(folder, "--preset", "tiny-gpt2")
    assert (plain.config.model.hidden_dropout, preset.config.model.hidden_dropout) == (0.1, 0.0)
    assert (preset.config.optimizer.adam_beta2, preset.config.training.seq_length) == (0.95, 256)


def test_what_the_weights_compute_may_change_and_is_told(folder: Path) -> None:
    longer = started(folder, "--rotary-base", "1e6", "--max-position-embeddings", "512", "--seq-length", "512")
    assert longer.notes == ("--rotary-base: config.json 10000 -> now 1e+06",)
    (folder / "config.json").write_text(json.dumps(GPT2))
    assert codes(folder, "--max-position-embeddings", "512") == ["E821"]


def test_the_shape_that_contradicts_can_be_pasted(folder: Path) -> None:
    flags = ["--hidden-size", "64", "--disable-bias-linear", "--activation", "gelu"]
    with pytest.raises(UserError, match=r"--hidden-size: config.json 32 -> now 64") as caught:
        started(folder, *flags)
    (fix,) = caught.value.problems[0].fixes
    mended = started(folder, *flags, *fix.split())
    assert mended.config == started(folder).config


def test_everything_is_told_at_once(folder: Path) -> None:
    flags = "--num-layers 5 --lr fast --global-batch-size 3 --micro-batch-size 2"
    assert codes(folder, *flags.split()) == ["E002", "E301", "E821"]


def test_an_unreadable_model_hides_no_other_problem(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert codes(folder, "--seq-length", "0", "--tensor-model-parallel-size", "7") == ["E850", "E600", "E202"]


def test_a_written_configuration_starts_the_same_run(folder: Path, tmp_path: Path) -> None:
    config = started(folder).config
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert flat_values(
        parse(["--config", str(tmp_path / "again.yaml")], {}, read_model=read_model_values).config
    ) == flat_values(config)


def test_checking_needs_no_torch(folder: Path) -> None:
    argv = [*RUN, "--check-config", "--load", f"hf:{folder}", "--save", str(folder / "ckpt")]
    command = [sys.executable, "-X", "importtime", "pretrain_gpt.py", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {line.split("|")[-1].strip() for line in done.stderr.splitlines()}.isdisjoint({"torch", "transformers"})
