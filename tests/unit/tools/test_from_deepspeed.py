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
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
}
RATES = json.loads((Path(__file__).parents[2] / "golden" / "other_frameworks" / "rates.json").read_text())


def translated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], *flags: str, world: int | None = 8
) -> tuple[int, str]:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(settings))
    ranks = ["--world-size", str(world)] if world else []
    status = from_megatron.main([*ranks, str(file), *MODEL.split(), *flags])
    return status, capsys.readouterr().out


def config_of(out: str, world: int = 8) -> RunConfig:
    """Return the configuration of the printed command line."""
    line = re.search(rf"^{world} ranks: pretrain_gpt.py (.*)$", out, re.MULTILINE)
    assert line is not None
    return parse([*shlex.split(line[1]), "--check-config", "--world-size", str(world)], {}).config


def test_batch_optimizer_and_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = translated(tmp_path, capsys, PLAIN, "--train-iters", "10")
    assert status == 0
    config = config_of(out)
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (4, 4 * 2 * 8)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (1e-3, 0.9, 0.999, 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_grad) == (0.1, 0.5)
    assert config.parallel.data_parallel_sharding_strategy == "optim_grads"
    assert optimizer.lr_decay_style == "constant", "there is no schedule in the file"


def test_real_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Read the values of gpt_neox_20b_zero3.json of deepspeedai/DeepSpeedExamples, with a linear warm-up."""
    settings = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "stage3_prefetch_bucket_size": 200000000,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 6e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 6e-5,
                "warmup_num_steps": 3000,
                "total_num_steps": 100000,
                "warmup_type": "linear",
            },
        },
    }
    status, out = translated(tmp_path, capsys, settings)
    assert status == 0
    config = config_of(out)
    assert config.training.train_iters == 100000
    assert (config.optimizer.lr, config.optimizer.lr_warmup_iters, config.optimizer.min_lr) == (6e-5, 3000, 0.0)
    assert (config.optimizer.adam_beta1, config.optimizer.adam_beta2) == (0.9, 0.95)
    assert (config.optimizer.optimizer_cpu_offload, config.parallel.param_cpu_offload) == (True, True)
    assert config.parallel.data_parallel_sharding_strategy == "optim_grads_params"
    assert (config.training.global_batch_size, config.precision.params_dtype) == (64, "bf16")
    assert translated(tmp_path, capsys, settings | {"scheduler": {"type": "WarmupLR", "params": {}}})[0] == 1


def test_file_and_flags_of_megatron_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Join both halves of tr11-176B-ml.slurm of bigscience-workshop/bigscience, on its 384 ranks."""
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 2048,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": True},
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }
    flags = "--num-layers 72 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 --train-samples 220000000"
    flags += " --optimizer adam --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-decay-samples 200000000"
    status, out = translated(tmp_path, capsys, settings, *flags.split(), world=384)
    assert status == 0
    config = config_of(out, 384)
    assert (config.training.global_batch_size, config.training.micro_batch_size) == (2048, 2)
    assert (config.optimizer.lr_decay_style, config.optimizer.lr, config.optimizer.clip_grad) == ("cosine", 6e-5, 1.0)
    assert config.precision.params_dtype == "bf16"
    contradiction = settings | {"gradient_accumulation_steps": 127}  # 2048 / 2 / (384 / 4 / 12) is 128
    assert translated(tmp_path, capsys, contradiction, *flags.split(), world=384)[0] == 1
    agreement = settings | {"gradient_accumulation_steps": 128}
    assert translated(tmp_path, capsys, agreement, *flags.split(), world=384)[0] == 0


