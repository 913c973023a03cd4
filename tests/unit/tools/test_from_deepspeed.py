"""Configurations of DeepSpeed as flags: batch, precision, ZeRO, and the rates of its own schedules."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments.cli import parse
from megatron.config.batch import schedule_lengths
from megatron.config.run import RunConfig
from megatron.config.settings import SPELLINGS
from megatron.optimizer.lr_scheduler import LearningRateSchedule
from tools import from_megatron
from tools.lib.deepspeed_config import table

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 96"
PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
}


def translated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], *flags: str
) -> tuple[int, str]:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(settings))
    status = from_megatron.main(["--world-size", "8", str(file), *MODEL.split(), *flags])
    return status, capsys.readouterr().out


def config_of(out: str) -> RunConfig:
    """The configuration of the printed command line."""
    line = re.search(r"^8 ranks: pretrain_gpt.py (.*)$", out, re.MULTILINE)
    assert line is not None
    return parse([*shlex.split(line[1]), "--check-config", "--world-size", "8"], {}).config


def test_batch_optimizer_and_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = translated(tmp_path, capsys, PLAIN, "--train-iters", "10", "--lr-decay-style", "constant")
    assert status == 0
    config = config_of(out)
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (4, 4 * 2 * 8)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (1e-3, 0.9, 0.999, 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_grad) == (0.1, 0.0), "DeepSpeed does not clip unless it is asked to"
    assert config.parallel.data_parallel_sharding_strategy == "optim_grads"


def test_fp16_has_the_scale_of_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = PLAIN | {"fp16": {"enabled": True, "loss_scale": 0}, "bf16": {"enabled": False}}
    config = config_of(translated(tmp_path, capsys, settings, "--train-iters", "10")[1])
    assert (config.precision.params_dtype, config.precision.initial_loss_scale) == ("fp16", 2**16)


RECORDED = {
    "WarmupLR": [0.0, 5e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3],
    "WarmupCosineLR": [0.0, 5e-4, 9.901664e-4, 8.511088e-4, 5.970378e-4, 3.25e-4, 1.389045e-4],
    "WarmupDecayLR": [0.0, 5e-4, *(1e-3 * (40 - step) / 30 for step in (11, 17, 23, 29, 35))],
}
"""Rates of every sixth step with DeepSpeed 0.19.8, the last by its formula: warm-up of 10 steps, 40 steps in all."""


@pytest.mark.parametrize("name", RECORDED)
def test_rates_are_those_of_deepspeed_a_step_earlier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    params = {"warmup_num_steps": 10, "warmup_type": "linear", "total_num_steps": 40, "warmup_max_lr": 1e-3}
    params |= {"cos_min_ratio": 0.1} if name == "WarmupCosineLR" else {}
    for absent in {"WarmupLR": ["total_num_steps"], "WarmupCosineLR": ["warmup_max_lr"]}.get(name, ()):
        params.pop(absent)
    length = ["--train-iters", "40"] if name == "WarmupLR" else []
    status, out = translated(tmp_path, capsys, PLAIN | {"scheduler": {"type": name, "params": params}}, *length)
    assert status == 0
    config = config_of(out)
    schedule = LearningRateSchedule.from_config(config.optimizer, schedule_lengths(config, 8))
    batch = config.training.global_batch_size
    assert batch is not None
    later = [int(step > 0 and (step <= 10 or name != "WarmupCosineLR")) for step in range(40)]  # its cosine is not late
    ours = [schedule.rates((step - later[step]) * batch).lr for step in range(0, 40, 6)]
    assert ours == pytest.approx(RECORDED[name], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}}, "rises as a logarithm"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "this schedule is not implemented"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "this optimizer is not implemented"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offloaded to host memory only"),
        ({"curriculum_learning": {"enabled": True}}, "it is not a known setting"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], sentence: str
) -> None:
    status, out = translated(tmp_path, capsys, PLAIN | change, "--train-iters", "10")
    assert status == 1
    assert sentence in out
    assert re.search(r"^would not start as it is: [1-9]", out, re.MULTILINE)


def test_values_of_the_trainer_are_left_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    status, out = translated(tmp_path, capsys, settings, "--train-iters", "10", "--micro-batch-size", "2")
    assert status == 0
    assert out.count("the Trainer's own argument counts") == 3


def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ('{"model_type": "llama"}', "[1]", "{"):
        (tmp_path / "config.json").write_text(text)
        assert from_megatron.main([str(tmp_path / "config.json")]) == 2
        assert capsys.readouterr().err.startswith("from_megatron: ")


def test_every_flag_of_the_table_exists() -> None:
    entries = [
        value for entry in table().values() for value in (entry.values() if isinstance(entry, dict) else [entry])
    ]
    flags = {word for value in entries if value.startswith("--") for word in value.split() if word.startswith("--")}
    assert flags - SPELLINGS.keys() == {"--bf16", "--fp16"} - SPELLINGS.keys()
    assert {value.partition(": ")[0] for value in entries if not value.startswith("--")} == {"missing", "not needed"}