@pytest.mark.parametrize(
    ("sizes", "flags", "batch", "micro"),
    [
        ((None, 4, 3), "", 4 * 3 * 8, 4),
        ((96, None, 3), "", 96, 96 // 3 // 8),
        ((96, None, None), "", 96, 96 // 8),
        ((96, 4, 3), "", 96, 4),
        ((None, 4, None), "", 4 * 8, 4),
        ((None, 4, 3), "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4 * 3 * 2, 4),
        ((96, None, 3), "--context-parallel-size 4", 96, 96 // 3 // 2),
    ],
)
def test_sizes_of_the_batch(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sizes: tuple[int | None, ...],
    flags: str,
    batch: int,
    micro: int,
) -> None:
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    settings = {name: value for name, value in PLAIN.items() if name not in names}
    settings |= dict(zip(names, sizes, strict=True))
    status, out = translated(tmp_path, capsys, settings, "--train-iters", "10", *flags.split())
    assert status == 0
    training = config_of(out).training
    assert (training.global_batch_size, training.micro_batch_size) == (batch, micro)


@pytest.mark.parametrize("section", [{"tensor_parallel": {"autotp_size": 4}}, {"sequence_parallel_size": 4}])
def test_ranks_of_one_sample_count_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: dict[str, Any]
) -> None:
    status, out = translated(tmp_path, capsys, PLAIN | section, "--train-iters", "10")
    assert status == 0
    config = config_of(out)
    assert config.training.global_batch_size == 4 * 2 * 8 / 4
    sizes = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    assert sizes == ((4, 1) if "tensor_parallel" in section else (1, 4))
    assert "a2a" in out or sizes == (4, 1)


def test_optimizers_have_the_defaults_of_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def of(kind: str, **params: Any) -> RunConfig:
        settings = PLAIN | {"optimizer": {"type": kind, "params": params}}
        return config_of(translated(tmp_path, capsys, settings, "--train-iters", "10")[1])

    assert (of("Adam").optimizer.lr, of("Adam").optimizer.weight_decay) == (1e-3, 0.0)
    lion = of("Lion", betas=[0.8, 0.7]).optimizer
    assert (lion.optimizer, lion.lion_beta1, lion.lion_beta2, lion.weight_decay) == ("lion", 0.8, 0.7, 0.0)
    assert (of("Lion").optimizer.lion_beta1, of("Lion").optimizer.lion_beta2) == (0.9, 0.999)
    sgd = of("SGD", lr=0.1).optimizer
    assert (sgd.optimizer, sgd.lr, sgd.sgd_momentum, sgd.weight_decay) == ("sgd", 0.1, 0.0, 0.0)


def test_fp16_has_the_scale_of_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = PLAIN | {"fp16": {"enabled": True, "loss_scale": 0}, "bf16": {"enabled": False}}
    config = config_of(translated(tmp_path, capsys, settings, "--train-iters", "10")[1])
    assert (config.precision.params_dtype, config.precision.initial_loss_scale) == ("fp16", 2**16)
    fp16 = {"initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2}
    config = config_of(
        translated(tmp_path, capsys, PLAIN | {"fp16": {"enabled": True} | fp16}, "--train-iters", "9")[1]
    )
    found = config.precision
    assert (found.initial_loss_scale, found.loss_scale_window, found.hysteresis, found.min_loss_scale) == (
        4096,
        500,
        3,
        2,
    )
    off = PLAIN | {"fp16": {"enabled": False, "hysteresis": 7}}
    config = config_of(translated(tmp_path, capsys, off, "--train-iters", "10")[1])
    assert (config.precision.params_dtype, config.precision.hysteresis) == ("fp32", 2)


@pytest.mark.parametrize("data_type", ["bf16", "bfp16"])
def test_gradients_are_reduced_in_their_data_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data_type: str
) -> None:
    settings = PLAIN | {"communication_data_type": data_type, "bf16": {"enabled": True}}
    assert config_of(translated(tmp_path, capsys, settings, "--train-iters", "10")[1]).parallel.grad_reduce_in_bf16


@pytest.mark.parametrize("case", RATES["cases"], ids=lambda case: f"{case['schedule']}-{len(case['params'])}")
def test_rates_are_those_of_deepspeed_a_step_earlier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: dict[str, Any]
) -> None:
    """Compare with rates that DeepSpeed itself has made (tests/golden/other_frameworks/rates.py)."""
    name, params = case["schedule"], case["params"]
    optimizer = {"type": "AdamW", "params": {"lr": 2e-3}}
    flags = ["--train-iters", "40"] if name == "WarmupLR" else []
    if name == "WarmupLR" and "warmup_max_lr" not in params:
        flags += ["--lr", "2e-3"]  # as the tool asks for
    settings = PLAIN | {"optimizer": optimizer, "scheduler": {"type": name, "params": params}}
    status, out = translated(tmp_path, capsys, settings, *flags)
    assert status == 0
    config = config_of(out)
    schedule = LearningRateSchedule.from_config(config.optimizer, schedule_lengths(config, 8))
    batch = config.training.global_batch_size
    assert batch is not None
    # DeepSpeed is a step late, except in its cosine.
    later = [int(step > 0 and (step <= 10 or name != "WarmupCosineLR")) for step in RATES["steps"]]
    ours = [schedule.rates((step - late) * batch).lr for step, late in zip(RATES["steps"], later, strict=True)]
    first = int(name == "WarmupCosineLR")  # DeepSpeed's first step is at 0, whatever warmup_min_ratio is
    assert ours[first:] == pytest.approx(case["rates"][first:], rel=1e-6)


COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_type": "linear", "warmup_num_steps": 2}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}}, "rises as a logarithm"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}},
            "give --lr, the rate of the optimizer",
        ),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "this schedule is not implemented"),
        ({"scheduler": COSINE, "optimizer": None}, "the peak is unknown"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "this optimizer is not implemented"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}, "its defaults differ"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "always decoupled"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offloaded to host memory only"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zenflow.topk_ratio: 0.1"),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "overlap_com: True"),
        ({"gradient_clipping": None}, "give --clip-grad 1"),
        ({"train_batch_size": 100}, "4 x 2 x 8 is not 100  missing     the sizes contradict"),
        ({"communication_data_type": "fp16"}, "reduced in fp32 or bf16"),
        ({"curriculum_learning": {"enabled": True}}, "it is not a known setting"),
        ({"fp16": True}, "it is not a known setting"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], sentence: str
) -> None:
    status, out = translated(tmp_path, capsys, PLAIN | change, "--train-iters", "10")
    assert status == 1
    assert sentence in out
    assert re.search(r"^would not start as it is: [1-9]", out, re.MULTILINE)


def test_flags_answer_what_the_file_leaves_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {name: value for name, value in PLAIN.items() if name not in ("gradient_clipping", "optimizer")}
    settings |= {"scheduler": COSINE}
    status, out = translated(tmp_path, capsys, settings, "--clip-grad", "0.7", "--lr", "2e-3")
    assert status == 0
    optimizer = config_of(out).optimizer
    assert (optimizer.clip_grad, optimizer.lr, optimizer.min_lr) == (0.7, 2e-3, 2e-7)


def test_number_of_ranks_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = translated(tmp_path, capsys, PLAIN, "--train-iters", "10", world=None)
    assert status == 1
    assert "give --world-size N" in out
    assert translated(tmp_path, capsys, PLAIN, "--train-iters", "10", "--global-batch-size", "64", world=None)[0] == 0


def test_sections_that_are_off_have_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off = {"amp": {"enabled": False, "opt_level": "O1"}, "curriculum_learning": {"enabled": False, "params": {"x": 1}}}
    status, out = translated(tmp_path, capsys, PLAIN | off, "--train-iters", "10")
    assert status == 0
    assert "opt_level" not in out


def test_values_of_the_trainer_are_left_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    status, out = translated(tmp_path, capsys, settings, "--train-iters", "10", "--micro-batch-size", "2")
    assert status == 0
    assert out.count("the Trainer's own argument counts") == 3


def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ('{"train_batch_size": "64"}', '{"optimizer": {"type": "Adam"}, "train_batch_size": [1]}')
    for text in ('{"model_type": "llama"}', "[1]", "{", *wrong):
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
